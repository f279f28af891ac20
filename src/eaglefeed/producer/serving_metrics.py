"""A target server's numbers in Prometheus' text form."""

from collections.abc import Callable, Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eaglefeed.producer.work import BatcherStats

__all__ = ["ServerMetrics"]

_GAUGES = {
    "waiting": "Requests that wait for a forward.",
    "in_flight": "Requests in a forward, and answers that are not sent yet.",
}
_COUNTERS = {
    "forwards": "Forwards of the target.",
    "forward_s": "Seconds in forwards and in making answers.",
    "answered": "Requests with an answer.",
    "num_tokens": "Tokens of those, padding counted.",
    "failed": "Requests that were not answered: impossible rows, or a forward that failed.",
    "refused": "Requests that found no room to wait.",
    "timed_out": "Requests dropped before their forward since they were late.",
    "cancelled": "Requests given up before their answer was made.",
}
_NAMES = {"forward_s": "forward_seconds", "num_tokens": "tokens"}


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

    def collect(self) -> Iterator[Metric]:
        """Prometheus' own interface."""
        values = asdict(self._stats())
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(_full(name), text, value=values[name])
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(_full(name), text, value=values[name])
        yield GaugeMetricFamily(_full("sessions"), "Sessions with a vocabulary map.", value=self._num_sessions())
        yield GaugeMetricFamily(_full("ready"), "1 after the warm-up.", value=float(self._is_ready()))


def _full(name: str) -> str:
    return f"eaglefeed_target_{_NAMES.get(name, name)}"
