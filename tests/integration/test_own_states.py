"""Every row keeps its own states, however rows are put together, in whatever order they are answered, and asked again.

Row i is the token i, a different number of times for each i; the target's states are the token itself.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeline
from coded_target import HIGH, CodedTarget, H, V
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import SchemaError
from eaglefeed.producer.rows import Rows
from eaglefeed.producer.server import TargetServer
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.padding import pad_prompt
from eaglefeed.schema.prompt import Prompt, PromptRow
from eaglefeed.storage.shared_dir import SharedDirStore
from faults.processes import wait_until
from remote_models import closing
from target_servers import serving

torch.set_num_threads(1)
LENGTHS = dict(zip(range(1, 9), (3, 9, 17, 2, 33, 5, 64, 1), strict=True))


class Telling(CodedTarget):
    """Aux states are the token at the same position; the best token is the position's own."""

    def _forward(self, rows: Rows, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        self.forwards.append(rows.input_ids)
        assert self.gate.wait(60)
        aux = rows.input_ids[..., None].float().expand(-1, -1, 3 * H).clone()
        return aux, nn.functional.one_hot(rows.input_ids, H).float()


def prompts(size: int) -> list[Prompt]:
    """All eight rows, `size` in a prompt."""
    rows = [PromptRow((i,) * n, (1,) * n) for i, n in LENGTHS.items()]
    return [
        pipeline.prompt(0, sample_id=f"from-{start + 1}", rows=tuple(rows[start : start + size]), max_length=64)
        for start in range(0, 8, size)
    ]


def check(batches: Sequence[Eagle3TargetBatch], size: int) -> None:
    """That prompts' answers, in order, are made of their own rows alone."""
    assert len(batches) == -(-8 // size)
    for first, batch in zip(range(1, 9, size), batches, strict=True):
        tokens = range(first, min(first + size, 9))
        assert len(batch.input_ids) == len(tokens)
        for row, token in enumerate(tokens):
            n = LENGTHS[token]
            wanted = torch.zeros(batch.input_ids.shape[1], dtype=torch.int64)
            wanted[:n] = token
            later = torch.cat([wanted[1:], torch.zeros(1, dtype=torch.int64)])
            assert torch.equal(batch.aux_hidden_states[row], wanted[:, None].float().expand(-1, 3 * H))
            assert torch.equal(batch.attention_mask[row], (wanted > 0).long())
            assert torch.equal(batch.input_ids[row], later)
            assert batch.logits is not None
            logits = nn.functional.one_hot(later, V).float() * HIGH * (later > 0)[:, None]
            assert torch.equal(batch.logits[row], logits)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_every_sample_of_a_run_holds_the_states_of_its_own_tokens(size: int, tmp_path: Path) -> None:
    target: Any = Telling()
    for call in range(2):
        run = pipeline.Run(
            clock=pipeline.TurnableClock(),
            store=SharedDirStore(tmp_path / str(call), durability="none"),
            target=target,
        )
        run.feed(*prompts(size))
        own = pipeline.contract(hidden_size=H, vocab_size=V, max_length=64)
        assert run.produce(own=own).dead == 0
        with SampleStream(run.samples, run.store, consumer="t", contract=own, clock=run.clock) as stream:
            batches = {batch.sample_ids[0]: batch for batch in stream.take(len(prompts(size)))}
        check([batches[given.sample_id] for given in prompts(size)], size)


def has_arrived(server: TargetServer, num_requests: int) -> bool:
    stats = server._batcher.stats()
    return stats.waiting + stats.in_flight == num_requests


@pytest.mark.parametrize(("plane", "exact"), [("http", True), ("http", False), ("gloo", False)])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_every_answer_of_a_server_that_merges_requests_is_of_its_own_tokens(size: int, exact: bool, plane: str) -> None:
    target = Telling()
    with serving(target) as server, closing(server.url, exact=exact, in_flight=4, data_plane=plane) as model:
        for _ in range(2):
            target.gate.clear()  # so that requests wait, and are put together
            handles = [model.generate_batch_async(**pad_prompt(given)) for given in prompts(size)]
            wait_until(partial(has_arrived, server, min(len(handles), 4)))
            target.gate.set()
            answers = [handle.result(60) for handle in reversed(handles)]  # waited for in another order
            check(answers[::-1], size)
        merged = max(map(len, target.forwards)) > size
        assert merged == (size < 8 and not exact)


def test_what_is_written_to_a_batch_changes_neither_the_next_one_nor_what_was_given() -> None:
    target = Telling()
    packing = {
        "position_ids": torch.tensor([[0, 1, 2, 0, 1]]),
        "seq_lens": torch.tensor([[3, 2]]),
        "doc_remaining": torch.tensor([[2, 1, 0, 1, 0]]),
    }
    ones = torch.ones(1, 5, dtype=torch.int64)
    given = {"input_ids": torch.tensor([[5, 9, 3, 7, 4]]), "attention_mask": ones, "loss_mask": ones.clone(), **packing}
    before = {name: tensor.clone() for name, tensor in given.items()}
    first = target.generate_batch(**given).tensors()
    kept = {name: tensor.clone() for name, tensor in first.items()}
    for tensor in first.values():
        tensor.fill_(1)
    assert all(torch.equal(given[name], before[name]) for name in before)
    again = target.generate_batch(**given).tensors()
    assert all(torch.equal(again[name], kept[name]) for name in kept)
    for tensor in given.values():
        tensor.zero_()
    assert all(torch.equal(again[name], kept[name]) for name in kept)


@pytest.mark.parametrize("kind", [torch.int32, torch.int8, torch.uint8, torch.bool, torch.float32, torch.float64])
def test_ids_and_masks_of_any_whole_numbers_become_int64_here_and_on_a_server(
    kind: torch.dtype,
) -> None:
    target, ids = Telling(), torch.tensor([[5, 9, 3, 7]])
    real, loss = torch.tensor([[1, 1, 1, 0]]), torch.tensor([[0, 1, 1, 0]])
    with serving(target) as server, closing(server.url) as model:
        for asked in (target, model):
            given = ids if kind == torch.bool else ids.to(kind)
            batch = asked.generate_batch(given, real.to(kind), loss.to(kind))
            assert {batch.input_ids.dtype, batch.attention_mask.dtype, batch.loss_mask.dtype} == {torch.int64}
            assert (batch.input_ids.tolist(), batch.loss_mask.tolist()) == ([[9, 3, 0, 0]], [[1, 1, 0, 0]])
            with pytest.raises(SchemaError, match="no whole numbers"):
                asked.generate_batch(ids + 0.5, real, loss)
