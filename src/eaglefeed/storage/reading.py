"""The body of a reply: read in whole, or its tensors read and hashed into memory of the caller's."""

from collections.abc import Callable
from http.client import HTTPException, HTTPResponse

from torch import Tensor

from eaglefeed.errors import BuffersHeld, EaglefeedError, SampleCorrupt
from eaglefeed.schema.protocol import TENSOR_BODY
from eaglefeed.storage.buffers import BufferRing, fresh_memory, memory_for
from eaglefeed.storage.header import ShardHeader, header_bytes, parse_header
from eaglefeed.storage.shard import TensorReader, texts_of

__all__ = ["Cut", "Incoming", "checked_length", "header_of", "memory_or_fresh", "tensors_of"]

_LENGTH_BYTES = 8
_STEP_BYTES = 2**20


class Cut(HTTPException):
    """A body that is not as long as it has to be."""


class Incoming:
    """A reply whose body is still to be read.

    Args:
        response: read up to its body.
        translated: what to raise for an error of the connection.
    """

    def __init__(self, response: HTTPResponse, translated: Callable[[OSError | HTTPException], EaglefeedError]) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.headers.items()}
        self.content_length = response.length
        """Bytes of the body; None if the server does not say."""
        self._response, self._translated = response, translated

    def readinto(self, memory: "memoryview | bytearray") -> None:
        """Fill all of it with the body's next bytes.

        Raises:
            EaglefeedError: of the client's class `unavailable`: the body is cut short, or late.
        """
        try:
            view, done = memoryview(memory), 0
            while done < len(view):
                if not (got := self._response.readinto(view[done:])):
                    raise Cut(f"cut short, {len(view) - done} bytes of a piece are missing")
                done += got
        except (OSError, HTTPException) as error:
            raise self._translated(error) from None
        finally:
            view.release()

    def first(self, max_bytes: int) -> bytes:
        """The rest of the body, or so much of it.

        Raises:
            EaglefeedError: see `readinto`.
        """
        try:
            data = self._response.read(max_bytes)
            if self._response.length and len(data) < max_bytes:
                raise Cut(f"cut short, {self._response.length} bytes are missing")
        except (OSError, HTTPException) as error:
            raise self._translated(error) from None
        return data

    def read(self, max_bytes: int) -> bytes:
        """All of the body.

        Raises:
            EaglefeedError: see `readinto`; or it is longer than `max_bytes`, or its end could not be told from a cut.
        """
        if self.content_length is None and not self._response.chunked:
            raise self._translated(Cut("a reply of no stated length"))
        data = self.first(max_bytes + 1) if (self.content_length or 0) <= max_bytes else b""
        if max(self.content_length or 0, len(data)) > max_bytes:
            raise self._translated(Cut(f"a reply of more than {max_bytes} bytes"))
        return data


def header_of(incoming: Incoming, file_bytes: int, subject: str) -> tuple[ShardHeader, bytearray]:
    """Read a safetensors header, the first thing in a body.

    Args:
        incoming: the reply.
        file_bytes: what the whole file takes.
        subject: what to call the file in an error.

    Returns:
        The header, and its bytes.

    Raises:
        SampleCorrupt: see parse_header.
        EaglefeedError: see Incoming.readinto.
    """
    start = bytearray(min(_LENGTH_BYTES, file_bytes))
    incoming.readinto(start)
    rest = bytearray(header_bytes(start, file_bytes, subject) - len(start))
    incoming.readinto(rest)
    return parse_header(start + rest, file_bytes, subject), start + rest


def memory_or_fresh(num_bytes: int, ring: BufferRing | None, holder: str) -> memoryview:
    """Memory out of the ring; fresh memory if it has none free in time, for a caller may keep what it was given."""
    try:
        return memory_for(num_bytes, ring, holder)
    except BuffersHeld:
        return fresh_memory(num_bytes)


def tensors_of(
    incoming: Incoming, *, ring: BufferRing | None, subject: str, max_bytes: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read an answer's tensors, each piece hashed while it is in the cache.

    Args:
        incoming: the reply.
        ring: whose buffer they are read into.
        subject: what to call them in an error.
        max_bytes: of the whole file.

    Returns:
        The tensors in the file's order, and the file's metadata.

    Raises:
        SampleCorrupt: no tensors in it, more than wanted, or damaged.
        EaglefeedError: see Incoming.readinto.
    """
    header, _ = header_of(incoming, checked_length(incoming, subject, max_bytes), subject)
    memory = memory_or_fresh(header.file_bytes - header.data_start, ring, subject)
    try:
        reader = TensorReader(header, memory, subject)
        for begin in range(0, len(memory), _STEP_BYTES):
            with memory[begin : begin + _STEP_BYTES] as piece:
                incoming.readinto(piece)
                reader.advance(begin + len(piece))
        return reader.tensors(), texts_of(header)
    except BaseException:
        memory.release()  # or whoever keeps the error would keep a buffer of the ring
        raise


def checked_length(incoming: Incoming, subject: str, max_bytes: int) -> int:
    """What the file in a body takes.

    Raises:
        SampleCorrupt: no tensors in it, of no stated length, or more than wanted.
    """
    kind, length = incoming.headers.get("content-type"), incoming.content_length
    if kind != TENSOR_BODY or length is None:
        got = f"{kind}, {length} bytes"
        raise SampleCorrupt(subject, "a reply without tensors", wanted=f"{TENSOR_BODY}, of a stated length", got=got)
    if length > max_bytes:
        wanted = f"at most {max_bytes} bytes"
        raise SampleCorrupt(subject, "a reply larger than was asked for", wanted=wanted, got=f"{length} bytes")
    return length
