"""A run's samples as a folder that speculators trains on offline; `speculators.py` describes it.

A sample lacks its row's first token, and that token's last state: the contract's shift drops them. Zeros stand for them
in the files; speculators' EAGLE-3 drops them as well. Of the state before the final norm a sample knows the direction
alone, and gets one of mean square 1: the norm makes the same of it, but for rounding to the run's dtype.

B batch · S sequence · n tokens · H target hidden size
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from eaglefeed.errors import ConfigError, SampleCorrupt, SampleMissing, SchemaError, StorageError
from eaglefeed.interop.norm import Gain
from eaglefeed.interop.speculators import FOLDER, file_name, needs_pyarrow
from eaglefeed.schema.contract import RunContract
from eaglefeed.schema.eagle3 import NUM_AUX_LAYERS
from eaglefeed.schema.eagle3_compact import decode_stored, validate_ref
from eaglefeed.schema.refs import SampleRef
from eaglefeed.schema.vocab import VocabMapping
from eaglefeed.storage.base import FeatureStore

__all__ = ["Exported", "SpeculatorsExport", "check_exportable"]


@dataclass
class Exported:
    """What an export did: samples, their rows, tokens and bytes; and samples left out, with the reason."""

    samples: int = 0
    rows: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    left_out: dict[str, str] = field(default_factory=dict)


class Row(NamedTuple):
    """One conversation, not shifted: ids and mask [n], states [n, 4, H]."""

    token_ids: Tensor
    loss_mask: Tensor
    hidden_states: Tensor


def check_exportable(contract: RunContract, folder: Path) -> None:
    """Refuse what cannot be exported, before anything is read.

    Raises:
        ConfigError: the run's samples hold no last hidden states, or the folder is neither new nor empty.
    """
    if contract.supervision != "last_hidden_states":
        what, wanted = "its samples hold no last hidden states", "a run with produce.supervision=last_hidden_states"
        raise ConfigError(what, subject="speculators", wanted=wanted, got=contract.supervision)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            "not empty", subject=str(folder), fix="pass a new folder, or delete what an export left there"
        )


class SpeculatorsExport:
    """Writes samples as rows, in the order in which they come.

    Args:
        folder: that `check_exportable` accepted.
        contract: of the run, likewise.
        assets: the target's: norm.weight, perhaps norm.bias, and t2d where the run has a vocabulary map.
    """

    def __init__(self, folder: Path, contract: RunContract, assets: Mapping[str, Tensor]) -> None:
        self._folder, self._contract, self._assets = folder, contract, assets
        self._ascending = sorted(range(NUM_AUX_LAYERS), key=contract.aux_layer_ids.__getitem__)
        self._gain: Gain | None = None
        self.done = Exported()

    def write(self, store: FeatureStore, refs: Iterable[SampleRef]) -> Exported:
        """Export these samples; before it returns, the folder is no data set to speculators.

        Raises:
            SchemaError: last hidden states that did not come out of the norm in the run's assets.
            StorageError: the store is out of reach, or the folder cannot be written to.
        """
        with needs_pyarrow():
            from eaglefeed.interop.arrow_rows import ArrowWriter
        with _translated(self._folder):
            (self._folder / FOLDER).mkdir(parents=True, exist_ok=True)
            table = ArrowWriter(self._folder)
            for ref in refs:
                for row in self._rows(ref, store):
                    self._write_row(row)
                    table.add(row.token_ids.tolist(), row.loss_mask.tolist(), ref.sample_id)
            self._write_vocabulary()
            table.finish()
        return self.done

    def _rows(self, ref: SampleRef, store: FeatureStore) -> Iterator[Row]:
        features = self._read(ref, store)
        if features is None:
            return
        self.done.samples += 1
        for index in range(len(features["input_ids"])):
            row = {name: tensor[index] for name, tensor in features.items()}
            yield from _documents(self._unshifted(row, ref.sample_id), row)

    def _read(self, ref: SampleRef, store: FeatureStore) -> dict[str, Tensor] | None:
        try:
            validate_ref(ref, self._contract.schema_version)
            stored = store.get(ref)
            self._contract.require_sample(ref, stored)
            return decode_stored(ref, stored)
        except (SampleMissing, SampleCorrupt, SchemaError) as error:
            self.done.left_out[ref.sample_id] = str(error)
            return None

    def _unshifted(self, row: Mapping[str, Tensor], sample_id: str) -> Row:
        num_tokens = int(row["attention_mask"].sum())
        ids, mask, last = (
            torch.cat([torch.zeros_like(row[name][:1]), row[name][: num_tokens - 1]])
            for name in ("input_ids", "loss_mask", "last_hidden_states")
        )
        aux = row["aux_hidden_states"][:num_tokens].view(num_tokens, NUM_AUX_LAYERS, -1)
        before = self._before_norm(last, sample_id).to(aux.dtype)
        return Row(ids, mask, torch.cat([aux[:, self._ascending], before[:, None]], dim=1))

    def _before_norm(self, last: Tensor, sample_id: str) -> Tensor:
        """[n, H], zero where the sample holds no state: at its first token, and in rows that were dropped."""
        is_known = last.any(-1)
        found = torch.zeros_like(last, dtype=torch.float32)
        if is_known.any():
            self._gain = self._gain or Gain.of_assets(self._assets, last[is_known])
            if not self._gain.is_of(last[is_known]):
                raise SchemaError("last hidden states that did not come out of the final norm", subject=sample_id)
            found[is_known] = self._gain.undo(last[is_known])
        return found

    def _write_row(self, row: Row) -> None:
        tensors = {"hidden_states": row.hidden_states.contiguous(), "token_ids": row.token_ids.clone()}
        data = safetensors.torch.save(tensors)
        (self._folder / FOLDER / file_name(self.done.rows)).write_bytes(data)
        self.done.rows += 1
        self.done.num_tokens += len(row.token_ids)
        self.done.num_bytes += len(data)

    def _write_vocabulary(self) -> None:
        if "t2d" in self._assets:
            t2d = self._assets["t2d"]
            mapping = VocabMapping.from_ids(t2d.nonzero().flatten(), vocab_size=len(t2d))
            for name, tensor in (("t2d", mapping.t2d), ("d2t", mapping.d2t)):
                np.save(self._folder / f"{name}-{mapping.draft_vocab_size}.npy", tensor.numpy())


def _documents(row: Row, features: Mapping[str, Tensor]) -> Iterator[Row]:
    """The conversations of a row: one, unless it is packed."""
    lengths = features["seq_lens"].tolist() if "seq_lens" in features else [len(row.token_ids)]
    start = 0
    for length in filter(None, lengths):  # the last one's may count padding, which the row has lost
        yield Row(*(tensor[start : start + length] for tensor in row))
        start += length


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "delete the folder, and export again where there is room"
        raise StorageError("cannot be written to", subject=str(folder), got=error.strerror, fix=fix) from None
