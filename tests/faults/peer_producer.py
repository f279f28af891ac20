"""A producer that keeps its samples, as a process of its own: `python peer_producer.py QUEUE NAME DATA_PLANE BYTES`.

Its target costs nothing. Signs of life grow old in seconds here, not in half a minute.
"""

import sys
import threading
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import json

import torch

import pipeline
import samples as made
from eaglefeed import logs
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.producer import worker as worker_module
from eaglefeed.producer.ledger import QueueLedger
from eaglefeed.producer.worker import ProducerWorker
from eaglefeed.queue import connect, open_queue, rules
from eaglefeed.storage import janitor
from eaglefeed.storage.janitor import Janitor
from eaglefeed.storage.keeping import KeepingStore
from eaglefeed.storage.options import PeerOptions

GRACE_S = 4.0
PAUSE_S = 0.02


def main(url: str, name: str, data_plane: str, capacity_bytes: str) -> None:
    """Produce until nobody needs what is kept; tells where it listens, and what it did."""
    torch.set_num_threads(1)
    logs.configure("WARNING")
    rules.WORKER_GRACE_S, worker_module._RECALL_S, janitor._GRACE_S = GRACE_S, 0.5, 0.5
    client = connect(url)
    options = PeerOptions(data_plane=data_plane, capacity_bytes=int(capacity_bytes))  # type: ignore[arg-type]
    store = KeepingStore("127.0.0.1:0", options)
    _tell(store.uri)
    target = pipeline.EchoTarget()
    target.before = lambda _ids: SYSTEM_CLOCK.sleep(PAUSE_S)
    ledger = QueueLedger("run", lambda queue: open_queue(client, "run", queue))
    worker = ProducerWorker(
        prompts=open_queue(client, "run", "prompts"),
        samples=open_queue(client, "run", "samples"),
        store=store,
        target=target,
        contract=pipeline.contract(),
        assets=lambda: ({"norm.weight": torch.ones(made.H)}, {"config": "{}"}),
        run_id="run",
        name=name,
        lease_batch=2,
        tidy=Janitor(store, ledger, interval_s=0.5).maybe_run,
    )
    stats = worker.run(threading.Event())
    _tell(json.dumps(asdict(stats)))
    store.close()
    client.close()


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
