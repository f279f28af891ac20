"""The draft: its unroll is what a server computes, and its names and sizes are what a server loads."""

import math

import pytest
import torch
from torch import Tensor

from draft_samples import CONFIG, T2D, D, H, V, make_batch, make_draft
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.draft_config import DraftConfig
from eaglefeed.errors import ConfigError, SchemaError

LLAMA = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
}


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + CONFIG.rms_norm_eps).sqrt() * weight


def rotate(x: Tensor, position: int) -> Tensor:
    """Llama's rotary embedding of one head at one position, written pair by pair."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = position * CONFIG.rope_theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def by_hand(weights: dict[str, Tensor], embeds: Tensor, entries: list[tuple[int, Tensor, int]]) -> Tensor:
    """The layer's output for the last of `entries` (token, hidden, position), which attends to all of them."""
    w = {name.removeprefix("midlayer."): tensor for name, tensor in weights.items()}
    normed = [
        torch.cat([rms(embeds[token], w["input_layernorm.weight"]), rms(hidden, w["hidden_norm.weight"])])
        for token, hidden, _ in entries
    ]
    places, dim = [position for _, _, position in entries], CONFIG.head_dim
    heads = []
    for head in range(CONFIG.num_attention_heads):
        own, shared = slice(head * dim, (head + 1) * dim), slice(head // 2 * dim, (head // 2 + 1) * dim)
        query = rotate(w["self_attn.q_proj.weight"][own] @ normed[-1], places[-1])
        keys = [
            rotate(w["self_attn.k_proj.weight"][shared] @ x, place) for x, place in zip(normed, places, strict=True)
        ]
        share = torch.stack([query @ key / math.sqrt(dim) for key in keys]).softmax(0)
        heads.append(sum(s * (w["self_attn.v_proj.weight"][shared] @ x) for s, x in zip(share, normed, strict=True)))
    hidden = entries[-1][1] + w["self_attn.o_proj.weight"] @ torch.cat(heads)
    x = rms(hidden, w["post_attention_layernorm.weight"])
    gate = w["mlp.gate_proj.weight"] @ x
    return hidden + w["mlp.down_proj.weight"] @ (gate * gate.sigmoid() * (w["mlp.up_proj.weight"] @ x))


def unroll(draft: Eagle3Draft, **changes: Tensor) -> list[Tensor]:
    batch = make_batch()
    inputs = {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "aux_hidden_states": batch.aux_hidden_states,
    }
    return draft.unroll(**(inputs | changes))


@torch.no_grad()
@pytest.mark.parametrize("t", [0, 3, 6])
def test_every_unrolled_step_equals_decoding_one_token_after_another_by_hand(t: int) -> None:
    draft, batch, row = make_draft(), make_batch(), 1
    weights, aux = draft.state_dict(), batch.aux_hidden_states[row]
    entries = [(int(batch.input_ids[row, s]), weights["fc.weight"] @ aux[s], s) for s in range(t + 1)]
    for k, states in enumerate(unroll(draft)):
        wanted = by_hand(weights, draft.embed_tokens, entries)
        torch.testing.assert_close(states[row, t], wanted, atol=2e-5, rtol=2e-5)
        if t + k + 1 < 9:
            entries.append((int(batch.input_ids[row, t + k + 1]), wanted, t + k + 1))


@torch.no_grad()
def test_every_unrolled_step_equals_cached_decoding_also_with_padding_between() -> None:
    draft, batch, t = make_draft(), make_batch(), 4
    steps = unroll(draft)
    hidden = draft.fuse(batch.aux_hidden_states)
    cache, places = draft.new_cache(2), torch.arange(9).expand(2, -1)
    real = torch.tensor([[True, True, False]] * 2)
    draft.extend(batch.input_ids[:, :3], hidden[:, :3], places[:, :3], cache, real)
    out = draft.extend(batch.input_ids[:, 2 : t + 1], hidden[:, 2 : t + 1], places[:, 2 : t + 1], cache)[:, -1:]
    for k, states in enumerate(steps):
        torch.testing.assert_close(out[:, 0], states[:, t], atol=2e-5, rtol=2e-5)
        at = t + k + 1
        out = draft.extend(batch.input_ids[:, at : at + 1], out, places[:, at : at + 1], cache)


@torch.no_grad()
def test_cropped_slots_are_forgotten() -> None:
    draft, batch = make_draft(), make_batch()
    hidden, places = draft.fuse(batch.aux_hidden_states), torch.arange(9).expand(2, -1)
    plain, cropped = draft.new_cache(2), draft.new_cache(2)
    draft.extend(batch.input_ids[:, :4], hidden[:, :4], places[:, :4], plain)
    draft.extend(batch.input_ids[:, :7], hidden[:, :7], places[:, :7], cropped)
    cropped.crop(4)
    last = (batch.input_ids[:, 4:5], hidden[:, 4:5], places[:, 4:5])
    torch.testing.assert_close(draft.extend(*last, cropped), draft.extend(*last, plain))


@torch.no_grad()
def test_padding_changes_nothing_before_it() -> None:
    draft, batch = make_draft(), make_batch()
    mask = batch.attention_mask.clone()
    mask[:, 6:] = 0
    aux, ids = batch.aux_hidden_states.clone(), batch.input_ids.clone()
    aux[:, 6:], ids[:, 6:] = 7.0, 1
    padded = unroll(draft, attention_mask=mask, aux_hidden_states=aux, input_ids=ids)
    for k, (one, other) in enumerate(zip(unroll(draft), padded, strict=True)):
        torch.testing.assert_close(one[:, : 6 - k], other[:, : 6 - k])
        assert other.isfinite().all()


@torch.no_grad()
def test_padding_on_the_left_is_not_attended_to() -> None:
    draft, batch = make_draft(), make_batch()
    padded = unroll(
        draft,
        input_ids=torch.nn.functional.pad(batch.input_ids, (2, 0), value=1),
        attention_mask=torch.nn.functional.pad(batch.attention_mask, (2, 0)),
        aux_hidden_states=torch.nn.functional.pad(batch.aux_hidden_states, (0, 0, 2, 0), value=7.0),
    )
    for one, other in zip(unroll(draft), padded, strict=True):
        torch.testing.assert_close(one, other[:, 2:], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_packed_documents_do_not_see_each_other() -> None:
    draft, batch = make_draft(), make_batch()
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, -1)
    packed = unroll(draft, position_ids=places, seq_lens=torch.tensor([[4, 5], [4, 5]]))
    alone = unroll(
        draft,
        input_ids=batch.input_ids[:, 4:],
        attention_mask=batch.attention_mask[:, 4:],
        aux_hidden_states=batch.aux_hidden_states[:, 4:],
    )
    for one, other in zip(packed, alone, strict=True):
        torch.testing.assert_close(one[:, 4:], other, atol=1e-5, rtol=1e-5)


def test_a_row_shorter_than_the_unroll_trains_what_it_has() -> None:
    output = make_draft()(**make_batch(1, 2).to_trainer_inputs())
    assert output.num_supervised.shape == (3,)
    assert output.num_supervised[1:].sum() == 0


def test_parameters_have_the_names_that_servers_load_and_hold_nothing_of_the_target() -> None:
    layer = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    layer += ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    wanted = {f"midlayer.{name}.weight" for name in layer} | {"fc.weight", "norm.weight", "lm_head.weight"}
    draft = make_draft()
    assert set(draft.state_dict()) == {name for name, _ in draft.named_parameters()} == wanted


def test_the_head_starts_as_the_target_heads_rows_of_the_draft_vocabulary() -> None:
    draft, head = make_draft(), torch.arange(V * H).view(V, H).float()
    draft.initialize_from_target(embed_tokens=head + 1, lm_head=head, t2d=T2D, norm=torch.full((H,), 3.0))
    assert draft.lm_head.weight[3].tolist() == head[5].tolist()
    assert draft.norm.weight.tolist() == pytest.approx([0.9] * H)  # a cold start: 0.3 of the target's
    assert torch.equal(draft.embed_tokens, head + 1)


def test_a_target_of_another_size_is_refused() -> None:
    table = torch.zeros(V, H)
    with pytest.raises(SchemaError, match="lm_head does not fit"):
        make_draft().initialize_from_target(embed_tokens=table, lm_head=table[:-1], t2d=T2D)
    with pytest.raises(SchemaError, match=f"wanted .{V}, {D}., got .{V}, {V}."):
        make_draft().initialize_from_target(embed_tokens=table, lm_head=table, t2d=torch.ones(V, dtype=torch.bool))


def test_equal_seeds_give_equal_drafts() -> None:
    one, other, third = (Eagle3Draft(CONFIG, seed=seed).fc.weight for seed in (5, 5, 6))
    assert torch.equal(one, other)
    assert not torch.equal(one, third)


def test_a_draft_takes_its_sizes_from_a_llama_target_of_transformers_5() -> None:
    config = DraftConfig.from_target_config(LLAMA, draft_vocab_size=4096)
    assert (config.hidden_size, config.head_dim, config.num_key_value_heads) == (576, 64, 3)
    assert (config.rope_theta, config.max_position_embeddings, config.draft_vocab_size) == (100000.0, 8192, 4096)


def test_a_draft_takes_its_sizes_from_a_nested_text_config_and_an_older_rope_theta() -> None:
    text = {name: value for name, value in LLAMA.items() if name != "rope_parameters"} | {"rope_theta": 5e5}
    config = DraftConfig.from_target_config({"text_config": text, "vocab_size": 1}, draft_vocab_size=8)
    assert (config.rope_theta, config.vocab_size) == (5e5, 49152)


def test_a_draft_takes_its_sizes_from_gpt2() -> None:
    gpt2 = {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257, "n_inner": None}
    config = DraftConfig.from_target_config(gpt2 | {"layer_norm_epsilon": 1e-6}, draft_vocab_size=8)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (768, 3072, 64)
    assert (config.num_key_value_heads, config.max_position_embeddings) == (12, 1024)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-6, 10000.0)


def test_a_draft_takes_its_sizes_from_mpt() -> None:
    mpt = {"d_model": 2048, "n_heads": 16, "n_layers": 24, "max_seq_len": 4096, "vocab_size": 50368}
    config = DraftConfig.from_target_config(mpt, draft_vocab_size=8)
    assert (config.hidden_size, config.num_attention_heads, config.max_position_embeddings) == (2048, 16, 4096)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": 7}, "draft_vocab_size"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"head_dim": 3}, "head_dim"),
    ],
)
def test_a_target_without_usable_sizes_is_named(changes: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        DraftConfig.from_target_config(LLAMA | changes, draft_vocab_size=8)
