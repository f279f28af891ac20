"""What `eaglefeed feed` notes in the run's journal."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eaglefeed.cli.common import RunQueues
from eaglefeed.cli.journaling import add_fact
from eaglefeed.config import Settings
from eaglefeed.errors import EaglefeedError

__all__ = ["noted"]

_KEPT, _TEXT, _KEPT_REASONS = 100, 200, 50
_SUMMED = ("accepted", "duplicates", "rejected", "items", "tokens", "num_bytes", "queued", "known", "produced")


@contextmanager
def noted(settings: Settings, queues: RunQueues, path: Path, document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Append a fact "feed:<n>" of this call, also where it is refused: then the fact says why in "refused".

    Its "rejections" are the first 100, [line, id, reason]; texts are cut to 200 bytes. Totals are summed over all
    calls of the run.

    Args:
        settings: of the call.
        queues: of the run.
        path: of the conversations; its name alone is told.
        document: what became of the file's rows, and the estimate.

    Yields:
        The fact, to be added to.
    """
    fact = {name: document[name] for name in _SUMMED if name in document}
    reasons = list(document["reasons"].items())[:_KEPT_REASONS]
    fact |= {"path": _short(path.name), "reasons": {_short(reason): count for reason, count in reasons}}
    fact["rejections"] = [
        [row["line"], _short(row["id"]), _short(row["reason"])] for row in document["rejections"][:_KEPT]
    ]
    fact["settings"] = _settings_that_matter(settings)
    try:
        yield fact
    except BaseException as error:  # also one by Ctrl-C
        told = f": {error}" if isinstance(error, EaglefeedError) else ""
        fact["refused"] = _short(type(error).__name__ + told)
        raise
    finally:
        fact["conflicts"] = len(fact.get("conflicts", ()))
        add_fact(queues, "feed", fact, {name: fact[name] for name in _SUMMED if name in fact})


def _settings_that_matter(settings: Settings) -> dict[str, Any]:
    feed, produce = settings.feed, settings.produce
    return {
        "target": settings.target.name,
        "max_length": feed.max_length,
        "batch_size": feed.batch_size,
        "packing": feed.packing,
        "keep_open": feed.keep_open,
        "role_aliases": dict(feed.role_aliases),
        "supervision": produce.supervision,
        "vocab": produce.vocab.name if produce.vocab else "",
        "groups": list(settings.queue.groups),
    }


def _short(text: str) -> str:
    """Texts come from data: bounded in bytes, so that a fact fits the journal."""
    data = text.encode(errors="backslashreplace")
    return data.decode() if len(data) <= _TEXT else data[: _TEXT - 3].decode(errors="ignore") + "…"
