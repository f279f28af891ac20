"""The doctor's look at a bucket: one small object `doctor_<random>.json`, written, read, listed and deleted."""

import secrets
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from eaglefeed.errors import StorageError
from eaglefeed.ops.doctor import Said, fail, ok

if TYPE_CHECKING:
    from eaglefeed.storage.object_store import ObjectStore

__all__ = ["BUCKET_S", "ask_bucket"]

BUCKET_S = 40.0
"""What all requests together take at most, with the time that each has and one more try."""

_REQUEST_S = 5.0


def ask_bucket(uri: str) -> Iterator[Said]:
    """Ask an s3:// store for all that samples need of it."""
    try:
        from eaglefeed.storage.object_store import ObjectStore
    except ModuleNotFoundError as error:
        yield fail(f"{uri}: the package {error.name} is missing", "pip install 'eaglefeed[object]'")
        return
    with closing(ObjectStore(uri, request_timeout_s=_REQUEST_S, deadline_s=_REQUEST_S, max_retries=2)) as store:
        yield from _objects(store)


def _objects(store: "ObjectStore") -> Iterator[Said]:
    name, data = f"doctor_{secrets.token_hex(8)}.json", b'{"of": "eaglefeed doctor"}'
    try:
        store.put_document(name, data)
    except StorageError:
        with suppress(StorageError):  # it may be there though nobody said so
            store.delete_document(name)
        raise
    try:
        is_conditional = not store.put_document(name, b"{}")
        is_same = store.get_document(name) == data
        next(store.scan(), None)
    finally:
        store.delete_document(name)
    if not is_conditional:
        fix = "use a server with conditional writes (If-None-Match), or producers may replace each other's files"
        yield fail(f"{store.uri}: a conditional write replaced an object", fix)
    elif not is_same:
        yield fail(f"{store.uri}: an object reads otherwise than it was written", "see what stands between it and here")
    elif store.has_document(name):
        yield fail(f"{store.uri}: a deleted object is still there", "grant s3:DeleteObject, and see its versioning")
    else:
        yield ok(f"{store.uri}: write, conditional write, read, list and delete work")
