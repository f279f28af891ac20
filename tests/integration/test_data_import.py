"""`eaglefeed data import`: other projects' offline features become a run's samples, and a draft is trained on them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import offline_features
import tiny_target
from commands import Ended, Shell, save_tiny_target, write_rows
from eaglefeed.producer.loading import tokenizer_fingerprint
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.eagle3_compact import decode_stored
from eaglefeed.schema.vocab import VocabMapping
from eaglefeed.storage.base import open_store

LAYERS = (1, 2, 3)  # the contract's for seven layers
WRITERS = {"speculators": offline_features.write_speculators, "specforge": offline_features.write_specforge}
SHARDS = "runs/default/shards"

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_target.tiny_model()


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    small = ["feed.max_length=64", "train.checkpoint_every=4", "train.start_timeout_s=20"]
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", *small)


def _import(shell: Shell, form: str, *words: str) -> Ended:
    return shell.run("data", "import", "features", "--format", form, "--json", *words)


def _features(folder: str = SHARDS) -> dict[str, dict[str, Tensor]]:
    """Sample → its decoded features."""
    store = open_store(folder)
    refs = [store.read_ref(shard.key) for shard in store.scan()]
    return {ref.sample_id: decode_stored(ref, store.get(ref)) for ref in refs}


def _ids(form: str) -> list[str]:
    if form == "speculators":
        return [f"hs_{index}" for index in range(offline_features.NUM_ROWS)]
    return [f"rows_{index // 3 * 3}-{index // 3 * 3 + 3}.data_{index}" for index in range(offline_features.NUM_ROWS)]


@pytest.mark.parametrize(("form", "dtype"), [("speculators", torch.bfloat16), ("specforge", torch.float32)])
def test_imported_samples_are_those_of_a_producer_and_train_without_the_target(
    shell: Shell, form: str, dtype: torch.dtype, target: Path
) -> None:
    rows, model = offline_features.rows(), tiny_target.tiny_model().to(dtype)
    WRITERS[form](Path("features"), rows, model, LAYERS)
    VocabMapping.from_ids(torch.arange(0, 259, 2), vocab_size=259).save(Path("map.safetensors"))
    shutil.copytree(target, "target")
    words = ("target.name=./target", f"target.dtype={str(dtype).removeprefix('torch.')}")
    ended = _import(shell, form, "--vocab", "map.safetensors", *words)
    assert ended.code == 0, ended.err
    document = ended.document
    assert (document["files"], document["imported"], document["known"], document["drained"]) == (5, 5, 0, True)
    assert document["num_tokens"] == sum(len(row.ids) for row in rows)
    producer, imported = HFEagle3TargetModel(model, compact=True), _features()
    assert sorted(imported) == sorted(_ids(form))
    for sample_id, row in zip(_ids(form), rows, strict=True):
        ids, mask = torch.tensor([row.ids]), torch.tensor([row.mask])
        wanted = producer.generate_batch(ids, torch.ones_like(ids), mask).tensors()
        assert wanted.keys() == imported[sample_id].keys()
        for name, tensor in wanted.items():
            assert torch.equal(imported[sample_id][name], tensor), name
    assert shell.run("validate", "--queue", "--values", "--json").document["faults"] == []
    shutil.rmtree("target")
    trained = shell.run("train", "--json", *words)
    assert trained.code == 0, trained.err
    assert (trained.document["acked"], trained.document["drained"]) == (5, True)
    assert load_file(Path(trained.document["draft"]) / "model.safetensors")["lm_head.weight"].shape == (130, 32)


def test_agreement_counts_supervised_tokens_that_the_target_would_have_said(shell: Shell, model: Any) -> None:
    ids = [5, 6, 7]
    with torch.no_grad():
        for _ in range(20):  # greedy
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    spoiled = (ids[-1] + 1) % 259
    row = offline_features.Row([*ids, spoiled], [0, 0, 0] + [1] * 21)
    offline_features.write_specforge(Path("features"), [row], model, LAYERS)
    document = _import(shell, "specforge").document
    assert (document["supervised"], document["agreed"]) == (21, 20)


def test_a_second_import_imports_nothing_twice(shell: Shell, model: Any) -> None:
    offline_features.write_specforge(Path("features"), offline_features.rows(), model, LAYERS)
    _import(shell, "specforge")
    again = _import(shell, "specforge").document
    assert (again["imported"], again["known"], again["drained"]) == (0, 5, True)
    stats = shell.run("queue", "stats", "--json").document
    assert (stats["samples"]["ready"], stats["samples"]["closed"], stats["prompts"]["done"]) == (5, True, 5)


def test_compact_storage_is_the_runs_choice(shell: Shell, model: Any) -> None:
    offline_features.write_specforge(Path("features"), offline_features.rows(), model, LAYERS)
    words = ["supervision=last_hidden_states", "aux_storage=fp8", "supervision_rows=supervised"]
    assert _import(shell, "specforge", *(f"produce.{word}" for word in words)).code == 0
    store = open_store(SHARDS)
    stored = [store.get(store.read_ref(shard.key)) for shard in store.scan()]
    assert {each["aux_hidden_states"].dtype for each in stored} == {torch.float8_e4m3fn}
    assert all(len(each["last_hidden_states"]) == int(each["loss_mask"].sum()) for each in stored)
    assert shell.run("train", "--json").document["acked"] == 5


def test_a_map_of_another_tokenizer_is_refused_and_the_targets_own_is_taken(shell: Shell, model: Any) -> None:
    offline_features.write_specforge(Path("features"), offline_features.rows(), model, LAYERS)
    mapping = VocabMapping.from_ids(torch.arange(200), vocab_size=259)
    mapping.of_tokenizer("f" * 32).save(Path("theirs"))
    mapping.of_tokenizer(tokenizer_fingerprint(tiny_target.tiny_tokenizer())).save(Path("ours"))
    ended = _import(shell, "specforge", "--vocab", "theirs")
    assert (ended.code, "the vocabulary map is another tokenizer's" in ended.err) == (3, True)
    assert not list(Path().glob(f"{SHARDS}/*.safetensors"))
    assert _import(shell, "specforge").code == 0
    assert (
        shell.run("train", "--vocab", "ours", "--json").document["acked"] == 5
    )  # of an import nobody says the tokenizer


@pytest.mark.parametrize("form", WRITERS)
def test_other_layers_than_the_default_come_in_the_runs_order(shell: Shell, model: Any, form: str) -> None:
    (row,) = offline_features.rows(1)
    WRITERS[form](Path("features"), [row], model, (5, 0, 3))
    assert _import(shell, form, "target.aux_layer_ids=5,0,3").code == 0
    wanted = offline_features.take(model, row, (5, 0, 3)).aux.flatten(1)
    assert torch.equal(_features()[_ids(form)[0]]["aux_hidden_states"][0], wanted)


def test_states_in_fp8_are_decoded_as_their_reader_does(shell: Shell, model: Any) -> None:
    (row,) = offline_features.rows(1)
    taken = offline_features.take(model, row, LAYERS)
    states = torch.cat([taken.aux, taken.before[:, None]], dim=1)
    scales = states.abs().amax((1, 2), keepdim=True) / 448
    packed = (states / scales).to(torch.float8_e4m3fn)
    offline_features.write_dataset(Path("features"), [row])
    offline_features.write_states(Path("features"), 0, packed, torch.tensor(row.ids), hidden_states_scales=scales)
    assert _import(shell, "speculators").code == 0
    wanted = (packed.float() * scales)[:, :3].flatten(1)
    assert torch.equal(_features()["hs_0"]["aux_hidden_states"][0], wanted)


def test_rows_without_a_file_are_an_error_unless_they_are_to_be_left_out(shell: Shell, model: Any) -> None:
    offline_features.write_speculators(Path("features"), offline_features.rows(), model, LAYERS)
    Path("features/hidden_states/hs_1.safetensors").unlink()
    ended = _import(shell, "speculators")
    assert (ended.code, "hs_1.safetensors" in ended.err, "1 of 5 rows" in ended.err) == (3, True, True)
    document = _import(shell, "speculators", "--partial").document
    assert (document["imported"], document["left_out"]) == (4, 1)
    assert sorted(_features()) == ["hs_0", "hs_2", "hs_3", "hs_4"]


def test_what_is_wrong_with_the_first_file_leaves_the_run_as_it_was(shell: Shell, model: Any) -> None:
    offline_features.write_specforge(Path("features"), offline_features.rows(), model, LAYERS)
    ended = _import(shell, "specforge", "target.dtype=bfloat16")
    assert ended.code == 3
    assert "data_0.ckpt: auxiliary states of another dtype, wanted bfloat16, got float32" in ended.err
    assert not Path(SHARDS, "contract.json").exists()
    assert _import(shell, "specforge").code == 0


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("input_ids", torch.full((26,), 300), "token ids out of range, wanted 0 to 258"),
        ("loss_mask", torch.ones(900), "a loss mask of another length"),
    ],
    ids=["of the same size", "of another size"],
)
def test_a_file_that_does_not_fit_ends_the_import_and_the_next_goes_on_with_it(
    shell: Shell, model: Any, name: str, value: Tensor, fault: str
) -> None:
    rows = offline_features.rows()
    offline_features.write_specforge(Path("features"), rows, model, LAYERS)
    path = Path("features/rows_0-3/data_2.ckpt")
    good = path.read_bytes()
    spoiled = offline_features.specforge_row(rows[2], offline_features.take(model, rows[2], LAYERS))
    offline_features.write_ckpt(path, spoiled | {name: value})
    ended = _import(shell, "specforge")
    assert ended.code == 3
    assert f"rows_0-3/data_2.ckpt: {fault}" in ended.err
    assert sorted(_features()) == _ids("specforge")[:2]
    stats = shell.run("queue", "stats", "--json").document
    assert (stats["samples"]["ready"], stats["samples"]["closed"], stats["prompts"]["ready"]) == (2, False, 3)
    path.write_bytes(good)
    assert _import(shell, "specforge").document["imported"] == 3
    assert sorted(_features()) == _ids("specforge")


def test_a_file_that_changed_since_it_was_queued_is_refused(shell: Shell, model: Any) -> None:
    offline_features.write_specforge(Path("features"), offline_features.rows(), model, LAYERS)
    _import(shell, "specforge")
    path = Path("features/rows_3-6/data_4.ckpt")
    path.write_bytes(path.read_bytes() + b"\0")
    ended = _import(shell, "specforge")
    assert (ended.code, "data_4.ckpt: another file than the one that was queued" in ended.err) == (3, True)


def test_a_run_that_was_fed_takes_no_import(shell: Shell, model: Any, tmp_path: Path) -> None:
    offline_features.write_specforge(Path("features"), offline_features.rows(), model, LAYERS)
    messages = tiny_target.turns("a", "b")
    shell.run("feed", write_rows(tmp_path / "rows.jsonl", [{"id": "c", "messages": messages}]), "--keep-open")
    ended = _import(shell, "specforge")
    assert (ended.code, "prompts: queued by somebody else" in ended.err) == (2, True)
    prompts = shell.run("queue", "stats", "--json").document["prompts"]
    assert (prompts["ready"], prompts["dead"], prompts["closed"]) == (1, 0, False)
    assert not Path(SHARDS, "contract.json").exists(), "the run is still its producers'"


def test_a_file_that_came_after_the_others_is_refused(shell: Shell, model: Any) -> None:
    offline_features.write_speculators(Path("features"), offline_features.rows(), model, LAYERS)
    late = Path("features/hidden_states/hs_1.safetensors")
    late.rename("late")
    _import(shell, "speculators", "--partial")
    Path("late").rename(late)
    ended = _import(shell, "speculators")
    assert (ended.code, "hs_1.safetensors: not there when the others were queued, got 1 such" in ended.err) == (3, True)


def test_an_import_goes_on_with_a_queue_that_was_rebuilt(shell: Shell, model: Any) -> None:
    offline_features.write_specforge(Path("features"), offline_features.rows(), model, LAYERS)
    _import(shell, "specforge")
    assert shell.run("queue", "purge", "--yes").code == 0
    next(Path(SHARDS).glob("*/*data_3.*.safetensors")).unlink()
    assert shell.run("store", "rebuild").code == 0
    document = _import(shell, "specforge").document
    assert (document["imported"], document["known"], document["drained"]) == (1, 4, True)
    stats = shell.run("queue", "stats", "--json").document
    assert (stats["samples"]["ready"], stats["samples"]["closed"], stats["prompts"]["done"]) == (5, True, 1)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["nowhere", "--format", "specforge"], "no such folder"),
        ([".", "--format", "specforge"], "no feature files in it, wanted .ckpt or .ckpt.gz"),
        ([".", "--format", "speculators"], "no saved data set, wanted state.json"),
        ([".", "--format", "specforge", "--partial"], "rows and files are one there"),
        ([".", "--format", "specforge", "produce.supervision=logits"], "wanted last_hidden_states, got logits"),
        ([".", "--format", "specforge", "--store", "nccl://"], "nowhere to import to"),
        ([".", "--format", "specforge", "--vocab", "map.safetensors"], "another target's, wanted 259 tokens, got 64"),
        ([".", "--format", "other"], "Invalid value"),
    ],
)
def test_usage_errors_say_what_to_pass(shell: Shell, words: list[str], fault: str) -> None:
    VocabMapping.from_ids(torch.arange(5), vocab_size=64).save(Path("map.safetensors"))
    ended = shell.run("data", "import", *words)
    assert ended.code in (2, 3)
    assert fault in ended.err
