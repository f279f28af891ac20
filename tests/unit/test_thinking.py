"""Thinking: no draft is taught a layout that its target never writes."""

from typing import Any

import pytest

from chat_templates import HARMONY, QWEN3, R1, TAGGED_THINKING, family_tokenizer, supervised_spans
from eaglefeed.producer.chat import Chat, RowFault
from eaglefeed.producer.masking import tokenize_chat
from eaglefeed.producer.rendering import give_values
from tiny_target import CHATML, turns

THINKING = turns("a", "<think>t1</think>x", "b", "<think>t2</think>y")
ALWAYS_THINKS = QWEN3.replace("{%- if enable_thinking", "{{- '<think>\n' }}{%- if enable_thinking")
READS_IT_BESIDE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
TAGGED_OPENS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
UPPER = CHATML.replace("m['content']", "m['content'] | upper")


def tokenized(template: str, messages: list[dict[str, Any]], eos: str = "<|im_end|>", **options: Any):
    """The text, the supervised spans, and how many turns were left without loss."""
    tokenizer = family_tokenizer(template, eos)
    give_values(tokenizer, options.pop("values", {}), None)
    tokens = tokenize_chat(tokenizer, Chat("x", messages, **options))
    return tokenizer.decode(tokens.input_ids), supervised_spans(tokenizer, tokens), tokens.unsupervised_turns


def given_beside(content: str, thinking: str, key: str = "reasoning_content") -> list[dict[str, Any]]:
    return [*turns("a"), {"role": "assistant", key: thinking, "content": content}]


def test_thinking_that_the_template_takes_out_of_earlier_turns_is_in_no_sample():
    text, spans, unsupervised = tokenized(QWEN3, THINKING)
    assert "t1" not in text
    assert spans == ["<think>\nt2\n</think>\n\ny<|im_end|>"]
    assert unsupervised == 1


def test_of_a_template_with_generation_tags_rewritten_turns_get_no_loss_either():
    text, spans, unsupervised = tokenized(TAGGED_THINKING, THINKING)
    assert "t1" not in text
    assert spans == ["<think>t2</think>y<|im_end|>"]
    assert unsupervised == 1


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_beside_the_content_reaches_the_template(key: str):
    _, spans, _ = tokenized(QWEN3, given_beside("y", "t2", key))
    assert spans == ["<think>\nt2\n</think>\n\ny<|im_end|>"]


def test_thinking_goes_into_its_channel():
    _, spans, _ = tokenized(HARMONY, given_beside("y", "t2"), "<|return|>")
    assert spans == ["<|channel|>analysis<|message|>t2<|end|><|start|>assistant<|channel|>final<|message|>y<|return|>"]


def test_thinking_that_the_template_would_drop_rejects_the_row():
    with pytest.raises(RowFault, match=r"does not render its thinking: turn 1 .* put it into the content"):
        tokenized(CHATML, given_beside("y", "t2"))


def test_empty_thinking_beside_the_content_is_none():
    assert tokenized(CHATML, given_beside("y", ""))[1] == ["y<|im_end|>"]


def test_thinking_in_the_content_is_not_put_behind_an_empty_one():
    text, spans, unsupervised = tokenized(READS_IT_BESIDE, THINKING)
    assert spans == ["t2</think>y<|im_end|>"]
    assert text.endswith("<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\nt2</think>y<|im_end|>\n")
    assert unsupervised == 1
    _, spans, _ = tokenized(READS_IT_BESIDE, given_beside("y", "t2"))
    assert spans == ["t2\n</think>\n\ny<|im_end|>"]


def test_of_a_template_with_generation_tags_an_answer_may_open_the_thinking_that_its_prompt_opens():
    messages = turns("a", "<think>\nt1\n</think>\nx", "b", "<think>\nt2\n</think>\ny")
    _, spans, unsupervised = tokenized(TAGGED_OPENS, messages)
    assert spans == ["t1\n</think>\nx<|im_end|>", "t2\n</think>\ny<|im_end|>"]
    assert unsupervised == 0


def test_without_thinking_its_empty_form_is_the_prompts_and_not_trained_on():
    messages = turns("a", "y")
    assert tokenized(QWEN3, messages)[1] == ["<think>\n\n</think>\n\ny<|im_end|>"]
    text, spans, _ = tokenized(QWEN3, messages, values={"enable_thinking": False})
    assert spans == ["y<|im_end|>"]
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\ny<|im_end|>\n")


@pytest.mark.parametrize("content", ["<think>\n\n</think>\n\ny", "<think></think>y", "\n<think>\n</think>\n\ny"])
def test_an_empty_thinking_that_the_prompt_holds_is_not_written_twice(content: str):
    text, spans, _ = tokenized(QWEN3, turns("a", content), values={"enable_thinking": False})
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\ny<|im_end|>\n")
    assert (text.count("<think>"), spans) == (1, ["y<|im_end|>"])


@pytest.mark.parametrize("finish", [True, False])
def test_thinking_behind_a_prompt_that_has_closed_it_rejects_the_row(finish: bool):
    with pytest.raises(RowFault, match="the answer has thinking: its prompt holds an empty <think> already"):
        tokenized(QWEN3, turns("a", "<think>\nt\n</think>\n\ny"), values={"enable_thinking": False}, cut_off=finish)


def test_an_answer_that_begins_with_a_blank_keeps_its_loss_once_it_is_an_earlier_one():
    _, spans, unsupervised = tokenized(QWEN3, turns("a", " b", "c", " d"))
    assert (spans, unsupervised) == ([" b<|im_end|>", "<think>\n\n</think>\n\n d<|im_end|>"], 0)


def test_a_thinking_that_was_passed_over_is_kept_to_the_letter():
    # what a server is made to go on from, where its target shall not think
    text, spans, _ = tokenized(R1, turns("a", "<think>\n\n</think>\n\ny"), "</s>")
    assert (text, spans) == ("<s><|User|>a<|Assistant|><think>\n\n</think>\n\ny</s>", ["\n</think>\n\ny</s>"])


def test_without_thinking_earlier_turns_stand_behind_another_prompt_and_get_no_loss():
    _, spans, unsupervised = tokenized(QWEN3, turns("a", "b", "c", "d"), values={"enable_thinking": False})
    assert spans == ["d<|im_end|>"]
    assert unsupervised == 1


def test_an_answer_that_the_template_would_rewrite_stands_behind_its_prompt_as_it_was_written():
    text, spans, unsupervised = tokenized(R1, THINKING, "</s>")
    assert text == "<s><|User|>a<|Assistant|>x</s><|User|>b<|Assistant|><think>\nt2</think>y</s>"
    assert spans == ["t2</think>y</s>"]
    assert unsupervised == 1


def test_an_answer_as_its_target_goes_on_from_an_opened_thinking_is_kept():
    # what a server returns: its prompt holds the opening
    assert tokenized(R1, turns("a", "t\n</think>\n\ny"), "</s>")[1] == ["t\n</think>\n\ny</s>"]


def test_an_answer_without_thinking_of_a_target_that_always_thinks_rejects_the_row():
    with pytest.raises(RowFault, match=r"the answer has no thinking: .* no </think> is in it"):
        tokenized(R1, turns("a", "y"), "</s>")


def test_a_template_that_rewrites_letters_does_not_reach_the_answer():
    _, spans, unsupervised = tokenized(UPPER, turns("a", "well", "c", "fine"))
    assert spans == ["fine<|im_end|>"]
    assert unsupervised == 1


def test_a_rewritten_answer_that_is_not_the_last_turn_rejects_the_row():
    with pytest.raises(RowFault, match="rewrites earlier turns: turn 1"):
        tokenized(R1, [*turns("a", "t</think>y"), *turns("b")], "</s>")


def test_an_answer_that_a_template_refuses_for_its_marks_is_taken_as_it_was_written():
    refusing = (
        "{% for m in messages %}{% if '<|channel|>' in m.content %}{{ raise_exception('tags') }}{% endif %}{% endfor %}"
    )
    written = "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>y"
    assert tokenized(refusing + HARMONY, turns("a", written), "<|return|>")[1] == [f"{written}<|return|>"]
    assert tokenized(HARMONY, turns("a", written), "<|return|>")[1] == [f"{written}<|return|>"]


@pytest.mark.parametrize(
    ("template", "messages", "span"),
    [
        (CHATML, turns("a", "ok so "), "ok so"),
        (CHATML, turns("a", "<|im_end|> ends"), "<|im_end|> ends"),
        (QWEN3, turns("a", "<think>\nso long"), "<think>\nso long"),
        (QWEN3, turns("a", "<think>t</think>so"), "<think>\nt\n</think>\n\nso"),
        (QWEN3, given_beside("so", "t"), "<think>\nt\n</think>\n\nso"),
        (ALWAYS_THINKS, turns("a", "so long"), "so long"),
        (ALWAYS_THINKS, turns("a", "t\n</think>\n\nso"), "t\n</think>\n\nso"),
        (R1, turns("a", "so long"), "so long"),
        (R1, turns("a", "<think>\nso long"), "so long"),
        (TAGGED_THINKING, turns("a", "so"), "so"),
    ],
)
def test_an_answer_that_was_cut_off_teaches_nothing_behind_its_cut(
    template: str, messages: list[dict[str, Any]], span: str
):
    assert tokenized(template, messages, cut_off=True)[1] == [span]


def test_a_cut_before_the_first_letter_of_the_content_teaches_nothing():
    assert tokenized(QWEN3, given_beside("", "t"), cut_off=True)[1] == []
