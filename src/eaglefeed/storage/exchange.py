"""A request whose answer's tensors come over a pair group if one can be had, and else in the body of the reply."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import SampleCorrupt
from eaglefeed.schema.protocol import FILE_BYTES_HEADER, PAIR_BODY, PAIR_HEADER
from eaglefeed.storage.buffers import BufferRing
from eaglefeed.storage.control import Abort, ControlClient, Fetched
from eaglefeed.storage.header import MAX_HEADER_BYTES, NO_DIGEST, ShardHeader, parse_header
from eaglefeed.storage.pair_pool import Pair, PairPool
from eaglefeed.storage.reading import Incoming, checked_length, header_of, memory_or_fresh
from eaglefeed.storage.shard import TORCH_DTYPES, TensorReader, digest, texts_of
from eaglefeed.storage.wire import Body

__all__ = ["Answer", "TensorExchange"]

_STEP_BYTES, _LENGTH_BYTES = 2**20, 8
_LEAST_S = 0.001
_CPU = torch.device("cpu")
_SIZE = re.compile(r"[0-9]{1,18}")


class Answer:
    """An answer whose header has been read and whose tensors are still to be.

    Args:
        incoming: the reply.
        header: of the tensors' file.
        raw: the header's bytes.
        pair: what the tensors come over; None for the body.
        device: where they come to.
        left_s: how much time there is.
    """

    def __init__(
        self,
        incoming: Incoming,
        header: ShardHeader,
        raw: bytearray,
        *,
        pair: Pair | None,
        device: torch.device,
        left_s: Callable[[], float],
    ) -> None:
        self.headers, self.header = incoming.headers, header
        self.num_bytes = header.file_bytes - header.data_start
        self.is_on_device = device.type != "cpu"
        """Whether the tensors are for `read_on_device`, not for `read`."""
        self._incoming, self._raw, self._pair, self._device, self._left_s = incoming, raw, pair, device, left_s

    def read(self, memory: memoryview, arrived: Callable[[int], object]) -> None:
        """Fill memory with the tensors.

        Args:
            memory: writable, num_bytes long.
            arrived: told again and again how many bytes are there, while the last of them are in the cache.

        Raises:
            PeerGone: the pair broke.
            EaglefeedError: see Incoming.readinto.
        """
        if self._pair is not None:
            if self.num_bytes:
                self._receive(self._pair, torch.frombuffer(memory, dtype=torch.uint8), arrived)
            return
        for begin in range(0, self.num_bytes, _STEP_BYTES):
            with memory[begin : begin + _STEP_BYTES] as piece:
                self._incoming.readinto(piece)
                arrived(begin + len(piece))

    def read_on_device(self, subject: str, *, hashed: bool = True) -> dict[str, Tensor]:
        """The tensors in the file's order, in memory of the device; only where is_on_device.

        Args:
            subject: what to call them in an error.
            hashed: whether the digests are checked, where the sender made some: each tensor comes to the host for it.

        Raises:
            PeerGone: the pair broke.
            SampleCorrupt: a digest differs.
        """
        arena = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
        if self._pair is not None and self.num_bytes:
            self._receive(self._pair, arena, lambda _done: None)
        found = {name: self._view(arena, name, subject) for name in self.header.tensors}
        if hashed:
            self._check(found, subject)
        return found

    def _receive(self, pair: Pair, arena: Tensor, arrived: Callable[[int], object]) -> None:
        places = [self._place(name) for name in self.header.tensors]
        memories = [arena[begin:end] for begin, end in places if begin < end]
        pair.joined().receive(memories, label=bytes(self._raw), timeout_s=self._left_s(), arrived=arrived)
        pair.is_proven = True

    def _place(self, name: str) -> tuple[int, int]:
        entry = self.header.tensors[name]
        return entry.begin - self.header.data_start, entry.end - self.header.data_start

    def _view(self, arena: Tensor, name: str, subject: str) -> Tensor:
        spec, (begin, end) = self.header.tensors[name].spec, self._place(name)
        dtype = TORCH_DTYPES[spec.dtype]
        if begin % dtype.itemsize:
            raise SampleCorrupt(subject, f"{name} is not aligned", wanted=f"{dtype.itemsize} bytes", got=begin)
        return arena[begin:end].view(dtype).reshape(spec.shape)

    def _check(self, tensors: Mapping[str, Tensor], subject: str) -> None:
        for name, wanted in self.header.digests(subject).items():
            if wanted != NO_DIGEST and (got := digest(tensors[name])) != wanted:
                raise SampleCorrupt(subject, f"checksum of {name} differs", wanted=wanted, got=got)


class TensorExchange:
    """Asks one server for tensors; any number of threads may share it.

    Args:
        client: of the server.
        pool: of pairs with it; None for the body alone.
        ring: whose buffers `fetch` reads into; fresh memory if it is None, or has none free in time.
        clock: measures the deadlines.
    """

    def __init__(
        self,
        client: ControlClient,
        pool: PairPool | None = None,
        ring: BufferRing | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._client, self._pool, self._ring, self._clock = client, pool, ring, clock

    def fetch(
        self,
        path: str,
        body: Body = b"",
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
        subject: str,
        max_bytes: int,
        abort: Abort | None = None,
    ) -> Fetched:
        """The tensors of the answer to a request, with their digests checked; see `open`.

        Raises:
            PeerGone: the pair that they came over broke; asked again, they come over another.
            SampleCorrupt: no tensors in the answer, more than wanted, or damaged.
            Refused: the server says no.
            EaglefeedError: of the client's class `unavailable`: no whole answer came.
        """
        request = self.open(
            path,
            body,
            method=method,
            headers=headers,
            timeout_s=timeout_s,
            subject=subject,
            max_bytes=max_bytes,
            abort=abort,
        )
        with request as answer:
            return Fetched(answer.headers, self._read(answer, subject), texts_of(answer.header))

    @contextmanager
    def open(
        self,
        path: str,
        body: Body = b"",
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
        subject: str,
        max_bytes: int,
        abort: Abort | None = None,
    ) -> Iterator[Answer]:
        """Send a request; its answer, whose tensors are read in the block, within the same deadline.

        Args:
            path: with its slash.
            body: the request's.
            method: GET or POST.
            headers: see ControlClient.call.
            timeout_s: for all of it.
            subject: what to call the tensors in an error.
            max_bytes: of their file.
            abort: ends it from another thread, though not while tensors come over a pair.

        Raises:
            SampleCorrupt: see `fetch`.
            Refused: see `fetch`.
            EaglefeedError: see `fetch`.
        """
        end_s = self._clock.monotonic() + timeout_s

        def left_s() -> float:
            return max(end_s - self._clock.monotonic(), _LEAST_S)

        with nullcontext() if self._pool is None else self._pool.borrow() as pair:
            offered = {PAIR_HEADER: pair.name_epoch} if pair is not None else {}
            all_headers = {**(headers or {}), **offered}
            request = self._client.open(path, body, method=method, headers=all_headers, timeout_s=left_s(), abort=abort)
            with request as incoming:
                yield self._answer(incoming, pair, subject, max_bytes, left_s)

    def _answer(
        self, incoming: Incoming, pair: Pair | None, subject: str, max_bytes: int, left_s: Callable[[], float]
    ) -> Answer:
        if self._pool is not None and pair is not None:
            if incoming.headers.get("content-type") == PAIR_BODY:
                header, raw = _pair_header(incoming, pair, subject, max_bytes)
                return Answer(incoming, header, raw, pair=pair, device=self._pool.device, left_s=left_s)
            self._pool.declined(pair)
        header, raw = header_of(incoming, checked_length(incoming, subject, max_bytes), subject)
        return Answer(incoming, header, raw, pair=None, device=_CPU, left_s=left_s)

    def _read(self, answer: Answer, subject: str) -> dict[str, Tensor]:
        if answer.is_on_device:
            return answer.read_on_device(subject)
        memory = memory_or_fresh(answer.num_bytes, self._ring, subject)
        try:
            reader = TensorReader(answer.header, memory, subject)
            answer.read(memory, reader.advance)
            return reader.tensors()
        except BaseException:
            memory.release()  # or whoever keeps the error would keep a buffer of the ring
            raise


def _pair_header(incoming: Incoming, pair: Pair, subject: str, max_bytes: int) -> tuple[ShardHeader, bytearray]:
    """The header that is all of the body, with the size of the file checked before anything comes over the pair."""
    raw = bytearray(incoming.read(MAX_HEADER_BYTES + _LENGTH_BYTES))
    named, size = incoming.headers.get(PAIR_HEADER), incoming.headers.get(FILE_BYTES_HEADER, "")
    if named != pair.name_epoch or not _SIZE.fullmatch(size) or int(size) > max_bytes:
        wanted = f"at most {max_bytes} bytes over {pair.name_epoch}"
        raise SampleCorrupt(subject, "a reply that was not asked for", wanted=wanted, got=f"{size} over {named}")
    header = parse_header(raw, int(size), subject)
    if header.data_start != len(raw):
        raise SampleCorrupt(subject, "not a header alone", wanted=header.data_start, got=f"{len(raw)} bytes")
    return header, raw
