"""Which layers states are of: read from a model whose layer k adds 2^k, the same for every engine and encoding.

Channel 0 of layer k's output is 2^0 + ... + 2^k = 2^(k+1) - 1 for every token; of what enters it, 2^k - 1.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import pipeline
from eaglefeed.errors import ContractMismatch, TargetMismatch
from eaglefeed.producer.checkpoint import Checkpoint
from eaglefeed.producer.engine import Eagle3Target
from eaglefeed.producer.engines.sglang import SGLangEagle3TargetModel, engine_arguments
from eaglefeed.producer.engines.vllm import captured_layers, open_vllm
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.contract import CONTRACT_FILE, RunContract
from eaglefeed.schema.eagle3 import default_aux_layer_ids
from fake_sglang import Engine
from fake_vllm import FakeVLLM
from remote_models import closing
from target_servers import serving
from tiny_target import tiny_model, tiny_sizes

torch.set_num_threads(1)

H, LAYERS = 32, 8
AUX = (1, 3, 4)
ROWS = torch.tensor([[5, 9, 33, 2, 60], [8, 3, 50, 0, 0]])
REAL = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


@pytest.fixture(scope="module")
def model() -> Any:
    """The head's weights are random, so that engines can be told from each other by their logits."""
    built = tiny_model(hf.LlamaConfig(**tiny_sizes(num_hidden_layers=LAYERS), mlp_bias=True))
    built.model.embed_tokens.weight.data[:, 0] = 0
    for k, layer in enumerate(built.model.layers):
        for parameter in layer.parameters():
            parameter.data.zero_()
        layer.mlp.down_proj.bias.data[0] = 2.0**k
    return built


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("counting")
    model.save_pretrained(folder)
    return Checkpoint(str(folder), dtype="float32")


@pytest.fixture(params=["hf", "vllm", "sglang", "server"])
def opened(request: pytest.FixtureRequest, model: Any, checkpoint: Checkpoint, tmp_path: Path) -> "Opened":
    return Opened(request.param, model, checkpoint, tmp_path)


class Opened:
    """Opens a target of the counting model by one way."""

    def __init__(self, way: str, model: Any, checkpoint: Checkpoint, folder: Path) -> None:
        self.way, self.model, self.checkpoint, self.folder = way, model, checkpoint, folder

    def supervised(self, aux: tuple[int, ...] | None) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Aux states, and the layers that the target says they are of."""
        if self.way == "hf":
            return self._of(HFEagle3TargetModel(self.model, aux))
        if self.way == "server":
            with serving(HFEagle3TargetModel(self.model, aux)) as server, closing(server.url) as remote:
                states = remote.generate_batch(ROWS, REAL, REAL).aux_hidden_states
                return states, tuple(remote.model_info()["aux_layer_ids"])
        ids = aux or default_aux_layer_ids(LAYERS)
        if self.way == "sglang":
            arguments = engine_arguments(self.checkpoint, ids, device="cpu", tp_size=1)
            engine = Engine(self.model, arguments["return_aux_hidden_state_layer_ids"])
            return self._of(SGLangEagle3TargetModel(self.checkpoint, aux, compact=False, device="cpu", engine=engine))
        with FakeVLLM(self.model, list(captured_layers(ids, LAYERS)), self.folder) as fake:
            return self._of(
                open_vllm(self.checkpoint, aux, device="cpu", compact=False, url=fake.url, folder=self.folder)
            )

    def _of(self, target: Eagle3Target) -> tuple[torch.Tensor, tuple[int, ...]]:
        try:
            return target.generate_batch(ROWS, REAL, REAL).aux_hidden_states, target.aux_layer_ids
        finally:
            target.close()


def channel(aux: torch.Tensor) -> list[float]:
    """Channel 0 of the three layers, which is the same at every real token."""
    found = aux.view(2, 5, 3, H)[..., 0]
    assert (found[REAL.bool()] == found[0, 0]).all()
    assert not found[~REAL.bool()].any()
    return [float(value) for value in found[0, 0]]


@pytest.mark.parametrize("aux", [(1, 3, 4), (4, 1, 3), (7, 0, 6), None])
def test_every_engine_gives_the_outputs_of_the_layers_in_the_order_asked_for(
    opened: Opened, aux: tuple[int, ...] | None
) -> None:
    states, said = opened.supervised(aux)
    assert said == (aux or (1, 3, 4))  # of 8 layers 1, 8 // 2 - 1 and 8 - 4
    assert channel(states) == [2.0 ** (layer + 1) - 1 for layer in said]
    assert states.shape[-1] == 3 * H


def test_the_runs_contract_says_which_layers_and_that_no_norm_has_been_on_them(model: Any) -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.target = HFEagle3TargetModel(model, AUX)
    run.feed(pipeline.prompt(0))
    said = {"hidden_size": H, "vocab_size": 64}
    assert run.produce(own=pipeline.contract(aux_layer_ids=AUX, **said)).produced == 1
    written = RunContract.from_json(run.store.get_document(CONTRACT_FILE) or b"")
    assert (written.aux_layer_ids, written.aux_norm) == ((1, 3, 4), "none")


@pytest.mark.parametrize("other", [{"aux_layer_ids": (2, 4, 5)}, {"aux_layer_ids": (3, 1, 4)}, {"aux_norm": "final"}])
def test_a_producer_that_counts_layers_otherwise_is_refused_by_the_contract_that_stands(other: dict[str, Any]) -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.feed(pipeline.prompt(0), pipeline.prompt(1), close=False)
    first = pipeline.contract(aux_layer_ids=AUX)
    run.prompts.close()
    run.samples.agree("contract", first.model_copy(update={"max_length": 16}).to_json())
    ((name, value),) = other.items()
    with pytest.raises(ContractMismatch) as refused:
        run.produce(own=first.model_copy(update=other))
    assert f"wanted {name}={getattr(first, name)}, got {name}={value}" in str(refused.value)
    assert (run.target.calls, run.prompts.stats().ready) == (0, 2)


def test_a_server_that_was_started_with_our_ids_in_the_place_of_its_own_is_refused(
    model: Any, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with FakeVLLM(model, [*AUX, LAYERS], tmp_path) as fake:
        with pytest.raises(TargetMismatch, match=r"captured other layers, wanted \[2, 4, 5, 8\], got \[1, 3, 4, 8\]"):
            open_vllm(checkpoint, AUX, device="cpu", compact=False, url=fake.url, folder=tmp_path)
        for left in tmp_path.glob("cmpl-*"):
            left.unlink()
