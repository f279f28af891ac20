"""A target's parts and fingerprint, read from its checkpoint without loading it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eaglefeed.errors import ConfigError, TargetUnavailable
from eaglefeed.producer.checkpoint import Checkpoint
from eaglefeed.producer.loading import load_target, target_fingerprint
from eaglefeed.producer.opening import open_target
from eaglefeed.producer.parts import TargetParts
from eaglefeed.producer.target import HFEagle3TargetModel
from tiny_target import LAYOUTS, tiny_model, tiny_sizes

IDS = torch.tensor([[5, 9, 33, 2, 60, 7, 7, 1, 12]])
PACKED_IN_LOADING = ("qwen3_moe",)


@pytest.fixture(params=LAYOUTS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any, str]:
    torch.set_num_threads(1)
    model = tiny_model(LAYOUTS[request.param]())
    model.save_pretrained(tmp_path)
    return request.param, model, str(tmp_path)


def test_the_parts_are_the_models_own(saved: tuple[str, Any, str]):
    _, model, folder = saved
    parts, own = Checkpoint(folder, dtype="float32").parts("cpu"), TargetParts.of_model(model)
    (tensors, metadata), (wanted, wanted_metadata) = parts.assets(), own.assets()
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)
    assert {name: metadata[name] for name in metadata if name != "config"} == {
        name: wanted_metadata[name] for name in wanted_metadata if name != "config"
    }
    assert json.loads(metadata["config"])["model_type"] == model.config.model_type
    assert parts.head_digest() == own.head_digest()
    with torch.no_grad():
        last = model.base_model(IDS).last_hidden_state
        torch.testing.assert_close(parts.logits(last), model(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_fingerprint_is_the_loaded_models(saved: tuple[str, Any, str], dtype: str):
    layout, _, folder = saved
    found = Checkpoint(folder, dtype=dtype).fingerprint()
    assert found == Checkpoint(folder, dtype=dtype).fingerprint()
    assert (found == target_fingerprint(load_target(folder, dtype=dtype))) == (layout not in PACKED_IN_LOADING)


def test_the_fingerprint_is_of_every_weight(tmp_path: Path):
    model = tiny_model(LAYOUTS["llama"]())
    model.save_pretrained(tmp_path / "one")
    model.model.layers[3].mlp.up_proj.weight.data[0, 0] += 1
    model.save_pretrained(tmp_path / "other")
    one, other = (Checkpoint(str(tmp_path / name), dtype="float32").fingerprint() for name in ("one", "other"))
    assert one != other


def test_a_checkpoint_of_several_files_is_read(tmp_path: Path):
    model = tiny_model(LAYOUTS["llama"]())
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    checkpoint = Checkpoint(str(tmp_path), dtype="float32")
    assert torch.equal(checkpoint.parts("cpu").head.weight, model.lm_head.weight)
    assert checkpoint.fingerprint() == target_fingerprint(model)


def test_a_tied_head_shares_its_memory(tmp_path: Path):
    import transformers as hf

    tiny_model(hf.LlamaConfig(**tiny_sizes(tie_word_embeddings=True))).save_pretrained(tmp_path)
    parts = Checkpoint(str(tmp_path), dtype="bfloat16").parts("cpu")
    assert parts.head.weight is parts.embed_tokens.weight
    assert (parts.head.weight.dtype, parts.head.weight.requires_grad) == (torch.bfloat16, False)


def test_the_last_layer_alone_gives_the_models_last_states(tmp_path: Path):
    for layout in ("llama", "qwen2", "mistral", "granite"):
        model = tiny_model(LAYOUTS[layout]())
        model.save_pretrained(tmp_path / layout)
        last_layer = Checkpoint(str(tmp_path / layout), dtype="float32").last_layer("cpu")
        own = HFEagle3TargetModel(model, (0, 5, 6)).capture(IDS, torch.ones_like(IDS), torch.ones_like(IDS))
        _, entering, leaving = own.aux[0].split(32, -1)
        output, last = last_layer(entering)
        torch.testing.assert_close(output, leaving, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(last, own.last[0], rtol=1e-4, atol=1e-4)


def test_the_last_layer_alone_is_what_the_configuration_says_of_the_last_one(tmp_path: Path):
    import transformers as hf

    model = tiny_model(hf.SmolLM3Config(**tiny_sizes(no_rope_layers=[1, 1, 1, 1, 1, 1, 0])))
    model.save_pretrained(tmp_path)
    own = HFEagle3TargetModel(model, (0, 5, 6)).capture(IDS, torch.ones_like(IDS), torch.ones_like(IDS))
    _, entering, leaving = own.aux[0].split(32, -1)
    output, last = Checkpoint(str(tmp_path), dtype="float32").last_layer("cpu")(entering)
    torch.testing.assert_close(output, leaving, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, own.last[0], rtol=1e-4, atol=1e-4)


def test_a_model_that_embeds_positions_has_no_last_layer_alone(tmp_path: Path):
    tiny_model(LAYOUTS["gpt2"]()).save_pretrained(tmp_path)
    with pytest.raises(TargetUnavailable, match="embeds more than tokens"):
        Checkpoint(str(tmp_path), dtype="float32").last_layer("cpu")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "no safetensors files in its checkpoint"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"{}"), "cannot be loaded"),
        (lambda folder: (folder / "config.json").write_text("{}"), "cannot be loaded"),
        (lambda folder: rename(folder, "lm_head.weight"), r"holds no lm_head\.weight"),
        (lambda folder: rename(folder, "model.norm.weight"), r"holds no model\.norm\.weight"),
        (lambda folder: resize(folder), "another shape than its configuration says"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_says_what_is_wrong(tmp_path: Path, damage: Any, message: str):
    tiny_model(LAYOUTS["llama"]()).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(TargetUnavailable, match=message):
        Checkpoint(str(tmp_path), dtype="float32").parts("cpu")


def rename(folder: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors[f"{name}.old"] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")


def resize(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:60].contiguous()
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "trt"}, "no such engine, wanted hf, vllm, sglang, got trt"),
        ({"tp_size": 2}, r"the engine hf runs on one device, got 2; use target\.engine=vllm or sglang"),
        ({"engine_url": "http://127.0.0.1:1"}, "only vllm runs elsewhere"),
        ({"engine": "sglang"}, r"SGLang is not installed.*pip install 'sglang>=0\.5\.23,<0\.6'"),
    ],
)
def test_settings_that_do_not_fit_together_say_what_to_do(tmp_path: Path, options: dict[str, Any], message: str):
    tiny_model(LAYOUTS["llama"]()).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        open_target(str(tmp_path), **options)


def test_hf_is_opened_as_it_always_was(tmp_path: Path):
    tiny_model(LAYOUTS["llama"]()).save_pretrained(tmp_path)
    target = open_target(str(tmp_path), aux_layer_ids=(4, 0, 2), compact=True, num_threads=1)
    assert isinstance(target, HFEagle3TargetModel)
    assert (target.engine, target.aux_layer_ids, target.dtype) == ("hf", (4, 0, 2), "float32")
    assert target.fingerprint() == target_fingerprint(target.model)
    target.close()
