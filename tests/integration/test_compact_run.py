"""Schema version 2 from prompt to trained draft: the same losses for fewer bytes."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pipeline
import samples
from commands import Shell, conversation, save_tiny_target, write_rows
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.draft_config import DraftConfig
from eaglefeed.consumer.run import RunAssets, TrainingRun, load_run_assets
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.consumer.trainer import DraftTrainer
from eaglefeed.errors import ConfigError, ContractMismatch
from eaglefeed.producer.sizes import Encoding, TargetSizes, sample_bytes
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.producer.worker import ProducerWorker
from eaglefeed.queue.base import QueueItem
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.contract import RunContract
from eaglefeed.schema.eagle3_compact import decode_compact, encode_compact
from eaglefeed.schema.padding import pad_prompt
from eaglefeed.schema.prompt import Prompt, PromptRow
from eaglefeed.schema.refs import SampleRef, decode_ref, encode_ref
from tiny_target import LAYOUTS, tiny_model

NUM_PROMPTS = 5
T2D = torch.arange(64) % 3 != 0
COMPACT = ["produce.supervision=last_hidden_states", "produce.aux_storage=fp8"]

torch.set_num_threads(1)


def prompts() -> list[Prompt]:
    """Prompts of two rows each, with loss at some positions of every row."""
    draw = torch.Generator().manual_seed(0)

    def row(length: int) -> PromptRow:
        ids, mask = (torch.randint(0, top, (length,), generator=draw).tolist() for top in (64, 2))
        return PromptRow(tuple(ids), tuple(mask))

    rows = [(row(12 + index), row(6)) for index in range(NUM_PROMPTS)]
    common = {"tokenizer_fingerprint": "t", "template_fingerprint": "p", "max_length": 16}
    return [Prompt(sample_id=f"p-{index}", rows=pair, **common) for index, pair in enumerate(rows)]


def target(layout: str = "llama") -> HFEagle3TargetModel:
    return HFEagle3TargetModel(tiny_model(LAYOUTS[layout]()), compact=True)


def contract(model: HFEagle3TargetModel, **options: str) -> RunContract:
    compact = {"supervision": "last_hidden_states", "head_digest": model.head_digest(), "schema_version": 2}
    return pipeline.contract(vocab_size=64, hidden_size=32, **compact, **options)


def worker(run: pipeline.Run, model: HFEagle3TargetModel, own: RunContract) -> ProducerWorker:
    return ProducerWorker(
        prompts=run.prompts,
        samples=run.samples,
        store=run.store,
        target=model,
        contract=own,
        assets=model.target_assets,
        run_id="run",
        name="w",
        clock=run.clock,
    )


def produced(layout: str = "llama", **options: str) -> pipeline.Run:
    """A run whose samples are all there."""
    run, model = pipeline.Run(clock=pipeline.TurnableClock()), target(layout)
    run.feed(*prompts())
    stats = worker(run, model, contract(model, **options)).run(threading.Event())
    assert (stats.produced, stats.dead) == (NUM_PROMPTS, 0)
    return run


def trainer(assets: RunAssets) -> DraftTrainer:
    sizes = DraftConfig.from_target_config(assets.config, draft_vocab_size=int(T2D.sum()))
    draft = Eagle3Draft(sizes)
    names = {"embed_tokens": "embed_tokens.weight", "lm_head": "lm_head.weight", "norm": "norm.weight"}
    draft.initialize_from_target(**{name: assets.tensors[key] for name, key in names.items()}, t2d=T2D)
    return DraftTrainer(draft)


def streamed(run: pipeline.Run, folder: Path) -> tuple[list[tuple[Any, ...]], dict[str, Tensor]]:
    """History and weights of a training run over the stream."""
    assets = load_run_assets(run.store)
    head = assets.head(T2D)
    learner = trainer(assets)
    folder.mkdir()
    with SampleStream(
        run.samples, run.store, consumer="t", contract=assets.contract, head=head, clock=run.clock
    ) as stream:
        assert TrainingRun(learner, stream, folder, contract=assets.contract.id).train() == NUM_PROMPTS
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [(row["loss"], tuple(row["accuracies"]), row["grad_norm"]) for row in rows], learner.state_tensors()


def colocated(layout: str = "llama", *, fp8: bool = False) -> tuple[list[tuple[Any, ...]], dict[str, Tensor]]:
    """The same training with the target in this process: no store, no queue, every row expanded from one forward."""
    model = target(layout)
    tensors, metadata = model.target_assets()
    assets = RunAssets(contract(model), json.loads(metadata["config"]), tensors, metadata)
    head, learner = assets.head(T2D), trainer(assets)
    history = []
    for prompt in prompts():
        features = model.generate_batch(**pad_prompt(prompt)).tensors()
        if fp8:
            stored = encode_compact(features, fp8_aux=True, supervised_rows=False)
            features = decode_compact(stored, samples.specs(features), sample_id="s")
        result = learner.step([Eagle3TargetBatch(**head.expand(features))])
        history.append((result.loss, result.accuracies, result.grad_norm))
    return history, learner.state_tensors()


def refs(run: pipeline.Run) -> list[SampleRef]:
    return [decode_ref(item.payload) for item in run.samples.payloads()]


def same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("layout", ["llama", "gemma2"])
@pytest.mark.parametrize("rows", ["all", "supervised"])
def test_streamed_training_equals_colocated_training_bit_for_bit(layout: str, rows: str, tmp_path: Path) -> None:
    history, weights = streamed(produced(layout, supervision_rows=rows), tmp_path / "t")
    wanted, wanted_weights = colocated(layout)
    assert history == wanted
    assert len({loss for loss, _, _ in history}) == NUM_PROMPTS
    assert same_weights(weights, wanted_weights)


@pytest.mark.parametrize("rows", ["all", "supervised"])
def test_fp8_changes_the_losses_by_what_it_changes_the_aux_states_and_by_nothing_else(
    rows: str, tmp_path: Path
) -> None:
    history, weights = streamed(produced(aux_storage="fp8", supervision_rows=rows), tmp_path / "t")
    wanted, wanted_weights = colocated(fp8=True)
    assert history == wanted
    assert same_weights(weights, wanted_weights)
    exact, _ = colocated()
    assert history != exact
    assert [loss for loss, _, _ in history] == pytest.approx([loss for loss, _, _ in exact], rel=0.02)


@pytest.mark.parametrize("storage", ["same", "fp8"])
@pytest.mark.parametrize("rows", ["all", "supervised"])
def test_a_shard_is_as_small_as_feed_estimates(storage: str, rows: str) -> None:
    run = produced(aux_storage=storage, supervision_rows=rows)
    encoding = Encoding("last_hidden_states", storage, rows)
    sizes = TargetSizes(hidden_size=32, vocab_size=64, num_layers=7, max_positions=256)
    for ref, prompt in zip(refs(run), prompts(), strict=True):
        tensors = run.store.header(ref).tensors
        stored = sum(tensor.spec.num_bytes for tensor in tensors.values())
        assert stored == sample_bytes(prompt, sizes, encoding, dtype="float32")
        assert set(ref.checksums) == set(tensors)
        decoded = len(prompt.rows) * len(prompt.rows[0].input_ids) * (4 * 32 * 4 + 3 * 8 + 4)
        assert ref.estimated_bytes == decoded
        assert (stored == decoded) == (storage == "same" and rows == "all")


def test_batches_reach_the_loop_as_probabilities(tmp_path: Path) -> None:
    run = produced(supervision_rows="supervised")
    assets = load_run_assets(run.store)
    head = assets.head(T2D)
    with SampleStream(run.samples, run.store, consumer="t", head=head, clock=run.clock) as stream:
        names = {tuple(batch.to_trainer_inputs()) for batch in stream}
    core = ("input_ids", "attention_mask", "loss_mask", "aux_hidden_states")
    assert names == {(*core, "target_probs", "position_mask")}


@pytest.mark.parametrize("is_compact", [True, False])
def test_a_stream_that_lacks_a_head_or_has_one_too_many_ends_and_no_sample_is_set_aside(is_compact: bool) -> None:
    compact, plain = produced(), pipeline.Run(clock=pipeline.TurnableClock())
    plain.feed(*(pipeline.prompt(index) for index in range(NUM_PROMPTS)))
    plain.produce()
    run, head, fix = compact, None, r"pass head=load_run_assets\(store\)"
    if not is_compact:
        run, head, fix = plain, load_run_assets(compact.store).head(T2D), "leave head out"
    stream = SampleStream(run.samples, run.store, consumer="t", head=head, clock=run.clock)
    with stream, pytest.raises(ConfigError, match=fix):
        list(stream)
    stats = run.samples.stats()
    assert (stats.ready, stats.dead, stats.redelivered) == (NUM_PROMPTS, 0, 0)


def test_a_producer_that_stores_otherwise_is_refused() -> None:
    run = produced()
    run.prompts = pipeline.Run().prompts
    run.feed(*prompts())
    model = target()
    with pytest.raises(ContractMismatch, match="wanted aux_storage=same, got aux_storage=fp8"):
        worker(run, model, contract(model, aux_storage="fp8")).run(threading.Event())


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("rows", "whose loss_mask is 1"), ("argmax", "target_argmax: not from 0 to 63"), ("scale", "not finite")],
)
def test_wrong_compact_values_are_dead_letters_and_never_reach_the_loop(fault: str, reason: str) -> None:
    run, model = produced(), target()
    features = model.generate_batch(**pad_prompt(prompts()[0])).tensors()
    stored = encode_compact(features, fp8_aux=True, supervised_rows=True)
    row = stored["loss_mask"][0].nonzero()[0]
    if fault == "rows":
        stored["loss_mask"] = stored["loss_mask"].clone()
        stored["loss_mask"][0, row] = 0
    elif fault == "argmax":
        stored["target_argmax"][0] = 64
    else:
        stored["aux_scale"][0, 0] = torch.inf
    ref = samples.ref(features, sample_id="bad", contract=load_run_assets(run.store).contract.id)
    bad = run.store.put(ref, stored)
    other = pipeline.Run(clock=run.clock)
    other.samples.put([QueueItem("bad", encode_ref(bad))])
    other.samples.close()
    assets = load_run_assets(run.store)
    head = assets.head(T2D)
    with SampleStream(other.samples, run.store, consumer="t", head=head, clock=run.clock) as stream:
        assert list(stream) == []
    letters = list(other.samples.dead_letters())
    assert len(letters) == 1
    assert "SampleCorrupt: bad" in letters[0].reason
    assert reason in letters[0].reason


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [conversation(index) for index in range(4)])
    small = ["feed.max_length=128", "draft.vocab_size=259", "train.start_timeout_s=20"]
    return Shell(capsys, f"target.name={folder}", "target.dtype=float32", *small)


def test_the_whole_job_by_its_commands(shell: Shell) -> None:
    made = shell.run("vocab", "rows.jsonl", "-o", "vocab.safetensors", "--json")
    assert made.code == 0, made.err
    losses = {}
    for rows in ("all", "supervised"):
        common = ["--run", rows, *COMPACT, f"produce.supervision_rows={rows}", "--json"]
        fed = shell.run("feed", "rows.jsonl", *common).document
        done = shell.run("produce", *common).document
        assert (done["produced"], done["dead"]) == (4, 0)
        assert fed["num_bytes"] < done["num_bytes"] < fed["num_bytes"] + 4 * 4096
        checked = shell.run("validate", "--queue", "--values", "--run", rows, "--json").document
        assert (checked["checked"], checked["faults"]) == (4, [])
        assert shell.run("validate", f"runs/{rows}/shards").code == 0
        trained = shell.run("train", "--vocab", "vocab.safetensors", "--run", rows, "--json")
        assert trained.code == 0, trained.err
        assert (trained.document["acked"], trained.document["dead"]) == (4, 0)
        history = Path(f"runs/{rows}/draft/history.jsonl").read_text().splitlines()
        losses[rows] = [json.loads(line)["loss"] for line in history]
    assert losses["all"] == losses["supervised"]


def test_validating_headers_of_version_2_needs_no_torch(shell: Shell, tmp_path: Path) -> None:
    options = [*COMPACT, "produce.supervision_rows=supervised"]
    shell.run("feed", "rows.jsonl", *options)
    shell.run("produce", *options)
    code = "import sys\nfrom eaglefeed.cli import main\ntry:\n    main(['validate', 'runs/default/shards'])\nfinally:\n"
    code += "    print('torch' in sys.modules)\n"
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert ended.stdout.decode().splitlines() == ["4 checked, 0 with faults", "False"], ended.stderr.decode()


def test_a_vocabulary_map_of_the_producers_comes_with_the_run(shell: Shell) -> None:
    shell.run("vocab", "rows.jsonl", "-o", "vocab.safetensors")
    options = ["produce.supervision=last_hidden_states", "produce.vocab=vocab.safetensors"]
    assert shell.run("feed", "rows.jsonl", *options).code == 0
    assert shell.run("produce", *options, "--json").document["produced"] == 4
    assert shell.run("train", "--json").document["acked"] == 4


@pytest.mark.parametrize("option", ["produce.aux_storage=fp8", "produce.supervision_rows=supervised"])
def test_options_of_last_hidden_states_are_refused_without_them(shell: Shell, option: str) -> None:
    ended = shell.run("produce", option)
    assert ended.code == 2
    assert f"{option.removeprefix('produce.')} needs supervision=last_hidden_states, not logits" in ended.err


def test_a_loop_of_ones_own_gets_the_heads_vocabulary_from_the_run() -> None:
    with_map, model = pipeline.Run(clock=pipeline.TurnableClock()), target()
    with_map.store.put_assets("target_assets.safetensors", model.target_assets()[0] | {"t2d": T2D}, {"config": "{}"})
    with_map.feed(*prompts()[:1])
    worker(with_map, model, contract(model)).run(threading.Event())
    for run, draft_vocab in ((with_map, int(T2D.sum())), (produced(), 64)):
        with SampleStream(
            run.samples, run.store, consumer="t", head=load_run_assets(run.store).head(), clock=run.clock
        ) as stream:
            batch = next(iter(stream))
        assert batch.target_probs is not None
        assert batch.target_probs.shape[-1] == draft_vocab
