"""What kinds of models are targets, which are refused and why, and what their configurations are read for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from eaglefeed.consumer.decoding import aux_outputs
from eaglefeed.errors import SchemaError, TargetMismatch
from eaglefeed.producer.configuration import check_kind, longest_row, max_positions, size_of
from eaglefeed.producer.engine import checked_layer_ids
from eaglefeed.producer.target import HFEagle3TargetModel
from tiny_target import tiny_model, tiny_sizes

torch.set_num_threads(1)

AUX = (4, 0, 2)
OLD = {"vocab_size": 64, "n_embd": 32, "n_layer": 7, "n_head": 4, "n_positions": 64}
OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 7, "num_attention_heads": 4, "vocab_size": 64}
BERT = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
BERT |= {"num_hidden_layers": 7, "intermediate_size": 48}


def llama(**changes: Any) -> Any:
    return tiny_model(hf.LlamaConfig(**tiny_sizes(**changes)))


@pytest.mark.filterwarnings("ignore")
def test_a_model_whose_states_see_what_comes_after_is_refused():
    with pytest.raises(TargetMismatch, match="BertLMHeadModel: its states see the tokens behind them"):
        HFEagle3TargetModel(tiny_model(hf.BertConfig(**BERT)), AUX)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (hf.T5Config(), "an encoder-decoder, .* got t5"),
        (hf.BartConfig(), "an encoder-decoder, .* got bart"),
        (SimpleNamespace(get_text_config=lambda **_: SimpleNamespace()), "lacks a size, wanted num_hidden_layers"),
        (hf.PreTrainedConfig(num_hidden_layers=3, hidden_size=4), "lacks a size, wanted vocab_size"),
    ],
)
def test_what_is_no_decoder_is_refused_by_its_configuration_alone(config: Any, said: str):
    with pytest.raises(TargetMismatch, match="^t: .*" + said):
        check_kind(config, "t")


def test_embeddings_of_another_width_than_the_states_are_refused_since_the_draft_shares_them():
    config = hf.OPTConfig(**OPT, word_embed_proj_dim=16, max_position_embeddings=64)
    with pytest.raises(TargetMismatch, match="another width than its states, wanted 32, got 16"):
        HFEagle3TargetModel(tiny_model(config), AUX)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (lambda states: torch.stack([states] * 4), "its layers give other states than one a token, wanted .* got"),
        (lambda states: {"states": states}, "no states come out of its layers, got .*Error"),
    ],
)
def test_layers_that_give_anything_but_one_state_a_token_are_refused(output: Any, said: str):
    model = llama()
    for index, layer in enumerate(model.model.layers):  # the next one takes what it is used to
        layer.register_forward_hook(lambda _module, _args, states: output(states))
        if index:
            layer.register_forward_pre_hook(
                lambda _module, args: (
                    (next(iter(args[0].values())), *args[1:]) if isinstance(args[0], dict) else (args[0][0], *args[1:])
                )
            )
    with pytest.raises(TargetMismatch, match=said):
        HFEagle3TargetModel(model, AUX)


def test_the_dtype_is_that_of_the_states_though_the_weights_have_another():
    model = llama().to(torch.bfloat16)
    for layer in model.model.layers:  # as of models that keep their residual in float32
        layer.register_forward_pre_hook(lambda _module, args: (args[0].to(torch.bfloat16), *args[1:]))
        layer.register_forward_hook(lambda _module, _args, output: output.float())
    model.model.norm.register_forward_pre_hook(lambda _module, args: (args[0].to(torch.bfloat16),))
    target, ids = HFEagle3TargetModel(model, AUX), torch.tensor([[5, 9, 33]])
    batch = target.generate_batch(ids, torch.ones_like(ids), torch.ones_like(ids))
    assert (target.dtype, batch.aux_hidden_states.dtype) == ("float32", torch.float32)


@pytest.mark.parametrize("slice_of", ["head", "output"])
def test_logits_of_a_part_of_the_vocabulary_are_refused(slice_of: str):
    model = llama(vocab_size=16)
    if slice_of == "head":  # as one of two processes that share it holds it
        model.lm_head.weight = nn.Parameter(model.lm_head.weight[:8].clone())
    else:
        model.lm_head.register_forward_hook(lambda _module, _args, output: output[..., :8])
    with pytest.raises(TargetMismatch, match=r"logits are of a part of its vocabulary.*wanted 16, got 8; gather them"):
        HFEagle3TargetModel(model, AUX)


# sizes and bounds


@pytest.mark.parametrize(
    ("config", "layers", "positions"),
    [
        (hf.GPT2Config(**OLD), 7, 64),
        (hf.MptConfig(vocab_size=64, d_model=32, n_layers=7, n_heads=4, max_seq_len=48), 7, 48),
        (hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=7, n_head=4, seq_length=40), 7, 40),
        (hf.Gemma3Config(text_config=tiny_sizes(max_position_embeddings=99)).text_config, 7, 99),
        (hf.MambaConfig(num_hidden_layers=7, hidden_size=32, vocab_size=64), 7, None),
        (SimpleNamespace(num_layers=7, hidden_size=32, padded_vocab_size=64, seq_length=77), 7, 77),
        (SimpleNamespace(n_layer=7, n_embd=32, vocab_size=64, max_position_embeddings=-1), 7, None),
    ],
)
def test_sizes_have_many_names(config: Any, layers: int, positions: int | None):
    sizes = [size_of(config, name) for name in ("num_hidden_layers", "hidden_size", "vocab_size")]
    assert (sizes, max_positions(config)) == ([layers, 32, 64], positions)


def test_an_engine_that_generates_keeps_some_of_the_positions():
    assert [longest_row(32, engine) for engine in ("hf", "vllm", "sglang")] == [32, 32, 24]
    assert longest_row(None, "sglang") is None


NO_LAYERS = [
    (1.0, 2, 3),
    ("1", "2", "3"),
    (True, 2, 3),
    ((1,), 2, 3),
    (),
    (2, 4, 5, 8),
    (2, 4, 8),
    (-1, 2, 4),
    (2, 2, 4),
]


@pytest.mark.parametrize("ids", NO_LAYERS)
def test_whatever_is_no_layer_is_refused_with_the_range(ids: tuple[Any, ...]):
    with pytest.raises(SchemaError, match=r"impossible aux_layer_ids, got .* from 0 to 7; they mean"):
        checked_layer_ids(ids, 8)


def test_layers_are_the_language_models_where_what_sees_images_has_as_many():
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 7, "num_attention_heads": 2}
    text, vision = tiny_sizes(head_dim=8), vision | {"image_size": 28, "patch_size": 14}
    model, ids = tiny_model(hf.Gemma3Config(text_config=text, vision_config=vision)), torch.tensor([[5, 9, 33]])
    target = HFEagle3TargetModel(model, AUX)
    ones = torch.ones_like(ids)
    produced = target.generate_batch(ids, ones, ones).aux_hidden_states
    with torch.no_grad(), aux_outputs(model, AUX) as evaluated:
        model(input_ids=ids)
    assert (target.hidden_size, produced.shape[-1]) == (32, 96)
    torch.testing.assert_close(torch.cat([evaluated[layer] for layer in AUX], -1), produced, rtol=1e-5, atol=1e-5)


LONG = [5, 9, 33, 2, 60, 7, 7, 1, 12]


def test_ids_keep_the_order_they_were_given_in():
    model = llama(num_hidden_layers=8)
    given = HFEagle3TargetModel(model, (7, 0, 3))
    with torch.no_grad():
        states = model.model(torch.tensor([LONG]), output_hidden_states=True).hidden_states
        last = {}
        hook = model.model.layers[7].register_forward_hook(lambda _module, _args, output: last.update(raw=output))
        model(torch.tensor([LONG]))
        hook.remove()
    ids = torch.tensor([LONG])
    aux = given.generate_batch(ids, *[torch.ones_like(ids)] * 2).aux_hidden_states[0]
    raw = last["raw"] if isinstance(last["raw"], Tensor) else last["raw"][0]
    # Of the last layer what enters the final norm; transformers' own list has what leaves it there.
    torch.testing.assert_close(aux, torch.cat([raw[0], states[1][0], states[4][0]], -1), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(raw, states[8])
