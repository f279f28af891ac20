"""Rows become chats, or are rejected with a reason that names the fault."""

import json
from typing import Any

import pytest

from eaglefeed.producer.chat import ChatIds, RowFault, parse_chat
from eaglefeed.schema.refs import safe_sample_id

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


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
        ({"messages": [{"content": "x"}]}, r"a turn without a role: turn 0, keys \['content'\]"),
        ({"messages": [MESSAGES[0], {"role": "assistant", "content": None}]}, "content is null: turn 1"),
        ({"messages": [{"role": "user", "content": 3}]}, "neither text nor a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"no text \(image_url\): turn 0"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
        ({"id": 1.5, "messages": MESSAGES}, "id is neither text nor an integer: float"),
        ({"id": True, "messages": MESSAGES}, "id is neither text nor an integer: bool"),
        ({"messages": MESSAGES, "tools": {"f": 1}}, "tools is no list"),
        ({"messages": MESSAGES, "tools": "{bad"}, "tools are not JSON"),
        ({"messages": MESSAGES, "system": ["S"]}, "system is no text: list"),
        ({"messages": [{"role": "user", "from": "human", "value": "hi"}]}, "both role and from: turn 0"),
        ({"messages": [{"role": "user", "content": "a", "value": "b"}]}, "both content and value: turn 0"),
        ({"messages": [{"role": "User", "content": "hi"}]}, "unknown role 'User': turn 0"),
        ({"messages": [{"role": "user ", "content": "hi"}]}, "unknown role 'user ': turn 0"),
        ({"messages": [{"role": "user", "content": "hi", "name": "\ud800"}]}, "lone surrogate.: turn 0"),
        ({"messages": [{"role": "user", "content": "hi", "\udfff": 1}]}, "lone surrogate.: turn 0"),
        ({"messages": MESSAGES, "tools": [{"name": "\ud800"}]}, "lone surrogate.: tools"),
        ({"messages": MESSAGES, "system": "\ud800"}, "lone surrogate.: system"),
        ({"messages": [{"role": "user", "content": "hi", "extra": nested(64)}]}, "nested too deeply: turn 0"),
        ({"messages": MESSAGES, "tools": nested(65)}, "nested too deeply: tools"),
    ],
)
def test_rows_that_cannot_be_used_are_rejected_with_the_reason(row: dict[str, Any], reason: str):
    with pytest.raises(RowFault, match=reason):
        parse_chat(row)


def test_what_is_null_is_as_good_as_absent():
    """Tables give every row all the keys that any row has."""
    nulls = {"name": None, "tool_calls": None, "from": None, "value": None, "weight": None}
    filled = {"messages": [turn | nulls for turn in MESSAGES], "conversations": None, "tools": None, "system": None}
    assert parse_chat(filled) == parse_chat({"messages": MESSAGES})


def test_an_empty_id_or_list_of_tools_is_none():
    assert parse_chat({"id": "", "messages": MESSAGES, "tools": []}) == parse_chat({"messages": MESSAGES})


def test_names_of_both_forms_can_be_mixed_within_a_turn():
    mixed = [{"from": "human", "content": "hi"}, {"role": "assistant", "value": "ok"}]
    assert parse_chat({"conversations": mixed}) == parse_chat({"messages": MESSAGES})


def test_a_system_text_beside_the_turns_becomes_the_first_of_them():
    system = [{"role": "system", "content": "S"}]
    inside = parse_chat({"id": "1", "messages": [*system, *MESSAGES]})
    for key in ("system", "system_prompt"):
        assert parse_chat({"id": "1", "messages": MESSAGES, key: "S"}) == inside
    assert parse_chat({"messages": MESSAGES, "system": ""}) == parse_chat({"messages": MESSAGES})
    sharegpt = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ok"}]
    assert parse_chat({"id": "1", "conversations": sharegpt, "system": "S"}) == inside


def test_a_role_is_what_its_alias_says():
    row = {"messages": [{"role": "narrator", "content": "S"}, MESSAGES[0], {"role": "laguna_s", "content": "ok"}]}
    known = {"messages": [{"role": "system", "content": "S"}, *MESSAGES]}
    assert parse_chat(row, {"laguna_s": "assistant", "narrator": "system"}) == parse_chat(known)
    with pytest.raises(RowFault, match="unknown role 'narrator': turn 0"):
        parse_chat(row, {"laguna_s": "assistant"})


def test_an_alias_goes_before_what_a_role_means_else():
    assert parse_chat({"messages": [{"role": "tool", "content": "x"}]}, {"tool": "user"}).messages[0]["role"] == "user"


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


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": ' + "9" * 5000 + "}"])
def test_arguments_that_python_alone_could_read_or_nobody_reject_the_row(arguments: str):
    with pytest.raises(RowFault, match="arguments are not JSON: turn 1"):
        parse_chat({"messages": [MESSAGES[0], call(arguments)]})


def test_tools_are_the_same_as_a_list_and_as_its_json():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    spelled = [parse_chat({"messages": MESSAGES, "tools": each}) for each in (tools, json.dumps(tools))]
    assert spelled[0] == spelled[1]
    assert spelled[0].tools == tools


def test_malformed_tool_call_arguments_reject_the_row_with_the_turn():
    with pytest.raises(RowFault, match="arguments are not JSON: turn 1"):
        parse_chat({"messages": [MESSAGES[0], call("{bad")]})


@pytest.mark.parametrize("arguments", ["", None, {}, "{}"])
def test_a_call_without_arguments_has_none_and_never_the_word_null(arguments: object):
    found = parse_chat({"messages": [MESSAGES[0], call(arguments)]}).messages[1]["tool_calls"]
    assert found[0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [("3", "int"), ('"{\\"k\\": 1}"', "str"), ("[1]", "list"), ([], "list"), (0, "int"), ([1], "list")],
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
        ({"messages": [MESSAGES[0], MESSAGES[1] | {"train": "no"}]}, "train that is neither true nor false: turn 1"),
    ],
)
def test_what_would_change_the_text_and_is_not_read_rejects_the_row(row: dict[str, Any], reason: str):
    with pytest.raises(RowFault, match=reason):
        parse_chat({"messages": MESSAGES} | row)


def test_a_turn_that_is_not_to_be_trained_on_has_no_weight():
    marks = ({"train": False}, {"train": 0}, {"weight": 0})
    chats = [parse_chat({"messages": [MESSAGES[0], MESSAGES[1] | mark]}) for mark in marks]
    assert [chat.messages[1]["weight"] for chat in chats] == [0, 0, 0]


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


def test_ids_that_differ_in_case_or_in_unicodes_forms_stay_apart():
    ids = [parse_chat({"id": text, "messages": MESSAGES}).sample_id for text in ("A", "a", "\u00e9", "e\u0301", " a")]
    assert len(set(ids)) == len(ids)


def test_unsafe_ids_stay_apart_among_millions():
    # Both have the same 32-bit xxh32, f51de95e and 89dc5cb8: a digest of 32 bits is met twice among 100,000 ids.
    for pair in (("http://6280912317", "http://6541373340"), ("x" * 70 + "2520408114漢", "x" * 70 + "10542125869漢")):
        first, second = (parse_chat({"id": text, "messages": MESSAGES}).sample_id for text in pair)
        assert first.rpartition("-")[2] != second.rpartition("-")[2]


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
