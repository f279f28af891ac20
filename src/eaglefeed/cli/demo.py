"""`eaglefeed demo`: the whole job on this machine, with a crash on purpose, and checks that decide the exit code."""

import json
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from eaglefeed.cli.common import JsonOption, TargetOption, open_queues, opened_store, read_settings, stop_on_signals
from eaglefeed.cli.display import RunDisplay
from eaglefeed.cli.peers import refuse_peers
from eaglefeed.cli.report import write_or_tell
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.config import Settings

__all__ = ["demo"]

NUM_TRAINED = 260
_MIN_PRODUCED = 200
_MIN_GAIN = 1.1
_SETTINGS = {
    "target.dtype": "float32",
    "target.num_threads": 1,
    "queue.visibility_timeout_s": 5,
    "produce.supervision": "target_probs",
    "produce.lease_batch": 2,
    "feed.max_length": 512,
    "draft.vocab_size": 4096,
    "draft.intermediate_size": 768,
    "train.num_threads": 1,
    "train.checkpoint_every": 10,
    "train.decay_steps": NUM_TRAINED,
}


class Check(NamedTuple):
    """One promise, and whether this run kept it."""

    text: str
    passed: bool


def demo(
    ctx: typer.Context,
    run_dir: Annotated[Path, typer.Option("--run-dir", help="Folder for the run's files.")] = Path("runs"),
    target: TargetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Produce, queue, train and evaluate a draft of a small real target, kill the trainer once, check every promise."""
    started_s = SYSTEM_CLOCK.monotonic()
    run = f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    base = [f"{name}={value}" for name, value in _SETTINGS.items()]
    ctx.obj = [*base, f"run.id={run}", f"run.dir={run_dir.absolute()}", *(ctx.obj or [])]
    settings = read_settings(ctx, None, target__name=target)
    with RunDisplay(f"eaglefeed demo · {settings.target.name}") as display:
        document = _play(settings, display)
    document["seconds"] = round(SYSTEM_CLOCK.monotonic() - started_s, 1)
    checks = _checks(document)
    for check in checks:
        sys.stderr.write(f"{'ok    ' if check.passed else 'FAILED'}  {check.text}\n")
    if document["report"]:
        sys.stderr.write(f"report: {document['report']}\n")
    sys.stderr.write(f"files of the run: {settings.run_dir}; {document['seconds']} s\n")
    if as_json:
        sys.stdout.write(json.dumps({key: value for key, value in document.items() if key != "mismatches"}) + "\n")
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


def _play(settings: Settings, display: RunDisplay) -> dict[str, Any]:
    from eaglefeed.cli.demo_evaluation import evaluate_drafts, held_out_prompts, same_as_colocated
    from eaglefeed.cli.demo_processes import DemoProcesses
    from eaglefeed.cli.demo_run import DemoRun, prepare
    from eaglefeed.cli.targets import target_model, target_tokenizer

    refuse_peers(settings, "the demo compares what is stored")
    stop = threading.Event()
    with open_queues(settings) as queues, opened_store(settings) as store:
        with stop_on_signals(stop.set), DemoProcesses(settings, stop) as processes:
            inputs = prepare(settings, display, processes, NUM_TRAINED)
            run = DemoRun(settings, display, processes, queues, store, inputs)
            streamed = run.play()
        display.event("loading the target to compare and to evaluate with")
        model, tokenizer = target_model(settings), target_tokenizer(settings)
        equal = same_as_colocated(model, tokenizer, inputs, streamed, settings)
        prompts = held_out_prompts(inputs, tokenizer)
        display.event(f"decoding {len(prompts)} held-out prompts with three kinds of guesses")
        lengths = evaluate_drafts(model, prompts, settings, store)
        page = write_or_tell(settings, queues, {"evaluation": lengths | {"num_prompts": len(prompts)}})
        return run.result() | lengths | {"bitwise_equal": equal, "report": str(page) if page else None}


def _checks(document: dict[str, Any]) -> list[Check]:
    produced, acked = document["produced"], document["acked"]
    untrained, trained = document["accept_length_untrained"], document["accept_length"]
    losses = f"{document['loss_first']:.3f} to {document['loss_last']:.3f}"
    lookup = document["accept_length_prompt_lookup"]
    return [
        Check(f"{produced} samples produced (at least {_MIN_PRODUCED})", produced >= _MIN_PRODUCED),
        Check(f"{acked} acknowledged, {document['lost']} lost", acked == produced and document["lost"] == 0),
        Check(f"{document['dead']} dead letters", document["dead"] == 0),
        Check(f"{document['redelivered']} leases of the killed trainer came back", document["redelivered"] > 0),
        Check(f"loss fell from {losses}", document["loss_last"] < document["loss_first"]),
        Check("streamed batches equal colocated ones bit for bit", document["bitwise_equal"]),
        Check(f"{document['mismatches']} tokens differ from the target's own", document["mismatches"] == 0),
        Check(
            f"acceptance length {trained:.2f}, untrained {untrained:.2f} (prompt lookup {lookup:.2f})",
            trained >= _MIN_GAIN * untrained,
        ),
    ]
