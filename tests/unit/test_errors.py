import inspect
import pickle

import pytest

from eaglefeed import errors
from eaglefeed.cli.app import EXIT_CODES, exit_code

CLASSES = [getattr(errors, name) for name in errors.__all__]
RETRYABLE = {
    "NoProducers",
    "PeerGone",
    "QueueFull",
    "QueueUnavailable",
    "RankGone",
    "SampleMissing",
    "StorageError",
    "StoreFull",
    "TargetUnavailable",
}


def test_the_tree_that_is_drawn_is_the_tree_that_is_there() -> None:
    drawn = {line.strip("│├└─ ").split()[0] for line in (errors.__doc__ or "").splitlines() if "──" in line}
    assert drawn | {"EaglefeedError"} == set(errors.__all__)


def test_every_error_is_an_eaglefeed_error() -> None:
    assert all(issubclass(each, errors.EaglefeedError) for each in CLASSES)
    assert issubclass(errors.SchemaError, ValueError)


def test_which_errors_are_worth_another_try() -> None:
    assert {each.__name__ for each in CLASSES if each.retryable} == RETRYABLE


def test_a_message_says_what_whom_wanted_got_and_what_next() -> None:
    error = errors.ConfigError("odd", subject="a.b", wanted=1, got=2, fix="do this")
    assert str(error) == "a.b: odd, wanted 1, got 2; do this"
    assert str(errors.ConfigError("odd")) == "odd"


@pytest.mark.parametrize(
    ("error", "texts"),
    [
        (errors.StaleLease("ack", 7, "a"), ["a:", "ack refused", "lease 7"]),
        (errors.QueueFull("prompts", depth=9, max_depth=9, retry_after_s=2), ["prompts", "9", "2 s"]),
        (errors.IdConflict("prompts", "a"), ["a:", "prompts"]),
        (errors.SampleMissing("a", "k"), ["a:", "k"]),
        (errors.StoreFull("s", num_bytes=5, free_bytes=3, reason="quota"), ["s:", "5", "3", "quota"]),
        (errors.BuffersHeld(["a", "b"], num_buffers=2, waited_s=9), ["2 are held", "of a, b;", "9 s"]),
        (errors.NoProducers(num_prompts=3, grace_s=60), ["3 prompts", "60 s", "none said why"]),
        (errors.NoProducers(num_prompts=3, grace_s=60, last_error="w: no GPU"), ["3 prompts", "last error: w: no GPU"]),
        (errors.QueueUnavailable("at", "out of memory", fix="raise it", is_full=True), ["at: out of memory; raise it"]),
        (errors.StaleLease.of_session("ack", 9, 7), ["wanted 7, got 9", "older data", "start this trainer again"]),
        (errors.UnsafeServer("x", subject="s"), ["s: x"]),
        (errors.ContractMismatch("x", subject="s"), ["s: x", "run's contract.json"]),
        (errors.RankGone("a step", rank=0, missing=[1], timeout_s=5), ["rank 0", "rank 1", "5 s"]),
    ],
)
@pytest.mark.parametrize("travelled", [False, True])
def test_typed_fields_stand_in_the_message(error: errors.EaglefeedError, texts: list[str], travelled: bool) -> None:
    told = pickle.loads(pickle.dumps(error)) if travelled else error  # as a worker process hands it to its parent
    assert (type(told), str(told), vars(told)) == (type(error), str(error), vars(error))
    assert all(text in str(told) for text in texts)
    assert "\n" not in str(told)


def test_exit_codes() -> None:
    assert exit_code(errors.ConfigError("x")) == 2
    assert exit_code(errors.SchemaVersionError("x")) == 3
    assert exit_code(errors.QueueUnavailable("a", "b")) == 4
    assert exit_code(errors.StorageError("x")) == 4
    assert exit_code(errors.StoreFull("s", num_bytes=1, free_bytes=0, reason="quota")) == 4
    assert exit_code(errors.SampleMissing("p-1", "ab/p-1.7.safetensors")) == 1
    assert exit_code(errors.BuffersHeld([], num_buffers=1, waited_s=1)) == 1
    assert exit_code(errors.SampleCorrupt("p-1", "cut short")) == 3
    assert exit_code(errors.EaglefeedError("x")) == 1
    assert all(inspect.isclass(kind) for kind, _ in EXIT_CODES)


def test_a_trainer_whose_session_is_over_is_told_to_stop_and_one_without_a_session_to_restore() -> None:
    replaced, careless = (errors.StaleLease.of_session("ack", session, 7) for session in (3, 0))
    assert str(replaced).startswith("ack refused, its session is over, wanted 7, got 3; stop this trainer")
    assert "call restore(step) first" in str(careless)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("s3://key:secret@bucket/p", "s3://…@bucket/p"),
        ("PUT https://u:p@ss@host:1/a and redis://:pw@h", "PUT https://…@host:1/a and redis://…@h"),
        ("http://host:1/a@b, mail x@y", "http://host:1/a@b, mail x@y"),
    ],
)
def test_no_message_holds_the_user_and_password_of_an_address(text: str, wanted: str) -> None:
    assert str(errors.ConfigError("odd", subject=text, got=text)) == f"{wanted}: odd, got {wanted}"
    assert errors.EaglefeedError.text_of(OSError(text)) == f"OSError: {wanted}"
