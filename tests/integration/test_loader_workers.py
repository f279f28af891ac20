"""DataLoader workers: streams are refused there, refs may be handed to them, and CUDA is touched in none."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import pipeline
from coded_target import CodedTarget
from eaglefeed.consumer import leasing
from eaglefeed.consumer.dataset import SampleDataset
from eaglefeed.consumer.remote import RemoteEagle3TargetModel
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import ConfigError
from eaglefeed.queue.base import Lease
from eaglefeed.schema.refs import SampleRef, decode_ref
from eaglefeed.storage.base import FeatureStore, open_store
from eaglefeed.storage.options import PeerOptions
from eaglefeed.storage.shared_dir import SharedDirStore
from target_servers import serving

NUM = 8
NONCE = "nccl://127.0.0.1:9/0123456789abcdef"


@pytest.fixture
def run(tmp_path: Path) -> pipeline.Run:
    made = pipeline.Run(clock=pipeline.TurnableClock(), store=SharedDirStore(tmp_path, durability="none"))
    made.feed(*(pipeline.prompt(index) for index in range(NUM)))
    made.produce()
    return made


@pytest.fixture
def cuda_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the parent used CUDA: whoever touches it in a forked child dies of what torch says there."""

    def touched(*_: object) -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    for name in ("_lazy_init", "current_device", "device_count", "init", "set_device"):
        monkeypatch.setattr(torch.cuda, name, touched)


class Refs(Dataset[dict[str, Tensor]]):
    """Reads the samples of refs that the training process has leased."""

    def __init__(self, refs: list[SampleRef], uri: str) -> None:
        self._refs, self._uri = refs, uri
        self._store: FeatureStore | None = None

    def __len__(self) -> int:
        return len(self._refs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self._store = self._store or open_store(self._uri)
        return self._store.get(self._refs[index])


def _leased(run: pipeline.Run) -> tuple[Lease, list[SampleRef]]:
    lease = run.samples.lease(NUM, visibility_timeout_s=1e6, consumer="t")
    assert isinstance(lease, Lease)
    return lease, [decode_ref(item.payload) for item in lease.items]


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("cuda_in_use")
def test_workers_read_each_sample_that_they_are_handed_once_into_memory_of_the_cpu(
    context: str, run: pipeline.Run
) -> None:
    lease, refs = _leased(run)
    loader = DataLoader(
        Refs(refs, run.store.uri),
        batch_size=None,
        num_workers=2,
        multiprocessing_context=context,
        persistent_workers=True,
    )
    for _ in range(2):  # the workers live on between two passes
        found = [(int(each["aux_hidden_states"][0, 0, 0]) - 1, each["input_ids"].device.type) for each in loader]
        assert found == [(index, "cpu") for index in range(NUM)]
    run.samples.ack(lease.token, [item.id for item in lease.items])
    assert run.samples.stats().done == NUM


@pytest.mark.parametrize(("context", "persistent"), [("fork", True), ("forkserver", True), ("spawn", True)])
@pytest.mark.usefixtures("cuda_in_use")
def test_a_stream_in_workers_is_refused_and_no_sample_is_leased_twice_or_at_all(
    context: str, persistent: bool, run: pipeline.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "_WAIT_S", 0.02)
    with SampleStream(run.samples, run.store, consumer="t", clock=run.clock) as stream:
        loader = DataLoader(
            SampleDataset(stream),
            batch_size=None,
            num_workers=1 + (context != "fork"),  # torch waits 5 s for each that has failed
            multiprocessing_context=context,
            persistent_workers=persistent,
        )
        with pytest.raises(ConfigError, match="num_workers=0"):
            list(loader)
        stats = run.samples.stats()
        assert (stats.leased, stats.ready) == (0, NUM)


class Calls(Dataset[str]):
    """Calls something in a worker."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        self._call()
        return "it went"


def _peer() -> Any:
    store = open_store("nccl://", peer=PeerOptions(data_plane="nccl", device="cuda"))
    run = pipeline.Run()
    run.feed(pipeline.prompt(0))
    run.produce()
    ref = decode_ref(next(iter(run.samples.payloads())).payload)
    return store.get(replace(ref, store_uri=NONCE))


CALLS: dict[str, Callable[[], object]] = {
    "samples of a producer over nccl": _peer,
    "a target server for a GPU": lambda: RemoteEagle3TargetModel(["http://127.0.0.1:9"], device="cuda"),
    "a stream for a GPU": lambda: SampleStream(
        pipeline.Run().samples, pipeline.Run().store, consumer="t", device="cuda"
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("cuda_in_use")
def test_what_needs_a_gpu_is_refused_in_a_worker_before_cuda_is_touched(name: str) -> None:
    loader = DataLoader(Calls(CALLS[name]), batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(ConfigError, match=r"not for a DataLoader's worker.*data_plane=http.*num_workers=0"):
        list(loader)


def test_a_target_server_may_be_asked_for_memory_of_the_cpu_in_a_worker() -> None:
    with serving(CodedTarget()) as server:

        def ask() -> None:
            model = RemoteEagle3TargetModel([server.url], device="cpu")
            ids = torch.tensor([[1, 2, 3]])
            assert model.generate_batch(ids, torch.ones_like(ids), torch.ones_like(ids)).input_ids.tolist() == [
                [2, 3, 0]
            ]
            model.close()

        loader = DataLoader(Calls(ask), batch_size=None, num_workers=1, multiprocessing_context="fork")
        assert list(loader) == ["it went"]
