"""The export: what servers load, and each thing that they would take wrongly without a word."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.draft_config import DraftConfig
from eaglefeed.consumer.export import export_draft, verify_export
from eaglefeed.errors import ConfigError, SchemaError, StorageError

V, H, L = 12, 8, 16
DEFAULT_IDS = (1, 7, 12)
TARGET = {
    "hidden_size": H,
    "intermediate_size": 20,
    "num_hidden_layers": L,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 12345.0,
    "max_position_embeddings": 77,
    "vocab_size": V,
}
SELECTED = [1, 4, 5, 9]


def make_draft(draft_vocab_size: int = len(SELECTED)) -> Eagle3Draft:
    draft = Eagle3Draft(DraftConfig.from_target_config(TARGET, draft_vocab_size=draft_vocab_size))
    draft.t2d.fill_(value=draft_vocab_size == V)
    draft.t2d[SELECTED] = True
    return draft


def export(folder: Path, **changes: Any) -> Path:
    arguments = {"target_config": TARGET, "aux_layer_ids": DEFAULT_IDS, "dtype": torch.float32}
    return export_draft(make_draft(), folder, **(arguments | changes))


def verify(folder: Path) -> None:
    verify_export(folder, target_config=TARGET, aux_layer_ids=DEFAULT_IDS)


def test_the_weights_have_the_servers_names_and_shapes(tmp_path: Path) -> None:
    tensors = load_file(export(tmp_path / "draft") / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": [8, 24],
        "lm_head.weight": [4, 8],
        "norm.weight": [8],
        "midlayer.hidden_norm.weight": [8],
        "midlayer.input_layernorm.weight": [8],
        "midlayer.post_attention_layernorm.weight": [8],
        "midlayer.self_attn.q_proj.weight": [8, 16],
        "midlayer.self_attn.k_proj.weight": [4, 16],
        "midlayer.self_attn.v_proj.weight": [4, 16],
        "midlayer.self_attn.o_proj.weight": [8, 8],
        "midlayer.mlp.gate_proj.weight": [20, 8],
        "midlayer.mlp.up_proj.weight": [20, 8],
        "midlayer.mlp.down_proj.weight": [8, 20],
        "d2t": [4],
        "t2d": [12],
    }
    assert (tensors["d2t"].dtype, tensors["d2t"].tolist()) == (torch.int64, [1, 3, 3, 6])
    assert (tensors["t2d"].dtype, tensors["t2d"].nonzero()[:, 0].tolist()) == (torch.bool, SELECTED)
    assert torch.equal(tensors["fc.weight"], make_draft().fc.weight)


def test_the_config_is_the_one_that_servers_read(tmp_path: Path) -> None:
    folder = export(tmp_path / "draft", dtype=torch.bfloat16)
    assert json.loads((folder / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 8,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 12345.0,
        "max_position_embeddings": 77,
        "vocab_size": 12,
        "draft_vocab_size": 4,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    assert load_file(folder / "model.safetensors")["norm.weight"].dtype == torch.bfloat16


def test_other_aux_layers_are_written_as_the_inputs_that_servers_count(tmp_path: Path) -> None:
    config = json.loads((export(tmp_path / "draft", aux_layer_ids=(0, 7, 15)) / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 8, 16]


def test_a_full_vocabulary_is_exported_without_a_map(tmp_path: Path) -> None:
    folder = export_draft(make_draft(V), tmp_path / "draft", target_config=TARGET, aux_layer_ids=DEFAULT_IDS)
    assert not {"d2t", "t2d"} & set(load_file(folder / "model.safetensors"))


def test_an_empty_folder_is_filled_and_a_full_one_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    export(tmp_path / "empty")
    with pytest.raises(ConfigError, match="not empty"):
        export(tmp_path / "empty")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_draft_of_another_target_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="rope_theta"):
        export(tmp_path / "draft", target_config=TARGET | {"rope_theta": 10000.0})
    assert list(tmp_path.iterdir()) == []


def change_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        kept = {name: value for name, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def change_tensors(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors") | changes
        save_file(
            {name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors"
        )

    return change


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (change_config(rope_theta=None), "rope_theta"),
        (change_config(rope_theta=10000.0), r"rope_theta.*12345.*10000"),
        (change_config(rope_scaling={"rope_type": "linear", "factor": 2.0}), "rope_scaling: unknown"),
        (change_config(norm_before_residual=True), "norm_before_residual: unknown"),
        (change_config(num_attention_heads=4, num_key_value_heads=2, head_dim=2), r"head_dim.*4.*2"),
        (change_config(rms_norm_eps=None), "rms_norm_eps"),
        (change_config(num_attention_heads=None), "num_attention_heads"),
        (change_config(intermediate_size="20"), r"gate_proj\.weight: wrong tensor"),
        (change_config(draft_vocab_size="4"), "missing or wrong"),
        (change_config(draft_vocab_size=V), "wrong tensor"),
        (change_config(max_position_embeddings=76), "max_position_embeddings: too short a draft"),
        (change_config(max_position_embeddings=None), "max_position_embeddings"),
        (change_config(max_position_embeddings="77"), "max_position_embeddings"),
        (change_config(tie_word_embeddings=True), "tie_word_embeddings"),
        (change_config(architectures=["LlamaForCausalLM"]), "architectures"),
        (change_config(draft_vocab_size=None), "draft_vocab_size"),
        (change_config(eagle_aux_hidden_state_layer_ids=[1, 7, 12]), "eagle_aux_hidden_state_layer_ids"),
        (change_config(eagle_aux_hidden_state_layer_ids=[3, 9, 14]), "eagle_aux_hidden_state_layer_ids"),
        (change_tensors(d2t=None), "d2t: wrong tensor"),
        (change_tensors(t2d=None), "t2d: wrong tensor"),
        (change_tensors(**{"lm_head.weight": None}), r"lm_head\.weight: wrong tensor"),
        (change_tensors(**{"lm_head.weight": torch.zeros(12, 8)}), r"lm_head\.weight: wrong tensor"),
        (change_tensors(**{"embed_tokens.weight": torch.zeros(12, 8)}), r"embed_tokens\.weight: wrong tensor"),
        (change_tensors(**{"norm.weight": torch.tensor([1.0] * 7 + [torch.nan])}), r"norm\.weight: not finite"),
        (change_tensors(d2t=torch.tensor(SELECTED)), "d2t holds offsets"),
        (change_tensors(d2t=torch.zeros(4, dtype=torch.int64)), "d2t does not lead"),
        (change_tensors(d2t=torch.tensor([1, 3, 3, 6], dtype=torch.int32)), "wrong dtype"),
    ],
)
def test_every_silent_trap_is_found(tmp_path: Path, change: Callable[[Path], None], fault: str) -> None:
    folder = export(tmp_path / "draft")
    verify(folder)
    change(folder)
    with pytest.raises(SchemaError, match=fault):
        verify(folder)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = export(tmp_path / "draft")
    (folder / "config.json").unlink()
    with pytest.raises(StorageError, match=r"config\.json"):
        verify(folder)


@pytest.mark.parametrize("written", [(0, 7, 15), (2, 9, 17), None])
def test_layer_ids_that_are_off_by_one_or_left_to_the_server_are_found(tmp_path: Path, written: list[int]) -> None:
    folder = export(tmp_path / "draft", aux_layer_ids=(0, 7, 15))
    change_config(eagle_aux_hidden_state_layer_ids=written)(folder)
    with pytest.raises(SchemaError, match=r"eagle_aux_hidden_state_layer_ids.*\[1, 8, 16\]"):
        verify_export(folder, target_config=TARGET, aux_layer_ids=(0, 7, 15))


@pytest.mark.parametrize("name", ["d2t", "t2d"])
def test_a_map_beside_a_full_vocabulary_is_found(tmp_path: Path, name: str) -> None:
    folder = export_draft(make_draft(V), tmp_path / "draft", target_config=TARGET, aux_layer_ids=DEFAULT_IDS)
    change_tensors(**{name: torch.zeros(V, dtype=torch.bool if name == "t2d" else torch.int64)})(folder)
    with pytest.raises(SchemaError, match=f"{name}: wrong tensor"):
        verify(folder)


def test_weights_that_are_not_finite_are_never_exported(tmp_path: Path) -> None:
    draft = make_draft()
    with torch.no_grad():
        draft.fc.weight[0, 0] = torch.inf
    with pytest.raises(SchemaError, match=r"fc\.weight: not finite"):
        export_draft(draft, tmp_path / "draft", target_config=TARGET, aux_layer_ids=DEFAULT_IDS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["[]", "{"])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    folder = export(tmp_path / "draft")
    (folder / "config.json").write_text(text)
    with pytest.raises(SchemaError, match=r"config\.json"):
        verify(folder)
