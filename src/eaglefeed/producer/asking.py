"""What a target server's client asks, read and checked: headers, rows, vocabulary maps.

B batch · S sequence · V target vocabulary · D draft vocabulary
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from eaglefeed.errors import SampleCorrupt, SchemaError
from eaglefeed.producer.work import TokenRows
from eaglefeed.schema.eagle3 import EAGLE3_PACKING_FEATURES
from eaglefeed.schema.protocol import EXACT_HEADER, PAIR_HEADER, REQUEST_HEADER, SESSION_HEADER, TIMEOUT_HEADER
from eaglefeed.storage.shard import decode_tensors

__all__ = ["Asked", "read_map", "read_rows", "read_session"]

_ID = re.compile(r"[0-9a-f]{32}")
_DEFAULT_TIMEOUT_S, _MAX_TIMEOUT_S = 120.0, 3600.0
_ROWS = dict.fromkeys(("input_ids", "attention_mask", "loss_mask"), torch.int64)
_PACKING = dict.fromkeys(EAGLE3_PACKING_FEATURES, torch.int64)
_MAP = {"selected_token_ids": torch.int64, "selected_token_mask": torch.bool}


class Asked(NamedTuple):
    """A request's headers.

    Args:
        request: its id, "" without one.
        session: whose vocabulary map it is answered over; "" for logits.
        exact: it shares no forward.
        pair: the pair group that its answer may come over; "" for the body.
        timeout_s: how long its client waits.
    """

    request: str
    session: str
    exact: bool
    pair: str
    timeout_s: float

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> "Asked":
        """Read them.

        Raises:
            SchemaError: ids or a timeout that are none.
        """
        request, session = (_id(headers, name) for name in (REQUEST_HEADER, SESSION_HEADER))
        exact, pair = headers.get(EXACT_HEADER) == "1", headers.get(PAIR_HEADER, "")
        return cls(request, session, exact, pair, _timeout_s(headers))


def read_session(headers: Mapping[str, str]) -> str:
    """The session's name.

    Raises:
        SchemaError: there is none.
    """
    if not (name := _id(headers, SESSION_HEADER)):
        raise SchemaError("no session", subject=SESSION_HEADER, wanted="32 hex digits")
    return name


def read_rows(body: bytearray, subject: str, *, max_tokens: int) -> TokenRows:
    """The rows of a request's body; what stands in them is the target's to check.

    Raises:
        SampleCorrupt: no tensors, or damaged ones.
        SchemaError: others than three of one shape [B, S] and packing's, or more than `max_tokens` in it.
    """
    tensors = _read(body, subject, _ROWS, _ROWS | _PACKING)
    shapes = {tuple(tensors[name].shape) for name in _ROWS}
    if len(shapes) != 1 or any(len(shape) != 2 or 0 in shape for shape in shapes):
        raise SchemaError("ids and masks need one shape", subject=subject, wanted="[B, S]", got=sorted(shapes))
    rows = TokenRows(**tensors)
    if rows.input_ids.numel() > max_tokens:
        wanted, got = f"at most {max_tokens}", f"{list(rows.input_ids.shape)}, {rows.input_ids.numel()} with padding"
        fix = "send fewer or shorter rows at a time, or raise serve.max_tokens"
        raise SchemaError("more tokens than a request may have", subject=subject, wanted=wanted, got=got, fix=fix)
    return rows


def read_map(body: bytearray, subject: str) -> tuple[Tensor, Tensor]:
    """A vocabulary map, ids [D] and mask [V]; whether it fits the target is the target's to check.

    Raises:
        SampleCorrupt: no tensors, or damaged ones.
        SchemaError: others than these two.
    """
    ids, mask = _read(body, subject, _MAP).values()
    if ids.ndim != 1 or mask.ndim != 1 or not len(ids):
        got = [list(tensor.shape) for tensor in (ids, mask)]
        raise SchemaError("not a vocabulary map", subject=subject, wanted="[D] and [V]", got=got)
    return ids, mask


def _read(body: bytearray, subject: str, *forms: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """The tensors of one of the forms, in its order, their names and dtypes checked."""
    try:
        tensors, _ = decode_tensors(body, subject)
    except SampleCorrupt as error:
        error.fix = "send it again, as a whole safetensors file with eaglefeed's digests"
        raise
    found = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    wanted = [{name: str(dtype).removeprefix("torch.") for name, dtype in form.items()} for form in forms]
    if found not in wanted:
        names = " or ".join(map(str, wanted))
        raise SchemaError("other tensors than were asked for", subject=subject, wanted=names, got=found)
    return {name: tensors[name] for name in wanted[wanted.index(found)]}


def _id(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name, "")
    if value and not _ID.fullmatch(value):
        raise SchemaError("not an id", subject=name, wanted="32 hex digits", got=repr(value[:80]))
    return value


def _timeout_s(headers: Mapping[str, str]) -> float:
    text = headers.get(TIMEOUT_HEADER, str(_DEFAULT_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise SchemaError("not a timeout", subject=TIMEOUT_HEADER, wanted="seconds above 0", got=repr(text[:80]))
    return min(seconds, _MAX_TIMEOUT_S)
