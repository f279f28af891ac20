"""VocabMapping: t2d and d2t say the same, whatever it was made of."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from eaglefeed.errors import ConfigError, SchemaError
from eaglefeed.producer.loading import reserved_token_ids
from eaglefeed.schema.vocab import VocabMapping
from tiny_target import END, tiny_tokenizer


def counts_of(vocab_size: int, **seen: int) -> torch.Tensor:
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for name, number in seen.items():
        counts[int(name[1:])] = number
    return counts


def test_d2t_holds_offsets_and_t2d_the_target_ids():
    mapping = VocabMapping.from_ids(torch.tensor([9, 1, 5, 4]), vocab_size=10)
    assert mapping.d2t.tolist() == [1, 3, 3, 6]
    assert mapping.t2d.nonzero().flatten().tolist() == [1, 4, 5, 9]
    assert mapping.selected_token_ids.tolist() == [1, 4, 5, 9]


def test_the_most_frequent_tokens_are_chosen_and_ties_go_to_the_lower_id():
    counts = counts_of(8, t7=5, t2=3, t6=3, t3=3)
    assert VocabMapping.from_counts(counts, draft_vocab_size=3, vocab_size=8).selected_token_ids.tolist() == [2, 3, 7]


def test_reserved_ids_are_in_the_map_however_rare():
    counts = counts_of(32, t5=100, t9=90, t11=80)
    mapping = VocabMapping.from_counts(counts, draft_vocab_size=3, vocab_size=32, always=[0, 30])
    assert mapping.selected_token_ids.tolist() == [0, 5, 30]


def test_fewer_seen_tokens_than_the_draft_has_are_filled_up_with_the_lowest_ids():
    counts = counts_of(32, t5=1, t9=1, t11=1)
    mapping = VocabMapping.from_counts(counts, draft_vocab_size=8, vocab_size=32)
    assert mapping.selected_token_ids.tolist() == [0, 1, 2, 3, 4, 5, 9, 11]


def test_a_map_of_everything_is_the_identity():
    mapping = VocabMapping.from_counts(counts_of(10, t3=1), draft_vocab_size=10, vocab_size=10)
    assert mapping.d2t.tolist() == [0] * 10
    assert mapping.t2d.all()


def test_a_tokenizer_that_knows_fewer_ids_than_the_head_is_wide_is_no_fault():
    mapping = VocabMapping.from_counts(counts_of(6, t5=4), draft_vocab_size=2, vocab_size=10)
    assert mapping.vocab_size == 10
    assert mapping.selected_token_ids.tolist() == [0, 5]


@pytest.mark.parametrize(("draft", "always"), [(40, ()), (0, ()), (2, (1, 2, 3))])
def test_a_draft_vocabulary_that_does_not_fit_is_refused(draft: int, always: tuple[int, ...]):
    with pytest.raises(ConfigError, match="impossible draft_vocab_size"):
        VocabMapping.from_counts(counts_of(32), draft_vocab_size=draft, vocab_size=32, always=always)


@pytest.mark.parametrize("counts", [torch.tensor([1, -1]), torch.tensor([0.5, 1.0]), torch.ones(1, 4)])
def test_what_counts_no_tokens_is_refused(counts: torch.Tensor):
    with pytest.raises(SchemaError, match="not counts of tokens"):
        VocabMapping.from_counts(counts, draft_vocab_size=2, vocab_size=8)


@pytest.mark.parametrize("always", [(32,), (-1,)])
def test_ids_outside_the_vocabulary_are_refused(always: tuple[int, ...]):
    with pytest.raises(SchemaError, match="beyond the target's vocabulary"):
        VocabMapping.from_counts(counts_of(32), draft_vocab_size=8, vocab_size=32, always=always)


@pytest.mark.parametrize("d2t", [[1, 4, 5, 9], [1, 3, 3], [0, 3, 3, 6], []])
def test_maps_whose_halves_disagree_are_refused(d2t: list[int]):
    t2d = torch.zeros(10, dtype=torch.bool)
    t2d[[1, 4, 5, 9]] = True
    with pytest.raises(SchemaError, match="disagree"):
        VocabMapping(t2d=t2d, d2t=torch.tensor(d2t, dtype=torch.int64))


def test_maps_of_other_dtypes_are_refused():
    with pytest.raises(SchemaError, match="not a vocabulary map"):
        VocabMapping(t2d=torch.ones(4, dtype=torch.int8), d2t=torch.zeros(4, dtype=torch.int64))


@given(st.sets(st.integers(0, 99), min_size=1), st.integers(100, 120))
def test_any_set_of_ids_comes_back(ids: set[int], vocab_size: int):
    mapping = VocabMapping.from_ids(torch.tensor(list(ids)), vocab_size=vocab_size)
    assert mapping.selected_token_ids.tolist() == sorted(ids)
    assert int(mapping.t2d.sum()) == mapping.draft_vocab_size == len(ids)


@pytest.mark.parametrize("ids", [[-1, 3], [3, 10], [3, 3], []])
def test_ids_that_are_no_vocabulary_are_refused(ids: list[int]):
    with pytest.raises(SchemaError):
        VocabMapping.from_ids(torch.tensor(ids, dtype=torch.int64), vocab_size=10)


def test_rows_of_the_head_that_no_token_has_come_in_last():
    counts, padding = counts_of(10, t5=1), [3, 8, 9]
    drawn = [
        VocabMapping.from_counts(
            counts, draft_vocab_size=size, vocab_size=10, never=padding
        ).selected_token_ids.tolist()
        for size in (4, 7, 8, 10)
    ]
    assert drawn == [[0, 1, 2, 5], [0, 1, 2, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7], list(range(10))]


def test_a_map_of_another_tokenizer_is_refused_and_one_that_does_not_say_is_taken():
    mapping = VocabMapping.from_ids(torch.tensor([1, 2]), vocab_size=8)
    own = mapping.of_tokenizer("a" * 32)
    assert own.tokenizer_fingerprint == "a" * 32
    assert torch.equal(own.of_tokenizer("a" * 32).d2t, mapping.d2t)
    with pytest.raises(
        SchemaError, match=r"another tokenizer's, wanted b{32}, got a{32}; make one with `eaglefeed vocab`"
    ):
        own.of_tokenizer("b" * 32)


def test_the_digest_tells_maps_apart():
    ids = torch.tensor([1, 2])
    digests = {VocabMapping.from_ids(*args, vocab_size=size).digest for args, size in [((ids,), 8), ((ids,), 9)]}
    digests.add(VocabMapping.from_ids(torch.tensor([1, 3]), vocab_size=8).digest)
    assert len(digests) == 3
    assert VocabMapping.from_ids(ids, vocab_size=8).digest in digests


def test_coverage_is_the_share_of_tokens_the_draft_can_say():
    mapping = VocabMapping.from_ids(torch.tensor([1, 2]), vocab_size=8)
    assert mapping.coverage(counts_of(8, t1=3, t5=1)) == 0.75
    assert mapping.coverage(counts_of(8)) == 0.0


def test_reserved_ids_are_the_special_tokens_and_every_single_byte():
    tokenizer = tiny_tokenizer()
    reserved = reserved_token_ids(tokenizer)
    assert reserved == list(range(259))
    assert tokenizer.convert_tokens_to_ids(END) in reserved


def test_byte_tokens_of_a_tokenizer_that_falls_back_to_bytes_are_reserved():
    letters = {token: index for index, token in enumerate(["<unk>", "a", "b", "ab", "é", "word"])}
    fallback = {f"<0x{byte:02X}>": len(letters) + byte for byte in range(256)}
    backend = Tokenizer(
        models.BPE(vocab=letters | fallback, merges=[("a", "b")], byte_fallback=True, unk_token="<unk>")
    )
    backend.add_special_tokens(["<end_of_turn>"])
    reserved = reserved_token_ids(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
    assert set(fallback.values()) <= set(reserved)
    assert {letters["<unk>"], backend.token_to_id("<end_of_turn>")} <= set(reserved)
    assert not {letters["ab"], letters["word"]} & set(reserved)
