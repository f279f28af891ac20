"""Train a model of your own on a target that `eaglefeed serve-target` runs: python remote_trainer.py URL [URL …]."""

import sys
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from eaglefeed import Eagle3TargetBackend, Eagle3TargetBatch, RemoteEagle3TargetModel

Rows = tuple[Tensor, Tensor, Tensor]
"""input_ids, attention_mask and loss_mask, each [B, S], as tokenized: the target shifts them."""


def batches(target: Eagle3TargetBackend, rows: Iterable[Rows], ahead: int = 2) -> Iterator[Eagle3TargetBatch]:
    """Batches in the order of `rows`, with up to `ahead` more on their way meanwhile."""
    handles = []
    for row in rows:
        handles.append(target.generate_batch_async(*row))
        if len(handles) > ahead:
            yield handles.pop(0).result()
    for handle in handles:
        yield handle.result()


def train(target: Eagle3TargetBackend, rows: Iterable[Rows], model: nn.Module) -> list[float]:
    """Train `model`, [n, 3H] aux hidden states to [n, D] logits, on every row; returns the losses."""
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches(target, rows):
        inputs = batch.to_trainer_inputs()
        chosen = inputs["position_mask"][..., 0]  # [B, S]: the positions that are supervised
        logits: Tensor = model(inputs["aux_hidden_states"][chosen].float())
        loss = nn.functional.cross_entropy(logits, inputs["target_probs"][chosen].float(), reduction="sum")
        loss = loss / chosen.sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(urls: list[str]) -> None:
    """Train a linear map on random ids: it shows the form, and learns nothing."""
    if not urls:
        sys.exit("which servers? remote_trainer.py http://127.0.0.1:8001")
    torch.manual_seed(0)
    target = RemoteEagle3TargetModel.from_urls(urls, device="cpu")
    try:
        info = target.model_info()
        size = min(1000, info["vocab_size"])
        chosen = torch.arange(info["vocab_size"]) < size
        target.set_vocab_mapping(chosen.nonzero().flatten(), chosen)
        ids = torch.randint(size, (8, 1, 64), generator=torch.Generator().manual_seed(0))
        rows = [(row, torch.ones_like(row), torch.ones_like(row)) for row in ids]
        width = 3 * info["hidden_size"]
        losses = train(target, rows, nn.Sequential(nn.LayerNorm(width), nn.Linear(width, size)))
    finally:
        target.close()
    sys.stdout.write(f"{len(losses)} steps, loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last\n")


if __name__ == "__main__":
    main(sys.argv[1:])
