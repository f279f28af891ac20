"""A target whose states say which tokens they are of, and what must come of a row, counted by hand.

Aux states at position s are the sum of the row's ids up to s, plus 1 to 3H; logits are 8 at the position's own id.
"""

import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from eaglefeed.producer.engine import Eagle3Target
from eaglefeed.producer.parts import TargetParts
from eaglefeed.schema.head import LogitRule

V, H, POSITIONS = 64, 64, 512
HIGH = 8.0


class CodedTarget(Eagle3Target):
    """Runs nothing. `forwards` holds what went in; `gate` can hold the next ones up; ids in `poison` make them fail."""

    engine = "coded"

    def __init__(self, *, hidden_size: int = H) -> None:
        config: Any = SimpleNamespace(num_hidden_layers=7, hidden_size=hidden_size, max_position_embeddings=POSITIONS)
        config.to_dict = lambda: {"model_type": "coded", "hidden_size": hidden_size}
        embed, norm = nn.Embedding(V, hidden_size), nn.LayerNorm(hidden_size)
        head = nn.Linear(hidden_size, V, bias=False)
        head.weight.data = torch.eye(V, hidden_size) * HIGH
        for module in (embed, head, norm):
            module.requires_grad_(False)
        super().__init__(TargetParts(config, embed, head, norm, LogitRule()), None, compact=False)
        self.forwards: list[Tensor] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.poison: set[int] = set()

    def fingerprint(self) -> str:
        return "c0de"

    def _forward(self, rows: Any, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        self.forwards.append(rows.input_ids.clone())
        self.entered.release()
        assert self.gate.wait(60)
        if self.poison & set(rows.input_ids.flatten().tolist()):
            raise RuntimeError("device-side assert triggered")
        return aux_of(rows.input_ids), nn.functional.one_hot(rows.input_ids, H).float()


def aux_of(ids: Tensor) -> Tensor:
    """[B, S] → [B, S, 3H]."""
    return ids.cumsum(-1)[..., None].float() + torch.arange(1, 3 * H + 1)


def row(*ids: int) -> tuple[Tensor, Tensor, Tensor]:
    """One row of a request: ids, attention mask, loss mask."""
    tokens = torch.tensor([ids])
    return tokens, torch.ones_like(tokens), torch.ones_like(tokens)


def check_answer(tensors: dict[str, Tensor], ids: Tensor, selected_ids: Tensor | None = None) -> None:
    """That an answer is of these ids, [B, S], all of them real and with loss: every value."""
    rows, length = ids.shape
    shifted = torch.cat([ids[:, 1:], torch.zeros(rows, 1, dtype=torch.int64)], 1)
    later = torch.ones(rows, length, dtype=torch.int64)
    later[:, -1] = 0
    assert torch.equal(tensors["aux_hidden_states"], aux_of(ids))
    assert torch.equal(tensors["input_ids"], shifted)
    assert torch.equal(tensors["attention_mask"], torch.ones_like(ids))
    assert torch.equal(tensors["loss_mask"], later)
    logits = nn.functional.one_hot(shifted, V).float() * HIGH * later[..., None]
    if selected_ids is None:
        assert torch.equal(tensors["logits"], logits)
        return
    wanted = logits[..., selected_ids].softmax(-1) * later[..., None]
    torch.testing.assert_close(tensors["target_probs"], wanted)
    known = torch.isin(shifted, selected_ids) & later.bool()
    assert torch.equal(tensors["position_mask"][..., 0], known)
