"""The history checker itself: possible histories pass, and impossible ones are found, at least one a rule."""

import json
from pathlib import Path

import pytest

from faults.chaos.handmade import PLACE, ack, call, faults, lease, lost, nack, put, refute
from faults.chaos.record import FOREVER, Recorder, read, write_death

# every id ends once


def test_an_item_that_is_put_leased_and_done_is_fine() -> None:
    assert faults(put("a"), lease(1, "a", at=0), ack(1, "a")) == []


def test_an_item_that_was_never_done_is_found() -> None:
    refute("a was never done", put("a"), lease(1, "a", at=0))


def test_an_item_that_vanished_is_found() -> None:
    refute("are not the 2 put", put("a", "b"), lease(1, "a", at=0), ack(1, "a"))


def test_an_item_left_over_is_found() -> None:
    refute("neither done nor dead", put("a"), lease(1, "a", at=0), done=0, unsettled=1)


def test_an_ack_without_a_reply_may_have_settled() -> None:
    assert faults(put("a"), lease(1, "a", at=0), lost(ack(1, "a"))) == []


def test_a_dead_item_was_refused_for_good_or_crashed_alone() -> None:
    refused = (put("a"), lease(1, "a", at=0), nack(1, "a", "dead"))
    assert faults(*refused, done=0, dead="a") == []
    crashed = (put("a"), lease(1, "a", at=0), lease(2, "a", at=100, n=2))
    assert faults(*crashed, done=0, dead="a") == []


def test_a_dead_item_that_nobody_refused_is_found() -> None:
    refute("crashed alone 1 times", put("a"), lease(1, "a", at=0), done=0, dead="a")
    together = (put("a", "b"), lease(1, "a", "b", at=0), lease(2, "a", "b", at=200, n=2), ack(2, "b"))
    refute("crashed alone 0 times", *together, dead="a")


def test_an_item_that_is_done_and_dead_is_found() -> None:
    refute("was done, and is dead", put("a"), lease(1, "a", at=0), ack(1, "a"), done=0, dead="a")


# nobody settles what he does not hold


def test_an_ack_of_something_never_leased_is_found() -> None:
    refute("which never held it", put("a"), lease(1, "a", at=0), ack(7, "a"))
    refute("which never held it", put("a", "b"), lease(1, "a", at=0), ack(1, "a", "b"))


def test_an_item_settled_twice_by_its_lease_is_found() -> None:
    refute("settled 2 times", put("a"), lease(1, "a", at=0), ack(1, "a"), ack(1, "a"))
    refute("settled 2 times", put("a"), lease(1, "a", at=0), nack(1, "a", "given"), ack(1, "a"))


def test_a_second_ack_that_was_refused_is_fine() -> None:
    assert faults(put("a"), lease(1, "a", at=0), ack(1, "a"), ack(1, "a", ok=())) == []


def test_a_stale_ack_that_was_accepted_is_found() -> None:
    calls = (put("a"), lease(1, "a", at=0), lease(2, "a", at=100, n=2), ack(1, "a"))
    refute("stale ack of a accepted", *calls)
    assert faults(*calls[:3], ack(1, "a", ok=()), ack(2, "a")) == []


def test_an_item_done_by_two_leases_is_found() -> None:
    refute("done by lease 1", put("a"), lease(1, "a", at=0), ack(1, "a"), lease(2, "a", at=100, n=2), ack(2, "a"))


def test_a_stale_nack_that_was_accepted_is_found() -> None:
    calls = (put("a"), lease(1, "a", at=0), lease(2, "a", at=100, n=2), nack(1, "a", "given"), ack(2, "a"))
    refute("stale nack of a accepted", *calls)


def test_a_stale_renewal_that_was_accepted_is_found() -> None:
    renewed = call("renew", token=1, deadline_ms=90)
    assert faults(put("a"), lease(1, "a", at=0), renewed, lease(2, "a", at=100, n=2), ack(2, "a")) == []
    late = (put("a"), lease(1, "a", at=0), lease(2, "a", at=100, n=2), call("renew", token=1, deadline_ms=90))
    refute("stale renewal of 1 accepted", *late, ack(2, "a"))


def test_an_ack_that_overlaps_the_next_lease_is_fine() -> None:
    first, second = lease(1, "a", at=0), lease(2, "a", at=100, n=2)
    refused = ack(1, "a", ok=(), start=second.start - 1, end=second.end + 1)
    assert faults(put("a"), first, second, refused, ack(2, "a")) == []


# nothing is leased by two


def test_a_lease_that_ran_out_is_leased_again() -> None:
    assert faults(put("a"), lease(1, "a", at=0), lease(2, "a", at=100, n=2), ack(2, "a")) == []


def test_an_item_leased_by_two_at_once_is_found() -> None:
    refute("held it until 100", put("a"), lease(1, "a", at=0), lease(2, "a", at=99, n=2), ack(2, "a"))


def test_a_renewed_lease_that_is_given_away_is_found() -> None:
    renewed = call("renew", token=1, deadline_ms=190)
    refute("held it until 190", put("a"), lease(1, "a", at=0), renewed, lease(2, "a", at=150, n=2), ack(2, "a"))


def test_an_item_given_back_is_leased_again_before_its_deadline() -> None:
    assert faults(put("a"), lease(1, "a", at=0), nack(1, "a", "given"), lease(2, "a", at=1), ack(2, "a")) == []


def test_a_dead_item_is_leased_again_only_when_it_was_requeued() -> None:
    died = (put("a"), lease(1, "a", at=0), nack(1, "a", "dead"))
    assert faults(*died, call("requeue", ids=("a",)), lease(2, "a", at=1), ack(2, "a")) == []
    refute("dead by lease 1", *died, lease(2, "a", at=1, n=2), ack(2, "a"))


# deliveries are counted


@pytest.mark.parametrize(("mode", "right", "wrong"), [("back", 2, 1), ("given", 1, 2)])
def test_a_count_that_does_not_say_what_happened_is_found(mode: str, right: int, wrong: int) -> None:
    first = (put("a"), lease(1, "a", at=0), nack(1, "a", mode))
    assert faults(*first, lease(2, "a", at=1, n=right), ack(2, "a")) == []
    refute(f"delivery_count {wrong}", *first, lease(2, "a", at=1, n=wrong), ack(2, "a"))


def test_a_count_that_did_not_grow_after_a_deadline_is_found() -> None:
    refute("delivery_count 1", put("a"), lease(1, "a", at=0), lease(2, "a", at=100, n=1), ack(2, "a"))


def test_a_first_delivery_counts_one_unless_a_lease_was_lost() -> None:
    refute("delivery_count 2", put("a"), lease(1, "a", at=0, n=2), ack(1, "a"))
    assert faults(put("a"), lost(lease(1, "a", at=0)), lease(2, "a", at=100, n=2), ack(2, "a")) == []


def test_a_lease_call_that_was_repeated_in_an_outage_may_have_been_granted_twice() -> None:
    outage = call("outage", place="")
    repeated = lease(2, "a", at=100, n=2, start=outage.start - 1, end=outage.end + 1)
    assert faults(put("a"), outage, repeated, ack(2, "a")) == []


# the files


def test_a_process_that_was_killed_leaves_calls_that_may_have_happened(tmp_path: Path) -> None:
    path = tmp_path / "trainer.1.jsonl"
    recorder = Recorder(path)
    with recorder.call("ack", place=PLACE, token=1, ids=["a"]) as reply:
        reply["ok"] = ["a"]
    with pytest.raises(ValueError, match="told"), recorder.call("ack", place=PLACE, token=1, ids=["b"]):
        raise ValueError("told")
    with path.open("a") as file:
        file.write(json.dumps({"n": 2, "op": "ack", "place": PLACE, "ids": ["c"], "start": 10**18}) + '\n{"n":2,"en')
    recorder.close()
    write_death(path)
    first, refused, unknown = read([path])
    assert (first.outcome, first.ok, first.process) == ("yes", ("a",), "trainer.1")
    assert (refused.outcome, refused.error) == ("no", "ValueError")
    assert (unknown.outcome, unknown.ids) == ("maybe", ("c",))
    assert unknown.end < FOREVER
