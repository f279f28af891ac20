"""Our side of a measurement in processes of its own: `python -m eaglefeed.bench.remote_worker serve | fetch`.

`serve` runs a TargetServer, and tells its process's memory at each line; `fetch` is a client of servers, and each line
is a run: `count` answers of `tokens` from the servers of `model`, `in_flight` at a time.
"""

import json
import sys
from collections import deque
from typing import Any

import torch
from structlog.testing import capture_logs

from eaglefeed import logs
from eaglefeed.bench.machine import process_bytes
from eaglefeed.bench.partners import say
from eaglefeed.bench.remote_answers import PreparedTarget, Tensors, read_answers
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.consumer.remote import RemoteEagle3TargetModel
from eaglefeed.errors import EaglefeedError
from eaglefeed.producer.opening import info_of
from eaglefeed.producer.server import TargetServer
from eaglefeed.schema.batch import BatchHandle, Eagle3TargetBatch

__all__ = ["main"]

_READY_S = 60.0


def _serve(task: dict[str, Any]) -> None:
    answers = read_answers(task["answers"], task["device"])
    target = PreparedTarget(answers, sleep_s=task["sleep_s"], are_copied=task["are_copied"])
    server = TargetServer(target, info_of(target, "prepared"), max_in_flight=task["max_in_flight"])
    server.start()
    server.wait_ready(_READY_S)
    say(url=server.url)
    for _ in sys.stdin:
        say(**{field: process_bytes(field) for field in ("VmRSS", "VmHWM")})
    server.stop()


def _fetch(task: dict[str, Any]) -> None:
    answers = read_answers(task["answers"])
    models = {name: _model(**words) for name, words in task["models"].items()}
    with capture_logs() as warnings:
        say(ready=True)
        for line in sys.stdin:
            words = json.loads(line)
            model = models[words.pop("model")]
            took_s = _run(model, answers[words["tokens"]], **words)
            if warnings:  # such as that answers came over HTTP instead of gloo: this is no measurement of that
                raise EaglefeedError("the client warns", subject="bench remote", got=warnings)
            say(took_s=took_s)


def _model(
    *, urls: list[str], data_plane: Any, in_flight: int, draft_vocab: int, device: str
) -> RemoteEagle3TargetModel:
    model = RemoteEagle3TargetModel.from_urls(urls, device=device, data_plane=data_plane, in_flight=in_flight)
    model.set_vocab_mapping(torch.arange(draft_vocab), torch.ones(draft_vocab, dtype=torch.bool))
    return model


def _run(
    model: RemoteEagle3TargetModel, answer: Tensors, *, tokens: int, count: int, in_flight: int, check: bool
) -> float:
    """Seconds for `count` answers; one at a time by generate_batch, more by generate_batch_async."""
    ones = torch.ones(1, tokens, dtype=torch.int64)
    start_s = SYSTEM_CLOCK.monotonic()
    if in_flight == 1:
        for _ in range(count):
            batch = model.generate_batch(ones, ones, ones)
    else:
        handles = deque[BatchHandle]()
        for number in range(count + in_flight):
            if number >= in_flight:
                batch = handles.popleft().result()
            if number < count:
                handles.append(model.generate_batch_async(ones, ones, ones))
    took_s = SYSTEM_CLOCK.monotonic() - start_s
    if check:
        _check(batch, answer)
    return took_s


def _check(batch: Eagle3TargetBatch, answer: Tensors) -> None:
    found = batch.to("cpu").tensors()
    for name, tensor in answer.items():
        if not torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)):
            raise EaglefeedError(f"{name} is not what the server has", subject="bench remote")


def main() -> None:
    """Do the task that stands on stdin."""
    logs.configure("WARNING")  # on stderr: stdout is for what we say
    {"serve": _serve, "fetch": _fetch}[sys.argv[1]](json.loads(sys.stdin.readline()))


if __name__ == "__main__":
    main()
