"""The document of the pipeline's bench, and its failures; the sizes are too small for figures, no time counts."""

import contextlib
import io
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eaglefeed.bench import pipeline_plan, pipeline_rounds, pipeline_table
from eaglefeed.bench.pipeline_plan import Load, PipelinePlan
from eaglefeed.bench.pipeline_run import run_pipeline_bench
from eaglefeed.bench.pipeline_samples import Training, make_batch
from eaglefeed.cli import main
from eaglefeed.errors import EaglefeedError

DRAFT = Load(tokens=16, hidden=64, draft_vocab=32, dtype="float32", step_s=None, steps=3, warm_up=1)
DEVICE = Load(
    tokens=16, hidden=64, draft_vocab=32, dtype="bfloat16", step_s=0.01, steps=3, warm_up=1, produced_ahead=True
)
TINY = PipelinePlan(rounds=1, draft=DRAFT, device=DEVICE, high_count=8, quick=True)
BOUNDS = {
    "draft_wait_share": (0.02, "lower"),
    "device_wait_share": (0.02, "lower"),
    "draft_stream_over_memory": (1.05, "lower"),
    "device_stream_over_memory": (1.05, "lower"),
    "device_observed_over_plain": (1.01, "lower"),
}
FIGURES = {
    *(f"{load}.{name}" for load in ("draft", "device") for name in ("memory", "stream", "stream_over_memory")),
    *("draft.wait_share", "device.wait_share", "device.ceiling", "device.observed", "device.observed_over_plain"),
}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """That of `eaglefeed bench pipeline --quick`, at tiny sizes."""
    out, folder = io.StringIO(), tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        patch.setattr(pipeline_plan, "QUICK", TINY)
        main(["bench", "pipeline", "--quick", "--json", "--dir", str(folder)])
    assert not list(folder.iterdir()), "shards were left behind"
    return dict(json.loads(out.getvalue()))


def test_the_command_measures_both_loads_and_lists_its_bounds(document: dict[str, Any]) -> None:
    assert {entry["name"]: (entry["bound"], entry["better"]) for entry in document["must"]} == BOUNDS
    assert set(document["figures"]) == FIGURES
    assert (document["quick"], document["rounds"]) == (True, 1)
    took = [figure for name, figure in document["figures"].items() if not name.endswith("wait_share")]
    assert all(0 < figure["min"] <= figure["median"] <= figure["max"] for figure in took)
    assert all(0 <= document["figures"][f"{load}.wait_share"]["max"] < 1 for load in ("draft", "device"))


def test_a_bound_is_held_against_the_median_of_its_figure(document: dict[str, Any]) -> None:
    values = {entry["name"]: entry["value"] for entry in document["must"]}
    assert values == {name: document["figures"][name.replace("_", ".", 1)]["median"] for name in BOUNDS}


def test_the_tables_tell_every_bound_and_figure(document: dict[str, Any]) -> None:
    told = "\n".join(pipeline_table.render(document))
    assert all(f"`{name}`" in told for name in (*BOUNDS, *FIGURES))
    assert "16 tokens, H 64, D 32, float32, trained, 3 steps" in told


def test_other_weights_than_from_memory_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = pipeline_rounds._from_memory(replace(DRAFT, dtype="float16"))
    assert other.digest != pipeline_rounds._from_memory(DRAFT).digest  # the digest sees other batches
    monkeypatch.setattr(pipeline_rounds, "_from_stream", lambda *_, **_options: other)
    bed: Any = None
    with pytest.raises(EaglefeedError, match="other weights came of the stream"):
        run_pipeline_bench(bed, tmp_path, TINY, observe=lambda *_: nullcontext(), tell=lambda _: None)


def test_a_load_that_waits_takes_its_time_and_learns_nothing() -> None:
    training = Training(DEVICE)
    training.step(make_batch(DEVICE))
    assert training.digest() == ""
