"""SGLangEagle3TargetModel against a stand-in for the engine, with replies of the form that SGLang 0.5.23 gave."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from eaglefeed.errors import ConfigError, SchemaError, TargetMismatch, TargetUnavailable
from eaglefeed.producer.checkpoint import Checkpoint
from eaglefeed.producer.engines.sglang import SGLangEagle3TargetModel, engine_arguments, open_sglang
from eaglefeed.producer.target import HFEagle3TargetModel
from fake_sglang import Engine
from tiny_target import LAYOUTS, tiny_model

AUX = (4, 0, 2)
IDS = torch.tensor([[5, 9, 33, 2, 60, 7, 7, 1, 12], [8, 3, 50, 4, 0, 0, 0, 0, 0]])
REAL = (torch.arange(9) < torch.tensor([9, 4])[:, None]).long()


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return tiny_model(LAYOUTS["llama"]())


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return Checkpoint(str(folder), dtype="float32")


def opened(checkpoint: Checkpoint, model: Any, aux: tuple[int, ...] = AUX) -> tuple[SGLangEagle3TargetModel, Engine]:
    arguments = engine_arguments(checkpoint, aux, device="cpu", tp_size=1)
    engine = Engine(model, arguments["return_aux_hidden_state_layer_ids"])
    return SGLangEagle3TargetModel(checkpoint, aux, compact=False, device="cpu", engine=engine), engine


@pytest.mark.parametrize(("aux", "asked"), [(AUX, [0, 2, 4, 5]), ((6, 0, 2), [0, 2, 5]), ((5, 6, 0), [0, 5])])
def test_it_gives_what_the_model_in_this_process_gives(
    checkpoint: Checkpoint, model: Any, aux: tuple[int, ...], asked: list[int]
):
    target, engine = opened(checkpoint, model, aux)
    assert engine.layers == asked
    got, wanted = (one.generate_batch(IDS, REAL, REAL).tensors() for one in (target, HFEagle3TargetModel(model, aux)))
    assert list(got) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-4)
    assert engine.prompts[-2:] == [IDS[0].tolist(), IDS[1, :4].tolist()]
    assert target.max_positions == 256 - 8
    target.close()
    assert engine.is_down


def test_each_packed_document_is_a_prompt_of_its_own_and_teaches_nothing_of_the_next(
    checkpoint: Checkpoint, model: Any
):
    target, engine = opened(checkpoint, model)
    packing = {
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]]),
        "seq_lens": torch.tensor([[3, 6]]),
        "doc_remaining": torch.tensor([[2, 1, 0, 3, 2, 1, 0, 0, 0]]),
    }
    real = (torch.arange(9) < 7).long()[None]
    rows = {"input_ids": IDS[:1], "attention_mask": real, "loss_mask": real} | packing
    got, wanted = (one.generate_batch(**rows).tensors() for one in (target, HFEagle3TargetModel(model, AUX)))
    assert list(got) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-4)
    assert engine.prompts[-2:] == [IDS[0, :3].tolist(), IDS[0, 3:7].tolist()]
    assert got["loss_mask"].tolist() == [[1, 1, 0, 1, 1, 1, 0, 0, 0]]


def test_shortened_captures_are_an_error(checkpoint: Checkpoint, model: Any):
    target, engine = opened(checkpoint, model)
    engine.keep = slice(-1, None)
    with pytest.raises(
        TargetMismatch, match=r"captured other states than it was asked for, wanted \[9, 128\], got \[1"
    ):
        target.generate_batch(IDS, REAL, REAL)


@pytest.mark.parametrize("times", [0, 1, 2])
def test_the_final_norm_is_applied_once_or_it_is_noticed_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
):
    own = tiny_model(LAYOUTS["llama"]())
    own.model.norm.weight.data.copy_(torch.linspace(1, 5, 32))  # so that it shows where it is left out or applied twice
    own.save_pretrained(tmp_path)
    checkpoint = Checkpoint(str(tmp_path), dtype="float32")
    layer = checkpoint.last_layer("cpu")

    def normed(entering: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = last = layer(entering)[0]
        for _ in range(times):
            last = own.model.norm(last)
        return output, last

    monkeypatch.setattr(Checkpoint, "last_layer", lambda *_: normed)
    if times != 1:
        with pytest.raises(TargetMismatch, match="its log probability is not what head and final norm make"):
            opened(checkpoint, own)
        return
    got = opened(checkpoint, own)[0].generate_batch(IDS[:1], REAL[:1], REAL[:1])
    with torch.no_grad():
        assert (got.logits[:, :-1] - own(IDS[:1]).logits[:, 1:]).abs().max() < 1e-4


def test_answers_are_found_by_their_requests_id_in_whatever_order_they_come(checkpoint: Checkpoint, model: Any):
    target, engine = opened(checkpoint, model)
    ids = torch.arange(1, 9)[:, None].expand(8, 7).contiguous()  # all of one length, so that no count tells them apart
    ones = torch.ones_like(ids)
    wanted = HFEagle3TargetModel(model, AUX).generate_batch(ids, ones, ones).tensors()
    for order in (lambda found: found, lambda found: found[::-1], lambda found: found[1::2] + found[::2]):
        engine.reorder = order
        got = target.generate_batch(ids, ones, ones).tensors()
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(got["input_ids"][:, :-1], ids[:, 1:])


@pytest.mark.parametrize(
    "fault",
    [lambda found: found[1:], lambda found: [*found, found[0]], lambda found: [found[0], {"meta_info": {"id": "x"}}]],
    ids=["one too few", "one twice", "somebody else's"],
)
def test_an_answer_to_another_request_is_refused(checkpoint: Checkpoint, model: Any, fault: Any):
    target, engine = opened(checkpoint, model)
    engine.reorder = fault
    with pytest.raises(TargetMismatch, match="the engine answers other requests"):
        target.generate_batch(IDS, REAL, REAL)


def test_another_model_is_noticed_at_the_start(checkpoint: Checkpoint, model: Any):
    engine = Engine(model, [0, 2, 4, 5])
    engine.bias = 0.1
    with pytest.raises(TargetMismatch, match="its log probability is not what head and final norm make"):
        SGLangEagle3TargetModel(checkpoint, AUX, compact=False, device="cpu", engine=engine)


def test_an_engine_that_fails_is_unavailable(checkpoint: Checkpoint, model: Any):
    target, engine = opened(checkpoint, model)
    engine.is_down = True
    with pytest.raises(TargetUnavailable, match="the engine failed, got scheduler is gone"):
        target.generate_batch(IDS, REAL, REAL)


def installed(monkeypatch: pytest.MonkeyPatch, version: str, engine: Any, *arguments: str) -> None:
    """As if SGLang of this version lay here, whose ServerArgs knows `arguments`."""
    package, server_args = types.ModuleType("sglang"), types.ModuleType("sglang.srt.server_args")
    package.Engine = engine  # type: ignore[attr-defined]
    named = ", ".join(f"{name}=None" for name in arguments)
    exec(f"def ServerArgs({named}): ...", server_args.__dict__)
    for name, module in (("sglang", package), ("sglang.srt", types.ModuleType("sglang.srt"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", server_args)
    monkeypatch.setattr("eaglefeed.producer.engines.sglang.metadata.version", lambda _name: version)


@pytest.mark.parametrize("version", ["0.5.22", "0.5.9.post1", "0.6.0", "1.0"])
def test_another_version_is_refused_with_the_range(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, version: str
):
    installed(monkeypatch, version, Engine)
    with pytest.raises(ConfigError, match=rf"wanted >=0\.5\.23,<0\.6, got {version}"):
        open_sglang(checkpoint, AUX, device="cpu", compact=False)


def test_a_version_that_lacks_an_argument_says_which(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    names = set(engine_arguments(checkpoint, AUX, device="cpu", tp_size=1)) - {"enable_return_aux_hidden_states"}
    installed(monkeypatch, "0.5.24", Engine, *names)
    with pytest.raises(ConfigError, match="lacks arguments, wanted enable_return_aux_hidden_states, got"):
        open_sglang(checkpoint, AUX, device="cpu", compact=False)


def test_an_engine_is_started_with_what_was_asked_and_shut_down_if_it_is_the_wrong_one(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, model: Any
):
    made: list[Any] = []

    class Started(Engine):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(model, arguments["return_aux_hidden_state_layer_ids"])
            self.arguments, self.bias = arguments, 0.1 * len(made)
            made.append(self)

    wanted = engine_arguments(checkpoint, AUX, device="cpu", tp_size=2)
    assert (wanted["tp_size"], wanted["device"], wanted["disable_radix_cache"]) == (2, "cpu", True)
    installed(monkeypatch, "0.5.23.post1", Started, *wanted)
    open_sglang(checkpoint, AUX, device="cpu", compact=False, tp_size=2).close()
    assert made[0].arguments == wanted
    with pytest.raises(TargetMismatch):
        open_sglang(checkpoint, AUX, device="cpu", compact=False)
    assert made[1].is_down


def test_one_that_does_not_start_is_told(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    def broken(**_arguments: Any) -> None:
        raise ValueError("no memory left")

    broken.generate = Engine.generate  # type: ignore[attr-defined]
    installed(monkeypatch, "0.5.23", broken, *engine_arguments(checkpoint, AUX, device="cpu", tp_size=1))
    with pytest.raises(TargetUnavailable, match="the engine does not start, got no memory left"):
        open_sglang(checkpoint, AUX, device="cpu", compact=False)


def test_impossible_layers_are_refused(checkpoint: Checkpoint, tmp_path: Path):
    with pytest.raises(SchemaError, match="three distinct aux_layer_ids"):
        open_sglang(checkpoint, (1, 1, 2), device="cpu", compact=False)
