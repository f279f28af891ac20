"""The doctor's look at targets: configuration, template, mask, vocabulary map, engines and target servers."""

from pathlib import Path

import pytest
import torch

import target_servers
from commands import Shell, save_tiny_target
from doctors import found, only
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.vocab import VocabMapping
from tiny_target import CHATML, FORGETS_THINKING, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    small = ["feed.max_length=128", "draft.vocab_size=259", "queue.high_bytes=67108864"]
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", *small)


def save_target(folder: Path, template: str | None) -> Path:
    tiny_model().save_pretrained(folder)
    tiny_tokenizer(template).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("template", "check", "status", "words"),
    [
        (None, "target.template", "fail", "no chat template"),
        ("{{ raise_exception('no such thing') }}", "target.mask", "fail", "no such thing"),
        (CHATML.replace("m['content']", "m['content'] | upper"), "target.mask", "warn", "not on 'It is Paris.'"),
        (
            CHATML.replace("m['content']", "(m['content'] if loop.last or m['role'] == 'user' else '')"),
            "target.mask",
            "warn",
            "not on 'It is Paris.'",
        ),
    ],
    ids=["none", "raises", "rewrites", "forgets"],
)
def test_a_template_that_breaks_the_mask_is_told(
    shell: Shell, tmp_path: Path, template: str | None, check: str, status: str, words: str
) -> None:
    folder = save_target(tmp_path / "broken", template)
    ended = shell.run(*only("target"), f"target.name={folder}")
    finding = found(ended, check)
    assert finding["status"] == status, finding
    assert words in finding["what"]
    assert finding["fix"]


def test_the_probe_shows_which_words_are_trained_on(shell: Shell, tmp_path: Path) -> None:
    folder = save_target(tmp_path / "thinks", FORGETS_THINKING)
    what = found(shell.run(*only("target"), f"target.name={folder}"), "target.mask")["what"]
    assert "'It is Paris.<|im_end|>', 'It is Madrid.<|im_end|>'" in what


@pytest.mark.parametrize(
    ("overrides", "check", "status", "words"),
    [
        (["target.name=./nowhere"], "target.config", "fail", "no such folder"),
        (["target.aux_layer_ids=1,2,9"], "target.layers", "fail", "impossible aux_layer_ids"),
        (["feed.max_length=512"], "target.config", "warn", "takes 256 positions"),
        (["produce.vocab=other.safetensors"], "target.vocab", "fail", "another target's"),
        (["produce.vocab=missing.safetensors"], "target.vocab", "fail", "no vocabulary map can be read"),
        (["produce.vocab=a.safetensors"], "target.vocab", "ok", "a.safetensors: 5 of the target's 259 tokens"),
        (["produce.vocab=a.safetensors", "draft.vocab=b.safetensors"], "target.vocab", "fail", "different maps"),
        (["produce.supervision=target_probs"], "target.vocab", "fail", "need a vocabulary map"),
        (["produce.supervision=last_hidden_states"], "target.sizes", "ok", "this run: last_hidden_states"),
        (["target.engine=sglang"], "target.engine", "fail", "SGLang is not installed"),
        (["target.engine=vllm"], "target.engine", "fail", "vLLM is not installed"),
        (
            ["target.engine=vllm", "target.engine_url=http://127.0.0.1:9"],
            "target.engine",
            "fail",
            "no answer to /health",
        ),
        (["train.remote_urls=http://127.0.0.1:9"], "target.server", "fail", "no answer to /ready"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_target_that_the_run_cannot_use_is_told(
    shell: Shell, tmp_path: Path, overrides: list[str], check: str, status: str, words: str
) -> None:
    for name, num_tokens, vocab_size in (("other", 5, 64), ("a", 5, 259), ("b", 6, 259)):
        VocabMapping.from_ids(torch.arange(num_tokens), vocab_size=vocab_size).save(tmp_path / f"{name}.safetensors")
    ended = shell.run(*only("target"), *overrides)
    finding = found(ended, check)
    assert (finding["status"], words in finding["what"]) == (status, True), finding
    assert ended.code == (3 if status == "fail" else 0)


def test_a_gguf_that_no_command_has_converted_yet_is_not_converted_by_a_look(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    ended = shell.run(*only("target"), f"target.name={tmp_path}/x.gguf", f"target.cache_dir={tmp_path}/cache")
    assert (ended.code, found(ended, "target.config")["status"]) == (0, "skipped")
    assert not (tmp_path / "cache").exists()


def test_a_target_server_is_asked_with_its_token(shell: Shell, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-that-is-long-enough")
    token.chmod(0o600)
    with target_servers.serving(HFEagle3TargetModel(tiny_model()), token=token.read_text()) as server:
        url = f"train.remote_urls={server.url}"
        served = found(shell.run(*only("target"), url, f"access.token_file={token}"), "target.server")
        assert served["status"] == "ok", served
        assert "serves test with hf in float32" in served["what"]
        assert found(shell.run(*only("target"), url), "target.server")["status"] == "fail"
