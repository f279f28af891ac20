"""What is measured of the stores: one sample put and got by all sides, every encoding, and many residents."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain, count
from pathlib import Path
from statistics import median

from torch import Tensor

from eaglefeed.bench.comparison import Peer
from eaglefeed.bench.plan import Reading
from eaglefeed.bench.storage_peers import LOADER, served
from eaglefeed.bench.storage_plan import StoragePlan
from eaglefeed.bench.storage_samples import Encoding, Sample, make_sample, small_plan
from eaglefeed.bench.storage_sides import OurSide, SafetensorsSide, Side, make_cold, move
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.storage.buffers import BufferRing

__all__ = ["measure_residents", "measure_rounds"]

_GB, _MB = 1e9, 1e6


def measure_rounds(root: Path, plan: StoragePlan, peers: Sequence[Peer]) -> Iterator[Reading]:
    """All sides in turn with one sample, and each encoding, in rounds; the first, not counted, checks what comes back.

    The side that begins changes with the round.
    """
    sample, ring = make_sample(plan, Encoding.TARGET_PROBS), BufferRing(1)
    with ExitStack() as stack:
        sides = _sides(stack, root / "sides", sample, ring, peers)
        encodings = [_Encoded(stack, root / encoding, plan, encoding, ring) for encoding in Encoding]
        loader = _loader(stack, root / "loader", encodings, peers)
        for number in range(plan.rounds + 1):
            first = number % len(sides)
            turns = chain(
                (_turn(side, sample.encode(), ring, plan, number) for side in (*sides[first:], *sides[:first])),
                (encoded.turn(number) for encoded in encodings),
                (_loader_turn(side) for side in loader),
            )
            for reading in chain.from_iterable(turns):
                if number:
                    yield reading
        yield from chain.from_iterable(encoded.sizes(plan.tokens) for encoded in encodings)


def _sides(stack: ExitStack, root: Path, sample: Sample, ring: BufferRing, peers: Sequence[Peer]) -> list[Side]:
    folders = {name: root / name for name in ("eaglefeed", "eaglefeed_default", "safetensors")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    ours = OurSide(folders["eaglefeed"], sample, ring)
    default = OurSide(folders["eaglefeed_default"], sample, None, durability="full", name="eaglefeed_default")
    for side in (ours, default):
        stack.enter_context(closing(side))
    tensors = sample.encode()
    return [
        ours,
        SafetensorsSide(folders["safetensors"], tensors, ring),
        *stack.enter_context(served(peers, root, tensors)),
        default,
    ]


def _turn(
    side: Side, tensors: Mapping[str, Tensor], ring: BufferRing, plan: StoragePlan, number: int
) -> Iterator[Reading]:
    """memmove, then put, get from the device, and get from the page cache."""
    size_gb = sum(tensor.nbytes for tensor in tensors.values()) / _GB
    yield Reading("memmove", "GB/s", size_gb / median(_move(tensors, ring) for _ in range(plan.moves)))
    yield Reading(f"put.{side.name}", "GB/s", size_gb / side.put(number))
    make_cold(side.folder)
    yield Reading(f"get_cold.{side.name}", "GB/s", size_gb / side.get(number, check=number == 0))
    yield Reading(f"get_hot.{side.name}", "GB/s", size_gb / side.get(number))
    side.drop(number)


def _move(tensors: Mapping[str, Tensor], ring: BufferRing) -> float:
    start_s = SYSTEM_CLOCK.monotonic()
    move(tensors, ring)
    return SYSTEM_CLOCK.monotonic() - start_s


class _Encoded:
    """A sample of one encoding in a store of ours."""

    def __init__(self, stack: ExitStack, folder: Path, plan: StoragePlan, encoding: Encoding, ring: BufferRing) -> None:
        folder.mkdir()
        self.sample = make_sample(plan, encoding)
        self._side = stack.enter_context(closing(OurSide(folder, self.sample, ring)))
        self._name = f"encoding.{encoding}"
        self._stored_bytes = 0

    def turn(self, number: int) -> Iterator[Reading]:
        """Encode, decode, write, read from the device and from the page cache."""
        if self.sample.encoding is Encoding.FP8_AUX:
            start_s = SYSTEM_CLOCK.monotonic()
            stored = self.sample.encode()
            encoded_s = SYSTEM_CLOCK.monotonic()
            self.sample.decode(stored)
            yield self._ms("encode", encoded_s - start_s)
            yield self._ms("decode", SYSTEM_CLOCK.monotonic() - encoded_s)
        yield self._ms("write", self._side.put(number))
        make_cold(self._side.folder)
        yield self._ms("read_cold", self._side.get(number, check=number == 0))
        yield self._ms("read_hot", self._side.get(number))
        self._stored_bytes = self._side.last_ref.stored_bytes
        self._side.drop(number)

    def sizes(self, tokens: int) -> Iterator[Reading]:
        """What the shards took, header and all."""
        yield Reading(f"{self._name}.stored", "MB", self._stored_bytes / _MB)
        yield Reading(f"{self._name}.stored_a_token", "bytes", self._stored_bytes / tokens)

    def _ms(self, what: str, took_s: float) -> Reading:
        return Reading(f"{self._name}.{what}", "ms", took_s * 1e3)


def _loader(stack: ExitStack, root: Path, encodings: Sequence[_Encoded], peers: Sequence[Peer]) -> list[Side]:
    """The data set of speculators, with the sample of last hidden states in its own form, which has no masks."""
    root.mkdir()
    (features,) = (each.sample.features for each in encodings if each.sample.encoding is Encoding.LAST_HIDDEN_STATES)
    tokens, hidden = features["last_hidden_states"].shape[1:]
    states = features["aux_hidden_states"].new_zeros(tokens, 4, hidden)
    states[:, :3] = features["aux_hidden_states"].view(tokens, 3, hidden)
    states[:, 3] = features["last_hidden_states"][0]
    own_form = {"hidden_states": states, "token_ids": features["input_ids"][0]}
    chosen = [peer for peer in peers if peer.name == LOADER]
    return list(stack.enter_context(served(chosen, root, own_form)))


def _loader_turn(side: Side) -> Iterator[Reading]:
    yield Reading(f"loader.{side.name}.write", "ms", side.put(0) * 1e3)
    make_cold(side.folder)
    yield Reading(f"loader.{side.name}.read_cold", "ms", side.get(0) * 1e3)
    yield Reading(f"loader.{side.name}.read_hot", "ms", side.get(0) * 1e3)
    side.drop(0)


def measure_residents(root: Path, plan: StoragePlan, peers: Sequence[Peer]) -> Iterator[Reading]:
    """Put and get of a small sample beside few residents and beside many, which are empty files of legal names."""
    sample, numbers = make_sample(small_plan(plan), Encoding.TARGET_PROBS), count(plan.many)
    with ExitStack() as stack:
        folder = root / "eaglefeed"
        folder.mkdir(parents=True)
        ours = stack.enter_context(closing(OurSide(folder, sample, None)))
        sides: list[Side] = [ours, *stack.enter_context(served(peers, root, sample.encode()))]
        there = 0
        for residents in (plan.few, plan.many):
            for side in sides:
                side.fill(there, residents)
            for call in range(plan.resident_calls + 1):
                for reading in chain.from_iterable(_resident_turn(side, next(numbers), residents) for side in sides):
                    if call:
                        yield reading
            there = residents


def _resident_turn(side: Side, number: int, residents: int) -> Iterator[Reading]:
    yield Reading(f"residents.{residents}.put.{side.name}", "ms", side.put(number) * 1e3)
    yield Reading(f"residents.{residents}.get.{side.name}", "ms", side.get(number) * 1e3)
    side.drop(number)
