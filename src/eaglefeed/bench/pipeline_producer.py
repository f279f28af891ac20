"""A producer in its own process, over a target that runs no model: `python -m eaglefeed.bench.pipeline_producer`."""

import json
import sys
import threading
from contextlib import closing

import torch

from eaglefeed import logs
from eaglefeed.bench.partners import say
from eaglefeed.bench.pipeline_plan import Load
from eaglefeed.bench.pipeline_samples import PreparedTarget, contract_of
from eaglefeed.producer.worker import ProducerWorker
from eaglefeed.queue import connect, open_queue
from eaglefeed.storage.base import open_store

__all__ = ["main"]


def main() -> None:
    """Do the task that stands on stdin: the load, and the run's name, queue and store."""
    logs.configure("WARNING")  # on stderr: stdout is for what we say
    torch.set_num_threads(1)
    task = json.loads(sys.stdin.readline())
    load, run = Load(**task["load"]), task["run"]
    with closing(connect(task["url"])) as client, closing(open_store(task["store"])) as store:
        worker = ProducerWorker(
            prompts=open_queue(client, run, "prompts"),
            samples=open_queue(client, run, "samples"),
            store=store,
            target=PreparedTarget(load),
            contract=contract_of(load),
            assets=lambda: ({}, {"config": "{}"}),
            run_id=run,
            name="bench",
        )
        say(produced=worker.run(threading.Event()).produced)


if __name__ == "__main__":
    main()
