"""A trainer of one's own: any nn.Module on a SampleStream. Its argument is the folder of a run."""

import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor, nn

from eaglefeed import (
    Eagle3TargetBatch,
    EmbeddedServer,
    SampleStream,
    connect,
    load_run_assets,
    open_queue,
    open_store,
)
from eaglefeed.errors import EaglefeedError


def train(stream: SampleStream, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train `model`, [n, 3H] aux hidden states to [n, D] logits, on every sample; returns the losses."""
    losses = []
    for batch in stream:  # asking for the next batch acknowledges this one
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


def train_with_checkpoints(
    stream: SampleStream,
    learn: Callable[[list[Eagle3TargetBatch]], object],
    save: Callable[[Mapping[str, object]], object],
) -> int:
    """The same exactly once: `save` keeps the stream's state and your model. Returns the step.

    Started again, call `stream.load_state_dict` with what was saved last, or with the stream's own state, first.
    """
    step = stream.state_dict()["step"]
    while not stream.ended:
        batches = stream.take(8, wait_s=30.0)
        if batches:
            learn(batches)
            step += 1
            stream.ack(step)  # comes again until a checkpoint holds it
        if not batches or stream.ended or step % 100 == 0:
            save(stream.state_dict())
            stream.commit(step)  # settled for good; its shards go
    return step


def main(folder: Path) -> None:
    """Train a linear head on the samples of a run that was produced with a vocabulary map."""
    if not (folder / "queue").is_dir() or not (folder / "shards").is_dir():
        sys.exit(f"{folder}: not the folder of a run, which has queue and shards in it")
    store = open_store(str(folder / "shards"))
    assets = load_run_assets(store)  # the run's contract, and what trainers need of the target
    width = 3 * assets.contract.hidden_size
    model = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, int(assets.tensors["t2d"].sum())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with EmbeddedServer(folder / "queue") as server, closing(connect(server.url)) as client:
        samples = open_queue(client, folder.name, "samples")
        with SampleStream(
            samples,
            store,
            consumer="my-trainer",
            contract=assets.contract,
            head=assets.head(),  # makes target_probs of last hidden states; None in a run that stores them
        ) as stream:
            stream.load_state_dict(stream.state_dict())  # what an earlier start held when it died comes first
            losses = train(stream, model, optimizer)
    told = f"{losses[0]:.2f} at first, {losses[-1]:.2f} at last" if losses else "none: all samples are learned"
    sys.stdout.write(f"{len(losses)} steps, loss {told}\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} FOLDER, of a run")
    try:
        main(Path(sys.argv[1]))
    except EaglefeedError as error:
        sys.exit(str(error))
