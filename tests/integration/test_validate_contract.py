"""`eaglefeed validate` by the contract that lies beside the shards, or in the store of the queue's refs."""

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import pipeline
import samples
from commands import Shell
from eaglefeed.schema.contract import CONTRACT_FILE, RunContract
from eaglefeed.storage.base import open_store


def contract(**changes: Any) -> RunContract:
    """That of samples.tensors, whose target has a hidden size of 4."""
    fields = {"target_fingerprint": "target", "dtype": "bfloat16", "vocab_size": samples.V}
    return pipeline.contract(**(fields | changes))


def stored(folder: Path, own: RunContract, written: RunContract) -> Path:
    """A sample that says it is of `own`, in a store of the run of `written`."""
    features = samples.tensors(supervision="logits")
    features["logits"][:, -1] = 0
    with closing(open_store(str(folder))) as store:
        store.put(samples.ref(features, contract=own.id), features)
        store.put_document(CONTRACT_FILE, written.to_json())
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"hidden_size": 8}, r"aux_hidden_states .* wanted 24 \(3 layers of hidden_size 8\), got 12"),
        ({"vocab_size": 12}, r"logits .* wanted 12 \(vocab_size\), got 11"),
        ({"aux_layer_ids": (2, 3, 4)}, "made under another run contract"),
    ],
)
def test_a_shard_that_is_not_the_contracts_is_a_fault(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stored(tmp_path / "shards", contract(), contract(**changes))
    ended = Shell(capsys).run("validate", folder, "--json")
    assert (ended.code, ended.document["checked"]) == (3 if said else 0, 1)
    faults = ended.document["faults"]
    assert [fault["kind"] for fault in faults] == ["ContractMismatch"] * bool(said)
    assert all(re.search(said, fault["fault"]) for fault in faults)
