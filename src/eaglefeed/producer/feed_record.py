"""What all feeds of a run agree on before the first prompt is queued; no torch here."""

import os
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from eaglefeed.errors import ConfigError, ContractMismatch, SchemaError
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.schema.contract import CONTRACT_RECORD, RunContract
from eaglefeed.schema.refs import first_fault

__all__ = ["FeedRecord", "agree_on_feed", "agree_on_file", "note_whole", "unfinished"]

_FEED, _FILE, _WHOLE = "feed:", "file:", "whole:"
"""In the run's record, with the queue's instance behind them: a purged run may be fed otherwise."""
_CHUNK_BYTES = 2**20
_FIX = "feed as before, or into a new run; `eaglefeed queue purge` forgets what was fed"


class FeedRecord(BaseModel):
    """How conversations become a run's prompts: other prompts of the same ids would be neither new nor the same.

    Args:
        tokenizer_fingerprint: digest of the tokenizer.
        template_fingerprint: digest of the chat template and the mask rules.
        max_length: tokens a row is cut to.
        batch_size: rows of one item.
        packing: whether a row holds several conversations.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    tokenizer_fingerprint: str
    template_fingerprint: str
    max_length: int
    batch_size: int
    packing: bool

    @property
    def keeps_rows(self) -> bool:
        """Whether each conversation is an item of its own, whatever stands before and behind it."""
        return self.batch_size == 1 and not self.packing


def agree_on_feed(samples: LeaseQueue, instance: str, mine: FeedRecord) -> None:
    """Record how the run is fed, or check that `mine` is what stands there and fits the run's contract.

    Raises:
        ContractMismatch: names every field that differs, with both values.
    """
    if contract := samples.agreed().get(CONTRACT_RECORD):
        _require(RunContract.from_json(contract).model_dump(), mine)
    stands = samples.agree(_FEED + instance, mine.model_dump_json().encode())
    try:
        _require(FeedRecord.model_validate_json(stands).model_dump(), mine)
    except ValidationError as error:
        raise SchemaError("not a feed's record", subject=samples.name, got=first_fault(error)) from None


def agree_on_file(samples: LeaseQueue, instance: str, path: Path, *, may_grow: bool) -> str:
    """Record what a file holds, or check that it holds what was fed of it before; a pipe has no before.

    Returns what `note_whole` is told once all of it is queued.

    Args:
        samples: of the run.
        instance: the queue's.
        path: of the conversations.
        may_grow: whether there may be more behind what was fed.

    Raises:
        ContractMismatch: the file was changed since.
        ConfigError: it cannot be read.
    """
    if not path.is_file():
        return ""
    prefix = f"{_FILE}{instance}:{xxhash.xxh3_64_hexdigest(os.fsencode(path.resolve()))}:"
    before = {name.removeprefix(prefix): each for name, each in samples.agreed().items() if name.startswith(prefix)}
    fed = {int(size): digest.decode().partition(" ")[0] for size, digest in before.items()}
    size, digests = _digests(path, fed)
    for at, digest in fed.items():
        if digests.get(at) != digest or (at != size and not may_grow):
            wanted, got = f"data={at} bytes with digest {digest}", f"data={size} bytes with digest {digests[size]}"
            fix = f"put what is new into another file, or {_FIX}"
            raise ContractMismatch("changed since it was fed", subject=str(path), wanted=wanted, got=got, fix=fix)
    samples.agree(f"{prefix}{size}", f"{digests[size]} {path.name}".encode(errors="replace"))
    return f"{prefix}{size}"


def note_whole(samples: LeaseQueue, file: str) -> None:
    """All that a file held is queued."""
    if file:
        samples.agree(_WHOLE + file, b"1")


def unfinished(samples: LeaseQueue, instance: str) -> list[str]:
    """Names of the files whose feed has not come to its end, as they were at last: it was killed, or is under way."""
    agreed, latest = samples.agreed(), dict[str, int]()
    for name in agreed:
        if name.startswith(f"{_FILE}{instance}:"):
            file, _, size = name.rpartition(":")
            latest[file] = max(latest.get(file, 0), int(size))
    begun = [f"{file}:{size}" for file, size in latest.items()]
    return sorted(agreed[name].decode().partition(" ")[2] for name in begun if _WHOLE + name not in agreed)


def _digests(path: Path, sizes: dict[int, str]) -> tuple[int, dict[int, str]]:
    """The file's size, and digests of its first bytes: as many as asked for, if there are as many, and all."""
    digest, at, found = xxhash.xxh3_64(), 0, dict[int, str]()
    marks = sorted(sizes, reverse=True)
    try:
        with path.open("rb") as file:
            while data := file.read(min(_CHUNK_BYTES, marks[-1] - at) if marks else _CHUNK_BYTES):
                digest.update(data)
                at += len(data)
                if marks and marks[-1] == at:
                    found[marks.pop()] = digest.hexdigest()
    except OSError as error:
        raise ConfigError("cannot be read", subject=str(path), got=error.strerror) from None
    return at, {**found, at: digest.hexdigest()}


def _require(stands: dict[str, object], mine: FeedRecord) -> None:
    fields = {name: value for name, value in mine.model_dump().items() if name in stands}
    differing = [name for name in fields if stands[name] != fields[name]]
    if differing:
        wanted, got = (", ".join(f"{name}={each[name]}" for name in differing) for each in (stands, fields))
        raise ContractMismatch("not fed as the run was before", subject="feed", wanted=wanted, got=got, fix=_FIX)
