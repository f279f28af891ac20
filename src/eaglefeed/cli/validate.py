"""`eaglefeed validate`: check shards, folders, refs and a queue's refs against the contract, and rows of JSONL."""

import os
import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eaglefeed.cli.beside import check_beside, check_contract
from eaglefeed.cli.common import (
    ConfigOption,
    JsonOption,
    RedisOption,
    RunOption,
    StoreOption,
    emit,
    open_queues,
    opened_store,
    read_settings,
)
from eaglefeed.cli.rows import check_rows
from eaglefeed.config import Settings
from eaglefeed.errors import ConfigError, EaglefeedError, InputError, QueueUnavailable, SampleCorrupt, SchemaError
from eaglefeed.schema.contract import CONTRACT_FILE
from eaglefeed.schema.eagle3_compact import decode_stored, validate_any_ref
from eaglefeed.schema.refs import SampleRef, decode_ref, ref_from_json
from eaglefeed.storage.base import SHARD_KEY, FeatureStore, key_of
from eaglefeed.storage.files import check_digests, read_header, read_tensors
from eaglefeed.storage.header import check_header, ref_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["validate"]

_SHARD = re.compile(r".+\.[0-9]+\.safetensors")
_ADDRESS = re.compile(r"(s3|shm|mem|file|nccl):/")
_FAILED = 3
_MAX_JSON_BYTES = 64 * 1024


class _Depth(StrEnum):
    """How much of a shard is read: its header, all of it for the digests, or its tensors too."""

    HEADERS = "headers"
    DIGESTS = "digests"
    VALUES = "values"


def validate(
    ctx: typer.Context,
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Shards, folders, refs in JSON, or conversations in JSONL.")
    ] = None,
    queue: Annotated[bool, typer.Option("--queue", help="Check the refs of the run's samples queue.")] = False,
    values: Annotated[bool, typer.Option("--values", help="Check the tensors' values too.")] = False,
    headers: Annotated[bool, typer.Option("--headers", help="Read headers alone: no checksums.")] = False,
    run: RunOption = None,
    redis: RedisOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check samples: headers, refs and checksums, or with --values the tensors too. One line a fault; exits 0 or 3.

    Of conversations (.jsonl) the form is checked, row by row, without a target: its template is asked by `feed`.
    """
    verify = "always"  # whatever the run's trainers check
    settings = read_settings(ctx, config, run__id=run, redis_url=redis, store__uri=store, store__verify=verify)
    if not paths and not queue:
        raise ConfigError("nothing to validate", fix="pass shards, folders or refs, or --queue with --run")
    if values and headers:
        raise ConfigError("values stand behind the header", subject="--values, --headers", fix="leave one of both out")
    depth = _Depth.VALUES if values else _Depth.HEADERS if headers else _Depth.DIGESTS
    checked, faults = 0, list[dict[str, str]]()
    for path in filter(_has_rows, paths or []):
        num_rows, found = check_rows(path, settings.feed)
        checked, faults = checked + num_rows, faults + found
    others = [path for path in paths or [] if not _has_rows(path)]
    for name, check in chain(_in_paths(others, depth), _in_queue(settings, depth) if queue else ()):
        checked += 1
        try:
            check()
        except QueueUnavailable:
            raise
        except (EaglefeedError, OSError) as error:
            faults.append({"name": name, "fault": str(error), "kind": type(error).__name__})
    lines = [f"{fault['name']}: {fault['kind']}: {fault['fault']}" for fault in faults]
    emit(as_json, {"checked": checked, "faults": faults}, [*lines, f"{checked} checked, {len(faults)} with faults"])
    if faults:
        raise typer.Exit(_FAILED)


def _has_rows(path: Path) -> bool:
    return path.suffix in (".jsonl", ".ndjson") and not path.is_dir()


def _in_paths(paths: list[Path], depth: _Depth) -> Iterator[tuple[str, Callable[[], None]]]:
    for path in paths:
        if path.is_dir():
            yield from _in_folder(path, depth)
        elif path.suffix == ".json":
            yield str(path), partial(_check_json, path)
        elif path.exists():
            yield str(path), partial(_check_file, path, depth)
        else:
            raise ConfigError("no such file or folder", subject=str(path), fix=_address_fix(str(path)))


def _in_folder(folder: Path, depth: _Depth) -> Iterator[tuple[str, Callable[[], None]]]:
    closed: list[OSError] = []
    levels = os.walk(folder, onerror=closed.append)
    found = [Path(at, name) for at, inner, files in levels for name in (*inner, *files) if _SHARD.fullmatch(name)]
    if not found and not closed:
        raise ConfigError("no shards in this folder", subject=str(folder), wanted="<sample_id>.<token>.safetensors")
    yield from ((str(error.filename), partial(_refuse, error)) for error in closed)
    yield from ((str(each), partial(_check_stored, each, depth)) for each in sorted(found))


def _refuse(error: OSError) -> None:
    raise error


def _address_fix(path: str) -> str:
    address = _ADDRESS.match(path)  # a Path has made one slash of two
    if address is None:
        return ""
    uri = "nccl://" if address[1] == "nccl" else "URI"
    return f"a store is checked with `validate --queue --store {uri}`, a folder by its path"


def _in_queue(settings: Settings, depth: _Depth) -> Iterator[tuple[str, Callable[[], None]]]:
    with open_queues(settings, known=True) as queues, opened_store(settings) as store:
        for item in queues.samples.payloads():
            yield item.id, partial(_check_payload, item.payload, store, depth)


def _check_regular(path: Path) -> None:
    """Refuse a pipe, whose opening would wait for a writer, and whatever else is no file."""
    if path.exists() and not path.is_file():
        raise InputError("no regular file", subject=str(path))


def _check_stored(path: Path, depth: _Depth) -> None:
    """Check what lies in a store's folder, as a store would read it."""
    if path.is_symlink():
        raise InputError("a symbolic link, which no store follows", subject=str(path))
    _check_file(path, depth)


def _check_file(path: Path, depth: _Depth) -> None:
    _check_regular(path)
    with path.open("rb") as file:
        try:
            _check_open(file.fileno(), path, depth)
        except SampleCorrupt as error:
            raise error.found_in(str(path)) from None


def _check_open(fd: int, path: Path, depth: _Depth) -> None:
    header = read_header(fd, os.fstat(fd).st_size, path.name)
    ref = ref_of(header, f"file://{path.parent.absolute()}", path.name)
    validate_any_ref(ref)
    check_beside(ref, path)
    _check_name(path, ref)
    if depth is _Depth.DIGESTS:
        check_digests(fd, header, ref.sample_id)
    if depth is _Depth.VALUES:
        from eaglefeed.storage.buffers import fresh_memory
        from eaglefeed.storage.shard import ShardReader

        memory = fresh_memory(header.file_bytes - header.data_start)
        _check_values(ref, read_tensors(fd, header, memory, ShardReader(ref, header, memory)))


def _check_name(path: Path, ref: SampleRef) -> None:
    """A file that is named as stores name theirs has the name of its own ref."""
    keyed = f"{path.parent.name}/{path.name}"
    got, wanted = (keyed, key_of(ref)) if SHARD_KEY.fullmatch(keyed) else (path.name, key_of(ref).rpartition("/")[2])
    if got != wanted and _SHARD.fullmatch(path.name):
        raise SampleCorrupt(ref.sample_id, "a shard under another's name", wanted=wanted, got=got)


def _check_json(path: Path) -> None:
    _check_regular(path)
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise SchemaError("too large for a ref", subject=str(path), wanted=f"at most {_MAX_JSON_BYTES} bytes")
    validate_any_ref(ref_from_json(path.read_bytes()))


def _check_payload(payload: bytes, store: FeatureStore, depth: _Depth) -> None:
    ref = decode_ref(payload)
    validate_any_ref(ref)
    check_contract(ref, store.get_document(CONTRACT_FILE))
    check_header(store.header(ref), ref)
    if depth is not _Depth.HEADERS:
        tensors = store.get(ref)
        if depth is _Depth.VALUES:
            _check_values(ref, tensors)


def _check_values(ref: SampleRef, stored: "dict[str, Tensor]") -> None:
    from eaglefeed.schema.values import validate_eagle3_tensors

    validate_eagle3_tensors(decode_stored(ref, stored), ref.feature_specs, sample_id=ref.sample_id)
