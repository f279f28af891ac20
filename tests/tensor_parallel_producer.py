"""One of two processes that share a target: rank 0 runs the producer, rank 1 follows. Prints what came of it.

`python tensor_parallel_producer.py RANK STORE sharded|local`
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pipeline
from eaglefeed.errors import TargetMismatch
from eaglefeed.producer import supervision
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.prompt import Prompt, PromptRow
from eaglefeed.schema.refs import decode_ref
from tiny_target import tiny_model, tiny_sizes

V, CHUNK, NUM_SAMPLES = 16, 3, 4
AUX = (4, 0, 2)


class Leader(HFEagle3TargetModel):
    """Tells the other process what it runs, and keeps the lengths of what its head gave."""

    lengths: list[int]

    def _forward(self, rows: Any, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        said = [rows.input_ids]
        dist.broadcast_object_list(said, src=0)
        return super()._forward(rows, position_ids)

    def _logits(self, last: Tensor) -> Tensor:
        found = super()._logits(last)
        self.__dict__.setdefault("lengths", []).append(found.shape[1])
        return found


def model() -> Any:
    return tiny_model(hf.LlamaConfig(**tiny_sizes(vocab_size=V)))


def shared(mesh: Any, kind: str) -> Any:
    """Its blocks and its head split over both processes; each one's head gives 8 of 16 logits, and says so, or not."""
    plan: dict[str, Any] = {"lm_head": ColwiseParallel(use_local_output=kind == "local")}
    for layer in range(7):
        plan[f"model.layers.{layer}.mlp.up_proj"] = plan[f"model.layers.{layer}.mlp.gate_proj"] = ColwiseParallel()
        plan[f"model.layers.{layer}.mlp.down_proj"] = RowwiseParallel()
    return parallelize_module(model(), mesh, plan)


def prompts() -> list[Prompt]:
    said = {"tokenizer_fingerprint": "t", "template_fingerprint": "p", "max_length": 16}
    rows = [PromptRow(tuple((at + n) % V for at in range(4 + n)), (1,) * (4 + n)) for n in range(NUM_SAMPLES)]
    return [Prompt(sample_id=f"s-{n}", rows=(row,), **said) for n, row in enumerate(rows)]


def produced(target: HFEagle3TargetModel) -> dict[str, Any]:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.target = target
    run.feed(*prompts())
    stats = run.produce(own=pipeline.contract(hidden_size=32, vocab_size=V, aux_layer_ids=AUX))
    assert stats.dead == 0
    refs = [decode_ref(item.payload) for item in run.samples.payloads()]
    return {ref.sample_id: run.store.get(ref) for ref in refs}


def main(rank: int, path: str, kind: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    split = shared(init_device_mesh("cpu", (2,)), kind)
    supervision._CHUNK_TOKENS = CHUNK
    try:
        target = (HFEagle3TargetModel if rank else Leader)(split, AUX)
    except TargetMismatch as error:
        return {"refused": str(error)}
    if rank == 0:
        target.lengths.clear()
        found, alone = produced(target), produced(HFEagle3TargetModel(model(), AUX))
        dist.broadcast_object_list([None], src=0)
        for name, sample in alone.items():
            for feature, tensor in sample.items():
                torch.testing.assert_close(found[name][feature], tensor, rtol=1e-4, atol=1e-4)
        widths = {sample["logits"].shape[-1] for sample in found.values()}
        return {"published": sorted(found), "widths": sorted(widths), "longest": max(target.lengths)}
    while True:
        said: list[Any] = [None]
        dist.broadcast_object_list(said, src=0)
        if said[0] is None:
            return {"published": []}
        ids = said[0]
        target.generate_batch(ids, torch.ones_like(ids), torch.ones_like(ids))


if __name__ == "__main__":
    report = main(int(sys.argv[1]), *sys.argv[2:4])
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(report))
