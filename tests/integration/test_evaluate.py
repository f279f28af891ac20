"""Speculative decoding: the target's own answers, whoever guesses, and honest counts."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from eaglefeed.consumer.decoding import Decoded, Proposer, Settled, TargetDecoder, decode, end_tokens
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.draft_config import DraftConfig
from eaglefeed.consumer.evaluate import evaluate
from eaglefeed.consumer.proposers import DraftProposer, PromptLookupProposer

V, D = 40, 24
AUX = (0, 1, 3)
PROMPTS = [[3, 7, 7, 9, 3, 7], [5], [11, 12, 13, 11, 12, 13, 11, 12], [30, 2, 30]]
T2D = torch.arange(V) % 5 < 3
D2T = T2D.nonzero()[:, 0] - torch.arange(D)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=V,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def gpt2() -> PreTrainedModel:
    torch.manual_seed(4)
    config = GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=V, n_positions=128, initializer_range=0.3)
    return GPT2LMHeadModel(config).eval()


def greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int, end_ids: frozenset[int]) -> list[int]:
    """The target's own answer: no cache, no batch, one token at a time."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in end_ids:
                break
    return ids[len(prompt) :]


def answers(
    model: PreTrainedModel, proposer: Proposer, *, num_tokens: int = 20, end_ids: frozenset[int] = frozenset()
) -> list[Decoded]:
    return decode(
        TargetDecoder(model, AUX, len(PROMPTS)),
        proposer,
        PROMPTS,
        end_ids=end_ids,
        max_new_tokens=num_tokens,
        num_draft_tokens=4,
    )


def random_draft(model: PreTrainedModel, seed: int = 0) -> DraftProposer:
    config = DraftConfig.from_target_config(model.config.to_dict(), draft_vocab_size=D, intermediate_size=16)
    draft = Eagle3Draft(config, seed=seed)
    embeddings = model.get_input_embeddings().weight.detach()
    draft.initialize_from_target(embed_tokens=embeddings, lm_head=embeddings, t2d=T2D)
    return DraftProposer(draft, D2T)


class Oracle:
    """Knows every answer by heart; with `wrong_at`, its guess there is another token."""

    def __init__(self, texts: Sequence[Sequence[int]], wrong_at: int | None = None) -> None:
        self.texts, self.wrong_at = texts, wrong_at
        self.seen: list[Settled] = []

    def start(self, batch_size: int) -> None:
        self.seen = []

    def propose(self, contexts: Sequence[Sequence[int]], settled: Settled, num_tokens: int) -> Tensor:
        self.seen.append(settled)
        rows = []
        for text, context in zip(self.texts, contexts, strict=True):
            row = [*text[len(context) :], *[0] * num_tokens][:num_tokens]
            if self.wrong_at is not None:
                row[self.wrong_at] = (row[self.wrong_at] + 1) % V
            rows.append(row)
        return torch.tensor(rows)


def oracle(model: PreTrainedModel, wrong_at: int | None = None) -> Oracle:
    return Oracle([[*prompt, *greedy(model, prompt, 40, frozenset())] for prompt in PROMPTS], wrong_at)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("who", ["draft", "lookup", "oracle", "half oracle"])
def test_the_answer_is_the_targets_own_whoever_guesses(name: str, who: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    proposer: Proposer = {
        "draft": lambda: random_draft(model),
        "lookup": PromptLookupProposer,
        "oracle": lambda: oracle(model),
        "half oracle": lambda: oracle(model, wrong_at=2),
    }[who]()
    for prompt, answer in zip(PROMPTS, answers(model, proposer), strict=True):
        assert list(answer.token_ids) == greedy(model, prompt, 20, frozenset())


def test_an_oracle_is_accepted_whole_every_round(llama: PreTrainedModel) -> None:
    for answer in answers(llama, oracle(llama), num_tokens=26):
        assert answer.accepted == (4, 4, 4, 4, 4)


def test_the_tokens_after_a_wrong_guess_are_not_accepted(llama: PreTrainedModel) -> None:
    for answer in answers(llama, oracle(llama, wrong_at=2), num_tokens=10):
        assert answer.accepted == (2, 2, 2)


def test_an_answer_ends_with_its_end_token_inside_a_round_of_accepted_guesses(llama: PreTrainedModel) -> None:
    plain = [greedy(llama, prompt, 20, frozenset()) for prompt in PROMPTS]
    end_ids = frozenset({plain[0][3], plain[2][8]})
    for prompt, answer in zip(PROMPTS, answers(llama, oracle(llama), end_ids=end_ids), strict=True):
        wanted = greedy(llama, prompt, 20, end_ids)
        assert list(answer.token_ids) == wanted
        # The prefill's token, then five a round; the last round's guesses count beyond the end too, as servers do.
        assert answer.accepted == (4,) * -(-(len(wanted) - 1) // 5)
        assert not end_ids & set(answer.token_ids[:-1])


def test_a_proposer_sees_the_states_of_every_token_once_and_no_rejected_one(llama: PreTrainedModel) -> None:
    watcher = oracle(llama, wrong_at=1)
    done = answers(llama, watcher, num_tokens=9)
    for row, (prompt, answer) in enumerate(zip(PROMPTS, done, strict=True)):
        text = [*prompt, *answer.token_ids]
        places = torch.cat([seen.positions[row][seen.valid[row]] for seen in watcher.seen]).tolist()
        following = torch.cat([seen.next_ids[row][seen.valid[row]] for seen in watcher.seen]).tolist()
        aux = torch.cat([seen.aux[row][seen.valid[row]] for seen in watcher.seen])
        assert places == list(range(len(places)))
        assert following == text[1 : len(places) + 1]
        with torch.inference_mode():
            states = llama(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
        wanted = torch.cat([states[layer + 1] for layer in AUX[:2]], dim=-1)[0, : len(places)]
        torch.testing.assert_close(aux[:, :64], wanted, atol=1e-4, rtol=1e-4)


def test_the_last_aux_layer_is_taken_before_the_final_norm(llama: PreTrainedModel) -> None:
    with torch.inference_mode():
        best, aux = TargetDecoder(llama, (1, 2, 3), 1).forward(
            torch.tensor([[3, 7]]), torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool)
        )
        assert torch.equal(llama.lm_head(llama.model.norm(aux[..., 64:])).argmax(-1), best)


def test_a_cached_draft_guesses_what_it_would_from_scratch(llama: PreTrainedModel) -> None:
    """Guesses over ragged rounds equal those of a fresh draft that sees all verified positions at once."""
    watcher, proposer = oracle(llama, wrong_at=1), random_draft(llama)
    answers(llama, watcher, num_tokens=9)
    proposer.start(len(PROMPTS))
    for settled in watcher.seen:
        guesses = proposer.propose([], settled, 4)
    for row in range(len(PROMPTS)):
        rows = [[part[row][seen.valid[row]][None] for part in seen[:3]] for seen in watcher.seen]
        next_ids, aux, places = (torch.cat(parts, dim=1) for parts in zip(*rows, strict=True))
        fresh = random_draft(llama)
        fresh.start(1)
        alone = fresh.propose([], Settled(next_ids, aux, places, torch.ones_like(places, dtype=torch.bool)), 4)
        assert torch.equal(guesses[row], alone[0])


@torch.no_grad()
def test_a_chain_of_guesses_is_the_one_that_training_unrolls(llama: PreTrainedModel) -> None:
    config = DraftConfig.from_target_config(llama.config.to_dict(), draft_vocab_size=D, ttt_steps=4)
    length, draws = 6, torch.Generator().manual_seed(7)
    for seed in range(8):
        draft = Eagle3Draft(config, seed=seed)
        table = torch.randn(V, 32, generator=draws)
        draft.initialize_from_target(embed_tokens=table, lm_head=table, t2d=T2D)
        draft.midlayer.self_attn.o_proj.weight.mul_(10)  # so that what is attended to decides
        ids, aux = torch.randint(0, V, (1, length), generator=draws), torch.randn(1, length, 96, generator=draws)
        places = torch.arange(length)[None]
        proposer = DraftProposer(draft, D2T)
        proposer.start(1)
        guesses = proposer.propose([], Settled(ids, aux, places, torch.ones_like(places, dtype=torch.bool)), 4)
        steps = draft.unroll(
            input_ids=torch.cat([ids, guesses[:, :3]], dim=1),
            attention_mask=torch.ones(1, length + 3, dtype=torch.long),
            aux_hidden_states=torch.cat([aux, torch.zeros(1, 3, 96)], dim=1),
        )
        best = torch.stack([draft.logits(states[0, length - 1]).argmax() for states in steps])
        assert guesses[0].tolist() == T2D.nonzero()[:, 0][best].tolist()


def test_prompt_lookup_takes_the_longest_match_and_then_the_latest() -> None:
    lookup = PromptLookupProposer(max_ngram=3)
    context = [1, 2, 3, 50, 9, 2, 3, 60, 8, 3, 70, 1, 2, 3]
    settled = Settled(*(torch.zeros(1, 1) for _ in range(4)))
    assert lookup.propose([context], settled, 2).tolist() == [[50, 9]]
    assert lookup.propose([[*context[1:11], 5, 2, 3]], settled, 3).tolist() == [[60, 8, 3]]
    assert lookup.propose([[4, 6, 4, 7, 4]], settled, 3).tolist() == [[7, 4, -1]]
    assert lookup.propose([[4]], settled, 2).tolist() == [[-1, -1]]


def test_acceptance_length_is_what_servers_count_one_and_accepted_guesses_a_round(llama: PreTrainedModel) -> None:
    proposers = {"oracle": oracle(llama), "wrong": oracle(llama, wrong_at=1)}
    found = evaluate(llama, proposers, PROMPTS, aux_layer_ids=AUX, max_new_tokens=20, batch_size=4)
    whole, wrong = found["oracle"], found["wrong"]
    # 19 tokens after the prefill's: four rounds of five, the last of which gives one more than there is room for.
    assert (whole.num_prompts, whole.num_tokens, whole.num_rounds, whole.num_accepted) == (4, 80, 16, 64)
    assert whole.accept_length == 5.0
    # Ten rounds of two, of which the last again gives one too many.
    assert (wrong.num_rounds, wrong.num_accepted, wrong.accept_length) == (40, 40, 2.0)
    assert [(e.ties, e.mismatches) for e in found.values()] == [(0, 0), (0, 0)]


def test_guessing_nothing_gives_exactly_one_token_a_forward_in_batches_of_any_size(llama: PreTrainedModel) -> None:
    class Silent(PromptLookupProposer):
        def _lookup(self, context: Sequence[int]) -> list[int]:
            return []

    for batch_size in (1, 3):
        found = evaluate(
            llama, {"silent": Silent()}, PROMPTS, aux_layer_ids=AUX, max_new_tokens=7, batch_size=batch_size
        )["silent"]
        assert (found.accept_length, found.num_tokens, found.num_rounds) == (1.0, 28, 24)
        assert [list(p.decoded.token_ids) for p in found.prompts] == [
            greedy(llama, prompt, 7, frozenset()) for prompt in PROMPTS
        ]


def test_an_answer_of_one_token_has_no_round_and_an_acceptance_length_of_one(llama: PreTrainedModel) -> None:
    found = evaluate(llama, {"oracle": oracle(llama)}, PROMPTS, aux_layer_ids=AUX, max_new_tokens=1)["oracle"]
    assert (found.num_tokens, found.num_rounds, found.accept_length) == (4, 0, 1.0)


def test_an_answer_that_is_not_the_targets_is_counted_and_a_near_tie_apart(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = greedy(llama, PROMPTS[0], 4, frozenset())
    other = (wanted[3] + 1) % V

    def wrong(*_args: object, **_kwargs: object) -> list[Decoded]:
        return [Decoded((*wanted[:3], other), (2,))]

    monkeypatch.setattr("eaglefeed.consumer.evaluate.decode", wrong)
    arguments = {"aux_layer_ids": AUX, "max_new_tokens": 4}
    found = evaluate(llama, {"wrong": PromptLookupProposer()}, PROMPTS[:1], **arguments)["wrong"]
    assert (found.ties, found.mismatches) == (0, 1)
    monkeypatch.setattr("eaglefeed.consumer.evaluate.TIE_GAP", 1e9)
    found = evaluate(llama, {"wrong": PromptLookupProposer()}, PROMPTS[:1], **arguments)["wrong"]
    assert (found.ties, found.mismatches) == (1, 0)


def test_end_tokens_come_from_the_generation_config_then_the_config(llama: PreTrainedModel) -> None:
    assert end_tokens(llama) == frozenset()
    llama.config.eos_token_id = 5
    try:
        assert end_tokens(llama) == {5}
        llama.generation_config.eos_token_id = [6, 7]
        assert end_tokens(llama) == {6, 7}
    finally:
        llama.config.eos_token_id = llama.generation_config.eos_token_id = None
