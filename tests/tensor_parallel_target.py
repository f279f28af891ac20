"""One of two processes that share a target's embeddings and head; prints whether all it gives is whole and right."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate

from eaglefeed.producer.target import HFEagle3TargetModel
from tiny_target import LAYOUTS, tiny_model

IDS = torch.tensor([[5, 9, 33, 2, 60, 7, 7, 1, 12], [8, 3, 50, 4, 0, 0, 0, 0, 0]])
REAL = (torch.arange(9) < torch.tensor([9, 4])[:, None]).long()


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    own = HFEagle3TargetModel(tiny_model(LAYOUTS["llama"]()), (4, 0, 2))
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = tiny_model(LAYOUTS["llama"]())
    plan = {
        "lm_head": ColwiseParallel(use_local_output=False),
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    assert isinstance(model.lm_head.weight, DTensor)
    assert isinstance(model(IDS).logits, DTensor)
    target = HFEagle3TargetModel(model, (4, 0, 2))
    got, wanted = (one.generate_batch(IDS, REAL, REAL).tensors() for one in (target, own))
    (assets, _), (own_assets, _) = target.target_assets(), own.target_assets()
    pairs = [(got[name], wanted[name]) for name in wanted]
    pairs += [(assets[name], own_assets[name]) for name in own_assets]
    pairs.append((target.get_input_embeddings().weight, own.get_input_embeddings().weight))
    assert not any(isinstance(tensor, DTensor) for tensor, _ in pairs)
    for tensor, other in pairs:
        torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-4)
    assert target.vocab_size == 64
    assert target.head_digest() == own.head_digest()
    assert target.fingerprint() == own.fingerprint()
    dist.destroy_process_group()
    sys.stdout.write("whole")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
