"""`eaglefeed queue`, as an operator uses it, on a run's local server."""

import io
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import samples as sample_refs
from commands import Shell, run_server
from eaglefeed.cli.letters import given_words
from eaglefeed.queue import open_queue
from eaglefeed.queue.base import Lease, LeaseQueue, QueueItem
from eaglefeed.queue.connection import QueueClient
from eaglefeed.schema.prompt import Prompt, PromptRow, encode_prompt
from eaglefeed.schema.refs import SampleRef, encode_ref

SECRET_BYTES = b"\x00not a ref\x1b[2J"


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(capsys)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[QueueClient]:
    """The run's server, kept running between commands."""
    with run_server(tmp_path / "runs" / "default") as opened:
        yield opened


@pytest.fixture
def prompts(client: QueueClient) -> LeaseQueue:
    queue = open_queue(client, "default", "prompts")
    queue.put([QueueItem(f"c-{k}", encode_prompt(prompt(f"c-{k}"))) for k in range(3)])
    return queue


@pytest.fixture
def samples(client: QueueClient) -> LeaseQueue:
    queue = open_queue(client, "default", "samples")
    payloads = [encode_ref(dead_ref()), SECRET_BYTES, b"\x81\xa1v\x07"]
    queue.put([QueueItem(f"c-{k}", payload, 2**20) for k, payload in enumerate(payloads)])
    return queue


def prompt(sample_id: str) -> Prompt:
    rows = (PromptRow((5, 6, 7, 8), (0, 1, 1, 0)), PromptRow((5, 6), (0, 1)))
    return Prompt(
        sample_id=sample_id, rows=rows, tokenizer_fingerprint="tok", template_fingerprint="tem", max_length=64
    )


def dead_ref() -> SampleRef:
    return sample_refs.ref(sample_refs.tensors(supervision="logits"), sample_id="c-0")


def bury(queue: LeaseQueue, *reasons: str) -> None:
    """Make the first items dead letters, one for each reason."""
    for reason in reasons:
        got = queue.lease(1, visibility_timeout_s=60, consumer="test")
        assert isinstance(got, Lease)
        queue.nack(got.token, [got.items[0].id], reason=reason, retryable=False)


def answer(monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    terminal = io.StringIO(typed)
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)


# stats


def test_stats_tell_what_is_there_and_nothing_that_is_not(
    shell: Shell, prompts: LeaseQueue, samples: LeaseQueue
) -> None:
    bury(samples, "bad")
    samples.beat("trainer", "a")
    samples.close()
    lines = shell.run("queue", "stats").out.splitlines()
    assert lines == [
        "prompts: open; ready 3, leased 0, done 0, dead 0; alive: 1 trainer",
        "samples: closed; ready 2, leased 0, done 0, dead 1; 2.0 MiB stored; alive: 1 trainer",
    ]


def test_stats_show_every_group_of_trainers(shell: Shell, client: QueueClient, prompts: LeaseQueue) -> None:
    own = open_queue(client, "default", "samples", "own")
    own.configure(own.limits(), groups=["own", "other"])
    own.put([QueueItem("c-0", b"ref", 8)])
    got = own.lease(1, visibility_timeout_s=60, consumer="test", session=own.restore(4))
    assert isinstance(got, Lease)
    own.ack(got.token, ["c-0"], step=5, session=own.stats().session)
    _, line_of_other, line_of_own = shell.run("queue", "stats").out.splitlines()
    assert line_of_other == "samples/other: open; ready 1, leased 0, done 0, dead 0; 8 B stored; alive: nobody"
    assert line_of_own.startswith("samples/own: open; ready 0, leased 0, tentative 1, done 0, dead 0; ")
    assert line_of_own.endswith("; 8 B stored; committed step 4; alive: nobody")
    document = shell.run("queue", "stats", "--json").document
    assert {name: (each["ready"], each["tentative"]) for name, each in document["groups"].items()} == {
        "other": (1, 0),
        "own": (0, 1),
    }
    assert document["groups"]["own"]["session"] == own.stats().session > 0
    assert document["prompts"]["ready"] == 3
    only = shell.run("queue", "stats", "--group", "own", "--json").document
    assert only["samples"] == only["groups"]["own"] == document["groups"]["own"]
    unknown = shell.run("queue", "stats", "--group", "nobody")
    assert unknown.code == 2
    assert "nobody" in unknown.err
    assert "own" in unknown.err


# dead letters


def test_dead_letters_are_listed_each_on_one_line(shell: Shell, samples: LeaseQueue) -> None:
    bury(samples, "broken\nin \x1b[31mtwo lines", "other")
    lines = shell.run("queue", "dead", "ls").out.splitlines()
    assert lines[0] == "c-0: broken\\nin \\x1b[31mtwo lines (delivery 1)"
    assert lines[2:] == ["samples: 2 dead letters"]
    document = shell.run("queue", "dead", "ls", "--json").document
    assert [letter["id"] for letter in document["dead"]] == ["c-0", "c-1"]
    assert document["group"] == "main"


def test_a_dead_sample_is_shown_with_the_fields_of_its_ref(shell: Shell, samples: LeaseQueue) -> None:
    bury(samples, "checksum differs")
    shown = shell.run("queue", "dead", "show", "c-0").out
    assert "reason: checksum differs" in shown
    assert '  sample_id: "c-0"' in shown.splitlines()
    document = shell.run("queue", "dead", "show", "c-0", "--json").document
    ref = dead_ref()
    assert document["payload"]["store_uri"] == ref.store_uri
    assert document["payload"]["feature_specs"]["logits"]["shape"] == list(ref.feature_specs["logits"].shape)
    assert (document["id"], document["reason"], document["delivery_count"]) == ("c-0", "checksum differs", 1)


def test_a_dead_prompt_is_shown_with_the_sizes_of_its_rows(shell: Shell, prompts: LeaseQueue) -> None:
    bury(prompts, "too long")
    document = shell.run("queue", "dead", "show", "c-0", "--queue", "prompts", "--json").document
    assert document["payload"]["rows"] == [
        {"num_tokens": 4, "num_supervised": 2},
        {"num_tokens": 2, "num_supervised": 1},
    ]
    assert (document["payload"]["num_tokens"], document["payload"]["max_length"]) == (6, 64)


@pytest.mark.parametrize(("item_id", "payload"), [("c-1", SECRET_BYTES), ("c-2", b"\x81\xa1v\x07")])
def test_a_payload_that_cannot_be_read_is_shown_as_such(
    shell: Shell, samples: LeaseQueue, item_id: str, payload: bytes
) -> None:
    bury(samples, "a", "b", "c")
    ended = shell.run("queue", "dead", "show", item_id)
    assert (ended.code, ended.err) == (0, "")
    assert "unreadable" in ended.out
    assert "\x1b" not in ended.out
    document = shell.run("queue", "dead", "show", item_id, "--json").document["payload"]
    assert (document["num_bytes"], document["begins_with"]) == (len(payload), payload.hex())


def test_the_command_that_is_shown_makes_the_letter_ready_again(shell: Shell, client: QueueClient) -> None:
    own = open_queue(client, "default", "samples", "own")
    own.configure(own.limits(), groups=["own"])
    own.put([QueueItem("-it's odd", b"x")])
    bury(own, "bad")
    shown = shell.run("queue", "dead", "show", "--group", "own", "--json", "--", "-it's odd").document
    words = shlex.split(shown["requeue"])
    assert words[0] == "eaglefeed"
    assert shell.run(*words[1:]).code == 0
    assert (own.stats().ready, own.stats().dead) == (1, 0)


def test_the_command_that_is_shown_finds_the_run_where_the_user_found_it(
    shell: Shell, client: QueueClient, samples: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(samples, "bad")
    (tmp_path / "own settings.yaml").write_text("queue: {max_depth: 5}\n")
    away = tmp_path / "away"
    away.mkdir()
    monkeypatch.chdir(away)
    where = ("--config", "../own settings.yaml", f"run.dir={tmp_path / 'runs'}")
    words = shlex.split(shell.run("queue", "dead", "show", "c-0", "--json", *where).document["requeue"])
    assert (words[0], [each for each in where if each not in words]) == ("eaglefeed", [])
    ended = shell.run(*words[1:])
    assert (ended.code, samples.stats().ready) == (0, 3), ended.err
    bury(samples, "bad")
    for given in (("--redis", client.address), (f"redis_url={client.address}",)):
        words = shlex.split(shell.run("queue", "dead", "show", "c-1", "--json", *given).document["requeue"])
        assert [each for each in given if each not in words] == []


def test_the_command_that_is_shown_holds_no_password() -> None:
    words = given_words(
        "redis://me:hunter2@there:6379/1", None, ["redis_url=rediss://:hunter2@there:6380", "run.dir=r"]
    )
    assert words == ["--redis", "redis://there:6379/1", "redis_url=rediss://there:6380", "run.dir=r"]


def test_requeue_makes_all_of_them_ready_or_those_that_are_named(shell: Shell, samples: LeaseQueue) -> None:
    bury(samples, "a", "b", "c")
    assert shell.run("queue", "dead", "requeue", "c-1").out == "samples: 1 ready again\n"
    assert samples.stats().dead == 2
    assert shell.run("queue", "dead", "requeue", "--json").document["requeued"] == 2
    assert (samples.stats().ready, samples.stats().dead) == (3, 0)
    assert shell.run("queue", "dead", "requeue").out == "samples: 0 ready again\n"


def test_ids_that_are_no_dead_letters_are_named_and_the_others_requeued(shell: Shell, samples: LeaseQueue) -> None:
    bury(samples, "a")
    ended = shell.run("queue", "dead", "requeue", "c-0", "c-2", "nowhere", "--json")
    assert ended.code == 2
    assert (ended.document["requeued"], ended.document["unknown"]) == (1, ["c-2", "nowhere"])
    assert "c-2, nowhere: no such dead letter in samples" in ended.err
    missing = shell.run("queue", "dead", "show", "nowhere")
    assert (missing.code, missing.out) == (2, "")
    assert "nowhere: no such dead letter in samples" in missing.err


def test_a_queue_that_a_run_cannot_have_is_named(shell: Shell, samples: LeaseQueue) -> None:
    for words in (["dead", "ls"], ["purge", "--yes"]):
        ended = shell.run("queue", *words, "--queue", "sample")
        assert ended.code == 2
        assert "sample: no such queue, wanted prompts or samples" in ended.err
    assert samples.stats().ready == 3


# purge


def test_purge_without_a_terminal_and_without_yes_deletes_nothing(shell: Shell, samples: LeaseQueue) -> None:
    ended = shell.run("queue", "purge", "--force")
    assert ended.code == 2
    assert "--yes" in ended.err
    assert samples.stats().ready == 3


@pytest.mark.parametrize("typed", ["n\n", "\n", "what\ny\n", ""], ids=["no", "nothing", "else", "the end of input"])
def test_purge_deletes_nothing_unless_told_yes(
    shell: Shell, samples: LeaseQueue, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    answer(monkeypatch, typed)
    ended = shell.run("queue", "purge")
    assert ended.code == 1
    assert ended.out == "nothing was deleted\n"
    assert samples.stats().ready == 3


def test_purge_says_what_goes_asks_and_deletes_both_queues(
    shell: Shell, prompts: LeaseQueue, samples: LeaseQueue, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bury(samples, "bad")
    answer(monkeypatch, "y\n")
    ended = shell.run("queue", "purge", "--json")
    assert ended.code == 0
    assert ended.document == {"run": "default", "purged": {"prompts": 3, "samples": 3}}
    told = ended.err.splitlines()
    assert told[0].startswith("run default at unix://")
    assert told[1:4] == [
        "prompts: open; ready 3, leased 0, done 0, dead 0; alive: nobody",
        "samples: open; ready 2, leased 0, done 0, dead 1; 2.0 MiB stored; alive: nobody",
        f"shards stay, and no janitor deletes them: file://{tmp_path}/runs/default/shards",
    ]
    assert told[4].startswith("Delete it for good? [y/N]")
    for queue in (prompts, samples):
        assert (queue.stats().unsettled, queue.stats().done, queue.stats().dead) == (0, 0, 0)


def test_purge_of_one_queue_leaves_the_other(shell: Shell, prompts: LeaseQueue, samples: LeaseQueue) -> None:
    assert shell.run("queue", "purge", "--queue", "prompts", "--yes").out == "prompts: deleted, 3 were not done\n"
    assert (prompts.stats().ready, samples.stats().ready) == (0, 3)
    assert "`eaglefeed store rebuild`" in shell.run("queue", "purge", "--queue", "samples", "--yes").out


def test_purge_waits_for_nobody_while_workers_live(shell: Shell, prompts: LeaseQueue, samples: LeaseQueue) -> None:
    prompts.beat("producer", "a")
    prompts.beat("producer", "b")
    prompts.beat("trainer", "c")
    ended = shell.run("queue", "purge", "--yes")
    assert ended.code == 2
    assert "2 producers, 1 trainer" in ended.err
    assert (prompts.stats().ready, samples.stats().ready) == (3, 3)
    assert shell.run("queue", "purge", "--yes", "--force").code == 0
    assert (prompts.stats().ready, samples.stats().ready) == (0, 0)


def test_purge_takes_every_group(shell: Shell, client: QueueClient) -> None:
    groups = [open_queue(client, "default", "samples", name) for name in ("a", "b")]
    groups[0].configure(groups[0].limits(), groups=["a", "b"])
    groups[0].put([QueueItem("x", b"x")])
    bury(groups[1], "bad")
    ended = shell.run("queue", "purge", "--yes")
    assert ended.code == 0, ended.err
    assert "samples/a: open; ready 1," in ended.err
    assert "samples/b: open; ready 0, leased 0, done 0, dead 1" in ended.err
    assert [(queue.stats().ready, queue.stats().dead) for queue in groups] == [(0, 0), (0, 0)]


# what they cost


def test_queue_commands_need_no_torch(tmp_path: Path, samples: LeaseQueue) -> None:
    bury(samples, "bad")
    for words in (["dead", "show", "c-0"], ["purge", "--yes"]):
        code = f"""
import sys
from eaglefeed.cli import main
try:
    main({["queue", *words]})
except SystemExit as ended:
    sys.exit(100 * ("torch" in sys.modules) or int(ended.code or 0))
"""
        ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr.decode()
