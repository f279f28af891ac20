"""What a target server and its clients say to each other, and a producer that keeps tensors and its trainers.

HTTP is the control plane; tensors travel as safetensors bytes in the body, or over a pair group with the header alone
in the body. No torch here.
"""

import json
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from eaglefeed.errors import (
    ConfigError,
    ContractMismatch,
    EaglefeedError,
    PeerGone,
    SampleCorrupt,
    SampleMissing,
    SchemaError,
    StorageError,
    TargetError,
    TargetMismatch,
    TargetUnavailable,
)
from eaglefeed.schema.refs import first_fault

__all__ = [
    "DISCONNECT",
    "EXACT_HEADER",
    "FILE_BYTES_HEADER",
    "GENERATE",
    "HEALTH",
    "HEARTBEAT",
    "INIT_NCCL",
    "INPUT_EMBEDDINGS",
    "METRICS",
    "MODEL_HEADER",
    "MODEL_INFO",
    "PAIR_BODY",
    "PAIR_HEADER",
    "PROTOCOL_VERSION",
    "READY",
    "REQUEST_HEADER",
    "SESSION_HEADER",
    "SET_VOCAB_MAPPING",
    "TARGET_ASSETS",
    "TENSOR_BODY",
    "TIMEOUT_HEADER",
    "ModelInfo",
    "PairGrant",
    "PairRequest",
    "error_of",
    "refusal_of",
]

PROTOCOL_VERSION = 1
T = TypeVar("T", bound=BaseModel)

HEALTH, READY, METRICS = "/health", "/ready", "/metrics"
MODEL_INFO, INPUT_EMBEDDINGS, TARGET_ASSETS = "/model_info", "/input_embeddings", "/target_assets"
SET_VOCAB_MAPPING, GENERATE = "/set_vocab_mapping", "/generate"
INIT_NCCL, HEARTBEAT, DISCONNECT = "/init_nccl", "/heartbeat", "/disconnect"

SESSION_HEADER = "x-eaglefeed-session"
"""A client's own random name, 32 hex digits; the vocabulary map belongs to it."""
REQUEST_HEADER = "x-eaglefeed-request"
"""A request's random id, 32 hex digits, which its answer repeats."""
MODEL_HEADER = "x-eaglefeed-model"
"""ModelInfo.id of the target that answered."""
TIMEOUT_HEADER = "x-eaglefeed-timeout-s"
"""Seconds that the client waits for the whole answer; work that is later is not begun."""
EXACT_HEADER = "x-eaglefeed-exact"
"""1: the request shares no forward with others, so that its numbers are those of a target in the client's process."""
PAIR_HEADER = "x-eaglefeed-pair"
"""name:epoch of the pair group that the answer's tensors may come over."""

FILE_BYTES_HEADER = "x-eaglefeed-file-bytes"
"""With a header alone: the size of the whole file."""

TENSOR_BODY = "application/x-safetensors"
"""A whole safetensors file."""
PAIR_BODY = "application/x-safetensors-header"
"""Its header alone, data_start bytes; the tensors follow over the pair group, in the file's order, one send each."""


class ModelInfo(BaseModel):
    """What a target server says of its target.

    Args:
        target: the target's name, for people.
        target_fingerprint: digest of its weights.
        dtype: of its features.
        hidden_size: H.
        vocab_size: V.
        num_hidden_layers: decoder layers.
        aux_layer_ids: 0-based decoder layers whose outputs are taken, in this order.
        aux_norm: as in RunContract.
        max_positions: tokens a row may have; None if the model does not say.
        engine: what runs the target.
        data_planes: what answers may travel over, besides the HTTP body.
        protocol_version: of this module.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    target: str
    target_fingerprint: str
    dtype: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    aux_layer_ids: tuple[int, int, int]
    aux_norm: str = "none"
    max_positions: int | None = None
    engine: str
    data_planes: tuple[Literal["gloo", "nccl"], ...] = ()
    protocol_version: int = PROTOCOL_VERSION

    @property
    def id(self) -> str:
        """Digest over what must be equal among the servers of a training."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self._identity(), sort_keys=True).encode())

    def _identity(self) -> dict[str, object]:
        return self.model_dump(mode="json", exclude={"target", "engine", "data_planes"})

    def to_json(self) -> bytes:
        """The reply of MODEL_INFO."""
        return self.model_dump_json().encode()

    @classmethod
    def from_json(cls, data: bytes, who: str) -> "ModelInfo":
        """Read `to_json` back.

        Raises:
            TargetMismatch: not a target server's reply, or another version's.
        """
        return _parsed(cls, data, who)

    def require(self, other: "ModelInfo", who: str) -> None:
        """Check that `other`, the target of server `who`, is this one.

        Raises:
            TargetMismatch: names every field that differs, with both values.
        """
        mine, theirs = self._identity(), other._identity()
        differing = [name for name in mine if mine[name] != theirs[name]]
        if differing:
            wanted, got = (", ".join(f"{name}={side[name]}" for name in differing) for side in (mine, theirs))
            fix = "start every server of a training with the same target, dtype and aux_layer_ids"
            raise TargetMismatch("another target than the other servers'", subject=who, wanted=wanted, got=got, fix=fix)


class PairRequest(BaseModel):
    """INIT_NCCL: please join a pair group as rank 0.

    Args:
        backend: gloo or nccl.
        name: the client's own random name of the pair, 32 hex digits.
        epoch: from 1; one more after each interrupted transfer. 0: the pair is not needed any more.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    backend: Literal["gloo", "nccl"]
    name: str
    epoch: int

    @classmethod
    def from_json(cls, data: bytes, who: str) -> "PairRequest":
        """Read a request.

        Raises:
            SchemaError: it is none.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise SchemaError("not a pair request", subject=who, got=first_fault(error)) from None


class PairGrant(BaseModel):
    """The reply: where both sides meet.

    Args:
        port: of the store, on the server's host.
        key: secret prefix of this pair and epoch in it.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    port: int
    key: str

    @classmethod
    def from_json(cls, data: bytes, who: str) -> "PairGrant":
        """Read a reply.

        Raises:
            TargetMismatch: it is none.
        """
        return _parsed(cls, data, who)


class Refusal(NamedTuple):
    """An error as a reply: the HTTP status and the body."""

    status: int
    body: bytes


_STATUS: tuple[tuple[type[EaglefeedError], int], ...] = (
    (ConfigError, 401),
    (SampleMissing, 404),
    (ContractMismatch, 422),
    (SchemaError, 422),
    (SampleCorrupt, 422),
    (TargetUnavailable, 503),
    (TargetMismatch, 422),
    (PeerGone, 503),
    (StorageError, 503),
    (TargetError, 500),
)
_KINDS = {kind.__name__: kind for kind, _ in _STATUS}


def refusal_of(error: EaglefeedError) -> Refusal:
    """How a server says an error; the status says whether to come again (503)."""
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    said = {name: str(value) for name in ("what", "subject", "wanted", "got", "fix") if (value := getattr(error, name))}
    kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), TargetError.__name__)
    return Refusal(status, json.dumps({"error": kind, **said}).encode())


def error_of(status: int, body: bytes, who: str) -> EaglefeedError:
    """The error that a server's reply says; one of an unknown form by its status, 5xx as TargetUnavailable."""
    try:
        said = json.loads(body)
        kind, texts = _KINDS[said["error"]], {name: str(text) for name, text in said.items() if name != "error"}
        return _rebuilt(kind, {"subject": who} | texts)
    except (ValueError, KeyError, TypeError, AttributeError):
        kind = TargetUnavailable if status >= 500 else TargetMismatch
        got = f"HTTP {status}: {body[:200].decode(errors='replace')}"
        return kind(
            "no answer of a target server", subject=who, got=got, fix="check the address, and what listens there"
        )


def _rebuilt(kind: type[EaglefeedError], texts: Mapping[str, str]) -> EaglefeedError:
    known = {name: texts[name] for name in ("subject", "wanted", "got", "fix") if name in texts}
    error = kind.__new__(kind)  # some classes word their message from fields of their own; here it is worded already
    EaglefeedError.__init__(error, texts["what"], **known)
    return error


def _parsed(kind: type[T], data: bytes, who: str) -> T:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        fix = "check the address, and that the server runs this version of eaglefeed"
        raise TargetMismatch("not a reply of a target server", subject=who, got=first_fault(error), fix=fix) from None
