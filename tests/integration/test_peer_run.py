"""Runs whose samples stay with their producers, as commands: feed, two producers, a trainer; and all the others."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from commands import Shell, conversation, save_tiny_target, write_rows
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.queue import EmbeddedServer, connect, open_queue
from eaglefeed.queue.base import LeaseQueue, QueueItem
from eaglefeed.schema.refs import SampleRef, decode_ref, encode_ref
from peers import TOKEN

NUM_ROWS = 16
PATIENCE_S = 120

pytestmark = pytest.mark.timeout(300)


class House:
    """A folder with a target, conversations, and a queue server; the runs' commands as processes."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        target = save_tiny_target(folder / "target")
        self.rows = write_rows(folder / "rows.jsonl", [conversation(index) for index in range(NUM_ROWS)])
        (folder / "token").write_text(TOKEN)
        server = stack.enter_context(EmbeddedServer(folder / "queue"))
        self.client = connect(server.url)
        stack.callback(self.client.close)
        sizes = ["target.dtype=float32", "feed.max_length=128", "draft.vocab_size=259", "train.checkpoint_every=5"]
        self._common = [f"target.name={target}", f"redis_url={server.url}", *sizes]
        self._common += [f"access.token_file={folder / 'token'}", "produce.lease_batch=1"]

    def words(self, run: str, store: str) -> list[str]:
        return [*self._common, f"run.id={run}", f"store.uri={store}"]

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{words[0]}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "eaglefeed", *words], cwd=self.folder, stdout=log, stderr=log
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def end(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.wait(PATIENCE_S) == 0, "\n".join(log.read_text()[-2000:] for log in self.folder.glob("*.log"))

    def queue(self, run: str, name: str = "samples") -> LeaseQueue:
        return open_queue(self.client, run, name)

    def wait_until_ready(self, run: str, count: int, *producers: "subprocess.Popen[bytes]") -> None:
        end_s = SYSTEM_CLOCK.monotonic() + PATIENCE_S
        while self.queue(run).stats().ready < count:
            assert SYSTEM_CLOCK.monotonic() < end_s
            assert all(process.poll() is None for process in producers), (self.folder / "produce.log").read_text()
            SYSTEM_CLOCK.sleep(0.05)

    def draft(self, run: str) -> bytes:
        (path,) = (self.folder / "runs" / run / "draft").glob("export-*/model.safetensors")
        return path.read_bytes()

    def reordered(self, run: str, order: list[str]) -> list[str]:
        """The samples of `in-files` in another order, as another run has them; returns the words that name it."""
        refs = {item.id: item for item in self.queue("in-files").payloads()}
        samples = self.queue(run)
        samples.put([QueueItem(item_id, refs[item_id].payload) for item_id in order])
        samples.close()
        return self.words(run, (self.folder / "shards").as_uri())


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """With a run `in-files` whose samples are made, and never trained on."""
    with ExitStack() as stack:
        made = House(tmp_path_factory.mktemp("house"), stack)
        words = made.words("in-files", (made.folder / "shards").as_uri())
        made.end(made.start("feed", str(made.rows), *words))
        made.end(made.start("produce", *words))
        yield made


@pytest.mark.parametrize("data_plane", ["http", "gloo"])
def test_a_run_of_two_producers_that_keep_their_samples_trains_what_a_run_in_files_does(
    house: House, data_plane: str
) -> None:
    run = f"over-{data_plane}"
    bound = "store.peer_bytes=500000"  # of 16 samples of nearly 50 kB each, neither can keep all
    words = [*house.words(run, "nccl://127.0.0.1:0"), f"store.data_plane={data_plane}", bound]
    house.end(house.start("feed", str(house.rows), *words))
    producers = [house.start("produce", *words) for _ in range(2)]
    house.wait_until_ready(run, NUM_ROWS, *producers)
    refs = [decode_ref(item.payload) for item in house.queue(run).payloads()]
    assert len({ref.store_uri for ref in refs}) == 2
    straight = house.start("train", *house.reordered(f"straight-{data_plane}", [ref.sample_id for ref in refs]))
    trainer = house.start("train", *words)
    for process in (trainer, straight, *producers):
        house.end(process)
    assert house.draft(run) == house.draft(f"straight-{data_plane}")
    assert (house.queue(run).stats().done, house.queue(run, "prompts").stats().done) == (NUM_ROWS, NUM_ROWS)
    assert house.queue(run).stats().released == 0
    house.end(house.start("train", *words))  # the run's files are there, though its producers have ended


@pytest.fixture
def shell(house: House, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(house.folder)
    return Shell(capsys, *house.words("commands", "nccl://127.0.0.1:0"))


def test_a_queues_refs_are_validated_while_their_producer_lives(house: House, shell: Shell) -> None:
    assert shell.run("feed", house.rows, "--keep-open").code == 0
    producer = house.start("produce", *shell.common)
    house.wait_until_ready("commands", NUM_ROWS, producer)
    ended = shell.run("validate", "--queue", "--values", "--json")
    assert (ended.code, ended.document["checked"], ended.document["faults"]) == (0, NUM_ROWS, [])
    producer.kill()
    producer.wait()
    ended = shell.run("validate", "--queue", "--json")
    assert ended.code == 3
    assert {fault["kind"] for fault in ended.document["faults"]} == {"PeerGone"}


def test_a_trainer_with_another_kind_of_store_than_the_samples_is_told_at_once(house: House, shell: Shell) -> None:
    house.reordered("of-files", [item.id for item in house.queue("in-files").payloads()])
    ended = shell.run("train", "run.id=of-files")
    assert ended.code == 2
    assert f"wanted file://{house.folder}/shards, got nccl://" in ended.err
    kept = replace(_a_ref(house), store_uri="nccl://127.0.0.1:1/0123456789abcdef")
    house.queue("of-peers").put([QueueItem(kept.sample_id, encode_ref(kept))])
    ended = shell.run("train", "run.id=of-peers", f"store.uri={house.folder}/none")
    assert ended.code == 2
    assert "lie in another kind of store, wanted nccl://…" in ended.err
    assert "pass --store nccl://" in ended.err


def test_a_trainer_of_samples_whose_producers_are_gone_asks_for_a_producer_once(house: House, shell: Shell) -> None:
    kept = replace(_a_ref(house), store_uri="nccl://127.0.0.1:1/0123456789abcdef")
    house.queue("left").put([QueueItem(kept.sample_id, encode_ref(kept))])
    ended = shell.run("train", "run.id=left", "train.start_timeout_s=7")
    assert ended.code == 4
    (line,) = [line for line in ended.err.splitlines() if "samples_without_producers" in line]
    assert json.loads(line)["count"] == 1
    assert "eaglefeed produce" in line


def _a_ref(house: House) -> SampleRef:
    return decode_ref(next(iter(house.queue("in-files").payloads())).payload)


@pytest.mark.parametrize("command", ["gc", "rebuild", "inspect"])
def test_commands_that_need_shards_say_that_there_are_none(shell: Shell, command: str) -> None:
    ended = shell.run("store", command)
    assert ended.code == 2
    assert "its samples are in their producers' memory" in ended.err


def test_a_producer_without_an_address_of_its_own_is_told_how_to_give_one(shell: Shell) -> None:
    ended = shell.run("produce", "store.uri=nccl://")
    assert ended.code == 2
    assert "nccl://HOST:PORT" in ended.err


def test_a_bound_too_small_for_one_sample_is_refused_before_anything_is_queued(house: House, shell: Shell) -> None:
    ended = shell.run("feed", house.rows, "store.peer_bytes=1000", "run.id=small")
    assert ended.code == 2
    assert "store.peer_bytes" in ended.err
    assert house.queue("small", "prompts").stats().unsettled == 0


def test_a_producer_beyond_this_machine_needs_a_token(house: House, shell: Shell) -> None:
    words = [word for word in shell.common if not word.startswith("access.token_file")]
    shell.common = tuple(words)
    ended = shell.run("produce", "store.uri=nccl://0.0.0.0:0")
    assert ended.code == 2
    assert "access.token_file" in ended.err
