"""Every service of docker-compose.yml that is ours, and its Redis, run as processes of this machine."""

import json
import os
import shutil
import signal
import stat
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest
import yaml

from compose_local import LocalRun, Running
from eaglefeed.queue import connect, open_queue
from eaglefeed.queue.base import Lease, QueueItem
from tiny_target import tiny_model, tiny_tokenizer, turns

NUM_CONVERSATIONS = 12
GROUPS = ("main", "second")


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalRun]:
    if not shutil.which("redis-server") or not shutil.which("redis-cli"):
        pytest.skip("redis-server and redis-cli are not on PATH")
    settings, conversations = tmp_path / "settings.yaml", tmp_path / "conversations.jsonl"
    settings.write_text(yaml.safe_dump(settings_of(tmp_path / "target")), encoding="utf-8")
    rows = [{"id": f"c{index}", "messages": turns(f"say {index}", "yes " * 4)} for index in range(NUM_CONVERSATIONS)]
    conversations.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    variables = {"SETTINGS": str(settings), "CONVERSATIONS": str(conversations), "RUN_ID": "compose-test"}
    run = LocalRun(tmp_path / "root", variables)
    try:
        yield run
    finally:
        run.stop()


def settings_of(target: Path) -> dict[str, object]:
    return {
        "target": {"name": str(target), "num_threads": 1},
        "produce": {"supervision": "last_hidden_states", "lease_batch": 1},
        "queue": {"groups": [*GROUPS]},
        "train": {"num_threads": 1, "checkpoint_every": 4},
        "draft": {"ttt_steps": 1},
    }


def save_target(local: LocalRun) -> None:
    folder = local.folder.parent / "target"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def start_redis(local: LocalRun) -> None:
    local.wait_until_healthy("redis", local.start("redis"))


def start_trainers(local: LocalRun) -> list[Running]:
    """A trainer of the first group as the file has it, and one of another."""
    command = local.services["consumers"]["command"]
    other = ["train.group=second", "train.output=/runs/compose-test/draft-second"]
    return [local.start("consumers"), local.start("consumers", [*command, *other])]


def scraped(worker: Running, token: str) -> str:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    asked = urllib.request.Request(f"http://127.0.0.1:{worker.port}/metrics", headers=headers)
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return str(answer.read().decode())


def assert_nothing_shows_a_secret(run: LocalRun) -> None:
    assert run.leaks == []
    written = [
        path for folder in ("runs", "home", "tmp") for path in (run.folder / folder).rglob("*") if path.is_file()
    ]
    told = [run.given(), run.outputs(), *(path.read_bytes().decode("latin-1") for path in written)]
    assert not [secret for secret in run.secrets.values() for text in told if secret in text]


def assert_volumes_alone_were_written(run: LocalRun) -> None:
    """The root file system is read-only, and /tmp is memory: no file may stay there."""
    assert [path for folder in ("home", "tmp") for path in (run.folder / folder).rglob("*") if path.is_file()] == []
    for path in (each for volume in ("shards", "runs") for each in (run.folder / volume).rglob("*")):
        wanted = 0o770 if path.is_dir() else 0o660
        assert stat.S_IMODE(path.stat().st_mode) & wanted == wanted, f"{path}: the group cannot share it"


@pytest.mark.slow
@pytest.mark.timeout(300)  # eight processes that load torch, on any machine
def test_producers_and_trainers_of_two_groups_carry_a_run_to_its_end(local: LocalRun) -> None:
    save_target(local)
    assert local.check("redis") != 0, "nobody listens yet"
    start_redis(local)
    trainers = start_trainers(local)
    assert local.run("feed") == 0, local.outputs()
    local.wait_until_healthy("consumers", trainers[0])
    with pytest.raises(HTTPError, match="401"):
        scraped(trainers[0], "")
    assert "eaglefeed_" in scraped(trainers[0], local.secrets["access_token"])

    again = local.start("feed")  # as `up producers` does once more
    producers = [local.start("producers") for _ in range(4)]
    for worker in (again, *producers, *trainers):
        assert local.finish(worker) == 0, worker.output()

    assert local.run("consumers", ["queue", "stats", "--json"]) == 0, local.last_output()
    stats = json.loads(local.last_output().splitlines()[-1])
    for counts in (stats["prompts"], *(stats["groups"][group] for group in GROUPS)):
        assert counts["done"] == NUM_CONVERSATIONS
        assert counts["dead"] == counts["ready"] == counts["leased"] == 0

    runs = local.folder / "runs" / "compose-test"
    assert all(list(runs.glob(f"{draft}/export-*/model.safetensors")) for draft in ("draft", "draft-second"))
    assert (runs / "report.html").is_file()
    report = json.loads((runs / "report.json").read_text(encoding="utf-8"))
    assert (report["run"], report["fed"]["queued"]) == ("compose-test", NUM_CONVERSATIONS)
    assert list((local.folder / "data").rglob("*.aof")), "the append-only file lies outside the volume"
    assert "redis-server -\n" in local.given(), "the configuration comes by stdin"
    assert_volumes_alone_were_written(local)
    assert_nothing_shows_a_secret(local)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_remote_trainer_asks_the_target_server_for_all_that_it_trains_on(local: LocalRun) -> None:
    save_target(local)
    server = local.start("target-server", EAGLEFEED_SERVE__NCCL_PORT="0")
    local.wait_until_healthy("target-server", server)
    assert local.run("consumers-remote") == 0, local.last_output()
    assert list((local.folder / "runs").glob("compose-test/draft-remote/export-*/model.safetensors"))
    server.process.send_signal(signal.SIGTERM)
    assert local.finish(server) == 0, server.output()
    assert f"trained {NUM_CONVERSATIONS} steps" in local.last_output()
    assert_volumes_alone_were_written(local)
    assert_nothing_shows_a_secret(local)


def test_a_wrong_password_is_one_line_and_exit_code_2(local: LocalRun) -> None:
    start_redis(local)
    wrong = local.folder / "wrong"
    wrong.write_text("not-the-password\n", encoding="ascii")
    assert local.run("producers", ["queue", "stats"], EAGLEFEED_QUEUE__PASSWORD_FILE=str(wrong)) == 2
    (line,) = local.last_output().splitlines()
    assert line.startswith("eaglefeed: ")
    assert "not-the-password" not in line
    assert_nothing_shows_a_secret(local)


def test_a_killed_redis_comes_back_with_all_that_was_put_leased_and_done(local: LocalRun) -> None:
    start_redis(local)
    url = f"redis://eaglefeed@127.0.0.1:{local.port}/0"
    client = connect(url, password_file=local.secret())
    queue = open_queue(client, "compose-test", "prompts")
    queue.put([QueueItem(f"p{index}", b"prompt") for index in range(100)])
    held = queue.lease(10, visibility_timeout_s=600, consumer="c")
    assert isinstance(held, Lease)
    queue.ack(held.token, [item.id for item in held.items[:4]])
    time.sleep(1.1)  # what everysec may lose
    os.kill(local.started[0].process.pid, signal.SIGKILL)
    local.started[0].process.wait()
    start_redis(local)
    stats = queue.stats()
    assert (stats.ready, stats.leased, stats.done) == (90, 6, 4)
    assert queue.put([QueueItem(f"p{index}", b"prompt") for index in range(100)])[:2] == (0, 100)
    assert len(queue.ack(held.token, [item.id for item in held.items[4:]]).ok) == 6
    client.close()
    assert list(Path(local.paths["/data"]).glob("appendonlydir/*.aof")), "the volume holds the file"


def test_who_is_not_the_queues_user_may_nothing(local: LocalRun) -> None:
    start_redis(local)
    local.run("redis", ["/bin/sh", "-c", "redis-cli -p 6379 PING"])
    assert "NOAUTH" in local.last_output()
    told = local.run("consumers", ["queue", "stats"], EAGLEFEED_REDIS_URL=f"redis://127.0.0.1:{local.port}/0")
    assert told == 2, "the password alone is not the user's"
    local.secret().write_text("not-the-password\n", encoding="ascii")
    assert local.check("redis") != 0
    assert_nothing_shows_a_secret(local)


def test_a_server_that_still_loads_is_not_healthy(local: LocalRun) -> None:
    loading = local.folder / "loading"
    loading.mkdir()
    client = loading / "redis-cli"
    answer = "#!/bin/sh\ncat >/dev/null\nprintf 'OK\\n# Persistence\\r\\nloading:%s\\r\\n'\n"
    client.write_text(answer.replace("%s", "1"))
    client.chmod(0o755)
    path = f"{loading}:/usr/bin:/bin"
    assert local.check("redis", PATH=path) != 0
    client.write_text(answer.replace("%s", "0"))
    assert local.check("redis", PATH=path) == 0, "this test's client is not asked"


def test_a_worker_that_does_not_answer_is_not_healthy(local: LocalRun) -> None:
    assert local.check("producers") != 0
    assert local.check("target-server") != 0


@pytest.mark.parametrize(
    "content", ["", "two words\n", "two\nlines\n", "quo'te\n"], ids=["empty", "blank", "lines", "quote"]
)
def test_a_password_that_breaks_the_configuration_is_refused_without_showing_it(local: LocalRun, content: str) -> None:
    local.secret().write_text(content, encoding="ascii")
    assert local.run("redis") == 1
    (line,) = local.last_output().splitlines()
    assert line.startswith("redis_password: ")
    assert not content or content.split("\n")[0] not in line
