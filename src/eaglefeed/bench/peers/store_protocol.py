"""What the drivers of peers' stores share: one line of JSON in for each operation, one line of JSON out.

A driver runs in the peers' own environment. Its one argument is what it does: `about` says what is measured, `serve`
opens the store. The first line on stdin is the task: folder, and the safetensors file of the sample, which is read into
this process's memory. Then each line is an operation on the sample of a number: `put`, `get` (with "check": compare
what came), `drop`, or `fill`, which makes empty files of legal names for the numbers from `start` to `end`.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file

__all__ = ["Store", "Tensors", "WarmBuffer", "as_bytes", "main"]

Tensors = dict[str, torch.Tensor]


class Store(Protocol):
    """A peer's store in one folder; samples have numbers."""

    def put(self, number: int, tensors: Tensors) -> None:
        """Store the sample."""

    def get(self, number: int) -> Tensors:
        """Bring the sample into memory, all of it."""

    def drop(self, number: int) -> None:
        """Remove the sample."""

    def resident(self, number: int) -> Path:
        """The file that a sample of this number would have."""


class WarmBuffer:
    """Memory that was written before: where a trainer brings tensors that a loader only mapped."""

    def __init__(self, tensors: Tensors) -> None:
        self._bytes = torch.zeros(sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)

    def bring(self, tensors: Tensors) -> Tensors:
        """Copy the tensors' bytes; returns the copies."""
        start, brought = 0, {}
        for name, tensor in tensors.items():
            target = self._bytes[start : start + tensor.nbytes]
            ctypes.memmove(target.data_ptr(), tensor.data_ptr(), tensor.nbytes)
            brought[name] = target.view(tensor.dtype).reshape(tensor.shape)
            start += tensor.nbytes
        return brought


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: equal also where a number is not equal to itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def say(**fields: object) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main(about: Mapping[str, Any], open_store: Callable[[Path, Tensors], Store]) -> None:
    """Do what the command line says."""
    if sys.argv[1] == "about":
        say(**about)
        return
    task = json.loads(sys.stdin.readline())
    tensors = {name: tensor.clone() for name, tensor in load_file(task["sample"]).items()}
    store = open_store(Path(task["folder"]), tensors)
    say(ready=True)
    for line in sys.stdin:
        say(took_s=_do(store, tensors, json.loads(line)))


def _do(store: Store, tensors: Tensors, words: dict[str, Any]) -> float:
    start_s = time.monotonic()
    match words["op"]:
        case "put":
            store.put(words["number"], tensors)
        case "get":
            found = store.get(words["number"])
            took_s = time.monotonic() - start_s
            if words["check"]:
                _check(found, tensors)
            return took_s
        case "drop":
            store.drop(words["number"])
        case "fill":
            for number in range(words["start"], words["end"]):
                store.resident(number).touch()
    return time.monotonic() - start_s


def _check(found: Tensors, wanted: Tensors) -> None:
    for name, tensor in wanted.items():
        if not torch.equal(as_bytes(found[name]), as_bytes(tensor)):
            sys.exit(f"{name} is not what was put")
