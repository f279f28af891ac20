"""A template is told the same values wherever it is rendered, and they are part of its fingerprint."""

from datetime import date
from typing import Any

import pytest

from chat_templates import HARMONY, LLAMA3, QWEN3, R1, family_tokenizer
from eaglefeed.producer.chat import Chat, RowFault
from eaglefeed.producer.loading import template_fingerprint
from eaglefeed.producer.masking import tokenize_chat
from eaglefeed.producer.rendering import give_values, render
from tiny_target import CHATML, WITH_TOOLS, tiny_tokenizer, turns

CHAT = Chat("x", turns("a", "b"))
SHOWS = "{{ value | tojson }}"


def told(template: str, values: dict[str, Any], today: date | None = None) -> Any:
    tokenizer = family_tokenizer(template)
    give_values(tokenizer, values, today)
    return tokenizer


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (True, "true"),
        (None, "null"),
        (-3, "-3"),
        (1e-5, "1e-05"),
        ("a 'b' \"c\" \\ {{ d }} {% e %} \n é 😀 \u2028", '"a \'b\' \\"c\\" \\\\ {{ d }} {% e %} \\n é 😀 \u2028"'),
        ({"k": [1, {"é": None}]}, '{"k": [1, {"é": null}]}'),
        ([], "[]"),
    ],
)
def test_every_kind_of_value_reaches_the_template_as_it_is(value: Any, written: str):
    assert render(told(SHOWS, {"value": value}), CHAT) == written


@pytest.mark.parametrize("template", ["\n  {% if true %}x{% endif %}\n", "  {{ 'x' }}\n", CHATML, QWEN3])
def test_values_that_a_template_does_not_know_change_nothing(template: str):
    plain, valued = family_tokenizer(template), told(template, {"value": 1}, date(2026, 1, 31))
    assert render(valued, CHAT) == render(plain, CHAT)
    assert render(valued, CHAT, 1) == render(plain, CHAT, 1)


def test_macros_and_loops_see_the_values():
    template = "{% macro f() %}{{ value }}{% endmacro %}{% for m in messages %}{{ f() }}{{ value }}{% endfor %}"
    assert render(told(template, {"value": 7}), CHAT) == "7777"


def test_all_templates_of_a_tokenizer_are_told():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": SHOWS, "tool_use": "tools " + SHOWS}
    give_values(tokenizer, {"value": 1}, None)
    assert render(tokenizer, CHAT) == "1"
    assert render(tokenizer, Chat("x", CHAT.messages, tools=[{"type": "function"}])) == "tools 1"


def test_a_date_that_is_set_is_written_whatever_the_day():
    day = date(2026, 3, 7)
    assert "Today Date: 07 Mar 2026\n" in render(told(LLAMA3, {}, day), CHAT)
    assert "Current date: 2026-03-07<" in render(told(HARMONY, {}, day), CHAT)
    formats = "{{ strftime_now('%A %-d. %B %y, %j %H:%M') }}"
    assert render(told(formats, {}, day), CHAT) == "Saturday 07. March 26, 066 00:00"
    assert "Today Date: yesterday\n" in render(told(LLAMA3, {"date_string": "yesterday"}), CHAT)


def test_without_a_date_the_template_is_left_as_it_is():
    assert told(LLAMA3, {}).chat_template == LLAMA3


def test_values_date_and_every_template_are_part_of_the_fingerprint():
    several = tiny_tokenizer()
    prints = []
    for default, tools in ((CHATML, WITH_TOOLS), (CHATML, CHATML), (WITH_TOOLS, WITH_TOOLS)):
        several.chat_template = {"default": default, "tool_use": tools}
        prints.append(template_fingerprint(several))
    for values, today in (
        ({}, None),
        ({"enable_thinking": False}, None),
        ({"enable_thinking": True}, None),
        ({}, date(2026, 1, 31)),
        ({}, date(2026, 2, 1)),
    ):
        prints.append(template_fingerprint(told(QWEN3, values, today)))
    assert len(set(prints)) == len(prints)
    assert template_fingerprint(told(QWEN3, {"a": 1, "b": 2})) == template_fingerprint(told(QWEN3, {"b": 2, "a": 1}))


def test_turns_that_the_template_leaves_out_are_told_by_their_role():
    messages = [{"role": "system", "content": "Be brief"}, *turns("a", "t</think>y")]
    assert tokenize_chat(family_tokenizer(R1, "</s>"), Chat("x", messages)).unrendered == ("system",)
    only_known = "{% for m in messages %}{% if m.role != 'developer' %}" + CHATML.split("%}", 1)[1].replace(
        "{% endfor %}", "{% endif %}{% endfor %}", 1
    )
    messages = [{"role": "developer", "content": "Be brief"}, *turns("a", "b"), {"role": "developer", "content": "x y"}]
    messages += turns("c", "d")
    assert tokenize_chat(tiny_tokenizer(only_known), Chat("x", messages)).unrendered == ("developer", "developer")


def test_turns_that_the_template_writes_otherwise_are_not_left_out():
    as_json = CHATML.replace("m['content']", "(m['content'] | tojson if m['role'] == 'tool' else m['content'] | trim)")
    messages = [*turns(" a  b ", "c"), {"role": "tool", "content": '"x"\n'}, {"role": "assistant", "content": "d"}]
    assert tokenize_chat(tiny_tokenizer(as_json), Chat("x", messages)).unrendered == ()


@pytest.mark.parametrize("key", ["content", "reasoning_content"])
def test_text_that_is_no_unicode_rejects_the_row_wherever_it_stands(key: str):
    with pytest.raises(RowFault, match="no valid Unicode"):
        render(
            family_tokenizer(QWEN3),
            Chat("x", [*turns("a"), {"role": "assistant", "content": "d"} | {key: "\ud800"}]),
        )


def test_turns_behind_the_cut_take_no_rendering():
    tokenizer, calls = tiny_tokenizer(), []
    rendering = tokenizer.apply_chat_template

    def counted(messages: Any, **options: Any) -> Any:
        calls.append(len(messages))
        return rendering(messages, **options)

    tokenizer.apply_chat_template = counted
    chat = Chat("x", turns(*["abcd"] * 2000))
    # a pair of turns takes 12 + 17 tokens, so at 290 tokens the cut lies behind ten pairs
    tokens = tokenize_chat(tokenizer, chat, max_length=290)
    assert sum(tokens.loss_mask[:290]) == 10 * 5
    assert sum(calls) < 10 * 2000
    assert len(calls) < 40


def test_of_a_conversation_without_end_a_bounded_number_of_turns_is_trained_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("eaglefeed.producer.turns._MAX_RENDERED", 3)
    tokens = tokenize_chat(tiny_tokenizer(), Chat("x", turns(*["abcd"] * 20)))
    # of ten answers of four letters and an end, the first three and the last
    assert sum(tokens.loss_mask) == 4 * 5
    assert tokens.unsupervised_turns == 6
    assert tokens.loss_mask[-6:] == [1, 1, 1, 1, 1, 0]
