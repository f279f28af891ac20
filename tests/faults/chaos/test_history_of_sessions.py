"""The history checker itself: sessions, models, hand-offs and shards that may go."""

from typing import Any

from faults.chaos.handmade import PLACE, ack, call, faults, lease, lost, nack, put, refute, restore
from faults.chaos.history import Final, check, tell
from faults.chaos.record import Call

# sessions, commits, restores


def session() -> tuple[Call, ...]:
    """Puts a, opens session 1, in which lease 1 has it."""
    return (put("a"), restore(1, 0), lease(1, "a", at=0, session=1))


def commit(step: int, session: int, **fields: Any) -> Call:
    return call("commit", step=step, session=session, **fields)


def test_a_committed_ack_is_done() -> None:
    assert faults(*session(), ack(1, "a", step=5, session=1), commit(5, 1), model="a") == []


def test_a_tentative_ack_is_not_done() -> None:
    refute("never done", *session(), ack(1, "a", step=5, session=1), commit(4, 1), model="a")


def test_a_committed_item_that_is_leased_again_is_found() -> None:
    calls = (*session(), ack(1, "a", step=5, session=1), commit(5, 1), restore(2, 5), lease(2, "a", at=1, session=2))
    refute("done by lease 1", *calls, ack(2, "a", step=6, session=2), commit(6, 2), model="a")


def test_an_ack_beyond_the_restored_step_comes_back() -> None:
    calls = (*session(), ack(1, "a", step=5, session=1), restore(2, 4), lease(2, "a", at=1, session=2))
    assert faults(*calls, ack(2, "a", step=5, session=2), commit(5, 2), model="a") == []


def test_an_ack_beyond_the_restored_step_that_stays_away_is_found() -> None:
    refute("never leased again", *session(), ack(1, "a", step=5, session=1), restore(2, 4), model="")


def test_an_ack_before_the_restored_step_that_comes_back_is_found() -> None:
    calls = (*session(), ack(1, "a", step=5, session=1), restore(2, 5, origin=1), lease(2, "a", at=1, session=2))
    refute("done by lease 1", *calls, ack(2, "a", step=6, session=2), commit(6, 2), model="a a")


def test_a_restore_without_a_reply_leaves_both_open() -> None:
    calls = (*session(), ack(1, "a", step=5, session=1), lost(restore(0, 4)), restore(3, 5, origin=1))
    assert faults(*calls, model="a") == []
    calls = (*session(), ack(1, "a", step=5, session=1), lost(restore(0, 4)), restore(3, 5))
    again = (lease(2, "a", at=1, session=3), ack(2, "a", step=6, session=3), commit(6, 3))
    assert faults(*calls, *again, model="a") == []


def test_a_lease_ended_by_a_restore_counts_nothing() -> None:
    calls = (*session(), restore(2, 0), lease(2, "a", at=1, session=2))
    assert faults(*calls, ack(2, "a", step=1, session=2), commit(1, 2), model="a") == []
    refute("delivery_count 3", *session(), restore(2, 0), lease(2, "a", at=1, session=2, n=3))


def test_a_call_of_an_older_session_that_was_accepted_is_found() -> None:
    refute("lease of session 1 accepted", *session(), restore(2, 0), lease(2, "a", at=1, session=1))
    refute("ack of session 1 accepted", *session(), restore(2, 0), ack(1, "a", step=1, session=1))
    refute("commit of session 1 accepted", *session(), restore(2, 0), commit(1, 1))
    calls = (*session(), restore(2, 0), commit(1, 1, outcome="no"), lease(2, "a", at=1, session=2))
    assert faults(*calls, ack(2, "a", step=1, session=2), commit(1, 2), model="a") == []


def test_a_lease_of_an_older_session_that_settles_in_a_new_one_is_found() -> None:
    calls = (*session(), restore(2, 0), ack(1, "a", step=1, session=2), commit(1, 2))
    refute("a was leased in session 1 and settled in session 2", *calls, model="a")


def test_tokens_and_sessions_that_do_not_grow_are_found() -> None:
    refute("lease 1 came after 2", put("a", "b"), lease(2, "a", at=0), lease(1, "b", at=0))
    refute("restore 1 came after 2", put("a"), restore(2, 0), restore(1, 0))


def test_a_step_restored_before_the_committed_one_is_found() -> None:
    calls = (*session(), ack(1, "a", step=5, session=1), commit(5, 1), restore(2, 4))
    refute("step 4 was restored after step 5", *calls)


def test_what_a_checkpoint_has_seen_is_not_handed_out_again() -> None:
    assert faults(*session(), lost(ack(1, "a", step=5, session=1)), restore(2, 5, "a")) == []
    calls = (*session(), restore(2, 5, "a"), lease(2, "a", at=1, session=2), ack(2, "a", step=6, session=2))
    refute("whose checkpoint had seen it", *calls, commit(6, 2))


# learned exactly once


def learned() -> tuple[Call, ...]:
    """Session 1 learns a at step 5 and b at step 6."""
    first = (put("a", "b"), restore(1, 0), lease(1, "a", "b", at=0, session=1))
    return (*first, ack(1, "a", step=5, session=1), ack(1, "b", step=6, session=1))


def relearned(step: int) -> tuple[Call, ...]:
    """Session 2 learns b at `step`."""
    return (lease(2, "b", at=1, session=2), ack(2, "b", step=step, session=2), commit(step, 2))


def test_a_model_restored_to_an_older_step_learns_the_later_samples_again() -> None:
    assert faults(*learned(), restore(2, 5, origin=1), *relearned(6), done=2, model="a b") == []


def test_a_sample_that_was_learned_twice_is_found() -> None:
    refute("b was learned 2 times", *learned(), restore(2, 6, origin=1), *relearned(7), done=2, model="a b b")


def test_a_sample_that_was_never_learned_is_found() -> None:
    refute("b is done and was never learned", *learned(), restore(2, 6), commit(6, 2), done=2, model="")
    refute("b is done and was never learned", *learned(), restore(2, 5, origin=1), commit(6, 2), done=2, model="a")


def test_a_sample_that_is_dead_and_was_learned_is_found() -> None:
    calls = (*learned(), commit(5, 1), nack(1, "b", "dead"))
    refute("b is dead and was learned", *calls, dead="b", model="a b")


def test_a_model_that_differs_from_its_acks_is_found() -> None:
    refute("differ: ['b']", *learned(), commit(6, 1), done=2, model="a a")


# hand-offs and payloads

PROMPTS: dict[str, Any] = {"place": "prompts/main"}


def handoff(token: int, payload: str, **fields: Any) -> Call:
    return call("handoff", token=token, ids=("a",), payloads=(payload,), **(PROMPTS | {"ok": ("a",)} | fields))


def prompted() -> tuple[Call, ...]:
    """Prompt a, leased as 1 and, when that ran out, as 2."""
    first = call("put", ids=("a",), **PROMPTS)
    return (first, lease(1, "a", at=0, **PROMPTS), lease(2, "a", at=100, n=2, **PROMPTS))


def delivered(payload: str) -> tuple[Call, ...]:
    return (lease(9, "a", at=500, payloads=(payload,)), ack(9, "a"))


def pipeline_faults(*calls: Call) -> str:
    return "\n".join(check(tell(calls, {"prompts/main": Final(done=1), PLACE: Final(done=1)})))


def test_the_sample_of_the_producer_that_holds_the_prompt_is_delivered() -> None:
    refused = handoff(1, "one", outcome="no", ok=())
    assert pipeline_faults(*prompted(), refused, handoff(2, "two"), *delivered("two")) == ""


def test_a_stale_handoff_that_was_accepted_is_found() -> None:
    found = pipeline_faults(*prompted(), handoff(1, "one"), handoff(2, "two"), *delivered("two"))
    assert "stale handoff of a accepted" in found


def test_a_sample_with_the_payload_of_a_refused_handoff_is_found() -> None:
    refused = handoff(1, "one", outcome="no", ok=())
    found = pipeline_faults(*prompted(), refused, handoff(2, "two"), *delivered("one"))
    assert "delivered as ['one'], which nobody handed off" in found


def test_a_sample_delivered_with_two_payloads_is_found() -> None:
    made = (*prompted(), lost(handoff(1, "one")), handoff(2, "two"), lease(8, "a", at=300, payloads=("one",)))
    assert "delivered with 2 payloads" in pipeline_faults(*made, *delivered("two"))


def test_a_prompt_that_is_done_without_a_sample_is_found() -> None:
    found = check(tell([*prompted(), lost(handoff(2, "x"))], {"prompts/main": Final(done=1)}))
    assert found == ["prompts/main: a is done, but its sample was never put"]


# shards that may go


def released(*ids: str) -> Call:
    return call("released", place="samples", ids=ids)


def test_a_sample_that_is_done_is_released() -> None:
    assert faults(put("a"), lease(1, "a", at=0), ack(1, "a"), released("a"), released("a")) == []


def test_a_sample_leased_after_its_release_is_found() -> None:
    calls = (put("a"), lease(1, "a", at=0), released("a"), lease(2, "a", at=100, n=2), ack(2, "a"))
    refute("was released, and leased as 2", *calls)


def test_a_sample_that_is_not_released_is_found_unless_it_is_dead() -> None:
    both = (put("a", "b"), lease(1, "a", "b", at=0), ack(1, "a"))
    refute("b was never released", *both, ack(1, "b"), released("a"), done=2)
    assert faults(*both, nack(1, "b", "dead"), released("a"), dead="b") == []
    refute("b was released, and is dead", *both, nack(1, "b", "dead"), released("a", "b"), dead="b")
