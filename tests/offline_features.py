"""Offline features as other projects write them, captured from a model of transformers without this project's code."""

import gzip
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from safetensors.torch import save_file
from torch import Tensor

NUM_ROWS = 5


class Row(NamedTuple):
    """Token ids and loss mask of a conversation, not shifted."""

    ids: list[int]
    mask: list[int]


class Taken(NamedTuple):
    """What a model computed for a row: layers' outputs [n, 3, H], and last states [n, H] before the norm and after."""

    aux: Tensor
    before: Tensor
    after: Tensor


def rows(count: int = NUM_ROWS, *, vocab_size: int = 259, longest: int = 40) -> list[Row]:
    """Rows of different lengths, with loss on their second half."""
    draw = torch.Generator().manual_seed(1)
    lengths = [longest - 7 * (index % 4) for index in range(count)]
    ids = [torch.randint(0, vocab_size, (length,), generator=draw).tolist() for length in lengths]
    return [Row(each, [int(at >= len(each) // 2) for at in range(len(each))]) for each in ids]


def take(model: Any, row: Row, layers: tuple[int, ...]) -> Taken:
    """Run the model on one row; state k + 1 of transformers is what leaves layer k, the last one excepted."""
    before: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _module, args: before.append(args[0]))
    with torch.no_grad():
        result = model.model(input_ids=torch.tensor([row.ids]), output_hidden_states=True, use_cache=False)
    hook.remove()
    aux = torch.stack([result.hidden_states[layer + 1][0] for layer in layers], dim=1)
    return Taken(aux, before[0][0], result.last_hidden_state[0])


def write_speculators(folder: Path, found: list[Row], model: Any, layers: tuple[int, int, int]) -> Path:
    """The folder of `prepare-data` and `generate-offline-data`: the layers ascending, then the last one."""
    write_dataset(folder, found)
    for index, row in enumerate(found):
        taken = take(model, row, tuple(sorted(layers)))
        states = torch.cat([taken.aux, taken.before[:, None]], dim=1)
        write_states(folder, index, states, torch.tensor(row.ids))
    return folder


def write_states(folder: Path, index: int, states: Tensor, ids: Tensor, **more: Tensor) -> Path:
    path = folder / "hidden_states" / f"hs_{index}.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file({"hidden_states": states.contiguous(), "token_ids": ids, **more}, path)
    return path


def write_dataset(folder: Path, found: list[Row]) -> None:
    """As `Dataset.save_to_disk` lays it out."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = {
        "input_ids": pa.array([row.ids for row in found], pa.list_(pa.int32())),
        "loss_mask": pa.array([row.mask for row in found], pa.list_(pa.int64())),
        "seq_len": pa.array([len(row.ids) for row in found]),
    }
    table = pa.table(columns)
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_format_type": "torch"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))


def specforge_row(row: Row, taken: Taken) -> dict[str, Tensor]:
    """What SpecForge saves of a row."""
    return {
        "input_ids": torch.tensor(row.ids),
        "loss_mask": torch.tensor(row.mask),
        "hidden_state": taken.after[None],
        "aux_hidden_state": taken.aux.flatten(1)[None],
    }


def write_specforge(folder: Path, found: list[Row], model: Any, layers: tuple[int, int, int]) -> Path:
    """Two folders of files, the layers ascending, every other file compressed."""
    for index, row in enumerate(found):
        path = folder / f"rows_{index // 3 * 3}-{index // 3 * 3 + 3}" / f"data_{index}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        taken = take(model, row, tuple(sorted(layers)))
        write_ckpt(path, specforge_row(row, taken), compressed=bool(index % 2))
    return folder


def write_ckpt(path: Path, values: object, *, compressed: bool = False) -> Path:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    if compressed:
        path = path.with_name(f"{path.name}.gz")
        path.write_bytes(gzip.compress(buffer.getvalue()))
    else:
        path.write_bytes(buffer.getvalue())
    return path
