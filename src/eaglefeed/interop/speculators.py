"""speculators' offline features: a data set of tokenized rows, and hidden_states/hs_<row>.safetensors beside it.

    token_ids               [n], the tokens of that row
    hidden_states           [n, 4, H]: what leaves three decoder layers, the lowest first, and then what leaves the last
                            one, before the final norm
    hidden_states_scales    [n, 1, 1] float32, where hidden_states are float8_e4m3fn

An id there is that of the layer that the states enter, ours + 1. Loss masks stand in the data set alone, not shifted.

H target hidden size · n tokens
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from eaglefeed.errors import ConfigError, InputError
from eaglefeed.interop.features import Features, dense_tensor
from eaglefeed.interop.folder import FeatureFile, read_bounded, size_of
from eaglefeed.schema.contract import RunContract
from eaglefeed.schema.eagle3 import NUM_AUX_LAYERS

if TYPE_CHECKING:
    from eaglefeed.interop.arrow_rows import ArrowRows

__all__ = ["FOLDER", "SCALES", "SpeculatorsFolder", "file_name", "needs_pyarrow"]

FOLDER, SCALES = "hidden_states", "hidden_states_scales"
_FILE = re.compile(r"hs_(0|[1-9][0-9]*)\.safetensors")
_LAYERS = NUM_AUX_LAYERS + 1


def file_name(row: int) -> str:
    """The file of a row."""
    return f"hs_{row}.safetensors"


class SpeculatorsFolder:
    """A folder of `speculators prepare-data`, and of `speculators generate-offline-data` after it.

    Args:
        root: the folder.
        contract: of the run; says which layers the files hold.
        is_partial: leave out rows without a file.
    """

    format = "speculators"

    def __init__(self, root: Path, contract: RunContract, *, is_partial: bool = False) -> None:
        self._root, self._contract, self._is_partial = root, contract, is_partial
        self._dtype = getattr(torch, contract.dtype)
        self.num_missing = 0
        self._rows: ArrowRows | None = None

    def files(self) -> Sequence[FeatureFile]:
        """See FeatureFolder; without `is_partial` every row has its file."""
        num_rows, found = len(self._open_rows()), self._found()
        if not found:
            raise InputError("no feature files in it", subject=str(self._root / FOLDER), wanted=file_name(0))
        if (last := max(found)) >= num_rows:
            raise InputError("no row for it", subject=file_name(last), wanted=f"0 to {num_rows - 1}", got=last)
        missing = [row for row in range(num_rows) if row not in found]
        self.num_missing = len(missing)
        if missing and not self._is_partial:
            fix = "generate the others, or leave their rows out with --partial"
            got = f"{len(missing)} of {num_rows} rows have none"
            raise InputError("a row's file is missing", subject=file_name(missing[0]), got=got, fix=fix)
        return [FeatureFile(f"hs_{row}", file_name(row), found[row]) for row in sorted(found)]

    def read(self, name: str, max_bytes: int) -> Features:
        """See FeatureFolder."""
        values = _load(read_bounded(self._root / FOLDER / name, name, max_bytes), name)
        tokens, states = dense_tensor(values, "token_ids", name), self._states(values, name)
        ids, mask = self._open_rows().row(_row_of(name))
        if not torch.equal(tokens.long(), ids):
            fix = "the data set is another one than the files were generated from"
            raise InputError(
                "other tokens than its row's", subject=name, wanted=_short(ids), got=_short(tokens), fix=fix
            )
        return Features(
            name=name,
            input_ids=tokens,
            loss_mask=mask,
            aux=states[:, :-1].flatten(1),
            last=states[:, -1],
            is_normed=False,
        )

    def _open_rows(self) -> "ArrowRows":
        if self._rows is None:
            with needs_pyarrow():
                from eaglefeed.interop.arrow_rows import ArrowRows
            self._rows = ArrowRows(self._root)
        return self._rows

    def _found(self) -> dict[int, int]:
        """Row → bytes of its file."""
        paths = (self._root / FOLDER).glob("hs_*.safetensors")
        return {_row_of(path.name): size_of(path, path.name) for path in paths}

    def _states(self, values: dict[str, Tensor], name: str) -> Tensor:
        """[n, 4, H], decoded where they are in fp8."""
        states, width = dense_tensor(values, "hidden_states", name), self._contract.hidden_size
        if states.ndim != len(("n", "layers", "H")) or list(states.shape[1:]) != [_LAYERS, width]:
            fix = f"generate them with the layers {[layer + 1 for layer in sorted(self._contract.aux_layer_ids)]}"
            fix += ", or pass target.aux_layer_ids with the others, each less 1"
            wanted = ["n", _LAYERS, width]
            raise InputError("states of another shape", subject=name, wanted=wanted, got=list(states.shape), fix=fix)
        if states.dtype != torch.float8_e4m3fn or SCALES not in values:
            return states
        scales = dense_tensor(values, SCALES, name)
        if list(scales.shape) != [len(states), 1, 1]:
            raise InputError(
                "scales of another shape", subject=name, wanted=[len(states), 1, 1], got=list(scales.shape)
            )
        return states.to(self._dtype) * scales.to(self._dtype)


@contextmanager
def needs_pyarrow() -> Iterator[None]:
    """A block that imports it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        fix = "pip install 'eaglefeed[interop]'"
        raise ConfigError("a package is missing", subject="speculators", wanted=error.name, fix=fix) from None


def _row_of(name: str) -> int:
    found = _FILE.fullmatch(name)
    if found is None:
        raise InputError("no row's name", subject=name, wanted="hs_<row>.safetensors")
    return int(found[1])


def _load(data: bytes, name: str) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:  # an unknown dtype is a KeyError
        raise InputError("no whole safetensors file", subject=name, got=str(error)[:300]) from None


def _short(ids: Tensor) -> str:
    return f"{len(ids)} from {ids[:8].tolist()}" if ids.ndim == 1 else str(list(ids.shape))
