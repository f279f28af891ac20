"""What a run's journal promises, on fakeredis and real servers alike."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import fakeredis
import msgpack
import pytest

from eaglefeed.errors import ConfigError, QueueError
from eaglefeed.queue import journal as module
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.journal import JournalView, RunJournal, WorkerView
from queue_servers import OffsetClock, VirtualTimeClient

LETTER = "eaglefeed:{%s}:journal:%s"
_names = iter(range(10**6))


class Desk(NamedTuple):
    """A journal in a run of the test's own, and the connection that it uses."""

    journal: RunJournal
    client: QueueClient

    def key(self, name: str) -> str:
        return LETTER % (self.journal.run, name)


@pytest.fixture(params=["fakeredis", "valkey", "redis"])
def desk(request: pytest.FixtureRequest) -> Desk:
    clients = request.getfixturevalue("clients") if request.param != "fakeredis" else {}
    if request.param == "fakeredis":
        client: QueueClient = VirtualTimeClient(fakeredis.FakeRedis().connection_pool, OffsetClock())
    elif request.param in clients:
        client = clients[request.param]
    else:
        pytest.skip(f"no {request.param}-server is installed")
    return Desk(RunJournal(client, f"journal{next(_names)}"), client)


class Turned(NamedTuple):
    journal: RunJournal
    pass_time: Callable[[float], None]


@pytest.fixture
def turned() -> Turned:
    """A journal whose server's clock the test turns; at first a stretch of 10 s has just begun."""
    clock = OffsetClock()
    clock.advance(10 - clock.time() % 10 + 1)
    client = VirtualTimeClient(fakeredis.FakeRedis().connection_pool, clock)
    return Turned(RunJournal(client, "run"), clock.advance)


def refuse() -> dict[str, float]:
    raise AssertionError("nobody should make this point")


def test_a_journal_that_nobody_wrote_is_empty(desk: Desk) -> None:
    assert desk.journal.read() == JournalView()


def test_a_workers_newest_snapshot_takes_the_place_of_the_one_before(desk: Desk) -> None:
    desk.journal.post("producer", "host-1-ab", {"produced": 1, "state": "working"})
    desk.journal.post("trainer", "host-2-cd", {"loss": 1.5, "versions": {"torch": "2.13"}, "accuracies": [0.5, 0.25]})
    desk.journal.post("producer", "host-1-ab", {"produced": 3})
    producer, trainer = desk.journal.read().workers
    assert (producer.role, producer.name, producer.values) == ("producer", "host-1-ab", {"produced": 3})
    assert (trainer.role, trainer.name) == ("trainer", "host-2-cd")
    assert trainer.values == {"loss": 1.5, "versions": {"torch": "2.13"}, "accuracies": [0.5, 0.25]}
    now_s = int(desk.client.call("TIME")[0])
    assert now_s - 60 < producer.at_s <= now_s + 1


def test_of_too_many_workers_the_longest_silent_ones_go_and_are_counted(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WORKERS", 3)
    for name in ("a", "b", "c"):
        desk.journal.post("producer", name, {})
        desk.client.clock.sleep(0.002)  # silent for a millisecond longer than the next
    desk.journal.post("producer", "a", {})
    desk.client.clock.sleep(0.002)
    desk.journal.post("producer", "d", {})
    view = desk.journal.read()
    assert [worker.name for worker in view.workers] == ["a", "c", "d"]
    assert view.totals == {"forgotten_workers": 1}


def test_a_stretch_of_time_has_one_point_whoever_asks(turned: Turned) -> None:
    assert turned.journal.sample(lambda: {"samples.main.ready": 1})
    assert not turned.journal.sample(refuse)
    turned.pass_time(8)
    assert not turned.journal.sample(refuse)
    turned.pass_time(2)
    assert turned.journal.sample(lambda: {"samples.main.ready": 2})
    first, second = turned.journal.read().series
    assert (first["samples.main.ready"], second["samples.main.ready"]) == (1, 2)
    assert second["at_s"] - first["at_s"] == pytest.approx(10, abs=0.5)


def test_two_clients_that_ask_at_once_make_one_point(desk: Desk) -> None:
    others = [RunJournal(desk.client, desk.journal.run) for _ in range(3)]
    made = [journal.sample(lambda: {"x": 1.0}) for journal in others]
    assert len(desk.journal.read().series) == sum(made)
    assert sum(made) <= 2  # two where a stretch of 10 s ended meanwhile


def test_a_point_that_cannot_be_made_leaves_a_gap_and_no_point(turned: Turned) -> None:
    with pytest.raises(AssertionError):
        turned.journal.sample(refuse)
    assert not turned.journal.sample(refuse)
    assert turned.journal.read().series == ()


def test_of_too_many_points_every_second_one_goes_and_new_ones_come_half_as_often(
    turned: Turned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_POINTS", 8)
    for number in range(9):
        assert turned.journal.sample(lambda number=number: {"x": number})
        turned.pass_time(10)
    view = turned.journal.read()
    assert ([point["x"] for point in view.series], view.bucket_s) == ([0, 2, 4, 6, 8], 20)
    made = 0
    for _ in range(6):
        made += turned.journal.sample(lambda: {"x": -1})
        turned.pass_time(10)
    assert made == 3
    assert len(turned.journal.read(last_points=4).series) == 4


def test_however_long_a_run_lasts_its_points_stay_bounded(turned: Turned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_POINTS", 16)
    lengths = []
    for _ in range(300):
        turned.journal.sample(lambda: {"x": 1})
        turned.pass_time(10)
        lengths.append(len(turned.journal.read().series))
    # 17 points cover 16 stretches; each halving doubles the stretch, and 16 * 160 s < 3,000 s < 16 * 320 s
    assert (max(lengths), turned.journal.read().bucket_s) == (16, 320)


def test_the_newest_fact_of_a_name_stands(desk: Desk) -> None:
    desk.journal.note("evaluation", {"acceptance_length": 1.5})
    desk.journal.note("evaluation", {"acceptance_length": 2.5})
    fact = desk.journal.read().facts["evaluation"]
    assert fact.pop("at_s") > 1e9
    assert fact == {"acceptance_length": 2.5}


def test_facts_of_a_kind_are_numbered_bounded_and_summed_up_beyond_the_bound(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    numbers = [desk.journal.append("feed", {"path": f"f{n}"}, {"accepted": n, "rejected": 1}) for n in (5, 6, 7)]
    view = desk.journal.read()
    assert numbers == [1, 2, 3]
    assert {name: fact["path"] for name, fact in view.facts.items()} == {"feed:1": "f5", "feed:2": "f6"}
    assert view.totals == {"feed.count": 3, "feed.accepted": 18, "feed.rejected": 3}


def test_an_append_whose_reply_was_lost_counts_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = QueueClient._attempt
    lost: list[Any] = []

    def lose_the_first_reply(client: QueueClient, packed: bytes) -> Any:
        reply = attempt(client, packed)
        if b"feed" in packed and not lost:
            lost.append(reply)
            raise ConnectionResetError("the reply is lost")
        return reply

    desk.journal.append("export", {})  # the server knows the script
    monkeypatch.setattr(QueueClient, "_attempt", lose_the_first_reply)
    assert desk.journal.append("feed", {}, {"accepted": 4}) == 1
    assert lost
    assert desk.journal.read().totals == {"export.count": 1, "feed.count": 1, "feed.accepted": 4}


def test_what_is_too_large_is_refused_and_nothing_of_it_kept(desk: Desk) -> None:
    text = "x" * module.MAX_VALUE_BYTES
    for write in (
        lambda: desk.journal.post("producer", "w", {"text": text}),
        lambda: desk.journal.note("evaluation", {"text": text}),
        lambda: desk.journal.append("feed", {"text": text}, {"accepted": 1}),
    ):
        with pytest.raises(QueueError, match="too large"):
            write()
    assert desk.journal.read() == JournalView()


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"no time\n" + msgpack.packb({"a": 1}),
        b"12\n",
        b"12\n" + msgpack.packb([1, 2]),
        b"12\n" + msgpack.packb({"a": b"bytes"}),
        b"12\n" + msgpack.packb({"a": {1: 2}}),
        b"12\n" + msgpack.packb({"a": msgpack.ExtType(3, b"x")}),
        b"12\n" + msgpack.packb({"a": msgpack.Timestamp(3)}),
        b"12\n" + b"\x91" * 5000,
        b"9" * 5000 + b"\n" + msgpack.packb({"a": 1}),
        b"253402300800000\n" + msgpack.packb({"a": 1}),  # the year 10000
        b"-1\n" + msgpack.packb({"a": 1}),
    ],
)
def test_what_somebody_else_put_there_is_left_out_and_counted(desk: Desk, stored: bytes) -> None:
    desk.journal.post("producer", "good", {"produced": 1})
    desk.client.call("HSET", desk.key("workers"), "producer bad", stored)
    desk.client.call("HSET", desk.key("facts"), b"\xff", stored)
    desk.client.call("ZADD", desk.key("series"), 12, stored)
    view = desk.journal.read()
    assert [worker.name for worker in view.workers] == ["good"]
    assert (view.facts, view.series, view.unreadable) == ({}, (), 3)


@pytest.mark.parametrize("stored", ["", "many", "1.5", "-3", "9" * 400])
def test_a_count_that_somebody_else_put_there_is_left_out_and_counted(desk: Desk, stored: str) -> None:
    desk.journal.append("feed", {}, {"rejected": 2})
    desk.client.call("HSET", desk.key("totals"), "feed.accepted", stored)
    desk.client.call("HSET", desk.key("pace"), "bucket_ms", stored)
    view = desk.journal.read()
    assert (view.totals, view.bucket_s, view.unreadable) == ({"feed.count": 1, "feed.rejected": 2}, 10.0, 1)


def test_of_a_point_only_finite_numbers_are_read_and_one_with_texts_is_left_out(desk: Desk) -> None:
    desk.client.call("ZADD", desk.key("series"), 12, b"12\n" + msgpack.packb({"x": "text"}))
    desk.client.call("ZADD", desk.key("series"), 13, b"13\n" + msgpack.packb({"x": math.inf, "y": math.nan, "z": 1}))
    view = desk.journal.read()
    assert (view.series, view.unreadable) == (({"z": 1, "at_s": 0.013},), 1)


def test_delete_leaves_nothing(desk: Desk) -> None:
    desk.journal.post("producer", "w", {})
    desk.journal.sample(lambda: {"x": 1})
    desk.journal.note("evaluation", {})
    desk.journal.append("feed", {})
    desk.journal.delete()
    assert desk.journal.read() == JournalView()
    _, keys = desk.client.call("SCAN", "0", "MATCH", f"eaglefeed:{{{desk.journal.run}}}:journal:*", "COUNT", 100_000)
    assert keys == []


def test_a_name_that_would_break_the_key_is_refused(desk: Desk) -> None:
    with pytest.raises(ConfigError):
        RunJournal(desk.client, "r}un")


def test_worker_names_with_spaces_keep_them(desk: Desk) -> None:
    desk.journal.post("producer", "a b", {})
    assert desk.journal.read().workers[0] == WorkerView("producer", "a b", desk.journal.read().workers[0].at_s, {})
