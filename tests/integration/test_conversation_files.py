"""Conversation files as people bring them: every row is used, counted as a duplicate, or rejected with its line."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from eaglefeed.errors import ConfigError, InputError
from eaglefeed.producer.conversations import Conversation, batches, read_conversations, to_prompt
from eaglefeed.producer.jsonl import ReadReport
from eaglefeed.schema.prompt import decode_prompt, encode_prompt
from tiny_target import STRICT, WITH_TOOLS, tiny_tokenizer, turns

TOKENIZER = tiny_tokenizer()


def row(row_id: Any, *contents: str) -> bytes:
    return json.dumps({"id": row_id, "messages": turns(*contents)}, ensure_ascii=False).encode()


def write(folder: Path, *lines: bytes, end: bytes = b"\n") -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(lines) + end)
    return path


def read(path: Path, **options: Any) -> tuple[list[Conversation], ReadReport]:
    report = ReadReport()
    tokenizer = options.pop("tokenizer", TOKENIZER)
    return list(read_conversations(path, tokenizer, report, **{"max_length": 512} | options)), report


def test_a_byte_order_mark_changes_nothing(tmp_path: Path):
    lines = (row("a", "hi", "ok"), row("b", "x", "y"))
    plain, _ = read(write(tmp_path, *lines))
    marked, report = read(write(tmp_path, b"\xef\xbb\xbf" + lines[0], lines[1]))
    assert marked == plain
    assert report.accepted == len(plain) == 2


def test_a_byte_order_mark_elsewhere_is_text(tmp_path: Path):
    found, _ = read(write(tmp_path, row("a", "hi", "\ufeffok")))
    assert sum(found[0].loss_mask) == 3 + 2 + 1


def test_lines_end_at_a_line_feed_alone(tmp_path: Path):
    odd = "x\u2028y\u0085z\u2029"
    found, report = read(write(tmp_path, row("a", "q", "1"), row("b", odd, "2"), row("c", "q", "3"), b"{bad"))
    assert [conversation.sample_id for conversation in found] == ["a", "b", "c"]
    assert odd in TOKENIZER.decode(found[1].input_ids)
    assert report.rejections[0].line == 4


def test_characters_that_end_lines_elsewhere_stay_in_their_content(tmp_path: Path):
    odd = "a\u2028b\u0085c\x0bd\x0ce\x1cf\rg\nh\u2029i"
    escaped = row("b", odd, odd)
    raw = escaped.replace(rb"\u2028", "\u2028".encode())
    lines = [row("a", "q", "1"), escaped, raw.replace(b'"b"', b'"b2"'), row("c", "q", "3"), b'{"id": "cut']
    found, report = read(write(tmp_path, *lines))
    assert [conversation.line for conversation in found] == [1, 2, 3, 4]
    for conversation in found[1:3]:
        assert TOKENIZER.decode(conversation.input_ids).count(odd) == 2
        answer = [token for token, loss in zip(conversation.input_ids, conversation.loss_mask, strict=True) if loss]
        assert TOKENIZER.decode(answer) == odd + "<|im_end|>"
    assert [rejection.line for rejection in report.rejections] == [5]


def test_carriage_returns_alone_end_no_line_and_what_stands_behind_one_is_told(tmp_path: Path):
    old_mac = row("a", "hi", "ok") + b"\r" + row("b", "x", "y") + b"\r"
    found, report = read(write(tmp_path, old_mac, row("c", "x", "y"), end=b"\r\n"))
    assert [conversation.sample_id for conversation in found] == ["c"]
    assert report.rejections[0].reason.startswith("not JSON: Extra data at character")


def test_blank_lines_carriage_returns_and_a_missing_last_line_feed_are_no_faults(tmp_path: Path):
    found, report = read(write(tmp_path, row("a", "hi", "ok") + b"\r", b"", b"  ", row("b", "x", "y"), end=b""))
    assert [conversation.line for conversation in found] == [1, 4]
    assert report.rejected == 0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": "a", ', "not JSON"),
        (b"[" * 100_000, "not JSON: nested too deeply"),
        (b'{"id": "\xff"}', "not UTF-8: byte 8"),
        (b"[1, 2]", "not an object: list"),
        (b'"text"', "not an object: str"),
        (b"\xef\xbb\xbf" + row("r", "hi", "ok"), "not JSON: Unexpected UTF-8 BOM"),
        (b"\0" * 50, "not JSON: Expecting value at character 0"),
        (row("r\0", "hi", "ok").replace(rb"\u0000", b"\0"), "not JSON: Invalid control character at character 9"),
        (row("r", "hi", "ok") + b",", "not JSON: Extra data at character"),
        (row("r", "hi", "ok")[:-1] + b', "score": NaN}', "not JSON: NaN is no JSON number"),
        (row("r", "hi", "ok")[:-1] + b', "score": -Infinity}', "not JSON: -Infinity is no JSON number"),
        (row("r", "hi", "ok")[:-1] + b', "messages": []}', "not JSON: the name 'messages' twice in one object"),
        (row("r", "hi", "ok").replace(b'"ok"', b'"ok", "content": "no"'), "not JSON: the name 'content' twice"),
        (b'{"id": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit"),
        (b'{"messages": ' + b"[" * 990 + b"]" * 990 + b"}", ""),
        (row("r", "hi", "ok")[:-1] + b', "tools": ' + b"[" * 800 + b"]" * 800 + b"}", "nested too deeply: tools"),
        (row("r", "hi", "ok").replace(b'"ok"', rb'"\ud800"'), "no valid Unicode (a lone surrogate): turn 1"),
        (row(1.0, "hi", "ok"), "id is neither text nor an integer: float"),
        (b'{"id": "r", "prompt": "x"}', "no messages or conversations: keys ['id', 'prompt']"),
        (row("r", "hi", "ok").replace(b"assistant", b"oracle"), "unknown role 'oracle': turn 1"),
        (row("r", "hi"), "no assistant turn"),
    ],
)
def test_a_bad_line_is_rejected_with_line_and_reason_and_the_rest_goes_on(tmp_path: Path, line: bytes, reason: str):
    found, report = read(write(tmp_path, row("a", "hi", "ok"), line, row("b", "x", "y")))
    assert [conversation.sample_id for conversation in found] == ["a", "b"]
    assert (report.accepted, report.rejected, report.duplicates) == (2, 1, 0)
    assert report.rejections[0].line == 2
    assert report.rejections[0].reason.startswith(reason)


def test_a_tool_call_whose_content_is_null_is_kept_and_trained_on(tmp_path: Path):
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}
    messages = [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12C"},
        {"role": "assistant", "content": "12 degrees"},
    ]
    line = json.dumps({"id": "r1", "messages": messages}).encode()
    found, _ = read(write(tmp_path, line), tokenizer=tiny_tokenizer(WITH_TOOLS))
    text = TOKENIZER.decode(found[0].input_ids)
    learned = [token for token, loss in zip(found[0].input_ids, found[0].loss_mask, strict=True) if loss]
    assert "None" not in text
    assert "null" not in text
    assert TOKENIZER.decode(learned) == 'get_weather{"city": "Paris"}<|im_end|>12 degrees<|im_end|>'
    good = row("good", "hi", "ok")
    found, report = read(write(tmp_path, line, good))
    assert [conversation.sample_id for conversation in found] == ["good"]
    assert report.rejections == [
        (1, "r1", "the template renders no tool_calls: their turn would be empty (content null)")
    ]


def test_a_template_that_refuses_one_row_does_not_stop_the_run(tmp_path: Path):
    bad = json.dumps({"id": "bad", "messages": [*turns("a"), *turns("b", "c")]}).encode()
    found, report = read(write(tmp_path, bad, row("good", "a", "b")), tokenizer=tiny_tokenizer(STRICT))
    assert [conversation.sample_id for conversation in found] == ["good"]
    assert report.rejections == [(1, "bad", "the template refuses it: roles must alternate")]


def test_a_line_over_the_limit_is_rejected_unread_and_the_next_is_fine(tmp_path: Path):
    huge = row("huge", "a " * 8_000_000, "ok")
    path = write(tmp_path, huge, row("b", "x", "y"))
    tracemalloc.start()
    found, report = read(path, max_line_bytes=100_000)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(conversation.sample_id, conversation.line) for conversation in found] == [("b", 2)]
    assert report.rejections == [(1, "", "line too large: over 100000 bytes")]
    assert peak_bytes < len(huge) / 2


def test_a_line_just_within_the_limit_is_read(tmp_path: Path):
    line = row("a", "hi", "ok")
    assert len(read(write(tmp_path, line), max_line_bytes=len(line))[0]) == 1
    with pytest.raises(InputError, match="line too large"):
        read(write(tmp_path, line), max_line_bytes=len(line) - 1)


def test_a_row_of_megabytes_is_cut_without_tokenizing_all_of_it(tmp_path: Path):
    line = row("big", "a " * 1_000_000, "ok")
    path = write(tmp_path, line, row("first", "hi", "a " * 1_000_000))
    tracemalloc.start()
    found, report = read(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 5 + "\n" + "hi" + end "\n" + start + "assistant\n" = 1 + 5 + 2 + 2 + 11 = 21 tokens before the answer
    assert [
        (conversation.line, len(conversation.input_ids), sum(conversation.loss_mask)) for conversation in found
    ] == [(2, 512, 512 - 21)]
    assert report.reasons == {"no loss tokens after truncation": 1}
    assert peak_bytes < 30 * len(line)  # more than 100 times with all of its tokens


def test_the_same_row_twice_is_one_sample_and_another_of_its_id_is_rejected(tmp_path: Path):
    found, report = read(write(tmp_path, row("x", "a", "b"), row("x", "c", "d"), row("x", "a", "b")))
    assert len(found) == 1
    assert (report.accepted, report.duplicates, report.rejected) == (1, 1, 1)
    assert report.rejections[0].reason == "id used before with another content: lines 1 and 2"


def test_truncation_comes_before_the_check_for_loss_tokens(tmp_path: Path):
    # "x" * 100 as the user's turn: the answer begins at token 5 + 1 + 100 + 2 + 11 = 119
    path = write(tmp_path, row("long", "x" * 100, "yes"), row("short", "x", "yes"))
    found, report = read(path, max_length=119)
    assert [conversation.sample_id for conversation in found] == ["short"]
    assert report.reasons == {"no loss tokens after truncation": 1}
    found, _ = read(path, max_length=120)
    assert (len(found[0].input_ids), sum(found[0].loss_mask)) == (120, 1)


def test_the_first_token_alone_is_nothing_to_learn_from(tmp_path: Path):
    bare = tiny_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    found, report = read(write(tmp_path, row("one", "", "y"), row("two", "", "yy")), tokenizer=bare)
    assert [(conversation.sample_id, conversation.loss_mask) for conversation in found] == [("two", (1, 1))]
    assert report.reasons == {"no loss tokens": 1}


def test_a_cut_inside_an_answer_keeps_the_loss_of_what_is_left_and_of_the_turns_before(tmp_path: Path):
    # "ab" and "cd" take a user 10 tokens and the assistant 15; the answers' words stand at 21, 22 and 46, 47
    path = write(tmp_path, row("r", "ab", "cd", "ab", "cd"))
    for max_length, supervised in ((46, [21, 22, 23]), (47, [21, 22, 23, 46]), (50, [21, 22, 23, 46, 47, 48])):
        found, _ = read(path, max_length=max_length)
        assert [index for index, bit in enumerate(found[0].loss_mask) if bit] == supervised
        assert len(found[0].input_ids) == max_length


def test_half_a_character_anywhere_in_a_row_rejects_it_and_the_run_goes_on(tmp_path: Path):
    call = {"function": {"name": "f", "arguments": '{"k": "\\ud800"}'}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    bad = json.dumps({"id": "bad", "messages": [*turns("a"), turn]}).encode()
    found, report = read(write(tmp_path, bad, row("good", "a", "b")), tokenizer=tiny_tokenizer(WITH_TOOLS))
    assert [conversation.sample_id for conversation in found] == ["good"]
    assert report.reasons == {"no valid Unicode (a lone surrogate)": 1}


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: bytes):
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match="no rows in it"):
        read(path)


def test_a_file_without_one_usable_row_is_an_error_that_names_the_first_fault(tmp_path: Path):
    with pytest.raises(InputError, match="2 rejected, the first at line 1: not JSON"):
        read(write(tmp_path, b"{", b"{"))


def test_a_missing_file_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read, got No such file"):
        read(tmp_path / "none.jsonl")


def test_kept_rejections_are_bounded_and_their_counts_exact(tmp_path: Path):
    _, report = read(write(tmp_path, *[b"{"] * 1500, row("a", "hi", "ok")))
    assert len(report.rejections) == 1000
    assert report.rejected == report.reasons["not JSON"] == 1500


def test_every_reason_is_counted_and_the_first_rows_of_each_are_named(tmp_path: Path):
    odd = [row(f"r{n}", "hi", "ok").replace(b"assistant", f"role{n}".encode()) for n in range(1200)]
    _, report = read(write(tmp_path, *[b"{"] * 1500, *odd, row("a", "hi", "ok"), row("a", "hi", "ok")))
    assert report.rejected == 2700
    assert report.reasons["unknown role 'role0'"] == 1
    assert report.reasons["other reasons"] == 1200 - 999  # "not JSON" is one of the thousand
    assert (len(report.reasons), report.rejections[1000].line) == (1001, 1501)
    assert len(report.rejections) == 1000 + 999 + 10
    assert report.accepted + report.duplicates + report.rejected == 2702


def test_more_rejected_rows_than_may_be_are_an_error_at_the_files_end(tmp_path: Path):
    path = write(tmp_path, row("a", "hi", "ok"), row("a", "hi", "ok"), b"{", row("b", "hi", "ok"))
    assert len(read(path, max_rejected_share=0.25)[0]) == 2
    with pytest.raises(InputError) as caught:
        read(path, max_rejected_share=0.2)
    told = (
        "too many rows cannot be used, wanted at most 20.00% of 4 (feed.max_rejected_share), got 1 rejected, the first"
    )
    assert told in str(caught.value)


def test_rows_of_like_length_share_a_batch_and_none_is_lost(tmp_path: Path):
    lines = [row(f"r{n}", "x" * (n * 7 % 50), "y") for n in range(50)]
    found, _ = read(write(tmp_path, *lines))
    groups = list(batches(iter(found), 4))
    assert sorted(one.sample_id for group in groups for one in group) == sorted(one.sample_id for one in found)
    assert [len(group) for group in groups] == [4] * 12 + [2]
    spread = [len(group[-1].input_ids) - len(group[0].input_ids) for group in groups]
    assert max(spread) <= 6


def test_prompts_carry_the_rows_and_have_ids_of_their_own(tmp_path: Path):
    found, _ = read(write(tmp_path, row("a", "hi", "ok"), row("b", "x", "y"), row("c", "x", "y")))
    facts = {"tokenizer_fingerprint": "t", "template_fingerprint": "c", "max_length": 512}
    single, pair, other = (to_prompt(rows, **facts) for rows in (found[:1], found[:2], [found[0], found[2]]))
    assert single.sample_id == "a"
    assert pair.sample_id.startswith("a.b2-")
    assert len({single.sample_id, pair.sample_id, other.sample_id}) == 3
    assert decode_prompt(encode_prompt(pair)) == pair
    assert pair.rows[1].input_ids == found[1].input_ids
    assert pair.num_tokens == sum(len(conversation.input_ids) for conversation in found[:2])
