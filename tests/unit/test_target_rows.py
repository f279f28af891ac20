"""Rows beside each other: padding, longer rows and packed documents change nothing, or packing is refused."""

from itertools import chain
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from eaglefeed.errors import TargetMismatch
from eaglefeed.producer.probing import isolates_documents, looks_ahead
from eaglefeed.producer.target import HFEagle3TargetModel
from tiny_target import HEAD_DIM, LAYOUTS, tiny_model, tiny_sizes

torch.set_num_threads(1)

AUX = (4, 0, 2)
LONG, SHORT = [5, 9, 33, 2, 60, 7, 7, 1, 12], [8, 3, 50, 4]
NO_KV_HEADS = {name: value for name, value in tiny_sizes().items() if name != "num_key_value_heads"}
OLD = {"vocab_size": 64, "n_embd": 32, "n_layer": 7, "n_head": 4, "n_positions": 64}
LEARNED = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
BERT = LEARNED | {"num_hidden_layers": 7, "intermediate_size": 48}
OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 7, "num_attention_heads": 4, "vocab_size": 64}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 7, "num_attention_heads": 2}
IMAGES = VISION | {"image_size": 28, "patch_size": 14}
LINEAR = {f"linear_{name}": 4 for name in ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim")}


def llama(**changes: Any) -> Any:
    return tiny_model(hf.LlamaConfig(**tiny_sizes(**changes)))


def longrope() -> Any:
    """One set of rotary frequencies up to 6 positions, another beyond."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 6}
    rope = {"rope_type": "longrope", "rope_theta": 1e4} | factors
    return hf.Phi3Config(**tiny_sizes(), original_max_position_embeddings=6, rope_parameters=rope)


def rows(*given: list[int], pad: int = 0, left: bool = False) -> tuple[Tensor, Tensor]:
    """Padded ids, and the attention mask by the rows' lengths."""
    longest = max(map(len, given))
    beside = [(longest - len(row)) * (1 if left else 0) for row in given]
    ids = [
        [pad] * before + row + [pad] * (longest - before - len(row)) for row, before in zip(given, beside, strict=True)
    ]
    mask = [
        [int(before <= at < before + len(row)) for at in range(longest)]
        for row, before in zip(given, beside, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(mask)


def packed(*documents: list[int]) -> dict[str, Tensor]:
    lengths = [len(document) for document in documents]
    return {
        "input_ids": torch.tensor([list(chain(*documents))]),
        "attention_mask": torch.ones(1, sum(lengths), dtype=torch.int64),
        "loss_mask": torch.ones(1, sum(lengths), dtype=torch.int64),
        "position_ids": torch.tensor([[at for length in lengths for at in range(length)]]),
        "seq_lens": torch.tensor([lengths]),
        "doc_remaining": torch.tensor([[length - 1 - at for length in lengths for at in range(length)]]),
    }


def alone(model: Any, ids: list[int], aux: tuple[int, ...] = AUX) -> Tensor:
    """Aux states of one row as the model itself gives them."""
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][0] for layer in aux], -1)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


# rows beside each other


ROWS_APART = LAYOUTS | {
    "longrope": longrope,
    "gemma3 with images": lambda: hf.Gemma3Config(
        text_config=tiny_sizes(**HEAD_DIM, sliding_window=4), vision_config=IMAGES
    ),
    "bloom": lambda: hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=7, n_head=4),
    "lfm2": lambda: hf.Lfm2Config(**tiny_sizes(), layer_types=["conv", "full_attention"] * 3 + ["conv"]),
    "openai": lambda: hf.OpenAIGPTConfig(**OLD),  # its layers return lists
    "modernbert": lambda: hf.ModernBertDecoderConfig(  # its `decoder` is its head
        **NO_KV_HEADS, local_attention=4, cls_token_id=1, sep_token_id=2
    ),
    "deepseek": lambda: hf.DeepseekV3Config(
        **tiny_sizes(num_key_value_heads=4), q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8,
        v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", ROWS_APART)
def test_a_row_has_the_same_states_beside_longer_ones_on_either_side_and_whatever_the_padding(layout: str):
    model = tiny_model(ROWS_APART[layout]())
    target = HFEagle3TargetModel(model, AUX)
    for pad, left in ((0, False), (2, False), (0, True), (2, True)):
        ids, mask = rows(LONG, SHORT, pad=pad, left=left)
        batch = target.generate_batch(ids, mask, mask)
        assert batch.attention_mask.tolist() == [[1] * 9, [1] * 4 + [0] * 5]
        close(batch.aux_hidden_states[0], alone(model, LONG))
        close(batch.aux_hidden_states[1, :4], alone(model, SHORT))
        assert not batch.aux_hidden_states[1, 4:].any()


def test_masks_come_from_lengths_though_the_padding_is_a_token_of_the_text():
    target = HFEagle3TargetModel(llama(), AUX)
    for pad in (0, 2):
        for left in (False, True):
            ids, mask = rows([7, pad, 9], [pad], pad=pad, left=left)
            batch = target.generate_batch(ids, mask, mask)
            assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
            assert batch.input_ids.tolist() == [[pad, 9, 0], [0, 0, 0]]
            assert batch.loss_mask.tolist() == [[1, 1, 0], [0, 0, 0]]


def test_longer_rows_before_it_do_not_change_a_row():
    target = HFEagle3TargetModel(tiny_model(longrope()), AUX)
    ids, mask = rows(SHORT)
    before = target.generate_batch(ids, mask, mask).aux_hidden_states
    target.generate_batch(*(rows(list(range(40)))[0], *[rows(list(range(40)))[1]] * 2))
    assert torch.equal(target.generate_batch(ids, mask, mask).aux_hidden_states, before)


# packing


PACKABLE = {
    "sdpa": lambda: hf.LlamaConfig(**tiny_sizes(), attn_implementation="sdpa"),
    "eager": lambda: hf.LlamaConfig(**tiny_sizes(), attn_implementation="eager"),
    "window sdpa": lambda: hf.MistralConfig(**tiny_sizes(), sliding_window=3, attn_implementation="sdpa"),
    "window eager": lambda: hf.MistralConfig(**tiny_sizes(), sliding_window=3, attn_implementation="eager"),
    "experts": LAYOUTS["qwen3_moe"],
    "learned positions": LAYOUTS["gpt2"],
    "longrope": longrope,
}


@pytest.mark.parametrize("layout", PACKABLE)
def test_a_packed_documents_states_are_those_it_has_alone_whatever_stands_before_it(layout: str):
    model = tiny_model(PACKABLE[layout]())
    target = HFEagle3TargetModel(model, AUX)
    one, other = (target.generate_batch(**packed(first, [8, 9, 4, 3, 2])) for first in ([5, 6, 7], [1, 2, 3]))
    exact = {"rtol": 1e-5, "atol": 1e-5} if layout == "experts" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(one.aux_hidden_states[:, 3:], other.aux_hidden_states[:, 3:], **exact)
    torch.testing.assert_close(one.logits[:, 3:], other.logits[:, 3:], **exact)
    torch.testing.assert_close(one.aux_hidden_states[0, 3:], alone(model, [8, 9, 4, 3, 2]), rtol=1e-5, atol=1e-5)
    assert not torch.equal(one.aux_hidden_states[:, :3], other.aux_hidden_states[:, :3])


def test_documents_of_one_token_and_one_that_fills_its_row():
    model = llama()
    target = HFEagle3TargetModel(model, AUX)
    batch = target.generate_batch(**packed([5], [6], [8, 9]))
    for place, ids in ((slice(0, 1), [5]), (slice(1, 2), [6]), (slice(2, 4), [8, 9])):
        close(batch.aux_hidden_states[0, place], alone(model, ids))
    assert batch.loss_mask.tolist() == [[0, 0, 1, 0]]
    close(target.generate_batch(**packed(LONG)).aux_hidden_states[0], alone(model, LONG))


STATEFUL = {
    "absolute positions": lambda: hf.OPTConfig(**OPT, word_embed_proj_dim=32, max_position_embeddings=64),
    "alibi": ROWS_APART["bloom"],
    "state space": lambda: hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=7, state_size=4),
    "convolution": ROWS_APART["lfm2"],
    "linear attention": lambda: hf.Qwen3_5TextConfig(**tiny_sizes(), **HEAD_DIM, **LINEAR),
    "recurrent": lambda: hf.RecurrentGemmaConfig(**tiny_sizes(), **HEAD_DIM, lru_width=32, attention_window_size=4),
    "token shift": lambda: hf.RwkvConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=7, attention_hidden_size=32, context_length=64
    ),
    "mask without positions": lambda: hf.GptOssConfig(
        **tiny_sizes(max_position_embeddings=8192), **HEAD_DIM, sliding_window=4, num_local_experts=4
    ),
    "chunks of a row": lambda: hf.Llama4TextConfig(
        **tiny_sizes(), **HEAD_DIM, attention_chunk_size=4, num_local_experts=4, intermediate_size_mlp=48
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_a_target_whose_documents_would_leak_is_not_packed_however_weak_its_weights(kind: str, scale: float):
    model = tiny_model(STATEFUL[kind]())
    for parameter in model.parameters():
        parameter.data.mul_(scale if parameter.ndim > 1 else 1.0)
    target = HFEagle3TargetModel(model, AUX)
    ids, mask = rows(LONG, SHORT)
    target.generate_batch(ids, mask, mask)
    with pytest.raises(TargetMismatch, match="the target lets packed documents see each other; feed without packing"):
        target.generate_batch(**packed(SHORT, SHORT))


def test_a_document_at_the_positions_of_its_row_is_not_isolated_though_it_sees_nothing_else():
    def by_place(ids: Tensor, _positions: Tensor | None) -> Tensor:
        return (ids + 10.0 * torch.arange(ids.shape[1]))[..., None].expand(-1, -1, 3)

    def by_position(ids: Tensor, positions: Tensor | None) -> Tensor:
        places = torch.arange(ids.shape[1]) if positions is None else positions
        return (ids + 10.0 * places)[..., None].expand(-1, -1, 3)

    assert isolates_documents(by_position, 64, torch.device("cpu"))
    assert not isolates_documents(by_place, 64, torch.device("cpu"))
    assert not looks_ahead(by_place, 64, torch.device("cpu"))
    assert looks_ahead(lambda ids, _: by_position(ids.flip(1).cumsum(1).flip(1), None), 64, torch.device("cpu"))
