"""BackendStream: order, what is under way, refused prompts, stops, and where it goes on."""

from collections.abc import Iterator

import pytest
import structlog
import torch

import pipeline
from eaglefeed.consumer.backend_stream import BackendStream
from eaglefeed.consumer.state import StreamState
from eaglefeed.consumer.walk import is_place
from eaglefeed.errors import InputError, SampleCorrupt, SchemaError, TargetError, TargetUnavailable
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.prompt import Prompt, PromptRow
from eaglefeed.storage.base import is_verified
from echo_servers import EchoServers, first_token, with_nan


def _prompts(count: int, start: int = 0) -> list[Prompt]:
    return [pipeline.prompt(index) for index in range(start, start + count)]


def _ids(batches: list[Eagle3TargetBatch]) -> list[str]:
    return [sample_id for batch in batches for sample_id in batch.sample_ids]


def _rest(stream: BackendStream, n: int = 1) -> list[str]:
    """The ids of all that comes."""
    found: list[str] = []
    while not stream.ended:
        found += _ids(stream.take(n))
        stream.ack()
    return found


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_batches_come_in_the_prompts_order_and_carry_their_names(depth: int) -> None:
    with BackendStream(EchoServers(), _prompts(7), depth=depth) as stream:
        taken = [stream.take(1)[0] for _ in range(7)]
        assert _ids(taken) == [f"p-{index}" for index in range(7)]
        assert [first_token(batch) for batch in taken] == list(range(1, 8))
        assert (stream.take(1), stream.drained, stream.ended) == ([], True, True)


def test_rows_are_padded_on_the_right_to_the_longest() -> None:
    rows = (PromptRow((5, 6, 7, 8), (0, 0, 1, 1)), PromptRow((9, 4), (0, 1)))
    with BackendStream(EchoServers(), [pipeline.prompt(0, rows=rows)]) as stream:
        (batch,) = stream.take(1)
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.input_ids.tolist() == [[6, 7, 8, 0], [4, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_as_many_requests_are_under_way_while_the_loop_trains_as_it_said(depth: int) -> None:
    servers = EchoServers()
    with BackendStream(servers, _prompts(20), depth=depth) as stream:
        for _ in range(10):
            stream.take(1)
            assert len(servers.under_way) == depth
            stream.ack()
    assert servers.most_under_way == depth + 1  # the one that was waited for


def test_a_target_that_answers_in_place_is_asked_for_what_is_taken_alone() -> None:
    target = pipeline.EchoTarget()
    with BackendStream(target, _prompts(9), depth=4) as stream:
        stream.take(2)
        assert target.calls == 2


def test_prompts_are_read_no_further_than_they_are_asked_for() -> None:
    read: list[str] = []

    def prompts() -> Iterator[Prompt]:
        for prompt in _prompts(100):
            read.append(prompt.sample_id)
            yield prompt

    with BackendStream(EchoServers(), prompts(), depth=3) as stream:
        stream.take(2)
    assert len(read) == 2 + 3


def test_the_last_step_has_what_is_left() -> None:
    with BackendStream(EchoServers(), _prompts(7), depth=2) as stream:
        sizes = []
        while not stream.ended:
            sizes.append(len(stream.take(3)))
            stream.ack()
    assert sizes == [3, 3, 1]
    assert (stream.stats.delivered, stream.stats.acked, stream.drained) == (7, 7, True)


def test_a_step_that_does_not_come_whole_in_time_comes_whole_later() -> None:
    servers, held = EchoServers(), {2}
    servers.answer = lambda number, answer: None if number in held else answer
    with BackendStream(servers, _prompts(6), depth=1, clock=servers.clock) as stream:
        assert stream.take(4, wait_s=3.0) == []
        assert not stream.ended
        held.clear()
        assert _ids(stream.take(4, wait_s=3.0)) == ["p-0", "p-1", "p-2", "p-3"]
        assert _ids(stream.take(4, wait_s=3.0)) == ["p-4", "p-5"]
    assert 3.0 <= stream.stats.wait_s < 4.0


def test_what_was_taken_and_not_acknowledged_is_not_seen() -> None:
    with BackendStream(EchoServers(), _prompts(6)) as stream:
        stream.take(2)
        stream.ack(1)
        place = stream.state_dict()["seen"]
        stream.take(3)
        assert stream.state_dict()["seen"] == place


@pytest.mark.parametrize("acked", range(8))
@pytest.mark.parametrize("refused", [(), (0, 1, 5), (6,)], ids=str)
def test_it_goes_on_behind_what_was_acknowledged_with_every_prompt_once(acked: int, refused: tuple[int, ...]) -> None:
    def refuse(number: int, answer: Eagle3TargetBatch) -> Eagle3TargetBatch:
        if first_token(answer) - 1 in refused:
            raise SchemaError("no")
        return answer

    servers = EchoServers()
    servers.answer = refuse
    with BackendStream(servers, _prompts(7), depth=2) as stream:
        before = []
        while len(before) < acked and not stream.ended:
            before += _ids(stream.take(1))
            stream.ack()
    state = stream.state_dict()
    with BackendStream(servers, _prompts(7), depth=2) as stream:
        stream.load_state_dict(state)
        after = _rest(stream)
    assert before + after == [f"p-{index}" for index in range(7) if index not in refused]


def test_a_place_is_short_however_many_were_seen() -> None:
    with BackendStream(EchoServers(), _prompts(40)) as stream:
        assert stream.state_dict() == {"run": "", "queue": "", "step": 0, "seen": []}
        _rest(stream, 8)
    seen = stream.state_dict()["seen"]
    assert is_place(seen)
    assert len(seen[0]) < 50
    assert not is_place(["p-1"])
    assert not is_place([])


def _place_behind(count: int) -> StreamState:
    with BackendStream(EchoServers(), _prompts(count)) as stream:
        _rest(stream)
    return stream.state_dict()


def test_prompts_that_were_added_behind_are_new() -> None:
    with BackendStream(EchoServers(), _prompts(7)) as stream:
        stream.load_state_dict(_place_behind(5))
        assert _rest(stream) == ["p-5", "p-6"]


@pytest.mark.parametrize(
    "prompts",
    [_prompts(4), _prompts(7, 1), [*_prompts(3), *_prompts(4, 5)], [*_prompts(2, 3), *_prompts(3)], []],
    ids=["fewer", "without the first", "without one", "in another order", "none"],
)
def test_other_prompts_than_were_seen_are_refused(prompts: list[Prompt]) -> None:
    with BackendStream(EchoServers(), prompts) as stream:
        stream.load_state_dict(_place_behind(5))
        with pytest.raises(InputError, match="same first 5 work items"):
            stream.take(1)


def test_a_refused_prompt_is_counted_logged_by_its_name_and_passed() -> None:
    servers = EchoServers()

    def refuse(number: int, answer: Eagle3TargetBatch) -> Eagle3TargetBatch:
        if number == 1:
            raise SchemaError("row longer than the target's positions", wanted=2, got=3)
        if number == 2:
            raise SampleCorrupt("answer", "a digest differs")
        return answer

    servers.answer = refuse
    with structlog.testing.capture_logs() as logs, BackendStream(servers, _prompts(5), depth=1) as stream:
        assert _ids(stream.take(3)) == ["p-0", "p-3", "p-4"]
    said = {entry["sample_id"]: entry["reason"] for entry in logs if entry["event"] == "sample_refused"}
    assert said.keys() == {"p-1", "p-2"}
    assert "SchemaError: row longer than the target's positions, wanted 2, got 3" in said["p-1"]
    assert (stream.stats.dead, stream.stats.delivered) == (2, 3)


@pytest.mark.parametrize("values", ["always", "sample", "never"])
def test_values_are_checked_by_the_policy(values: str) -> None:
    servers = EchoServers()
    servers.answer = lambda number, answer: with_nan(answer)
    prompts = _prompts(40)
    with BackendStream(servers, prompts, values=values) as stream:  # type: ignore[arg-type]
        came = _rest(stream)
    assert came == [each.sample_id for each in prompts if not is_verified(values, each.sample_id)]  # type: ignore[arg-type]
    assert stream.stats.dead == 40 - len(came)


def test_token_ids_are_held_against_the_vocabulary() -> None:
    with BackendStream(EchoServers(), _prompts(3), vocab_size=3) as stream:
        assert (_rest(stream), stream.stats.dead) == ([], 3)


@pytest.mark.parametrize("values", ["always", "never"])
def test_an_answer_of_wrong_shapes_never_reaches_the_loop(values: str) -> None:
    servers = EchoServers()
    servers.answer = lambda number, answer: Eagle3TargetBatch(
        **(answer.tensors() | {"aux_hidden_states": answer.aux_hidden_states[:, :2]})
    )
    with BackendStream(servers, _prompts(2), values=values) as stream:  # type: ignore[arg-type]
        assert (_rest(stream), stream.stats.dead) == ([], 2)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TargetUnavailable("all servers are out"), TargetUnavailable),
        (torch.OutOfMemoryError("CUDA out of memory"), TargetError),
        (RuntimeError("shapes"), TargetError),
    ],
    ids=["away", "memory", "torch"],
)
def test_a_target_that_fails_ends_the_stream_and_gives_up_the_rest(error: Exception, kind: type[Exception]) -> None:
    servers = EchoServers()

    def fail(number: int, answer: Eagle3TargetBatch) -> Eagle3TargetBatch:
        if number == 2:
            raise error
        return answer

    servers.answer = fail
    with BackendStream(servers, _prompts(9), depth=3, outage_s=0.0) as stream:
        stream.take(1)
        stream.ack()
        with pytest.raises(kind) as raised:
            stream.take(2)
        assert (stream.ended, stream.drained, servers.under_way) == (True, False, set())
        assert stream.ack() == 0  # of the step that did not become whole
        if kind is TargetError:
            assert "p-2" in str(raised.value)
    state = stream.state_dict()
    with BackendStream(EchoServers(), _prompts(9)) as stream:
        stream.load_state_dict(state)
        assert _rest(stream) == [f"p-{index}" for index in range(1, 9)]


def test_a_stop_in_a_step_gives_up_that_step_and_what_is_under_way() -> None:
    servers = EchoServers()
    with BackendStream(servers, _prompts(9), depth=2) as stream:

        def stop_at_3(number: int, answer: Eagle3TargetBatch) -> Eagle3TargetBatch:
            if number == 3:
                stream.stop()
            return answer

        servers.answer = stop_at_3
        assert _ids(stream.take(2)) == ["p-0", "p-1"]
        stream.ack()
        assert stream.take(4) == []
        assert (stream.ended, stream.drained) == (True, False)
    assert servers.under_way == set()
    state = stream.state_dict()
    with BackendStream(EchoServers(), _prompts(9)) as stream:
        stream.load_state_dict(state)
        assert _rest(stream, 2) == [f"p-{index}" for index in range(2, 9)]


def test_a_stop_while_it_waits_is_heeded_at_once() -> None:
    servers = EchoServers()
    with BackendStream(servers, _prompts(3), depth=0, clock=servers.clock) as stream:

        def stop_in_time(number: int, answer: Eagle3TargetBatch) -> None:
            if servers.clock.monotonic() > started_s + 10:
                stream.stop()

        started_s = servers.clock.monotonic()
        servers.answer = stop_in_time
        assert stream.take(1) == []
        assert servers.clock.monotonic() < started_s + 12
        assert servers.clock.monotonic() > started_s + 9


def test_a_stop_while_the_loop_trains_cancels_before_the_last_checkpoint_is_written() -> None:
    servers = EchoServers()
    with BackendStream(servers, _prompts(9), depth=2) as stream:
        stream.take(1)
        stream.stop()
        assert servers.cancelled == []
        assert stream.ack(1) == 1
        assert servers.cancelled == [1, 2]


def test_what_was_given_up_at_the_end_of_the_prompts_is_not_drained() -> None:
    with BackendStream(EchoServers(), _prompts(3), depth=4) as stream:
        stream.take(1)
        stream.stop()
        stream.ack()  # gives up the other two
        assert not stream.drained
    assert not stream.drained
    servers = EchoServers()
    with BackendStream(servers, _prompts(3), depth=4, outage_s=0.0) as stream:
        servers.answer = _fail_last
        stream.take(2)
        stream.ack()
        with pytest.raises(TargetUnavailable):
            stream.take(1)
        assert (stream.ended, stream.drained) == (True, False)
        assert (stream.take(1), stream.ack(), stream.drained) == ([], 0, False)


def _fail_last(number: int, answer: Eagle3TargetBatch) -> Eagle3TargetBatch:
    if number == 2:
        raise TargetUnavailable("away")
    return answer


def test_the_end_of_the_prompts_is_not_drained_before_all_is_taken() -> None:
    with BackendStream(EchoServers(), _prompts(3), depth=8) as stream:
        for _ in range(2):
            stream.take(1)
            stream.ack()
            assert (stream.ended, stream.drained) == (False, False)
        stream.take(1)
        assert (stream.ended, stream.drained, stream.commit_due, stream.commit(3)) == (True, True, False, 0)
