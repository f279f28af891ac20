"""What a whole run does: commit, restore, release, hand off, recall, wait, look, requeue, purge, where it matters."""

from eaglefeed.queue.base import QueueItem, QueueLimits
from faults.operation_base import Call, Operations, Run, hand_off, hand_off_held, held
from queue_steps import LONG_S, fail, finish, items, learn, lease, numbered

operation = Operations()


# commit, restore


@operation
def commit(run: Run) -> Call:
    run.samples.put(items("a", "b", "c", stored_bytes=9))
    for step in (1, 2, 3):
        learn(run.samples, 1, step)
    return lambda to: to.samples.commit(2)


@operation
def commit_in_chunks(run: Run) -> Call:
    learn_many(run, 2005)
    return lambda to: to.samples.commit(6)


@operation
def commit_of_nothing(run: Run) -> Call:
    return lambda to: to.samples.commit(6)


@operation
def restore(run: Run) -> Call:
    run.samples.put(items(*"abcdef"))
    for step in (1, 2, 3):
        learn(run.samples, 1, step)
    lease(run.samples, 1)
    return lambda to: to.samples.restore(2)


@operation
def restore_in_chunks(run: Run) -> Call:
    names = learn_many(run, 2310)
    learn(run.samples, 1000, 7)
    for _ in range(65):
        lease(run.samples, 1)
    run.samples.put(items(*numbered(2600)[2310:]))
    return lambda to: to.samples.restore(6, seen=[*names[-230:], "never"])


@operation
def restore_behind_the_commit(run: Run) -> Call:
    run.samples.commit(6)
    return lambda to: to.samples.restore(5)


def learn_many(run: Run, n: int) -> list[str]:
    names = numbered(n)
    run.samples.put(items(*names))
    for step in (5, 6):
        learn(run.samples, 600, step)
    if n < 2200:
        learn(run.samples, 1000, 6)
    return names


# released, forget


@operation
def released(run: Run) -> Call:
    release_two(run)
    return lambda to: sorted(to.samples.released())


@operation
def forget(run: Run) -> Call:
    release_two(run)
    return lambda to: to.samples.forget(["a", "later"])


def release_two(run: Run) -> None:
    run.samples.ack(held(run.samples, "a", "b", stored_bytes=8).token, ["a", "b"])


# handoff, recall


@operation
def handoff(run: Run) -> Call:
    token = held(run.prompts, "p", "q").token
    return lambda to: to.prompts.handoff(token, "p", QueueItem("s", b"ref", 6), to.samples)


@operation
def handoff_to_two_groups(run: Run) -> Call:
    run.in_group("a")
    token = held(run.prompts, "p").token
    return lambda to: to.prompts.handoff(token, "p", QueueItem("s", b"ref", 6), to.queue("samples", "b"))


@operation
def handoff_of_a_known_sample(run: Run) -> Call:
    hand_off(run, "p")
    token = held(run.prompts, "q").token
    return lambda to: to.prompts.handoff(token, "later", QueueItem("p", b"ref of p", 6), to.samples)


@operation
def handoff_stale(run: Run) -> Call:
    run.prompts.put(items("p"))
    return lambda to: to.prompts.handoff(1, "p", QueueItem("p", b"ref"), to.samples)


@operation
def handoff_conflict(run: Run) -> Call:
    run.samples.put(items("p"))
    token = held(run.prompts, "p").token
    return lambda to: to.prompts.handoff(token, "p", QueueItem("p", b"ref"), to.samples)


@operation
def handoff_held(run: Run) -> Call:
    token = held(run.prompts, "p").token
    return lambda to: to.prompts.handoff(token, "p", QueueItem("p", b"ref", 6), to.samples, holder="h")


@operation
def handoff_recalled(run: Run) -> Call:
    hand_off_held(run, "p", "q")
    run.prompts.recall(run.samples)
    token = lease(run.prompts, 2).token
    return lambda to: to.prompts.handoff(token, "p", QueueItem("p", b"again", 3), to.samples, holder="h2")


@operation
def recall(run: Run) -> Call:
    hand_off_held(run, "p", "q")
    run.prompts.beat("producer", "other")
    run.samples.close()
    return lambda to: to.prompts.recall(to.samples)


@operation
def recall_in_chunks(run: Run) -> Call:
    hand_off_held(run, *numbered(130))
    return lambda to: to.prompts.recall(to.samples)


@operation
def held_for(run: Run) -> Call:
    hand_off_held(run, "p", "q")
    finish(run.samples, 1)
    return lambda to: to.prompts.held_for(to.samples)


# room, workers, the end


@operation
def has_room(run: Run) -> Call:
    return lambda to: to.samples.has_room()


@operation
def wait_for_room_in_vain(run: Run) -> Call:
    run.samples.configure(QueueLimits(high_count=1, low_count=1))
    run.samples.put(items("a"))
    return lambda to: to.samples.wait_for_room(0.03)


@operation
def wait_for_room_that_is_there(run: Run) -> Call:
    return lambda to: to.samples.wait_for_room(LONG_S)


@operation
def beat(run: Run) -> Call:
    return lambda to: to.samples.beat("trainer", "t")


@operation
def farewell(run: Run) -> Call:
    run.samples.beat("trainer", "t")
    return lambda to: to.samples.farewell("trainer", "t")


@operation
def close(run: Run) -> Call:
    run.samples.put(items("a"))
    return lambda to: to.samples.close()


# looking, dead letters, purge


@operation
def stats(run: Run) -> Call:
    run.samples.beat("trainer", "t")
    dead_and_alive(run)
    return lambda to: to.samples.stats()


@operation
def dead_letters(run: Run) -> Call:
    dead_and_alive(run)
    return lambda to: sorted(to.samples.dead_letters())


@operation
def payloads(run: Run) -> Call:
    run.samples.put(items(*numbered(450)))
    learn(run.samples, 5, 2)
    lease(run.samples, 5)
    return lambda to: list(to.samples.payloads())


@operation
def requeue(run: Run) -> Call:
    dead_and_alive(run)
    return lambda to: to.samples.requeue(["b", "a", "later", "b"])


@operation
def requeue_of_a_prompt(run: Run) -> Call:
    run.prompts.put(items("p", "q"))
    run.samples.close()
    fail(run.prompts, "p")
    return lambda to: to.prompts.requeue(["p"])


@operation
def find(run: Run) -> Call:
    dead_and_alive(run)
    return lambda to: to.samples.find(["later", "d", "c", "b", "nobody"])


@operation
def known(run: Run) -> Call:
    dead_and_alive(run)
    return lambda to: sorted(to.samples.known(["d", "c", "b", "nobody"]))


@operation
def leased(run: Run) -> Call:
    run.in_group("a").put(items("x"))
    token = lease(run.queue("samples", "b")).token
    return lambda to: len(to.queue("samples", "a").leased([token, 1]))


@operation
def agree(run: Run) -> Call:
    return lambda to: to.samples.agree("contract", b"first")


@operation
def agree_on_what_stands(run: Run) -> Call:
    run.prompts.agree("contract", b"first")
    return lambda to: to.samples.agree("contract", b"second")


@operation
def agreed(run: Run) -> Call:
    run.prompts.agree("contract", b"first")
    return lambda to: to.samples.agreed()


@operation
def purge(run: Run) -> Call:
    dead_and_alive(run)
    run.samples.restore(0)
    return lambda to: to.samples.purge()


def dead_and_alive(run: Run) -> None:
    run.samples.put(items("a", "b", "c", "d", stored_bytes=2))
    fail(run.samples, "a", "b")
    finish(run.samples, 1)
