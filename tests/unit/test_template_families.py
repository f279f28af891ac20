"""Templates of every family: what the target writes is trained on, behind the very prompt that a server forms."""

from typing import Any

import pytest

from chat_templates import (
    END_OF_TEXT_ALONE,
    FIRST_USER_ONLY,
    GEMMA,
    GLM,
    HARMONY,
    LLAMA3,
    MISTRAL,
    PHI3,
    QWEN3,
    RESULTS_NEED_A_CALL,
    TAGGED_THINKING,
    TOOLS_AT_THE_LAST_USER,
    VICUNA,
    family_tokenizer,
    supervised_spans,
)
from eaglefeed.producer.chat import Chat, RowFault
from eaglefeed.producer.masking import tokenize_chat
from tiny_target import CHATML, turns

FOUR = turns("a", "b", "c", "d e")
THINKING = turns("a", "<think>t1</think>x", "b", "<think>t2</think>y")
SYSTEM = {"role": "system", "content": "S"}


def tokenized(template: str, messages: list[dict[str, Any]], eos: str = "<|im_end|>", **options: Any):
    tokenizer = family_tokenizer(template, eos)
    tokens = tokenize_chat(tokenizer, Chat("x", messages, **options))
    return tokenizer, tokens, supervised_spans(tokenizer, tokens)


@pytest.mark.parametrize(
    ("template", "eos", "spans"),
    [
        (LLAMA3, "<|eot_id|>", ["b<|eot_id|>", "d e<|eot_id|>"]),
        (MISTRAL, "</s>", [" b</s>", " d e</s>"]),
        (GEMMA, "<end_of_turn>", ["b<end_of_turn>", "d e<end_of_turn>"]),
        (PHI3, "<|endoftext|>", ["b<|end|>", "d e<|end|>"]),
        (HARMONY, "<|return|>", ["<|channel|>final<|message|>b", "<|channel|>final<|message|>d e<|return|>"]),
        (GLM, "<|endoftext|>", ["\nb", "\nd e"]),
        (VICUNA, "</s>", ["b</s>", "d e</s>"]),
        (END_OF_TEXT_ALONE, "</s>", ["b", "d e</s>"]),
        (TOOLS_AT_THE_LAST_USER, "</s>", ["b</s>", "d e</s>"]),
        (FIRST_USER_ONLY, "<|im_end|>", ["b<|im_end|>", "d e<|im_end|>"]),
        (TAGGED_THINKING, "<|im_end|>", ["b<|im_end|>", "d e<|im_end|>"]),
    ],
    ids=["llama3", "mistral", "gemma", "phi3", "harmony", "glm", "vicuna", "end", "tools", "first user", "tagged"],
)
def test_every_answer_and_what_ends_it_is_supervised(template: str, eos: str, spans: list[str]):
    tokenizer, tokens, found = tokenized(template, FOUR, eos)
    assert found == spans
    assert tokens.unsupervised_turns == 0
    assert tokens.input_ids == tokenizer.apply_chat_template(FOUR, return_dict=False)


@pytest.mark.parametrize("messages", [FOUR, THINKING, [SYSTEM, *FOUR]], ids=["plain", "thinking", "system"])
@pytest.mark.parametrize(
    ("template", "eos"),
    [
        (QWEN3, "<|im_end|>"),
        (LLAMA3, "<|eot_id|>"),
        (PHI3, "<|endoftext|>"),
        (HARMONY, "<|return|>"),
        (GLM, "<|endoftext|>"),
        (VICUNA, "</s>"),
        (END_OF_TEXT_ALONE, "</s>"),
    ],
    ids=["qwen3", "llama3", "phi3", "harmony", "glm", "vicuna", "end"],
)
def test_a_prompt_and_its_supervised_answer_open_the_text(template: str, eos: str, messages: list[dict[str, Any]]):
    tokenizer = family_tokenizer(template, eos)
    tokens = tokenize_chat(tokenizer, Chat("x", messages))
    text, spans = tokenizer.decode(tokens.input_ids), supervised_spans(tokenizer, tokens)
    answered = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    assert spans
    for index, span in zip(answered[-len(spans) :], spans, strict=True):
        prompt = tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True)
        assert text.startswith(prompt + span)


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (MISTRAL, [*turns("a"), *turns("b", "c")], "Conversation roles must alternate user/assistant"),
        (MISTRAL, [*turns("a", "b"), {"role": "assistant", "content": "c"}], "must alternate"),
        (MISTRAL, turns("hello", "a", "b", first="assistant"), "must alternate"),
        (GEMMA, [SYSTEM, *FOUR], "System role not supported"),
        (FIRST_USER_ONLY, [SYSTEM, {"role": "assistant", "content": "hi"}], "No user query found in messages."),
    ],
)
def test_what_a_strict_template_forbids_is_rejected_in_its_own_words(
    template: str, messages: list[dict[str, Any]], reason: str
):
    with pytest.raises(RowFault, match=f"the template refuses it: .*{reason}"):
        tokenized(template, messages, "</s>")


def test_a_loose_template_renders_consecutive_turns_as_they_are():
    # start, "assistant", line feed: 11 tokens before each answer; a user's turn of one letter takes 9
    _, tokens, spans = tokenized(FIRST_USER_ONLY, [*turns("a"), *turns("b", "c")])
    assert spans == ["c<|im_end|>"]
    assert [index for index, bit in enumerate(tokens.loss_mask) if bit] == [29, 30]


def test_a_prompt_that_the_template_refuses_leaves_its_answer_alone_without_loss():
    opened_by_the_assistant = [SYSTEM, {"role": "assistant", "content": "hello"}, *turns("a", "b")]
    _, tokens, spans = tokenized(FIRST_USER_ONLY, opened_by_the_assistant)
    assert spans == ["b<|im_end|>"]
    assert tokens.unsupervised_turns == 1


def test_an_end_behind_the_end_of_turn_is_not_the_targets():
    tokenizer, tokens, _ = tokenized(PHI3, FOUR, "<|endoftext|>")
    assert tokenizer.decode(tokens.input_ids).endswith("d e<|end|>\n<|endoftext|>")
    assert tokens.loss_mask[-3:] == [1, 0, 0]


def test_an_end_behind_an_answer_that_ends_in_a_special_token_is_the_targets():
    assert tokenized(VICUNA, turns("a", "x<|im_start|>"), "</s>")[2] == ["x<|im_start|></s>"]


@pytest.mark.parametrize("messages", [FOUR, turns("a", "b"), [SYSTEM, *FOUR]])
@pytest.mark.parametrize("header", ["<|im_start|>assistant\n", "### Response:\n"])
def test_a_template_that_adds_a_header_behind_every_text_rejects_the_row(header: str, messages: list[dict[str, Any]]):
    template = CHATML.replace("{% if add_generation_prompt %}", "{% if true %}").replace(
        "<|im_start|>assistant\n", header
    )
    with pytest.raises(RowFault, match=r"adds an answer's header .* \(add_generation_prompt\)"):
        tokenized(template, messages)


@pytest.mark.parametrize(("behind", "end"), [("<|im_end|>\\n", "<|im_end|>"), ("</s>", "</s>")])
def test_a_template_that_knows_no_generation_prompt_is_taken(behind: str, end: str):
    template = "{% for m in messages %}{{ m.content + '" + behind + "' }}{% endfor %}"
    assert tokenized(template, turns("a", "b", "c", "d"), "</s>")[2] == ["b" + end, "d" + end]


def test_a_prompt_that_changes_as_the_conversation_grows_leaves_earlier_answers_without_loss():
    counting = "{{ messages | length }}" + FIRST_USER_ONLY
    _, tokens, spans = tokenized(counting, FOUR)
    assert spans == ["d e<|im_end|>"]
    assert tokens.unsupervised_turns == 1


def test_a_header_that_ends_in_a_blank_is_not_supervised():
    tokenizer = family_tokenizer(VICUNA, "</s>")
    tokens = tokenize_chat(tokenizer, Chat("x", turns("a", " b ")))
    assert supervised_spans(tokenizer, tokens) == [" b </s>"]


def test_tools_that_move_to_the_last_user_leave_earlier_answers_without_loss():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    tokenizer, tokens, spans = tokenized(TOOLS_AT_THE_LAST_USER, FOUR, "</s>", tools=tools)
    assert spans == ["d e</s>"]
    assert tokens.unsupervised_turns == 1
    assert tokenizer.decode(tokens.input_ids).count("[TOOLS]") == 1


def tool_chat(**call: Any) -> list[dict[str, Any]]:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"k": "v"}}, **call}]
    answers = [{"role": "tool", "content": "R"}, {"role": "assistant", "content": "done"}]
    return [*turns("q"), {"role": "assistant", "content": "", "tool_calls": calls}, *answers]


@pytest.mark.parametrize(
    ("template", "eos", "spans"),
    [
        (
            QWEN3,
            "<|im_end|>",
            [
                '<tool_call>\n{"name": "f", "arguments": {"k": "v"}}\n</tool_call><|im_end|>',
                "<think>\n\n</think>\n\ndone<|im_end|>",
            ],
        ),
        (TOOLS_AT_THE_LAST_USER, "</s>", ['[CALLS][{"name": "f", "arguments": {"k": "v"}}]</s>', "done</s>"]),
        (RESULTS_NEED_A_CALL, "<|end|>", [' to=f<|message|>{"k": "v"}<|call|>', "<|message|>done<|end|>"]),
    ],
    ids=["xml", "json", "results that need a call"],
)
def test_tool_calls_are_supervised_as_the_family_writes_them_and_results_are_not(
    template: str, eos: str, spans: list[str]
):
    assert tokenized(template, tool_chat(id="123456789"), eos)[2] == spans


def test_a_tool_call_id_that_the_template_forbids_rejects_the_row():
    with pytest.raises(RowFault, match="Tool call IDs should be alphanumeric strings with length 9"):
        tokenized(TOOLS_AT_THE_LAST_USER, tool_chat(id="c"), "</s>")
