"""Tokenized rows as a data set that `datasets` saved to disk: Arrow streams, and two JSON files beside them.

Columns: input_ids and loss_mask, lists of integers, and seq_len, their length.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from eaglefeed.errors import InputError

__all__ = ["ArrowRows", "ArrowWriter"]

_STATE, _INFO, _DATA = "state.json", "dataset_info.json", "data-00000-of-00001.arrow"
_COLUMNS = ("input_ids", "loss_mask")
_MAX_STATE_BYTES = 2**20
_BATCH_ROWS = 256
_SCHEMA = pa.schema(
    [(name, pa.list_(pa.int64())) for name in _COLUMNS] + [("seq_len", pa.int64()), ("sample_id", pa.string())]
)


class ArrowRows:
    """The rows of a saved data set; its files are mapped, not read.

    Args:
        folder: where it was saved.

    Raises:
        InputError: none was saved there, or not of tokenized rows.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with self._translated():
            tables = [_table(path) for path in self._data_files()]
            table = pa.concat_tables(table.select(_COLUMNS) for table in tables)
            table.validate(full=True)  # its offsets are followed without another look
        for name in _COLUMNS:
            column = table.column(name)
            kind = column.type
            if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(kind.value_type):
                raise InputError("another column", subject=self._name, wanted=f"{name}: list of integers", got=kind)
        self._table = table

    def __len__(self) -> int:
        """How many rows."""
        return int(self._table.num_rows)

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        """Token ids and loss mask of a row, [n] int64 each.

        Raises:
            InputError: a value is missing in it.
        """
        ids, mask = (self._table.column(name)[index].as_py() for name in _COLUMNS)
        if ids is None or mask is None or None in ids or None in mask:
            raise InputError("a row with missing values", subject=f"{self._name}, row {index}")
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.int64)

    def _data_files(self) -> list[Path]:
        path = self._folder / _STATE
        if not path.is_file() or path.stat().st_size > _MAX_STATE_BYTES:
            fix = "pass the folder that `speculators prepare-data` wrote"
            raise InputError("no saved data set", subject=self._name, wanted=_STATE, fix=fix)
        state = json.loads(path.read_bytes())
        names = [str(entry["filename"]) for entry in state["_data_files"]]
        if not names or state.get("_indices_data_files") or any(Path(name).name != name for name in names):
            raise InputError("another layout", subject=self._name, wanted="data files in the folder", got=names[:5])
        return [self._folder / name for name in names]

    @property
    def _name(self) -> str:
        return str(self._folder)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, LookupError, RecursionError, TypeError, ValueError) as error:
            what = "its data set cannot be read"
            raise InputError(what, subject=self._name, got=f"{type(error).__name__}: {error}"[:300]) from None


def _table(path: Path) -> Any:
    return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()


class ArrowWriter:
    """Writes a data set that `datasets.load_from_disk` takes; it is none before `finish`.

    Args:
        folder: a new one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: list[dict[str, object]] = []
        self._writer = pa.ipc.new_stream(str(folder / _DATA), _SCHEMA)

    def add(self, input_ids: list[int], loss_mask: list[int], sample_id: str) -> None:
        """Append a row."""
        row = {"input_ids": input_ids, "loss_mask": loss_mask, "seq_len": len(input_ids), "sample_id": sample_id}
        self._rows.append(row)
        if len(self._rows) == _BATCH_ROWS:
            self._flush()

    def finish(self) -> None:
        """Write the last rows, and then what makes the folder a data set."""
        self._flush()
        self._writer.close()
        state: dict[str, object] = {
            "_format_columns": None,
            "_split": None,
            "_data_files": [{"filename": _DATA}],
            "_fingerprint": "eaglefeed",
            "_format_kwargs": {},
            "_format_type": "torch",
            "_output_all_columns": False,
        }
        (self._folder / _INFO).write_text("{}")
        (self._folder / _STATE).write_text(json.dumps(state))

    def _flush(self) -> None:
        self._writer.write_batch(pa.RecordBatch.from_pylist(self._rows, schema=_SCHEMA))
        self._rows.clear()
