"""A plain PyTorch loop that goes on from its checkpoint after any stop: python torch_loop.py FOLDER, of a run."""

import json
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from eaglefeed import (
    EmbeddedServer,
    SampleDataset,
    SampleStream,
    connect,
    load_run_assets,
    open_queue,
    open_store,
)
from eaglefeed.errors import EaglefeedError

SAVE_EVERY = 10


def learn(inputs: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step on a dict of a draft's inputs; the mean loss over its supervised positions."""
    chosen = inputs["position_mask"][..., 0]  # [B, S]: the positions that are supervised
    count = int(chosen.sum())
    if not count:  # momentum would move the weights all the same
        return 0.0
    logits: Tensor = model(inputs["aux_hidden_states"][chosen].float())
    loss = nn.functional.cross_entropy(logits, inputs["target_probs"][chosen].float(), reduction="sum") / count
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, stream: Mapping[str, object]) -> None:
    """Write a checkpoint, with the stream's state in it, in the place of the one before."""
    moments = {
        f"optimizer.{index}.{name}": tensor
        for index, state in optimizer.state_dict()["state"].items()
        for name, tensor in state.items()
    }
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    new = path.with_suffix(".tmp")
    save_file(weights | moments, new, metadata={"stream": json.dumps(stream)})
    new.replace(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Take over a checkpoint; returns the stream's state."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        stream: dict[str, object] = json.loads(file.metadata()["stream"])
    model.load_state_dict({name[6:]: tensor for name, tensor in tensors.items() if name.startswith("model.")})
    moments: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, kind = name.split(".")
            moments.setdefault(int(index), {})[kind] = tensor
    optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
    return stream


def train(stream: SampleStream, model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> list[float]:
    """Train on every sample, each exactly once in what the checkpoint at `path` has learned; returns the losses."""
    dataset = SampleDataset(stream, samples_per_batch=2, ack_on_next=False)
    # Where there is no checkpoint, what an earlier start held when it died comes first.
    dataset.load_state_dict(load(path, model, optimizer) if path.exists() else dataset.state_dict())
    step, losses = dataset.state_dict()["step"], []
    while not stream.ended:
        for inputs in DataLoader(dataset, batch_size=None):  # no workers: the stream reads ahead by itself
            losses.append(learn(inputs, model, optimizer))
            step += 1
            dataset.ack(step)  # comes again until a checkpoint holds it
            if step % SAVE_EVERY == 0:
                save(path, model, optimizer, dataset.state_dict())
                stream.commit(step)  # settled for good; its shards go
        save(path, model, optimizer, dataset.state_dict())  # the samples have ended, or the queue waits for a commit
        stream.commit(step)
    return losses


def main(folder: Path) -> None:
    """Train a linear head on the samples of a run that was produced with a vocabulary map."""
    if not (folder / "queue").is_dir() or not (folder / "shards").is_dir():
        sys.exit(f"{folder}: not the folder of a run, which has queue and shards in it")
    store = open_store(str(folder / "shards"))
    assets = load_run_assets(store)  # the run's contract, and what trainers need of the target
    torch.manual_seed(0)
    width = 3 * assets.contract.hidden_size
    model = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, int(assets.tensors["t2d"].sum())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        EmbeddedServer(folder / "queue") as server,
        closing(connect(server.url)) as client,
        SampleStream(
            open_queue(client, folder.name, "samples"),
            store,
            consumer="torch-loop",
            contract=assets.contract,
            head=assets.head(),  # makes target_probs of last hidden states; None in a run that stores them
        ) as stream,
    ):
        losses = train(stream, model, optimizer, folder / "head.safetensors")
    told = f"{losses[0]:.2f} at first, {losses[-1]:.2f} at last" if losses else "none: all samples are learned"
    sys.stdout.write(f"{len(losses)} steps, loss {told}\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} FOLDER, of a run")
    try:
        main(Path(sys.argv[1]))
    except EaglefeedError as error:
        sys.exit(str(error))
