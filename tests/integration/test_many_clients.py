"""Sixteen clients at once, of two trainings that share a server: each answer is the one to its own request."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor

from coded_target import CodedTarget, V, check_answer
from eaglefeed.consumer.remote import RemoteEagle3TargetModel
from eaglefeed.producer.batcher import Batcher
from eaglefeed.producer.work import Work
from eaglefeed.schema.vocab import VocabMapping
from eaglefeed.storage.pair_group import PairGroup
from remote_models import ODD, closing
from target_servers import serving

CLIENTS, REQUESTS = 16, 50
THIRDS = VocabMapping.from_ids(torch.arange(0, V, 3), vocab_size=V)
MAPS = (ODD, THIRDS)


@pytest.fixture
def target() -> CodedTarget:
    """Each forward of it takes up to two milliseconds, and notes if another one is under way."""
    torch.set_num_threads(1)
    coded, delay, alone = CodedTarget(), random.Random(7), threading.Lock()
    forward = coded._forward

    def at_its_own_pace(*args: Any) -> tuple[Tensor, Tensor]:
        assert alone.acquire(blocking=False), "two forwards at once"
        try:
            time.sleep(delay.uniform(0.0, 0.002))
            return forward(*args)
        finally:
            alone.release()

    coded._forward = at_its_own_pace  # type: ignore[method-assign]
    return coded


@pytest.fixture
def sent_over_pairs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each transfer over a pair group had."""
    seen: list[int] = []
    send = PairGroup.send

    def noted(self: PairGroup, tensors: Any, **options: Any) -> None:
        send(self, tensors, **options)
        seen.append(len(tensors))

    monkeypatch.setattr(PairGroup, "send", noted)
    return seen


def ask_all(model: RemoteEagle3TargetModel, client: int) -> int:
    """The answers to 50 requests of one client, three at a time: rows of its own id, each longer than the last."""
    asked = [torch.full((1, number), client) for number in range(1, REQUESTS + 1)]
    right = 0
    for first in range(0, REQUESTS, 3):
        some = asked[first : first + 3]
        handles = [model.generate_batch_async(ids, torch.ones_like(ids), torch.ones_like(ids)) for ids in some]
        for ids, handle in zip(some, handles, strict=True):
            check_answer(handle.result(60).tensors(), ids, MAPS[client % 2].selected_token_ids)
            right += 1
    return right


def test_each_of_800_answers_is_the_one_to_its_own_request(target: CodedTarget, sent_over_pairs: list[int]) -> None:
    """Half of the clients over pair groups, and half of each kind with forwards of their own."""
    with serving(target) as server, ExitStack() as stack, ThreadPoolExecutor(CLIENTS) as pool:
        models: list[RemoteEagle3TargetModel] = []
        for client in range(CLIENTS):
            options = {"data_plane": "gloo" if client < CLIENTS / 2 else "http", "exact": client % 4 < 2}
            models.append(stack.enter_context(closing(server.url, in_flight=2, **options)))
            mapping = MAPS[client % 2]
            models[-1].set_vocab_mapping(mapping.selected_token_ids, mapping.selected_token_mask)
        assert sum(pool.map(ask_all, models, range(CLIENTS))) == CLIENTS * REQUESTS
    over_pairs = sum(count > 1 for count in sent_over_pairs)
    assert over_pairs > CLIENTS * REQUESTS / 4  # of them, the others came in the body: both pairs were busy


@pytest.mark.parametrize("plane", ["http", "gloo"])
def test_answers_that_the_server_swaps_never_reach_a_trainer(
    plane: str, target: CodedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, submit = list[Work](), Batcher.submit

    def swapping(self: Batcher, work: Work) -> Work:
        work = submit(self, work)
        held.append(work)
        if len(held) == 2:
            held[0].deliver, held[1].deliver = held[1].deliver, held[0].deliver
            target.gate.set()
        return work

    monkeypatch.setattr(Batcher, "submit", swapping)
    with serving(target) as server, closing(server.url, data_plane=plane) as model:
        target.gate.clear()
        with structlog.testing.capture_logs() as logs:
            asked = [torch.full((1, 5), client) for client in (7, 8)]  # of one shape: no size tells them apart
            handles = [model.generate_batch_async(ids, torch.ones_like(ids), torch.ones_like(ids)) for ids in asked]
            for ids, handle in zip(asked, handles, strict=True):
                check_answer(handle.result(60).tensors(), ids)
    assert len(held) == 4
    assert any("other rows than those that were asked for" in str(entry.get("reason")) for entry in logs)
