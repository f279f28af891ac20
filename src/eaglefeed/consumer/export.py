"""Export a draft in the form that vLLM and SGLang load as EAGLE-3, and check what they would misread in silence."""

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.draft_config import DraftConfig
from eaglefeed.consumer.files import read_safetensors, sync_folder, translated, write_safetensors, write_whole
from eaglefeed.errors import ConfigError, SchemaError
from eaglefeed.schema.eagle3 import default_aux_layer_ids

__all__ = ["ARCHITECTURE", "LAYER_IDS_KEY", "export_draft", "verify_export"]

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
"""vLLM's key. Its ids name the *input* of a layer: our output of layer j is its j + 1."""

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_FREE = {
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "draft_vocab_size",
    "max_position_embeddings",
    "torch_dtype",
}
"""What the target does not decide; shapes and length are checked apart."""


def export_draft(
    draft: Eagle3Draft,
    folder: Path,
    *,
    target_config: Mapping[str, Any],
    aux_layer_ids: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a folder that a server loads; it appears whole or not at all, and is read again and verified.

    Args:
        draft: its t2d is the vocabulary map.
        folder: new or empty.
        target_config: the target's parsed config.json.
        aux_layer_ids: 0-based decoder layers whose outputs the draft was trained on.
        dtype: of the weights, bfloat16 or float32.

    Raises:
        ConfigError: the folder holds something.
        StorageError: (StoreFull without room) nothing is left behind.
        SchemaError: the draft does not fit the target.
    """
    with translated(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError("not empty", subject=str(folder), fix="pass a new folder")
        temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
        temporary.mkdir(parents=True)
    try:
        write_safetensors(temporary / _WEIGHTS, _tensors(draft, dtype), {"format": "pt"})
        config = _config(draft.config, target_config, aux_layer_ids, dtype)
        write_whole(temporary / _CONFIG, json.dumps(config, indent=2).encode())
        verify_export(temporary, target_config=target_config, aux_layer_ids=aux_layer_ids)
        with translated(folder):
            temporary.replace(folder)
            sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def verify_export(folder: Path, *, target_config: Mapping[str, Any], aux_layer_ids: Sequence[int]) -> None:
    """Read an export as a server would, and check each thing that a server takes wrongly without a word.

    Raises:
        SchemaError: the first fault.
        StorageError: a file is missing or unreadable.
    """
    tensors, _ = read_safetensors(folder / _WEIGHTS)
    with translated(folder / _CONFIG):
        text = (folder / _CONFIG).read_text(encoding="utf-8")
    try:
        config = json.loads(text)
    except ValueError as error:
        raise SchemaError("not JSON", subject=str(folder / _CONFIG), got=str(error)) from None
    if not isinstance(config, dict):
        raise SchemaError("not a draft's config.json", subject=str(folder / _CONFIG), got=type(config).__name__)
    _check_config(config, target_config, aux_layer_ids)
    shapes = _wanted_shapes(config)
    for name in [*shapes, *tensors]:
        wanted, got = shapes.get(name), list(tensors[name].shape) if name in tensors else None
        if wanted != got:
            fix = "" if wanted else "servers would use it in place of what they have: export again"
            raise SchemaError("wrong tensor", subject=name, wanted=wanted or "none", got=got or "none", fix=fix)
        if not tensors[name].isfinite().all():
            raise SchemaError("not finite", subject=name, fix="take an earlier checkpoint: nothing would be accepted")
    if "d2t" in shapes:
        _check_vocabulary(tensors["d2t"], tensors["t2d"])


def _tensors(draft: Eagle3Draft, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights by the servers' names, which are the draft's; with D = V the map stays out."""
    tensors = {name: tensor.to(dtype) for name, tensor in draft.state_dict().items()}
    if draft.config.draft_vocab_size < draft.config.vocab_size:
        selected = draft.t2d.nonzero()[:, 0]
        tensors |= {"d2t": selected - torch.arange(len(selected), device=selected.device), "t2d": draft.t2d}
    return tensors


def _config(
    config: DraftConfig, target_config: Mapping[str, Any], aux_layer_ids: Sequence[int], dtype: torch.dtype
) -> dict[str, Any]:
    layer_ids = _server_layer_ids(target_config, aux_layer_ids)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **({} if layer_ids is None else {LAYER_IDS_KEY: layer_ids}),
    }


def _server_layer_ids(target_config: Mapping[str, Any], aux_layer_ids: Sequence[int]) -> list[int] | None:
    """The ids as servers count them; None for the default, which they take by themselves."""
    text_config = target_config.get("text_config") or target_config
    num_layers = next(
        text_config[name] for name in ("num_hidden_layers", "n_layer", "n_layers") if text_config.get(name)
    )
    try:
        default = default_aux_layer_ids(num_layers)
    except SchemaError:  # a target too shallow to have one
        default = None
    return None if tuple(aux_layer_ids) == default else [layer + 1 for layer in aux_layer_ids]


def _check_config(config: Mapping[str, Any], target_config: Mapping[str, Any], aux_layer_ids: Sequence[int]) -> None:
    target = DraftConfig.from_target_config(target_config, draft_vocab_size=1)
    wanted = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "hidden_size": target.hidden_size,
        # The shapes hold heads and head_dim only as a product.
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": target.vocab_size,
        # Servers fall back to 10000 without it, and accept fewer tokens.
        "rope_theta": target.rope_theta,
        "tie_word_embeddings": False,
        LAYER_IDS_KEY: _server_layer_ids(target_config, aux_layer_ids),
    }
    for name, value in wanted.items():
        if config.get(name) != value:
            raise SchemaError(
                "wrong value in the draft's config.json", subject=name, wanted=value, got=config.get(name)
            )
    for name in config.keys() - wanted.keys() - _FREE:
        what, fix = "unknown in the draft's config.json", "servers may act on it: export again"
        raise SchemaError(what, subject=name, wanted="none", got=config[name], fix=fix)
    # Below the length that is served, nothing is accepted.
    longest = config.get("max_position_embeddings")
    if not isinstance(longest, int) or longest < target.max_position_embeddings:
        wanted_length = f"at least the target's {target.max_position_embeddings}"
        raise SchemaError("too short a draft", subject="max_position_embeddings", wanted=wanted_length, got=longest)


def _wanted_shapes(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Every tensor of an export and its shape, written down here apart from the draft's own code."""
    try:
        hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
        size = config["draft_vocab_size"]
        mapped = {"d2t": [size], "t2d": [vocab]} if size < vocab else {}
    except (KeyError, TypeError) as error:
        raise SchemaError("missing or wrong in the draft's config.json", subject=str(error.args[0])) from None
    shapes = {
        "fc.weight": [hidden, 3 * hidden],
        "lm_head.weight": [size, hidden],
        "norm.weight": [hidden],
        "midlayer.hidden_norm.weight": [hidden],
        "midlayer.input_layernorm.weight": [hidden],
        "midlayer.post_attention_layernorm.weight": [hidden],
        "midlayer.self_attn.q_proj.weight": [q, 2 * hidden],
        "midlayer.self_attn.k_proj.weight": [kv, 2 * hidden],
        "midlayer.self_attn.v_proj.weight": [kv, 2 * hidden],
        "midlayer.self_attn.o_proj.weight": [hidden, q],
        "midlayer.mlp.gate_proj.weight": [inner, hidden],
        "midlayer.mlp.up_proj.weight": [inner, hidden],
        "midlayer.mlp.down_proj.weight": [hidden, inner],
    }
    return shapes | mapped


def _check_vocabulary(d2t: Tensor, t2d: Tensor) -> None:
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        raise SchemaError("wrong dtype", subject="d2t, t2d", wanted="int64, bool", got=f"{d2t.dtype}, {t2d.dtype}")
    ids, selected = torch.arange(len(d2t)) + d2t, t2d.nonzero()[:, 0]
    if not torch.equal(ids, selected):
        fix = "d2t holds offsets: target_id = draft_id + d2t[draft_id]"
        raise SchemaError(
            "d2t does not lead to the ids of t2d",
            subject="d2t",
            wanted=selected[-3:].tolist(),
            got=ids[-3:].tolist(),
            fix=fix,
        )
