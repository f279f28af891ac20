"""A walk over prompts in a fixed order: where it stands is one short text, however many prompts lie behind it."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from eaglefeed.errors import InputError
from eaglefeed.schema.prompt import Prompt

__all__ = ["Walked", "is_place", "walk"]

_PLACE = re.compile(r"walk:(\d+):[0-9a-f]{32}")  # no sample id has a colon


class Walked(NamedTuple):
    """A prompt, the place just behind it, and whether it lies behind the walk's start."""

    prompt: Prompt
    place: str
    is_new: bool


def is_place(seen: Sequence[str]) -> bool:
    """Whether a checkpoint's `seen` is a place in a walk, and not the sample ids that a stream keeps there."""
    return len(seen) == 1 and _PLACE.fullmatch(seen[0]) is not None


def walk(prompts: Iterable[Prompt], start: str = "") -> Iterator[Walked]:
    """Go over prompts once, and say which are new since an earlier walk stood at `start`.

    A place is a count and a digest of the ids up to there: prompts that were added behind it do no harm.

    Args:
        prompts: in an order that is the same at every start.
        start: a place; "" makes all of them new.

    Raises:
        InputError: those up to `start` are not the ones that the earlier walk went over.
    """
    found = _PLACE.fullmatch(start)
    num_seen, count, digest = int(found[1]) if found else 0, 0, xxhash.xxh3_128()
    for count, prompt in enumerate(prompts, start=1):
        digest.update(f"{prompt.sample_id}\n".encode())
        place = f"walk:{count}:{digest.hexdigest()}"
        if count == num_seen and place != start:
            raise _others(num_seen, "others, or in another order")
        yield Walked(prompt, place, count > num_seen)
    if count < num_seen:
        raise _others(num_seen, f"{count} in all")


def _others(num_seen: int, got: str) -> InputError:
    fix = "pass the file and feed.batch_size that the run was started with (rows may be added at its end), or another "
    fix += "--output"
    what = "not the conversations that the checkpoint was trained on"
    return InputError(what, wanted=f"the same first {num_seen} work items", got=got, fix=fix)
