"""One prefix of an S3 bucket, through obstore: whole uploads, ranged reads, its errors translated into ours.

obstore retries by itself what may heal (5xx, SlowDown, lost connections, bodies cut short, timeouts) and takes
credentials, endpoint and client options from the AWS_* variables or the instance's metadata. It also asks HTTP_PROXY
and its like, as every client of S3 does: for a server outside, not for one of this machine or network.
"""

import ipaddress
import os
import re
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from eaglefeed.errors import ConfigError, EaglefeedError, SampleMissing, StorageError, StoreFull
from eaglefeed.logs import get_logger

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import S3Config

__all__ = ["NUM_PARALLEL", "PART_BYTES", "Bucket"]

PART_BYTES = 8 * 2**20
"""Size of a part of an upload and of a ranged read; S3 takes parts from 5 MiB on, and 10,000 of them an object."""
NUM_PARALLEL = 8
"""Parts under way at a time, and so with PART_BYTES the memory that an upload or the reads of a store take."""

_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3")
_NEAR = re.compile(r"[^.]+|.*\.(localhost|local|localdomain|internal|lan|svc)")
_NUM_TRIES = 3
_LIST_PAGE = 1000
_WRITER = "eaglefeed-writer"
_FULL = re.compile(r"status code: 507|<Code>(\w*Quota\w*|InsufficientStorage|\w*StorageFull)</Code>")
_DENIED = re.compile(r"status code: 40[13]")  # listing raises no class of its own for it
_CONFIG = (
    (
        re.compile(r"source: Missing(AccessKeyId|SecretAccessKey)|/latest/(api/token|meta-data\S*) in "),
        "no credentials found",
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run where the machine or pod has a role of its own",
    ),
    (
        re.compile(r"<Code>NoSuchBucket</Code>"),
        "no such bucket",
        "create it, or check store.uri, AWS_REGION and AWS_ENDPOINT_URL",
    ),
    (
        re.compile(r"source: BadScheme"),
        "an endpoint without TLS",
        "use an https:// endpoint, or set AWS_ALLOW_HTTP=true in a network that you trust",
    ),
    (
        re.compile(r"<Code>NotImplemented</Code>|status code: 501"),
        "the server lacks an operation of S3",
        "use one with multipart uploads and conditional writes (If-None-Match)",
    ),
    (re.compile(r"^Generic Config error"), "an AWS_* variable that cannot be used", "correct the variable"),
)
_DENIED_FIX = (
    "check the credentials and that their policy grants s3:GetObject, PutObject, DeleteObject, ListBucket and "
    "AbortMultipartUpload (without ListBucket a missing object is answered as denied)"
)
_FAILED_FIX = "check that the endpoint is reachable and not overloaded"
_log = get_logger(__name__)


def _past_proxies() -> dict[str, str]:
    """What has obstore ask no proxy for a server that is near, unless the user names one for S3 itself."""
    variables = os.environ  # noqa: TID251 - obstore's own, which it reads itself and tells nobody
    found = next((value for name in _ENDPOINTS if (value := variables.get(name))), "")
    host = urlsplit(found).hostname or ""
    if "AWS_PROXY_URL" in variables or not _is_near(host):
        return {}
    return {"proxy_url": "http://127.0.0.1:9", "proxy_excludes": host}  # one that is never asked


def _is_near(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _NEAR.fullmatch(host) is not None
    return address.is_private or address.is_loopback or address.is_link_local


class Bucket:
    """The objects below one prefix; keys are relative to it.

    Args:
        bucket: the bucket's name.
        prefix: without a slash at either end; "" for the whole bucket.
        request_timeout_s: for one request with its body, which is at most PART_BYTES long.
        deadline_s: no request is tried again later than this; a server that hangs is given up after this and one more
            `request_timeout_s`.
        max_retries: of one request.

    Raises:
        ConfigError: an AWS_* variable that cannot be used.
    """

    def __init__(
        self, bucket: str, prefix: str, *, request_timeout_s: float, deadline_s: float, max_retries: int
    ) -> None:
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        # The timeout as a config key: client_options would replace AWS_ALLOW_HTTP and the like as a whole.
        timeout = f"{round(request_timeout_s * 1000)}ms"
        config = cast("S3Config", {"timeout": timeout, "disable_bulk_delete": True, **_past_proxies()})
        with self._translated("", self.uri, "cannot be opened"):
            self._store = S3Store(
                bucket,
                prefix=prefix or None,
                config=config,
                retry_config={"max_retries": max_retries, "retry_timeout": timedelta(seconds=deadline_s)},
            )
        self._pool = ThreadPoolExecutor(NUM_PARALLEL, thread_name_prefix="eaglefeed-s3")

    def create(self, key: str, data: bytes, subject: str) -> bool:
        """Write a small object in one conditional request, unless it is there; False if it was.

        Of many writers exactly one gets True. A server that ignores If-None-Match lets each of them win, and the last
        one's bytes stay.
        """
        writer = secrets.token_hex(8)
        with self._translated(key, subject, "cannot be written", len(data)):
            try:
                self._store.put(key, data, mode="create", attributes={_WRITER: writer})
            except AlreadyExistsError:  # perhaps since this very request, whose first answer was lost
                return self._store.get(key, options={"head": True}).attributes.get(_WRITER) == writer
        return True

    def upload(self, key: str, chunks: Iterable[memoryview], num_bytes: int, subject: str) -> bool:
        """Write an object in parts, unless it is there; False if it was. An upload that fails is aborted.

        obstore can send no condition with these, so two writers that start at once both write: give each a key of its
        own, or the same bytes.
        """
        if self.exists(key, subject):
            return False
        with self._translated(key, subject, "cannot be written", num_bytes):
            # Copies, since obstore keeps a part's pieces until it is sent, and a piece may be overwritten before.
            pieces = (bytes(chunk) for chunk in chunks)
            self._store.put(key, pieces, chunk_size=PART_BYTES, max_concurrency=NUM_PARALLEL)
        return True

    def read(self, key: str, begin: int, end: int, subject: str) -> tuple[memoryview, int]:
        """The bytes from `begin` to `end`, fewer if the object ends before, and the object's size.

        Raises:
            SampleMissing: no such object.
            StorageError: it cannot be read.
        """
        for _ in range(_NUM_TRIES):
            with self._translated(key, subject, "cannot be read"):
                try:
                    result = self._store.get(key, options={"range": (begin, end)})
                except BaseError as error:
                    if "<Code>InvalidRange</Code>" in str(error):  # of an empty object, if it begins at 0
                        return memoryview(b""), begin
                    raise
                size, data = result.meta["size"], memoryview(result.bytes())
            wanted = min(end, size) - begin
            if len(data) == wanted:
                return data, size
            _log.warning("answer_cut_short", store=self.uri, key=key, wanted_bytes=wanted, got_bytes=len(data))
        what = self._sentence(key, subject, "cannot be read")
        what += f", each of {_NUM_TRIES} answers was cut short"
        raise StorageError(what, subject=subject, fix="check the proxies between here and the server")

    def pieces(self, key: str, begin: int, end: int, subject: str) -> Iterator[memoryview]:
        """The bytes from `begin` to `end`, in order, with NUM_PARALLEL reads under way; see `read`."""
        starts = iter(range(begin, end, PART_BYTES))

        def submit(count: int) -> list[Future[tuple[memoryview, int]]]:
            spans = ((at, min(at + PART_BYTES, end)) for at in islice(starts, count))
            return [self._pool.submit(self.read, key, *span, subject) for span in spans]

        ahead = deque(submit(NUM_PARALLEL))
        try:
            while ahead:
                piece, _ = ahead.popleft().result()
                ahead.extend(submit(1))
                yield piece
        finally:
            for future in ahead:
                future.cancel()

    def exists(self, key: str, subject: str) -> bool:
        """Whether there is such an object."""
        try:
            with self._translated(key, subject, "cannot be looked up"):
                self._store.head(key)
        except SampleMissing:
            return False
        return True

    def remove(self, key: str, subject: str) -> bool:
        """Delete an object; False if it was gone."""
        if not self.exists(key, subject):  # S3 says yes to every deletion
            return False
        with self._translated(key, subject, "cannot be deleted"):
            self._store.delete(key)
        return True

    def objects(self) -> Iterator["ObjectMeta"]:
        """All objects, a page of a thousand at a time."""
        with self._translated("", self.uri, "cannot be listed"):
            for page in self._store.list(chunk_size=_LIST_PAGE):
                yield from page

    def close(self) -> None:
        """Let the reading threads end; a read that still runs is given up."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _translated(self, key: str, subject: str, what: str, num_bytes: int | None = None) -> Iterator[None]:
        """Errors of obstore become ours; `num_bytes` is for writes, of which "not found" never means the object."""
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            raise self._translate(error, key, subject, what, num_bytes) from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # what obstore raises for an endpoint that is no address
                raise
            fix = "set AWS_ENDPOINT_URL to an address such as https://host:port, or leave it out"
            raise ConfigError("an endpoint that is no address", subject=self.uri, got=str(error), fix=fix) from None

    def _translate(self, error: Exception, key: str, subject: str, what: str, num_bytes: int | None) -> EaglefeedError:
        text = str(error)
        reason = text.partition("\n")[0][:300]
        for pattern, problem, fix in _CONFIG:
            if pattern.search(text):
                return ConfigError(problem, subject=self.uri, got=reason, fix=fix)
        if _FULL.search(text):
            return StoreFull(self.uri, num_bytes=num_bytes or 0, free_bytes=0, reason=reason)
        if isinstance(error, FileNotFoundError) and num_bytes is None:
            return SampleMissing(subject, key)
        denied = isinstance(error, PermissionDeniedError | UnauthenticatedError) or _DENIED.search(text) is not None
        what = self._sentence(key, subject, what) + (", access is denied" if denied else "")
        return StorageError(what, subject=subject, got=reason, fix=_DENIED_FIX if denied else _FAILED_FIX)

    def _sentence(self, key: str, subject: str, what: str) -> str:
        """What happened, without the subject, which stands before it."""
        named = what if key in ("", subject) else f"{key} {what}"
        return named if subject == self.uri else f"{named} in {self.uri}"
