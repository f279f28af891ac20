"""Tokenizers of every kind: the same text is supervised, whatever their offsets, normalizers and stored settings."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from chat_templates import PHI3, VICUNA, supervised_spans
from eaglefeed.producer.chat import Chat
from eaglefeed.producer.masking import TokenizedChat, tokenize_chat
from tiny_target import BOS, CHATML, END, START, WITH_BOS, tiny_tokenizer, turns

EMOJI = "👩‍👩‍👧 é 漢"
CORPUS = ["user: hello world\n\nassistant: fine thanks.\n\n USER: ASSISTANT: ok the answer\n\n"] * 50
WORDS = ["user", "assistant", "hi", "ok", "there"]


def wrapped(backend: Tokenizer, template: str = CHATML, **options: Any) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=END, bos_token=BOS, **options
    )
    tokenizer.chat_template = template
    return tokenizer


def tiny() -> Tokenizer:
    return tiny_tokenizer().backend_tokenizer


def merging(*, trim_offsets: bool = False) -> Tokenizer:
    """Byte-level BPE, trained, so that tokens reach over blanks and line feeds."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=[START, END, BOS], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    return backend


def sentencepiece(*, metaspace: bool) -> Tokenizer:
    """BPE with byte fallback, and a blank before what follows a special token."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", START, END, BOS, *byte_tokens]
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    )
    return backend


def words(model: Any) -> Tokenizer:
    backend = Tokenizer(model({"[UNK]": 0} | {word: index + 1 for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([START, END, BOS])
    return backend


def tokenized(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> TokenizedChat:
    tokens = tokenize_chat(tokenizer, Chat("x", messages))
    assert tokens.input_ids == tokenizer.apply_chat_template(messages, return_dict=False)
    assert len(tokens.loss_mask) == len(tokens.input_ids)
    return tokens


def spans(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> list[str]:
    return supervised_spans(tokenizer, tokenized(tokenizer, messages))


@pytest.mark.parametrize(
    "backend",
    [tiny(), merging(), merging(trim_offsets=True), sentencepiece(metaspace=True), sentencepiece(metaspace=False)],
    ids=["bytes", "merges", "trimmed offsets", "metaspace", "prepended blank"],
)
def test_every_byte_of_an_answer_is_supervised_and_no_header(backend: Tokenizer):
    assert spans(wrapped(backend), turns(EMOJI, "the answer", "ok", EMOJI)) == [f"the answer{END}", f"{EMOJI}{END}"]


@pytest.mark.parametrize("model", [models.WordLevel, models.WordPiece])
def test_tokenizers_that_drop_white_space_supervise_every_word(model: Any):
    assert spans(wrapped(words(model)), turns("hi", "ok there", "hi", "ok")) == [f"ok there {END}", f"ok {END}"]


@pytest.mark.parametrize(
    ("normalizer", "answer", "written"),
    [
        (normalizers.NFC(), "e\u0301 a", "\u00e9 a"),
        (normalizers.NFD(), "\u00e9 a", "e\u0301 a"),
        (normalizers.NFKC(), "\ufb01ne \u2460", "fine 1"),
        (normalizers.Lowercase(), "\u0130 OK", "i\u0307 ok"),
        (normalizers.NFC(), "\u0301x", "\u0301x"),
    ],
    ids=["composes", "decomposes", "expands", "lowers", "begins with a mark"],
)
def test_normalizers_that_change_the_lengths_of_texts_move_no_mask(normalizer: Any, answer: str, written: str):
    backend = tiny()
    backend.normalizer = normalizer
    assert spans(wrapped(backend), turns(answer, answer)) == [f"{written}{END}"]


def test_truncation_and_padding_that_a_tokenizer_has_stored_are_not_applied():
    backend = tiny()
    backend.enable_truncation(10)
    backend.enable_padding(length=100, direction="left", pad_id=257, pad_token=END)
    tokens = tokenized(wrapped(backend, truncation_side="left", padding_side="left"), turns("hi", "ok"))
    assert tokens == tokenized(tiny_tokenizer(), turns("hi", "ok"))
    assert len(tokens.input_ids) == 25


@pytest.mark.parametrize("template", [CHATML, WITH_BOS], ids=["template without", "template with"])
def test_a_post_processor_that_adds_bos_and_an_end_adds_none(template: str):
    backend = tiny()
    marks = [(mark, backend.token_to_id(mark)) for mark in (BOS, END)]
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A {END}", special_tokens=marks)
    tokenizer = wrapped(backend, template)
    tokens = tokenized(tokenizer, turns("hi", "ok"))
    assert tokens.input_ids.count(tokenizer.bos_token_id) == (template == WITH_BOS)
    assert tokenizer.decode(tokens.input_ids).endswith(f"ok{END}\n")
    assert supervised_spans(tokenizer, tokens) == [f"ok{END}"]


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_a_header_that_ends_in_a_blank_is_not_supervised(trim_offsets: bool):
    backend = tiny()
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    assert spans(wrapped(backend, VICUNA), turns("a", " b ", "c", "d")) == [f" b {END}", f"d{END}"]


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_a_token_that_begins_in_the_header_is_not_supervised(trim_offsets: bool):
    # "ASSISTANT: " and "the answer" meet in the token " the", which no server would split so: it is not the target's
    assert spans(wrapped(merging(trim_offsets=trim_offsets), VICUNA), turns("hello", "the answer")) == [f" answer{END}"]


def test_special_tokens_that_take_white_space_with_them_move_no_mask():
    backend = tiny()
    backend.add_special_tokens([AddedToken(mark, lstrip=True, rstrip=True, special=True) for mark in (START, END)])
    # the blank and the line feed around the marks are part of their tokens
    assert spans(wrapped(backend), turns("hi ", " ok ", "x", "y\n")) == [f" ok{END}", f"y{END}"]


def test_the_same_text_in_several_turns_is_found_in_each():
    same = turns("ok", "ok", "ok", "ok", "ok", "ok")
    # "ok" takes a user 10 tokens and the assistant 15, three of them "ok" and what ends it, behind a header of 11
    found = [index for index, bit in enumerate(tokenized(tiny_tokenizer(), same).loss_mask) if bit]
    assert found == [position + offset for position in (10, 35, 60) for offset in (11, 12, 13)]


@pytest.mark.parametrize(
    ("answer", "written"), [("", ""), ("  \n", "  \n"), ("\n\nok\n", "\n\nok\n"), ("a\u2028b\u00a0", "a\u2028b\u00a0")]
)
def test_white_space_that_the_template_keeps_is_part_of_the_answer(answer: str, written: str):
    assert spans(tiny_tokenizer(), turns("x", answer)) == [f"{written}{END}"]


def test_special_tokens_in_an_answer_are_special_ids_as_on_a_server():
    tokens = tokenized(wrapped(tiny(), PHI3), turns("a", f"x{START}y"))
    assert tokens.input_ids.count(tiny().token_to_id(START)) == 1
