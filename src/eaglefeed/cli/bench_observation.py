"""A training that is watched as one of `eaglefeed train` is: for the bench that says what it costs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from urllib.request import ProxyHandler, build_opener

from eaglefeed.cli.common import RunQueues
from eaglefeed.cli.journaling import journaled
from eaglefeed.cli.showing import run_shown
from eaglefeed.consumer.holdings import StreamStats
from eaglefeed.ops.collector import Shown
from eaglefeed.ops.exporter import METRICS_PATH, exporting
from eaglefeed.ops.readings import rank_readings
from eaglefeed.queue import open_queue
from eaglefeed.queue.connection import QueueClient

__all__ = ["observed"]

_SCRAPE_EVERY_S = 1.0
_PATIENCE_S = 10.0


@contextmanager
def observed(client: QueueClient, run: str, stats: StreamStats) -> Iterator[None]:
    """Meanwhile the run's journal is written at its pace, and the metrics are scraped every second.

    Args:
        client: of the run's queues.
        run: its name.
        stats: of the stream that is trained on.
    """
    queues = RunQueues(client, run, open_queue(client, run, "prompts"), open_queue(client, run, "samples"))
    shown, stop = Shown("trainer", run), threading.Event()
    shown.add(partial(rank_readings, (run, "samples", "main"), stats, is_first=True))
    with (
        journaled(queues, "trainer", "bench", lambda: asdict(stats)),
        run_shown(shown, queues),
        exporting(shown.text, host="127.0.0.1", port=0) as exporter,
    ):
        scraper = threading.Thread(target=_scrape, args=(exporter.url + METRICS_PATH, stop), name="scraper")
        scraper.start()
        try:
            yield
        finally:
            stop.set()
            scraper.join()


def _scrape(url: str, stop: threading.Event) -> None:
    opener = build_opener(ProxyHandler({}))  # our own exporter is behind no proxy
    while True:
        with opener.open(url, timeout=_PATIENCE_S) as reply:
            reply.read()
        if stop.wait(_SCRAPE_EVERY_S):
            return
