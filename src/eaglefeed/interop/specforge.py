"""SpecForge's offline features: .ckpt and .ckpt.gz files, each a dictionary of one row.

    input_ids, loss_mask    [n] int64, not shifted; the mask marks the tokens of the answers
    aux_hidden_state        [1, n, 3H], outputs of three decoder layers, the lowest first
    hidden_state            [1, n, H], after the target's final norm

Their default layers are this project's. A mask of theirs counts at the position of its own token, one of the contract
at the position before, which predicts that token: so the mask is shifted here like everything else.

H target hidden size · n tokens
"""

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from eaglefeed.errors import InputError
from eaglefeed.interop.features import Features, dense_tensor
from eaglefeed.interop.folder import FeatureFile, read_bounded, sample_id_of, size_of, too_large

__all__ = ["SpecForgeFolder"]

_SUFFIXES = (".ckpt", ".ckpt.gz")
_KEYS = {"input_ids", "loss_mask", "hidden_state", "aux_hidden_state"}


class SpecForgeFolder:
    """A folder of them, and the folders in it; a file's sample is called after it, with dots for slashes.

    Args:
        root: the folder.
    """

    format, num_missing = "specforge", 0

    def __init__(self, root: Path) -> None:
        self._root = root

    def files(self) -> Sequence[FeatureFile]:
        """See FeatureFolder."""
        paths = sorted(path for path in self._root.rglob("*") if path.name.endswith(_SUFFIXES))
        if not paths:
            raise InputError("no feature files in it", subject=str(self._root), wanted=" or ".join(_SUFFIXES))
        found: dict[str, FeatureFile] = {}
        for path in paths:
            name = str(path.relative_to(self._root))
            sample_id = sample_id_of(name.removesuffix(".gz").removesuffix(".ckpt").replace("/", "."), name)
            if sample_id in found:
                got = f"{found[sample_id].name} and {name}"
                raise InputError("two files would be one sample", subject=sample_id, got=got, fix="rename one of them")
            found[sample_id] = FeatureFile(sample_id, name, size_of(path, name))
        return list(found.values())

    def read(self, name: str, max_bytes: int) -> Features:
        """See FeatureFolder."""
        values = _load(read_bounded(self._root / name, name, max_bytes), name, max_bytes)
        if set(values) != _KEYS:
            raise InputError("other tensors", subject=name, wanted=sorted(_KEYS), got=sorted(map(str, values)))
        return Features(
            name=name,
            input_ids=_row(values, "input_ids", 1, name),
            loss_mask=_row(values, "loss_mask", 1, name),
            aux=_row(values, "aux_hidden_state", 2, name),
            last=_row(values, "hidden_state", 2, name),
            is_normed=True,
        )


def _row(values: dict[str, object], key: str, ndim: int, name: str) -> Tensor:
    """A tensor of `ndim` axes, without the batch axis of one row that may stand before them."""
    tensor = dense_tensor(values, key, name)
    return tensor[0] if tensor.ndim == ndim + 1 and tensor.shape[0] == 1 else tensor


def _load(data: bytes, name: str, max_bytes: int) -> dict[str, object]:
    """Unpickled by torch's reader of tensors and plain containers, which runs no code."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked_bytes = sum(entry.file_size for entry in archive.infolist())
        # The one place that reads another project's pickles: these files have no other form.
        values = (
            torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)  # noqa: TID251
            if unpacked_bytes <= max_bytes
            else None
        )
    except Exception as error:  # a damaged or hostile file makes these readers raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise InputError("cannot be loaded", subject=name, wanted="a torch.save of tensors", got=reason) from error
    if unpacked_bytes > max_bytes:
        raise too_large(name, max_bytes, unpacked_bytes)
    if not isinstance(values, dict):
        raise InputError("not a dictionary", subject=name, wanted=sorted(_KEYS), got=type(values).__name__)
    return values
