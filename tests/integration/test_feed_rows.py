"""Rows of all forms by the commands: what is fed, what is told, what refuses a file, and what a change changes."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from commands import Shell, conversation, save_tiny_target, write_rows
from tiny_target import tiny_tokenizer, turns

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", "feed.max_length=128")


def samples_of(run: str) -> dict[str, list[int]]:
    """Sample id → its input_ids, shifted, as they lie in the store."""
    found = Path(f"runs/{run}/shards").rglob("*.safetensors")
    shards = [path for path in found if path.name != "target_assets.safetensors"]
    return {path.name.split(".")[0]: load_file(path)["input_ids"][0].tolist() for path in shards}


def shifted(messages: list[dict[str, Any]]) -> list[int]:
    return [*TOKENIZER.apply_chat_template(messages, return_dict=False)[1:], 0]


FORMS: list[dict[str, Any] | str] = [
    {"id": "1", "messages": turns("hi", "ok")},
    {"id": "2", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ok"}]},
    {"id": "3", "messages": ["A"], "conversations": ["B"]},
    {"id": "4", "text": "raw"},
    {"id": "5", "prompt": "x"},
]


def test_both_forms_of_rows_give_the_same_tokens_and_the_others_are_told_with_their_keys(shell: Shell) -> None:
    fed = shell.run("feed", write_rows(Path("forms.jsonl"), FORMS), "--json").document
    assert fed["accepted"] + fed["rejected"] + fed["duplicates"] == 5
    assert [(row["line"], row["id"], row["reason"]) for row in fed["rejections"]] == [
        (3, "3", "both messages and conversations"),
        (4, "4", "no messages or conversations: keys ['id', 'text']"),
        (5, "5", "no messages or conversations: keys ['id', 'prompt']"),
    ]
    assert shell.run("produce", "--json").document["produced"] == 2
    assert samples_of("default") == {"1": shifted(turns("hi", "ok")), "2": shifted(turns("hi", "ok"))}


def test_rows_of_one_id_are_one_sample_a_duplicate_and_a_told_conflict(shell: Shell) -> None:
    rows = [{"id": "x", "messages": turns(*pair)} for pair in (("a", "b"), ("c", "d"), ("a", "b"))]
    fed = shell.run("feed", write_rows(Path("twice.jsonl"), list(rows)), "--json").document
    assert (fed["accepted"], fed["duplicates"], fed["rejected"], fed["queued"]) == (1, 1, 1, 1)
    assert fed["rejections"][0]["reason"] == "id used before with another content: lines 1 and 2"
    shell.run("produce")
    assert samples_of("default") == {"x": shifted(turns("a", "b"))}


ODD_ROLES = {
    "id": "r1",
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "laguna_s", "content": "ok"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "cya"},
    ],
}


def test_an_unknown_role_rejects_the_row_and_an_alias_makes_it_a_known_one(shell: Shell) -> None:
    path = write_rows(Path("roles.jsonl"), [conversation(0), *(ODD_ROLES | {"id": f"r{n}"} for n in range(30))])
    refused = shell.run("feed", path)
    assert refused.code == 3
    assert refused.out.count("30 rejected: unknown role 'laguna_s'") == 1
    fed = shell.run("feed", path, "feed.role_aliases=laguna_s:assistant,narrator:system", "--json").document
    assert (fed["accepted"], fed["rejected"]) == (31, 0)
    shell.run("produce")
    assert samples_of("default")["r7"] == shifted(turns("hi", "ok", "bye", "cya"))


@pytest.mark.parametrize("text", ["laguna_s:oracle", "laguna_s", "{laguna_s: assistant}"])
def test_an_alias_for_no_known_role_is_no_setting(shell: Shell, text: str) -> None:
    ended = shell.run("feed", write_rows(Path("one.jsonl"), [conversation(0)]), f"feed.role_aliases={text}")
    assert ended.code == 2
    assert "feed.role_aliases" in ended.err


def test_aliases_can_be_json_in_a_variable(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLEFEED_FEED__ROLE_ALIASES", '{"laguna_s": "assistant"}')
    assert shell.run("feed", write_rows(Path("roles.jsonl"), [ODD_ROLES]), "--json").document["rejected"] == 0


def test_aliases_stand_in_a_settings_file_too_and_hold_for_the_vocabulary(shell: Shell) -> None:
    Path("run.yaml").write_text("feed: {role_aliases: {laguna_s: assistant}, max_rejected_share: 0}\n")
    path = write_rows(Path("roles.jsonl"), [ODD_ROLES])
    words = ("vocab", path, "-o", "vocab.safetensors", "draft.vocab_size=259", "--json")
    assert shell.run(*words).code == 3
    # "ok" and "cya", and two end markers: o k c y a and the marker are six tokens
    assert shell.run(*words, "--config", "run.yaml").document["distinct"] == 6


def test_a_file_with_too_many_rejected_rows_is_told_in_full_and_nothing_of_it_is_queued(shell: Shell) -> None:
    path = write_rows(Path("bad.jsonl"), [conversation(0), *["{"] * 10])
    ended = shell.run("feed", path, "--json")
    assert ended.code == 3
    assert "too many rows cannot be used, wanted at most 90.00% of 11" in ended.err
    assert (ended.document["accepted"], ended.document["rejected"], len(ended.document["rejections"])) == (1, 10, 10)
    assert ended.document["refused"] in ended.err
    assert not Path("runs/default/queue").exists()
    assert shell.run("feed", path, "feed.max_rejected_share=1", "--json").document["queued"] == 1


def test_a_careful_user_has_no_row_rejected(shell: Shell) -> None:
    path = write_rows(Path("one-bad.jsonl"), [*map(conversation, range(9)), "{"])
    assert shell.run("feed", path, "feed.max_rejected_share=0").code == 3
    vocab = ("vocab", path, "-o", "vocab.safetensors", "draft.vocab_size=259")
    assert shell.run(*vocab, "feed.max_rejected_share=0").code == 3
    assert not Path("vocab.safetensors").exists()
    assert shell.run(*vocab).code == 0
    assert shell.run("feed", path).code == 0


def test_a_line_over_the_limit_is_named_and_the_limit_can_be_set(shell: Shell) -> None:
    rows = [{"id": "long", "messages": turns("hi", "ok " * 400)}, conversation(1)]
    path = write_rows(Path("long.jsonl"), list(rows))
    fed = shell.run("feed", path, "feed.max_line_bytes=1000", "--json").document
    assert fed["rejections"] == [{"line": 1, "id": "", "reason": "line too large: over 1000 bytes"}]
    assert shell.run("feed", path, "run.id=again", "--json").document["rejected"] == 0


def test_what_comes_through_a_pipe_can_be_fed(shell: Shell) -> None:
    os.mkfifo("rows.pipe")
    rows = "".join(json.dumps(conversation(n)) + "\n" for n in range(3))
    writer = threading.Thread(target=Path("rows.pipe").write_text, args=(rows,))
    writer.start()
    assert shell.run("feed", "rows.pipe", "--json").document["queued"] == 3
    writer.join(10)


# validate


def test_the_rows_of_a_file_are_validated_without_a_target(shell: Shell) -> None:
    assert shell.run("validate", write_rows(Path("good.jsonl"), FORMS[:2]), "--json").document == {
        "checked": 2,
        "faults": [],
    }
    bad = shell.run("validate", write_rows(Path("bad.jsonl"), [*FORMS, "{", *FORMS[:1]]), "good.jsonl", "--json")
    assert (bad.code, bad.document["checked"]) == (3, 9)
    assert [fault["name"] for fault in bad.document["faults"]] == [f"bad.jsonl:{line}" for line in (3, 4, 5, 6)]
    Path("none.jsonl").write_text("\n\n")
    Path("array.jsonl").write_text(json.dumps(FORMS))
    for path, told in (("none.jsonl", "no rows in it"), ("array.jsonl", "one JSON array"), ("gone.jsonl", "No such")):
        ended = shell.run("validate", path)
        assert ended.code == 3
        assert told in ended.out


# what a change changes


def prompts_of(shell: Shell, run: str, *words: str) -> dict[str, bytes]:
    from eaglefeed.queue import EmbeddedServer, connect, open_queue

    assert shell.run("feed", "rows.jsonl", f"run.id={run}", *words).code == 0
    with EmbeddedServer(Path(f"runs/{run}/queue")) as server:
        client = connect(server.url)
        found = {item.id: item.payload for item in open_queue(client, run, "prompts").payloads()}
        client.close()
    return found


def test_whatever_changes_is_seen_by_the_next_feed_and_nothing_else(shell: Shell, tmp_path: Path) -> None:
    from eaglefeed.schema.prompt import decode_prompt

    rows = [{"id": "a", "messages": turns("hi", "x" * 90)}, {"id": "b", "messages": turns("hi", "old")}]
    path = write_rows(Path("rows.jsonl"), list(rows))
    short, again = (prompts_of(shell, run, "feed.max_length=64") for run in ("short", "again"))
    assert again == short
    long = prompts_of(shell, "long", "feed.max_length=128")
    assert (len(decode_prompt(short["a"]).rows[0].input_ids), len(decode_prompt(long["a"]).rows[0].input_ids)) == (
        64,
        21 + 90 + 2,
    )
    edited = save_tiny_target(tmp_path / "edited")
    template = edited / "chat_template.jinja"
    template.write_text(template.read_text().replace("m['content']", "' ' + m['content']"))
    spaced = prompts_of(shell, "spaced", "feed.max_length=128", f"target.name={edited}")
    assert decode_prompt(spaced["b"]).rows != decode_prompt(long["b"]).rows
    assert decode_prompt(spaced["b"]).template_fingerprint != decode_prompt(long["b"]).template_fingerprint
    before = path.stat()
    path.write_text(path.read_text().replace("old", "new"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    changed = prompts_of(shell, "changed", "feed.max_length=128")
    assert changed["a"] == long["a"]
    assert decode_prompt(changed["b"]).rows[0].input_ids == tuple(
        TOKENIZER.apply_chat_template(turns("hi", "new"), return_dict=False)
    )
