"""s3:// : objects in a bucket, with the same bytes and checks as in a folder.

bucket/prefix/contract.json  bucket/prefix/target_assets.safetensors     files of the run
bucket/prefix/3f/<sample_id>.<token>.safetensors                          shards
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from eaglefeed.errors import ConfigError, SampleCorrupt, SampleMissing, StorageError
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.base import (
    ENDLESS,
    SHARD_KEY,
    FeatureStore,
    StoredShard,
    StoreHealth,
    Swept,
    Verify,
    check_document_name,
    key_of,
)
from eaglefeed.storage.bucket import PART_BYTES, Bucket
from eaglefeed.storage.header import HEADER_READ_BYTES, ShardHeader, check_header, header_bytes, keyed_ref, parse_header

if TYPE_CHECKING:
    from torch import Tensor

    from eaglefeed.storage.buffers import BufferRing
    from eaglefeed.storage.shard import TensorReader, TensorWriter

__all__ = ["ObjectStore"]

_ADDRESS = re.compile(r"s3://(?!.*\.\.)([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/[A-Za-z0-9_][A-Za-z0-9._=-]*)*)/?")


class ObjectStore(FeatureStore):
    """Shards as objects below one prefix of a bucket.

    Credentials, region and endpoint come from the AWS_* variables or the instance's metadata, as obstore reads them.

    Args:
        uri: s3://bucket or s3://bucket/prefix.
        verify: whose digests `get` checks.
        request_timeout_s: for one request with its body, at most 8 MiB.
        deadline_s: no request is tried again later than this; one to a server that hangs is given up after this and one
            more `request_timeout_s`.
        max_retries: of one request.

    Raises:
        ConfigError: no such address, or an AWS_* variable that cannot be used.
    """

    def __init__(
        self,
        uri: str,
        *,
        verify: Verify = "always",
        request_timeout_s: float = 60.0,
        deadline_s: float = 180.0,
        max_retries: int = 10,
    ) -> None:
        match = _ADDRESS.fullmatch(uri)
        if not match:
            raise ConfigError("impossible address", subject=uri, wanted="s3://bucket/prefix of letters, digits, ._=-")
        self._verify = verify
        self._bucket = Bucket(
            match[1],
            match[2][1:],
            request_timeout_s=request_timeout_s,
            deadline_s=deadline_s,
            max_retries=max_retries,
        )
        self.uri = self._bucket.uri

    def put(self, ref: SampleRef, tensors: Mapping[str, "Tensor"]) -> SampleRef:
        """See FeatureStore.put; the tensors must not change meanwhile, they are read twice."""
        from eaglefeed.storage.shard import ShardWriter

        key = key_of(ref)
        writer = ShardWriter(replace(ref, store_uri=self.uri), tensors)
        if not self._write(key, writer, ref.sample_id):
            raise StorageError("written before, shards are never replaced", subject=ref.sample_id, got=key)
        return writer.finish()[0]

    def get(self, ref: SampleRef, ring: "BufferRing | None" = None) -> dict[str, "Tensor"]:
        """See FeatureStore.get."""
        from eaglefeed.storage.buffers import memory_for
        from eaglefeed.storage.shard import ShardReader

        key = key_of(ref)
        with self._named(key):
            header, start = self._start(key, ref.sample_id, PART_BYTES)
            check_header(header, ref)
            memory = memory_for(header.file_bytes - header.data_start, ring, ref.sample_id)
            try:
                return self._read(key, header, start, memory, ShardReader(ref, header, memory, self._verify))
            except BaseException:
                memory.release()  # or whoever keeps the error would keep a buffer of the ring
                raise

    def header(self, ref: SampleRef) -> ShardHeader:
        """See FeatureStore.header."""
        with self._named(key_of(ref)):
            return self._start(key_of(ref), ref.sample_id, HEADER_READ_BYTES)[0]

    def read_ref(self, key: str) -> SampleRef:
        """See FeatureStore.read_ref."""
        if not SHARD_KEY.fullmatch(key):
            raise SampleCorrupt(key, "impossible key", wanted="xx/<sample_id>.<token>.safetensors")
        with self._named(key):
            return keyed_ref(self._start(key, key, HEADER_READ_BYTES)[0], self.uri, key)

    def delete(self, ref: SampleRef) -> bool:
        """See FeatureStore.delete; of two processes that delete at once, both may be told True."""
        return self._bucket.remove(key_of(ref), ref.sample_id)

    def scan(self) -> Iterator[StoredShard]:
        """See FeatureStore.scan."""
        for found in self._bucket.objects():
            if SHARD_KEY.fullmatch(found["path"]):
                yield StoredShard(found["path"], found["size"], found["last_modified"].timestamp())

    def sweep(self, older_than_s: float, *, dry_run: bool = False) -> Swept:  # noqa: ARG002
        """See FeatureStore.sweep: nothing to do here.

        An upload that fails is aborted at once. One whose process was killed, or whose id was lost with an answer,
        stays, unseen and paid for, until the bucket's lifecycle rule (AbortIncompleteMultipartUpload) removes it:
        obstore cannot list these.
        """
        return Swept()

    def health(self) -> StoreHealth:
        """It has no end."""
        return ENDLESS

    def put_document(self, name: str, data: bytes) -> bool:
        """See FeatureStore.put_document."""
        check_document_name(name)
        return self._bucket.create(name, data, name)

    def get_document(self, name: str) -> bytes | None:
        """See FeatureStore.get_document."""
        check_document_name(name)
        try:
            start, num_bytes = self._bucket.read(name, 0, PART_BYTES, name)
            return b"".join([start, *self._bucket.pieces(name, len(start), num_bytes, name)])
        except SampleMissing:
            return None

    def has_document(self, name: str) -> bool:
        """See FeatureStore.has_document."""
        check_document_name(name)
        return self._bucket.exists(name, name)

    def delete_document(self, name: str) -> bool:
        """See FeatureStore.delete_document."""
        check_document_name(name)
        return self._bucket.remove(name, name)

    def put_assets(self, name: str, tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> bool:
        """See FeatureStore.put_assets; two producers that start at once may both write (equal) bytes, see upload."""
        from eaglefeed.storage.shard import TensorWriter

        check_document_name(name)
        return self._write(name, TensorWriter(tensors, metadata), name)

    def get_assets(self, name: str) -> "tuple[dict[str, Tensor], dict[str, str]] | None":
        """See FeatureStore.get_assets."""
        from eaglefeed.storage.buffers import fresh_memory
        from eaglefeed.storage.shard import TensorReader, texts_of

        check_document_name(name)
        try:
            header, start = self._start(name, name, PART_BYTES)
        except SampleMissing:
            return None
        memory = fresh_memory(header.file_bytes - header.data_start)
        return self._read(name, header, start, memory, TensorReader(header, memory, name)), texts_of(header)

    def close(self) -> None:
        """Let the reading threads end."""
        self._bucket.close()

    @contextmanager
    def _named(self, key: str) -> Iterator[None]:
        try:
            yield
        except SampleCorrupt as error:
            raise error.found_in(f"{self.uri}/{key}") from None

    def _write(self, key: str, writer: "TensorWriter", subject: str) -> bool:
        for _ in writer.chunks():
            pass  # hashed on the way: the header goes first, and tells the digests
        chunks = chain([memoryview(writer.header())], writer.chunks(hashed=False))
        if writer.file_bytes <= PART_BYTES:
            return self._bucket.create(key, b"".join(map(bytes, chunks)), subject)
        return self._bucket.upload(key, chunks, writer.file_bytes, subject)

    def _start(self, key: str, subject: str, num_bytes: int) -> tuple[ShardHeader, memoryview]:
        """The header, and the first bytes of the object (`num_bytes`, or as many as the header takes)."""
        start, file_bytes = self._bucket.read(key, 0, num_bytes, subject)
        wanted = header_bytes(start[:num_bytes].tobytes(), file_bytes, subject)
        if wanted > len(start):
            start, file_bytes = self._bucket.read(key, 0, wanted, subject)
        return parse_header(start[:wanted].tobytes(), file_bytes, subject), start

    def _read(
        self, key: str, header: ShardHeader, start: memoryview, memory: memoryview, reader: "TensorReader"
    ) -> "dict[str, Tensor]":
        done = 0
        rest = self._bucket.pieces(key, len(start), header.file_bytes, reader.name)
        for piece in chain([start[header.data_start :]], rest):
            memory[done : done + len(piece)] = piece
            done += len(piece)
            reader.advance(done)
        if done != len(memory):
            wanted = f"{len(memory)} bytes of data"
            raise SampleCorrupt(reader.name, "cut short while it was read", wanted=wanted, got=done)
        return reader.tensors()
