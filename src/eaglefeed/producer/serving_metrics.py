"""A target server's numbers in Prometheus' text form."""

from collections.abc import Callable, Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from eaglefeed.metrics import METRICS, Kind, Reading, Shower, build_reading, families
from eaglefeed.producer.work import BatcherStats

__all__ = ["ServerMetrics"]

_PREFIX = "eaglefeed_target_"
_FIELDS = {"forward_seconds": "forward_s", "tokens": "num_tokens"}
"""Those of BatcherStats whose metric has another name."""


class ServerMetrics(Collector):
    """Reads the numbers when it is asked, so that nothing is counted twice.

    Args:
        stats: of the batcher.
        num_sessions: that it knows now.
        is_ready: whether it answers requests.
    """

    def __init__(
        self, stats: Callable[[], BatcherStats], num_sessions: Callable[[], int], is_ready: Callable[[], bool]
    ) -> None:
        self._stats, self._num_sessions, self._is_ready = stats, num_sessions, is_ready
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """All of them."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        """Prometheus' own interface."""
        values = asdict(self._stats()) | {"sessions": self._num_sessions(), "ready": self._is_ready()}
        yield from families([build_reading("target")])
        for name, metric in METRICS.items():
            if metric.shower is Shower.TARGET:
                yield from families([Reading(name, float(values[_field(name, metric.kind)]))])


def _field(name: str, kind: Kind) -> str:
    bare = name.removeprefix(_PREFIX)
    bare = bare.removesuffix("_total") if kind is Kind.COUNTER else bare
    return _FIELDS.get(bare, bare)
