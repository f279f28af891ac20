"""Rows become chats, or are rejected with a reason that names the fault."""

from typing import Any

import pytest

from eaglefeed.producer.chat import ChatIds, RowFault, parse_chat
from eaglefeed.schema.refs import safe_sample_id

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]


def test_sharegpt_rows_become_the_same_chat_as_openai_rows():
    sharegpt = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ok"}]
    chats = [
        parse_chat({"id": "1", "messages": MESSAGES}),
        parse_chat({"id": "1", "conversations": sharegpt}),
        parse_chat({"id": "1", "conversations": MESSAGES}),
    ]
    assert chats[0] == chats[1] == chats[2]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": MESSAGES, "conversations": MESSAGES}, "both messages and conversations"),
        ({"text": "raw", "n": 1}, r"no messages or conversations: keys \['n', 'text'\]"),
        ({"messages": []}, "no list of turns"),
        ({"messages": "hi"}, "no list of turns"),
        ({"messages": ["hi"]}, "turn is no object: turn 0"),
        ({"messages": [MESSAGES[0], {"role": "laguna_s", "content": "x"}]}, "unknown role 'laguna_s': turn 1"),
        ({"messages": [{"content": "x"}]}, "unknown role 'None'"),
        ({"messages": [MESSAGES[0], {"role": "assistant", "content": None}]}, "content is null: turn 1"),
        ({"messages": [{"role": "user", "content": 3}]}, "neither text nor a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"no text \(image_url\): turn 0"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
        ({"id": 1.5, "messages": MESSAGES}, "id is neither text nor an integer: float"),
        ({"id": True, "messages": MESSAGES}, "id is neither text nor an integer: bool"),
        ({"messages": MESSAGES, "tools": {}}, "tools is no list"),
    ],
)
def test_rows_that_cannot_be_used_are_rejected_with_the_reason(row: dict[str, Any], reason: str):
    with pytest.raises(RowFault, match=reason):
        parse_chat(row)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_chat({"messages": [{"role": "user", "content": parts}]}).messages[0]["content"] == "ab"


def call(arguments: object) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}


def test_tool_call_arguments_reach_the_template_as_an_object_however_they_are_spelled():
    spelled = [parse_chat({"messages": [MESSAGES[0], call(arguments)]}) for arguments in ('{"k": "v"}', {"k": "v"})]
    assert spelled[0] == spelled[1]
    assert spelled[0].messages[1]["content"] == ""


def test_malformed_tool_call_arguments_reject_the_row_with_the_turn():
    with pytest.raises(RowFault, match="arguments are not JSON: turn 1"):
        parse_chat({"messages": [MESSAGES[0], call("{bad")]})


@pytest.mark.parametrize("arguments", ["", None, {}, "{}"])
def test_a_call_without_arguments_has_an_empty_object(arguments: object):
    found = parse_chat({"messages": [MESSAGES[0], call(arguments)]}).messages[1]["tool_calls"]
    assert found[0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [("3", "int"), ('"{\\"k\\": 1}"', "str"), ("[1]", "list"), ([], "list"), (0, "int"), ("NaN", "float")],
)
def test_arguments_that_are_no_object_reject_the_row_with_the_turn(arguments: object, kind: str):
    with pytest.raises(RowFault, match=rf"arguments are no object \({kind}\): turn 1"):
        parse_chat({"messages": [MESSAGES[0], call(arguments)]})


@pytest.mark.parametrize("calls", [None, []])
def test_keys_without_a_value_are_as_if_they_were_not_there(calls: object):
    bare = {"role": "assistant", "content": "ok", "tool_calls": calls, "name": None, "reasoning_content": None}
    row = {"id": "1", "messages": [MESSAGES[0], bare], "tools": []}
    assert parse_chat(row) == parse_chat({"id": "1", "messages": MESSAGES})


def test_a_system_text_beside_the_turns_is_the_first_turn():
    system = {"role": "system", "content": "S"}
    beside = parse_chat({"id": "1", "system": "S", "messages": MESSAGES})
    assert beside == parse_chat({"id": "1", "messages": [system, *MESSAGES]})
    assert parse_chat({"id": "1", "system": "", "messages": MESSAGES}) == parse_chat({"id": "1", "messages": MESSAGES})
    for turn in (system, {"from": "system", "value": "S"}):
        with pytest.raises(RowFault, match="both a system text and a system turn"):
            parse_chat({"system": "S", "conversations": [turn, *MESSAGES]})
    with pytest.raises(RowFault, match="system is no text: dict"):
        parse_chat({"system": {"k": 1}, "messages": MESSAGES})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"functions": [{"name": "f"}]}, "functions of a row reach no template: call them tools"),
        ({"documents": [{"text": "t"}]}, "documents of a row"),
        ({"chat_template_kwargs": {"a": 1}}, r"set target\.chat_template_kwargs"),
        ({"messages": [MESSAGES[0], MESSAGES[1] | {"function_call": {"name": "f"}}]}, "old form of tool_calls: turn 1"),
        ({"messages": [MESSAGES[0], MESSAGES[1] | {"weight": 0.5}]}, "weight that is neither 0 nor 1: turn 1"),
    ],
)
def test_what_would_change_the_text_and_is_not_read_rejects_the_row(row: dict[str, Any], reason: str):
    with pytest.raises(RowFault, match=reason):
        parse_chat({"messages": MESSAGES} | row)


def test_other_keys_of_a_turn_are_kept():
    turn = MESSAGES[1] | {"reasoning_content": "t", "name": "n"}
    assert parse_chat({"messages": [MESSAGES[0], turn]}).messages[1] == turn


@pytest.mark.parametrize("row_id", ["a", 17, "x.y_z-1"])
def test_a_safe_id_is_kept(row_id: object):
    assert parse_chat({"id": row_id, "messages": MESSAGES}).sample_id == str(row_id)


def test_unsafe_ids_become_safe_ones_and_stay_apart():
    ids = [parse_chat({"id": text, "messages": MESSAGES}).sample_id for text in ("a/b", "a b", "../x", "é", "y" * 500)]
    assert len(set(ids)) == len(ids)
    assert [safe_sample_id(value) for value in ids] == ids
    assert ids[0].startswith("a-b-")


def test_rows_without_an_id_get_one_of_their_content():
    one, same = (parse_chat({"messages": MESSAGES}).sample_id for _ in range(2))
    other = parse_chat({"messages": MESSAGES[:1]}).sample_id
    assert one == same != other
    assert one.startswith("row-")


def test_the_same_id_with_other_content_names_both_lines():
    ids = ChatIds()
    first, other = (parse_chat({"id": "x", "messages": MESSAGES[:count]}) for count in (2, 1))
    assert ids.is_new(first, 3)
    assert not ids.is_new(first, 5)
    with pytest.raises(RowFault, match="lines 3 and 9"):
        ids.is_new(other, 9)
