"""VLLMEagle3TargetModel against a stand-in for the server, which answers and writes captures as the real one does."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import pipeline
from eaglefeed.errors import ConfigError, SchemaError, TargetMismatch, TargetUnavailable
from eaglefeed.producer.checkpoint import Checkpoint
from eaglefeed.producer.engines.vllm import VLLMEagle3TargetModel, captured_layers, open_vllm
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.prompt import PromptRow
from fake_vllm import FakeVLLM
from tiny_target import tiny_model, tiny_sizes

AUX = (4, 0, 2)
IDS = torch.tensor([[5, 9, 33, 2, 60, 7, 7, 1, 12], [8, 3, 50, 4, 0, 0, 0, 0, 0]])
REAL = (torch.arange(9) < torch.tensor([9, 4])[:, None]).long()
LOSS = torch.tensor([[0, 0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0, 0, 0, 0]])


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return tiny_model(hf.LlamaConfig(**tiny_sizes(max_position_embeddings=128)))


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return Checkpoint(str(folder), dtype="float32")


@pytest.fixture
def fake(model: Any, tmp_path: Path) -> Iterator[FakeVLLM]:
    with FakeVLLM(model, [1, 3, 5, 7], tmp_path) as server:
        yield server


@pytest.fixture
def opened(fake: FakeVLLM, checkpoint: Checkpoint) -> Iterator[VLLMEagle3TargetModel]:
    target = connected(fake, checkpoint)
    yield target
    target.close()
    assert list(fake.captures.glob("cmpl-*")) == []  # whatever happened in a test


def connected(fake: FakeVLLM, checkpoint: Checkpoint, **options: Any) -> VLLMEagle3TargetModel:
    options = {"device": "cpu", "compact": False, "url": fake.url, "folder": fake.captures} | options
    return open_vllm(checkpoint, AUX, **options)


def same(got: Any, wanted: Any) -> None:
    got, wanted = got.tensors(), wanted.tensors()
    assert list(got) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-4)


def test_the_ids_asked_for_are_what_enters_a_layer_each_once_and_ascending():
    assert captured_layers((4, 0, 2), 7) == (1, 3, 5, 7)
    assert captured_layers((6, 1, 2), 7) == (2, 3, 7)  # the last layer's output is what enters the final norm


def test_it_gives_what_the_model_in_this_process_gives(opened: VLLMEagle3TargetModel, model: Any):
    own = HFEagle3TargetModel(model, AUX)
    same(opened.generate_batch(IDS, REAL, LOSS), own.generate_batch(IDS, REAL, LOSS))
    for target in (opened, own):
        target.set_vocab_mapping(torch.arange(0, 64, 2), torch.arange(64) % 2 == 0)
    same(opened.generate_batch(IDS, REAL, LOSS), own.generate_batch(IDS, REAL, LOSS))
    assert (opened.num_layers, opened.hidden_size, opened.vocab_size, opened.dtype) == (7, 32, 64, "float32")
    assert (opened.engine, opened.aux_layer_ids, opened.max_positions) == ("vllm", AUX, 128)
    assert opened.fingerprint() == own.fingerprint()
    assert opened.head_digest() == own.head_digest()


def test_the_last_layers_output_is_taken_from_the_capture_that_the_norm_reads(
    model: Any, checkpoint: Checkpoint, tmp_path: Path
):
    with FakeVLLM(model, [1, 3, 7], tmp_path) as fake:
        target = open_vllm(checkpoint, (6, 0, 2), device="cpu", compact=True, url=fake.url, folder=tmp_path)
        same(
            target.generate_batch(IDS, REAL, LOSS),
            HFEagle3TargetModel(model, (6, 0, 2), compact=True).generate_batch(IDS, REAL, LOSS),
        )
        target.close()


def loud(tmp_path: Path) -> tuple[Any, Checkpoint]:
    """A target whose final norm multiplies by 1 to 5, so that it shows where it is left out or applied twice."""
    model = tiny_model(hf.LlamaConfig(**tiny_sizes(max_position_embeddings=128)))
    model.model.norm.weight.data.copy_(torch.linspace(1, 5, 32))
    model.save_pretrained(tmp_path / "loud")
    return model, Checkpoint(str(tmp_path / "loud"), dtype="float32")


def test_the_final_norm_is_applied_once(tmp_path: Path):
    model, checkpoint = loud(tmp_path)
    with FakeVLLM(model, [1, 3, 5, 7], tmp_path) as fake, closing(connected(fake, checkpoint)) as target:
        batch = target.generate_batch(IDS[:1], REAL[:1], LOSS[:1])
        assert batch.logits is not None
        with torch.no_grad():
            wanted = model(IDS[:1]).logits[:, 1:]
        assert (batch.logits[:, :-1] - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("times", [0, 2])
def test_a_final_norm_that_is_left_out_or_applied_twice_is_noticed_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
):
    model, checkpoint = loud(tmp_path)
    norm = model.model.norm
    parts = checkpoint.parts("cpu")
    wrong = replace(parts, norm=torch.nn.Sequential(*[norm] * times))
    monkeypatch.setattr(Checkpoint, "parts", lambda *_: wrong)
    with (
        FakeVLLM(model, [1, 3, 5, 7], tmp_path) as fake,
        pytest.raises(TargetMismatch, match="its log probability is not what head and final norm make of its states"),
    ):
        connected(fake, checkpoint)


def test_each_packed_document_is_a_request_of_its_own(opened: VLLMEagle3TargetModel, fake: FakeVLLM, model: Any):
    packing = {
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]]),
        "seq_lens": torch.tensor([[3, 6]]),
        "doc_remaining": torch.tensor([[2, 1, 0, 3, 2, 1, 0, 0, 0]]),
    }
    real = (torch.arange(9) < 7).long()[None]
    fake.requests.clear()
    got = opened.generate_batch(IDS[:1], real, LOSS[:1], **packing)
    same(got, HFEagle3TargetModel(model, AUX).generate_batch(IDS[:1], real, LOSS[:1], **packing))
    assert sorted(request["prompt"] for request in fake.requests) == [[2, 60, 7, 7], [5, 9, 33]]


def test_eight_rows_at_once_keep_their_own_states(opened: VLLMEagle3TargetModel, fake: FakeVLLM, model: Any):
    fake.delay_s = 0.05  # the answers come long before the files
    ids = torch.arange(8 * 11).reshape(8, 11) % 64
    ones = torch.ones_like(ids)
    same(opened.generate_batch(ids, ones, ones), HFEagle3TargetModel(model, AUX).generate_batch(ids, ones, ones))


def test_a_row_as_long_as_the_models_positions_passes_and_a_longer_one_is_refused(opened: VLLMEagle3TargetModel):
    ones = torch.ones(1, 129, dtype=torch.int64)
    assert opened.generate_batch(ones[:, :128], ones[:, :128], ones[:, :128]).aux_hidden_states.shape == (1, 128, 96)
    with pytest.raises(SchemaError, match="at most 128, got 129"):
        opened.generate_batch(ones, ones, ones)


SHARED = [(7 * at) % 64 for at in range(64)]
ASKED = [SHARED + [n] * 16 for n in (1, 2, 1)]
"""Two prompts of 80 tokens that share 64, and the first once more."""


def ids_of(prompt: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([prompt])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": torch.ones_like(ids)}


def test_prompts_that_share_a_prefix_have_a_state_for_each_token(opened: VLLMEagle3TargetModel, model: Any):
    own = HFEagle3TargetModel(model, AUX)
    for prompt in ASKED:
        same(opened.generate_batch(**ids_of(prompt)), own.generate_batch(**ids_of(prompt)))


def test_an_engine_with_a_prefix_cache_that_shortens_captures_is_refused_at_the_start(
    fake: FakeVLLM, checkpoint: Checkpoint
):
    fake.caches = True
    with pytest.raises(
        TargetMismatch, match=r"prefix caching .* shortens captures\), wanted 128, got 16; .*--no-enable-"
    ):
        connected(fake, checkpoint)


def test_a_prefix_cache_that_comes_later_ends_the_producer_and_no_prompt_is_lost(
    opened: VLLMEagle3TargetModel, fake: FakeVLLM
):
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.target = opened
    run.feed(*(pipeline.prompt(at, rows=(PromptRow(tuple(ids), (1,) * 80),)) for at, ids in enumerate(ASKED)))
    fake.requests.clear()
    fake.caches = True
    with pytest.raises(TargetMismatch, match=r"prefix caching .* shortens captures\), wanted 80, got 16"):
        run.produce(own=pipeline.contract(hidden_size=32, vocab_size=64))
    assert (run.samples.stats().ready, run.prompts.stats().ready, run.prompts.stats().dead) == (1, 2, 0)


def test_a_row_longer_than_the_server_takes_never_reaches_it(fake: FakeVLLM, checkpoint: Checkpoint):
    fake.max_model_len = 33  # one of them is for the token that it generates
    target = connected(fake, checkpoint)
    fake.requests.clear()
    assert target.max_positions == 32
    target.generate_batch(**ids_of([3] * 32))
    with pytest.raises(SchemaError, match="row longer than the target's positions, wanted at most 32, got 33"):
        target.generate_batch(**ids_of([3] * 33))
    assert [len(request["prompt"]) for request in fake.requests] == [32]
    target.close()


@pytest.mark.parametrize("fault", ["no file", "cut", "no lock", "503", "429"])
def test_a_capture_that_is_lost_once_is_asked_for_again(
    opened: VLLMEagle3TargetModel, fake: FakeVLLM, model: Any, fault: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(opened._server, "revive", lambda: None)
    fake.faults = [fault]
    same(opened.generate_batch(IDS, REAL, LOSS), HFEagle3TargetModel(model, AUX).generate_batch(IDS, REAL, LOSS))
    fake.faults = [fault] * 3
    with pytest.raises(TargetUnavailable):
        opened.generate_batch(IDS[:1], REAL[:1], LOSS[:1])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("short", r"prefix caching or chunked prefill shortens captures\), wanted 9, got 1"),
        ("other tokens", "captured other tokens than it was given"),
        ("narrow", r"captured states of another target, wanted \[9, 4, 32\], got \[9, 4, 31\]"),
        ("half", "captured in another dtype"),
        ("other layers", r"captured other layers, wanted \[1, 3, 5, 7\], got \[3, 5, 7\]"),
        ("other connector", "start the engine with eaglefeed's connector"),
        ("other request", "names another request's capture"),
        ("no path", "the engine captured nothing"),
        ("400", "the engine refused the request"),
    ],
)
def test_a_wrong_capture_is_an_error_at_once(opened: VLLMEagle3TargetModel, fake: FakeVLLM, fault: str, message: str):
    fake.faults = [fault]
    with pytest.raises(TargetMismatch, match=message):
        opened.generate_batch(IDS[:1], REAL[:1], LOSS[:1])
    for left in fake.captures.glob(f"cmpl-eaglefeed-{'0' * 32}*"):  # a name that no client of ours would ask for
        left.unlink()


def test_one_failing_row_leaves_no_file_of_the_others(opened: VLLMEagle3TargetModel, fake: FakeVLLM):
    fake.delay_s = 0.1
    fake.faults = ["", "other layers"]
    ids = torch.arange(8 * 5).reshape(8, 5)
    with pytest.raises(TargetMismatch, match="captured other layers"):
        opened.generate_batch(ids, torch.ones_like(ids), torch.ones_like(ids))
    assert list(fake.captures.glob("cmpl-*")) == []


def test_orphans_are_swept_and_nothing_else(opened: VLLMEagle3TargetModel, fake: FakeVLLM):
    old, new, foreign = (fake.captures / name for name in (f"{orphan('a')}.lock", orphan("b"), "notes.safetensors"))
    for path in (old, new, foreign):
        path.touch()
    for path in (old, foreign):
        os.utime(path, (1, 1))
    assert opened._folder.sweep(600.0) == 1
    assert (old.exists(), new.exists(), foreign.exists()) == (False, True, True)
    new.unlink()


def orphan(digit: str) -> str:
    return f"cmpl-eaglefeed-{digit * 32}-0-0a1b2c3d.safetensors"


def test_a_capture_that_is_never_finished_is_given_up_in_time(opened: VLLMEagle3TargetModel, fake: FakeVLLM):
    fake.delay_s = 1.0
    started = time.monotonic()
    name = f"cmpl-eaglefeed-{'c' * 32}-0-0a1b2c3d.safetensors"
    fake.write_later(name, [1], fake.run([1])[0], "")
    with pytest.raises(TargetUnavailable, match=r"no capture after 0\.05 s"):
        opened._folder.take(name, f"eaglefeed-{'c' * 32}", [1], 0.05)
    assert time.monotonic() - started < 1.0
    for writer in fake._writers:
        writer.join()
    (fake.captures / name).unlink()


def test_a_server_of_another_target_is_refused_at_the_start(fake: FakeVLLM, checkpoint: Checkpoint):
    fake.model = tiny_model(hf.LlamaConfig(**tiny_sizes(max_position_embeddings=128)), seed=5)
    fake.model.lm_head.weight.data.copy_(fake.model.lm_head.weight.roll(1, 0))
    with pytest.raises(TargetMismatch, match="its log probability is not what head and final norm make"):
        connected(fake, checkpoint)


def test_a_folder_that_is_not_the_servers_is_refused_at_the_start(
    fake: FakeVLLM, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("eaglefeed.producer.engines.vllm_server.RunningServer.revive", lambda _self: None)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match=r"captures do not come.*target.engine_dir"):
        connected(fake, checkpoint, folder=other)
    for writer in fake._writers:
        writer.join()


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_a_folder_that_cannot_be_written_to_is_refused_at_the_start(
    fake: FakeVLLM, checkpoint: Checkpoint, tmp_path: Path, folder: str
):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="captures cannot be read and deleted there"):
        connected(fake, checkpoint, folder=tmp_path / folder)


def test_an_address_without_a_folder_is_refused(checkpoint: Checkpoint):
    with pytest.raises(ConfigError, match="needs the folder of its captures"):
        open_vllm(checkpoint, AUX, device="cpu", compact=False, url="http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("http://127.0.0.1:1", TargetUnavailable, "127.0.0.1:1"),
        ("nonsense", ConfigError, "nonsense"),
    ],
)
def test_a_wrong_address_says_so(
    checkpoint: Checkpoint, tmp_path: Path, url: str, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        open_vllm(checkpoint, AUX, device="cpu", compact=False, url=url, folder=tmp_path)


def test_something_else_behind_the_address_is_told(
    fake: FakeVLLM, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fake, "max_model_len", None)
    with pytest.raises(ConfigError, match="no vLLM server answers there"):
        connected(fake, checkpoint)


def test_impossible_layers_are_refused_before_anything_is_asked(checkpoint: Checkpoint, tmp_path: Path):
    with pytest.raises(SchemaError, match="three distinct aux_layer_ids from 0 to 6"):
        open_vllm(checkpoint, (0, 1, 7), device="cpu", compact=False, url="http://127.0.0.1:1", folder=tmp_path)
