"""The bench of the pipeline: what streaming costs a training, beside the same batches in memory."""

import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from eaglefeed import __version__
from eaglefeed.bench.bed import Bed
from eaglefeed.bench.machine import describe_machine
from eaglefeed.bench.musts import entries_of
from eaglefeed.bench.pipeline_musts import PIPELINE_MUSTS
from eaglefeed.bench.pipeline_plan import PipelinePlan
from eaglefeed.bench.pipeline_rounds import Observe, measure_pipeline
from eaglefeed.bench.run import summarise
from eaglefeed.clock import SYSTEM_CLOCK

__all__ = ["run_pipeline_bench"]


def run_pipeline_bench(
    bed: Bed, folder: Path, plan: PipelinePlan, *, observe: Observe, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Measure everything; the document's `must` has the bounds, `figures` all values with their spread.

    Args:
        bed: the queue's server.
        folder: where shards go; a folder is made in it, and removed.
        plan: the sizes.
        observe: watches a training as `eaglefeed train` is watched, while the context that it makes is entered.
        tell: gets a line on what is done now.

    Raises:
        EaglefeedError: the stream did not give what it should, or a process failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start_s, threads = SYSTEM_CLOCK.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)  # the producer and the thread that reads ahead have the other core
    try:
        with tempfile.TemporaryDirectory(prefix="bench-pipeline-", dir=folder.absolute()) as root:
            figures = summarise(measure_pipeline(bed, Path(root), plan, observe, tell))
    finally:
        torch.set_num_threads(threads)
    medians = {name: figure["median"] for name, figure in figures.items()}
    return {
        "quick": plan.quick,
        "rounds": plan.rounds,
        "took_s": round(SYSTEM_CLOCK.monotonic() - start_s, 1),
        "machine": describe_machine(),
        "versions": {"eaglefeed": __version__, "python": platform.python_version(), "torch": version("torch")},
        "sizes": asdict(plan),
        "figures": figures,
        "must": entries_of(PIPELINE_MUSTS, medians),
    }
