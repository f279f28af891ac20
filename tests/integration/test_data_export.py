"""`eaglefeed data export`: a run's samples as a folder that speculators' own loader takes, and that imports again."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import offline_features
import tiny_target
from commands import Ended, Shell, conversation, save_tiny_target, write_rows
from eaglefeed.interop.arrow_rows import ArrowRows
from eaglefeed.producer.conversations import read_conversations
from eaglefeed.producer.jsonl import ReadReport
from eaglefeed.schema.eagle3_compact import decode_stored
from eaglefeed.schema.vocab import VocabMapping
from eaglefeed.storage.base import open_store

LAYERS = (1, 2, 3)  # the contract's for seven layers
NUM_ROWS = 7
START = tiny_target.tiny_tokenizer().convert_tokens_to_ids(tiny_target.START)
"""The first token of every conversation."""
SHARDS = "runs/default/shards"
COMPACT = "produce.supervision=last_hidden_states"
THEIR_PYTHON = Path(__file__).parents[2] / ".bench-peers" / "stores" / "bin" / "python"
THEIR_LOADER = """
import importlib.util, json, pathlib, sys, torch, types
from safetensors.torch import save_file
# Their own modules, without what their packages import besides: models and servers, half of the time.
root = pathlib.Path(importlib.util.find_spec("speculators").origin).parent
for name in ("", ".models", ".models.eagle3", ".train", ".data_generation"):
    package = sys.modules["speculators" + name] = types.ModuleType("speculators" + name)
    package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn
folder, length, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
data = ArrowDataset(length, folder, on_missing="raise", hidden_states_dtype=torch.float32)
collate = CollateFn(length, width, dtype=torch.float32, preprocess=shift_batch)
batch = collate([data[index] for index in range(len(data))])
assert batch.pop("error_records") == 0
save_file({name: tensor.contiguous() for name, tensor in batch.items()}, sys.argv[4])
print(json.dumps(data.approx_lengths if isinstance(data.approx_lengths, list) else list(data.approx_lengths)))
"""

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
    write_rows(tmp_path / "rows.jsonl", [conversation(10**index) for index in range(NUM_ROWS)])
    small = ["feed.max_length=128", "train.checkpoint_every=4", "train.start_timeout_s=20"]
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", *small)


def _produced(shell: Shell, *words: str) -> None:
    shell.run("feed", "rows.jsonl", *words)
    assert shell.run("produce", COMPACT, *words).code == 0


def _export(shell: Shell, *words: str) -> Ended:
    return shell.run("data", "export", "out", "--format", "speculators", "--json", *words)


def _exported(folder: str = "out") -> list[tuple[Tensor, Tensor, Tensor]]:
    """Token ids, loss mask and states of each row."""
    rows, found = ArrowRows(Path(folder)), []
    for index in range(len(rows)):
        values, (ids, mask) = load_file(Path(folder, "hidden_states", f"hs_{index}.safetensors")), rows.row(index)
        assert torch.equal(values["token_ids"], ids)
        found.append((ids, mask, values["hidden_states"]))
    return found


def _tokenized() -> dict[tuple[int, ...], list[int]]:
    """Token ids without the first → loss mask, of every conversation."""
    found = read_conversations(Path("rows.jsonl"), tiny_target.tiny_tokenizer(), ReadReport(), max_length=128)
    return {each.input_ids[1:]: list(each.loss_mask) for each in found}


@pytest.mark.parametrize(
    "words", [(), ("--batch-size", "3"), ("--packing", "--batch-size", "2")], ids=["rows", "batches", "packed"]
)
def test_every_conversation_is_a_row_of_its_own_with_the_states_that_the_target_has(
    shell: Shell, model: Any, words: tuple[str, ...]
) -> None:
    shell.run("feed", "rows.jsonl", *words)
    assert shell.run("produce", COMPACT).code == 0
    document = _export(shell).document
    assert (document["rows"], document["left_out"], document["target_layer_ids"]) == (NUM_ROWS, {}, [2, 3, 4])
    wanted, found = _tokenized(), _exported()
    assert {tuple(ids[1:].tolist()) for ids, _, _ in found} == set(wanted)
    for ids, mask, states in found:
        assert mask.tolist() == wanted[tuple(ids[1:].tolist())]
        assert int(ids[0]) in (0, START)
        taken = offline_features.take(model, offline_features.Row([START, *ids[1:].tolist()], []), LAYERS)
        torch.testing.assert_close(states[:, :3], taken.aux, rtol=1e-4, atol=1e-4)
        first = 0 if int(ids[0]) else 1  # of a first document, which the shift drops
        torch.testing.assert_close(model.model.norm(states[first:, 3]), taken.after[first:], rtol=1e-4, atol=1e-4)
        assert first == 0 or not states[0, 3].any()
    assert any(int(ids[0]) for ids, _, _ in found) == ("--packing" in words)


@pytest.mark.skipif(not THEIR_PYTHON.is_file(), reason="speculators is not installed: `make bench-peers`")
def test_speculators_own_loader_reads_what_it_would_have_captured_itself(shell: Shell, model: Any) -> None:
    _produced(shell)
    folder, length = _export(shell).document["folder"], 512
    words = [THEIR_PYTHON, "-c", THEIR_LOADER, folder, str(length), "32", "batch.safetensors"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [offline_features.Row([START, *ids[1:].tolist()], mask.tolist()) for ids, mask, _ in _exported()]
    assert json.loads(ended.stdout) == [len(row.ids) for row in rows]
    batch, taken = load_file("batch.safetensors"), [offline_features.take(model, row, LAYERS) for row in rows]
    ends = sum(len(row.ids) - 1 for row in rows)
    assert batch["document_ids"][0, :ends].tolist() == [at for at, row in enumerate(rows) for _ in row.ids[1:]]
    for name, parts in (
        ("input_ids", [torch.tensor(row.ids[1:]) for row in rows]),
        ("loss_mask", [torch.tensor(row.mask[1:]) for row in rows]),
        ("hidden_states", [each.aux.flatten(1)[:-1] for each in taken]),
        ("verifier_last_hidden_states", [each.after[1:] for each in taken]),
    ):
        got = batch[name][0, :ends]
        got = model.model.norm(got).detach() if name.startswith("verifier") else got
        torch.testing.assert_close(got, torch.cat(parts).to(got.dtype), rtol=1e-4, atol=1e-4)


def test_an_exported_run_imports_again_and_is_the_same_but_for_rounding(shell: Shell) -> None:
    VocabMapping.from_ids(torch.arange(0, 259, 2), vocab_size=259).save(Path("map.safetensors"))
    _produced(shell, "--vocab", "map.safetensors")
    assert _export(shell).document["draft_vocab_size"] == 130
    ended = shell.run(
        "data", "import", "out", "--format", "speculators", "--run", "again", "--vocab", "map.safetensors"
    )
    assert ended.code == 0, ended.err
    first, again = _features(SHARDS), _features("runs/again/shards")
    names = dict(zip([f"hs_{index}" for index in range(NUM_ROWS)], first, strict=True))
    assert set(again) == set(names)
    for name, sample_id in names.items():
        wanted, got = first[sample_id], again[name]
        for feature in ("aux_hidden_states", "input_ids", "attention_mask", "loss_mask", "target_argmax"):
            assert torch.equal(got[feature], wanted[feature]), feature
        torch.testing.assert_close(got["last_hidden_states"], wanted["last_hidden_states"], rtol=1e-4, atol=1e-4)
    assert np.load("out/t2d-130.npy").nonzero()[0].tolist() == list(range(0, 259, 2))
    assert np.load("out/d2t-130.npy").tolist() == list(range(130))


def _features(folder: str) -> dict[str, dict[str, Tensor]]:
    """Sample → its decoded features, in the order of their leases."""
    store = open_store(folder)
    shards = sorted(store.scan(), key=lambda shard: int(shard.key.split(".")[-2]))
    refs = [store.read_ref(shard.key) for shard in shards]
    return {ref.sample_id: decode_stored(ref, store.get(ref)) for ref in refs}


def test_dropped_rows_and_fp8_are_exported_as_they_are_trained_on(shell: Shell, model: Any) -> None:
    shell.run("feed", "rows.jsonl")
    options = ("produce.aux_storage=fp8", "produce.supervision_rows=supervised")
    assert shell.run("produce", COMPACT, *options).code == 0
    assert _export(shell).code == 0
    for ids, mask, states in _exported():
        taken = offline_features.take(model, offline_features.Row([START, *ids[1:].tolist()], []), LAYERS)
        kept = mask.bool()
        torch.testing.assert_close(model.model.norm(states[kept][:, 3]), taken.after[kept], rtol=1e-4, atol=1e-4)
        assert not states[~kept][:, 3].any()
        error = (states[:, :3] - taken.aux).square().mean().sqrt() / taken.aux.square().mean().sqrt()
        assert float(error) < 0.05


def test_what_was_trained_and_not_retained_is_no_longer_there(shell: Shell) -> None:
    _produced(shell)
    assert shell.run("train").code == 0
    ended = _export(shell)
    assert (ended.code, "no shards of run default" in ended.err) == (2, True)
    assert not Path("out").exists()


def test_a_damaged_sample_is_named_and_left_out(shell: Shell) -> None:
    _produced(shell)
    good, bad = sorted(Path(SHARDS).glob("*/*.safetensors"))[:2]
    data = bytearray(good.read_bytes())
    data[-20] ^= 1
    good.write_bytes(data)
    bad.write_bytes(b"")
    ended = _export(shell)
    assert (ended.code, ended.document["samples"]) == (3, NUM_ROWS - 2)
    reasons = ended.document["left_out"]
    assert ["checksum" in reason or "cut short" in reason for reason in reasons.values()] == [True, True]
    assert len(_exported()) == NUM_ROWS - 2


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--run", "none"], "no shards of run none"),
        (["--store", "nccl://"], "nothing to export"),
        (["--store", "./empty"], "contract.json"),
    ],
)
def test_usage_errors_say_what_is_missing(shell: Shell, words: list[str], fault: str) -> None:
    ended = _export(shell, *words)
    assert (ended.code in (1, 2, 3), fault in ended.err) == (True, True)


def test_only_a_new_folder_and_last_hidden_states_are_exported(shell: Shell) -> None:
    _produced(shell)
    Path("out").mkdir()
    Path("out/mine").write_text("")
    ended = _export(shell)
    assert (ended.code, "out: not empty" in ended.err) == (2, True)
    shell.run("feed", "rows.jsonl", "--run", "logits")
    shell.run("produce", "--run", "logits")
    ended = _export(shell, "--run", "logits")
    assert (ended.code, "last_hidden_states, got logits" in ended.err) == (2, True)
