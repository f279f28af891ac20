"""Producers that keep their samples on a GPU. None of this has been run where there is no CUDA."""

from typing import Any

import pytest
import torch

import samples as made
from eaglefeed.storage.base import key_of
from peers import keeping, pulling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

FEATURES = made.tensors()


def _put(store: Any) -> Any:
    return store.put(made.ref(FEATURES), {name: tensor.cuda() for name, tensor in FEATURES.items()})


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("data_plane", ["http", "gloo"])
def test_what_a_gpu_made_comes_back_as_it_was_over_the_host(data_plane: str, pinned: bool) -> None:
    options: dict[str, Any] = {"data_plane": data_plane, "device": "cuda"}
    with keeping(pinned=pinned, **options) as store, pulling(**options) as puller:
        ref = _put(store)
        found = puller.get(ref)
        assert list(found) == list(FEATURES)
        assert all(torch.equal(found[name], tensor) for name, tensor in FEATURES.items())
        kept = store._samples.get(key_of(ref))
        assert kept is not None
        assert all(tensor.is_cuda != pinned for tensor in kept.writer.tensors.values())
        assert not pinned or all(tensor.is_pinned() for tensor in kept.writer.tensors.values())


def test_a_commit_gives_memory_of_the_gpu_back() -> None:
    with keeping(data_plane="http", device="cuda") as store:
        features = {"aux_hidden_states": torch.zeros(4, 4096, 1024, device="cuda")}
        ref = store.put(made.ref(features), features)
        del features
        held = torch.cuda.memory_allocated()
        assert store.delete(ref)
        assert held - torch.cuda.memory_allocated() >= ref.estimated_bytes


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses a pair on one")
@pytest.mark.parametrize("pinned", [False, True])
def test_what_one_gpu_made_comes_back_on_another_over_nccl(pinned: bool) -> None:
    with keeping(pinned=pinned, device="cuda:0") as store, pulling(device="cuda:1") as puller:
        ref = _put(store)
        for _ in range(3):
            found = puller.get(ref)
            assert all(tensor.device == torch.device("cuda", 1) for tensor in found.values())
            assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in FEATURES.items())
