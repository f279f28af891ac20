"""What a stream tells a checkpoint of itself, and how it is read back."""

from collections.abc import Mapping, Sequence
from typing import TypedDict, TypeGuard

from eaglefeed.consumer.walk import is_place
from eaglefeed.errors import ConfigError, ContractMismatch, SchemaError
from eaglefeed.queue.rules import epoch_of

__all__ = ["StreamState", "already_begun", "read_place", "read_state", "require_first", "seen_in"]


class StreamState(TypedDict):
    """Where a stream stands, small enough for any checkpoint and readable as JSON.

    Args:
        run: the run's name; "" for a stream without a queue.
        queue: the queue's name; "" for a stream without one.
        step: of the last acknowledgement with a step.
        seen: ids acknowledged with a step since the last commit, or the place in a walk over prompts.
    """

    run: str
    queue: str
    step: int
    seen: list[str]


def read_state(state: Mapping[str, object]) -> StreamState:
    """What `state_dict` gave once, checked.

    Raises:
        SchemaError: it is no such state.
    """
    queue, step, seen = state.get("queue"), state.get("step"), state.get("seen")
    run = state.get("run", "")  # older states do not say
    if (
        not isinstance(run, str)
        or not isinstance(queue, str)
        or not isinstance(step, int)
        or step < 0
        or not _are_ids(seen)
    ):
        fix = "pass what the stream's state_dict() gave when the checkpoint was written"
        wanted, got = "queue: str, step: int >= 0, seen: list of str", str(dict(state))[:200]
        raise SchemaError("not a stream's state", wanted=wanted, got=got, fix=fix)
    return StreamState(run=run, queue=queue, step=step, seen=list(seen))


def seen_in(state: StreamState, run: str, queue: str) -> list[str]:
    """The ids that a checkpoint has learned of this run's queue: none if it was written in an earlier epoch.

    Raises:
        ContractMismatch: the checkpoint is of a training without a queue, or of another run, whose ids may be the same.
        ConfigError: it was written in a later epoch, or on another queue.
    """
    if not state["queue"] or is_place(state["seen"]):
        raise _other_kind(wanted="one of a stream", got="one of a colocated or remote target")
    if state["run"] not in ("", run):
        fix = "pass another --output: a run's training begins anew"
        raise ContractMismatch("the checkpoint is of another run", wanted=run, got=state["run"], fix=fix)
    if state["queue"] == queue:
        return state["seen"]
    before, now = epoch_of(state["queue"]), epoch_of(queue)
    if before is None or now is None or before > now:
        fix = "go on in the epoch that the checkpoint was written in, or in a later one (train.epoch)"
        raise ConfigError("the checkpoint is of another queue", wanted=queue, got=state["queue"], fix=fix)
    return []


def read_place(state: Mapping[str, object]) -> tuple[str, int]:
    """Where a walk over prompts goes on, "" at its start, and the step.

    Raises:
        SchemaError: it is no stream's state.
        ContractMismatch: the checkpoint is of a training on a queue.
    """
    checked = read_state(state)
    if checked["queue"] or (checked["seen"] and not is_place(checked["seen"])):
        raise _other_kind(wanted="one of a colocated or remote target", got="one of a stream")
    return (checked["seen"][0] if checked["seen"] else ""), checked["step"]


def require_first(sample_ids: Sequence[str], taken: Sequence[str]) -> None:
    """Hold an acknowledgement in a walk, whose place has only trained samples before it, to the walk's order.

    Raises:
        ConfigError: others are acknowledged than those that were taken first.
    """
    first = list(taken[: len(sample_ids)])
    if sorted(first) != sorted(sample_ids):
        wanted, got = ", ".join(first), ", ".join(sample_ids)
        raise ConfigError("acknowledged out of their order", subject="ack", wanted=wanted, got=got)


def already_begun() -> ConfigError:
    """The state came too late."""
    fix = "call load_state_dict before the first take or iteration"
    return ConfigError("the stream has handed out batches already", subject="load_state_dict", fix=fix)


def _are_ids(seen: object) -> TypeGuard[Sequence[str]]:
    return isinstance(seen, Sequence) and not isinstance(seen, str) and all(isinstance(each, str) for each in seen)


def _other_kind(*, wanted: str, got: str) -> ContractMismatch:
    fix = "go on with the train.target_backend that it was written with, or pass another --output"
    return ContractMismatch("another kind of checkpoint", wanted=wanted, got=got, fix=fix)
