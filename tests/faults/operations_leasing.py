"""What one worker does: configure, put, lease, renew, ack, nack, in the situations that matter."""

import time

from eaglefeed.queue.base import LeaseQueue, QueueItem, QueueLimits
from faults.operation_base import Call, Operations, Run, hand_off_held, held
from queue_steps import LONG_S, fail, finish, items, learn, lease, numbered

operation = Operations()


def expired(queue: LeaseQueue, n: int) -> None:
    queue.renew(lease(queue, n).token, visibility_timeout_s=0)


def take(queue: LeaseQueue, session: int = 0) -> object:
    return queue.lease(10, visibility_timeout_s=LONG_S, consumer="c", session=session)


# configure, limits, put


@operation
def configure(run: Run) -> Call:
    run.samples.put(items("a", "b", "c"))
    return lambda to: to.samples.configure(QueueLimits(high_count=2, low_count=1))


@operation
def configure_groups(run: Run) -> Call:
    return lambda to: to.samples.configure(QueueLimits(max_depth=9), groups=["main", "other"])


@operation
def configure_other_groups(run: Run) -> Call:
    run.in_group("a")
    return lambda to: to.samples.configure(QueueLimits(), groups=["c"])


@operation
def limits(run: Run) -> Call:
    run.samples.configure(QueueLimits(max_depth=7, backoff_base_s=0.5))
    return lambda to: to.samples.limits()


@operation
def put(run: Run) -> Call:
    run.samples.put(items("a"))
    return lambda to: to.samples.put(items("a", "b", "b", "c", stored_bytes=5))


@operation
def put_two_chunks(run: Run) -> Call:
    return lambda to: to.samples.put(items(*numbered(1003)))


@operation
def put_for_two_groups(run: Run) -> Call:
    run.in_group("a")
    return lambda to: to.queue("samples", "b").put(items("a", "b"))


@operation
def put_nothing_new(run: Run) -> Call:
    run.samples.put(items("a"))
    return lambda to: (to.samples.put(items("a")), to.samples.put([]))


@operation
def put_conflict(run: Run) -> Call:
    run.samples.put(items("a"))
    return lambda to: to.samples.put([QueueItem("new", b""), QueueItem("a", b"other")])


@operation
def put_closed(run: Run) -> Call:
    run.samples.close()
    return lambda to: to.samples.put(items("a"))


@operation
def put_full(run: Run) -> Call:
    run.samples.configure(QueueLimits(max_depth=1))
    return lambda to: to.samples.put(items("a", "b"))


# lease, renew


@operation
def lease_some(run: Run) -> Call:
    run.samples.put(items(*numbered(12), stored_bytes=3))
    return lambda to: take(to.samples)


@operation
def lease_reclaims(run: Run) -> Call:
    run.samples.put(items("a", "b", "c"))
    expired(run.samples, 2)
    return lambda to: take(to.samples)


@operation
def lease_buries(run: Run) -> Call:
    run.samples.configure(QueueLimits(max_deliveries=1))
    run.samples.put(items("poison", "b", stored_bytes=2))
    expired(run.samples, 1)
    return lambda to: take(to.samples)


@operation
def lease_promotes(run: Run) -> Call:
    token = held(run.samples, "a", "b").token
    run.samples.nack(token, ["a"], reason="later", delay_s=0.001)
    time.sleep(0.003)
    return lambda to: take(to.samples)


@operation
def lease_nothing(run: Run) -> Call:
    run.samples.nack(held(run.samples, "a", "b").token, ["a"], reason="later", delay_s=LONG_S)
    finish(run.samples, 1)
    return lambda to: take(to.samples)


@operation
def lease_drained(run: Run) -> Call:
    run.samples.put(items("a"))
    learn(run.samples, 1, 4)
    run.samples.close()
    return lambda to: take(to.samples)


@operation
def lease_commit_due(run: Run) -> Call:
    run.samples.configure(QueueLimits(high_count=2, low_count=1))
    run.samples.put(items("a", "b"))
    learn(run.samples, 2, 4)
    return lambda to: take(to.samples)


@operation
def lease_opens_the_room(run: Run) -> Call:
    run.samples.configure(QueueLimits(high_count=3, low_count=1))
    run.samples.put(items("a", "b", "c"))
    finish(run.samples, 1)
    lease(run.samples, 2)
    return lambda to: take(to.samples)


@operation
def lease_with_an_old_session(run: Run) -> Call:
    run.samples.put(items("a"))
    run.samples.restore(0)
    return lambda to: take(to.samples)


@operation
def lease_waits_in_vain(run: Run) -> Call:
    return lambda to: to.samples.lease(1, visibility_timeout_s=LONG_S, consumer="c", wait_s=0.03)


@operation
def renew(run: Run) -> Call:
    token = held(run.samples, "a").token
    return lambda to: to.samples.renew(token, visibility_timeout_s=2 * LONG_S)


@operation
def renew_stale(run: Run) -> Call:
    return lambda to: to.samples.renew(1, visibility_timeout_s=LONG_S)


# ack, nack


@operation
def ack(run: Run) -> Call:
    token = held(run.samples, "a", "b", "c", stored_bytes=7).token
    return lambda to: to.samples.ack(token, ["a", "b", "never", "a"])


@operation
def ack_at_a_step(run: Run) -> Call:
    token = held(run.samples, "a", "b").token
    return lambda to: to.samples.ack(token, ["a", "b"], step=3)


@operation
def ack_of_the_last_group(run: Run) -> Call:
    first = held(run.in_group("a"), "a", "b", stored_bytes=7)
    run.in_group("a").ack(first.token, ["a"])
    token = lease(run.in_group("b"), 2).token
    return lambda to: to.queue("samples", "b").ack(token, ["a", "b"])


@operation
def ack_ends_held_prompts(run: Run) -> Call:
    hand_off_held(run, "p", "q")
    token = lease(run.samples, 2).token
    return lambda to: to.samples.ack(token, ["p", "q"])


@operation
def ack_opens_the_room(run: Run) -> Call:
    run.samples.configure(QueueLimits(high_count=3, low_count=1))
    token = held(run.samples, "a", "b").token
    return lambda to: to.samples.ack(token, ["a", "b"])


@operation
def ack_of_nothing_in_an_old_session(run: Run) -> Call:
    run.samples.restore(0)
    return lambda to: to.samples.ack(1, [])


@operation
def nack_to_the_head(run: Run) -> Call:
    token = held(run.samples, "a", "b", "c").token
    return lambda to: to.samples.nack(token, ["b", "c", "never"], reason="stop", delay_s=0)


@operation
def nack_with_a_delay(run: Run) -> Call:
    token = held(run.samples, "a", "b").token
    return lambda to: to.samples.nack(token, ["b"], reason="later", delay_s=LONG_S)


@operation
def nack_uncounted(run: Run) -> Call:
    token = held(run.samples, "a", "b").token
    run.samples.nack(token, ["a"], reason="busy", delay_s=LONG_S)
    return lambda to: to.samples.nack(token, ["a", "b"], reason="gone", delay_s=LONG_S, counted=False)


@operation
def nack_with_backoff(run: Run) -> Call:
    token = held(run.samples, "a", "b").token
    return lambda to: to.samples.nack(token, ["a", "b"], reason="busy")


@operation
def nack_for_good(run: Run) -> Call:
    token = held(run.samples, "a", "b", stored_bytes=4).token
    return lambda to: to.samples.nack(token, ["a", "b"], reason="corrupt", retryable=False)


@operation
def nack_for_good_by_the_last_group(run: Run) -> Call:
    held(run.in_group("a"), "a", stored_bytes=4)
    finish(run.in_group("b"), 1)
    token = lease(run.in_group("b"), 1).token
    fail(run.in_group("a"), "later")
    return lambda to: to.queue("samples", "b").nack(token, ["later"], reason="corrupt", retryable=False)
