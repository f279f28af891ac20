"""NeMo AutoModel's remote target: its server in one process, its client in another, over the body of its HTTP replies.

One line of JSON in for each operation, one line of JSON out. The one argument is what it does: `about` says what is
measured, `serve` runs the server, `fetch` the client. The first line on stdin is the task: the safetensors files of the
answers, by their number of tokens; for `serve` the port, and for `fetch` the URL. Then each line for `fetch` is one
run: `count` answers of `tokens`, `in_flight` at a time; with "check", what came is compared with the file.

No model runs: the server's compute_supervision is replaced by one that returns the tensors of the file, so that what
is timed is the server, the wire and the client.
"""

import json
import sys
import threading
import time
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import requests
import torch
from nemo_automodel.components.speculative.eagle.remote import RemoteEagle3TargetModel, server
from safetensors.torch import load_file
from store_protocol import as_bytes, say

ABOUT = {
    "version": version("nemo-automodel"),
    "settings": "TargetModelServer behind its serve(), RemoteEagle3TargetModel on the CPU; without SGLang, so no NCCL",
    "does_more": [],
    "does_less": [
        "no digests, no request ids, no authentication",
        "one request at a time, by a lock in its server and one in its client",
        "the attention mask does not travel: 16 kB less",
    ],
}
_HOST, _READY_S, _POLL_S = "127.0.0.1", 60.0, 0.05
_SENT = ("aux_hidden_states", "target_probs", "position_mask", "input_ids", "loss_mask")
Answers = dict[int, dict[str, torch.Tensor]]


def _answers(task: dict[str, Any]) -> Answers:
    """The tensors of each answer in memory, not mapped, by its number of tokens."""
    return {
        int(tokens): {name: tensor.clone() for name, tensor in load_file(path).items()}
        for tokens, path in task["answers"].items()
    }


def _serve(task: dict[str, Any]) -> None:
    answers = _answers(task)

    def prepared(_target: object, _ids: object, _mask: object, *, input_ids: torch.Tensor, **_rows: object) -> Any:
        answer = answers[input_ids.shape[1]]
        return {name: answer[name] for name in _SENT}

    server.compute_supervision = prepared
    logic = server.TargetModelServer(SimpleNamespace(), nccl_port=task["port"] + 1, host=_HOST)
    threading.Thread(target=server.serve, args=(logic, _HOST, task["port"]), daemon=True).start()
    url = f"http://{_HOST}:{task['port']}"
    _wait_for(f"{url}/health")
    say(url=url)
    sys.stdin.read()


def _wait_for(address: str) -> None:
    with requests.Session() as session:
        session.trust_env = False
        end_s = time.monotonic() + _READY_S
        while True:
            try:
                session.get(address, timeout=1)
            except requests.ConnectionError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(_POLL_S)
            else:
                return


def _fetch(task: dict[str, Any]) -> None:
    answers = _answers(task)
    model = RemoteEagle3TargetModel.from_urls([task["url"]], device="cpu")
    widest = next(iter(answers.values()))["target_probs"].shape[-1]
    model.set_vocab_mapping(torch.arange(widest), torch.ones(widest, dtype=torch.bool))
    say(ready=True)
    for line in sys.stdin:
        words = json.loads(line)
        say(took_s=_run(model, answers[words["tokens"]], **words))


def _run(
    model: RemoteEagle3TargetModel,
    answer: dict[str, torch.Tensor],
    *,
    tokens: int,
    count: int,
    in_flight: int,
    check: bool = False,
) -> float:
    ones = torch.ones(1, tokens, dtype=torch.int64)
    start_s = time.monotonic()
    if in_flight == 1:
        for _ in range(count):
            batch = model.generate_batch(ones, ones, ones)
    else:
        handles = [model.generate_batch_async(ones, ones, ones) for _ in range(in_flight)]
        for number in range(count):
            batch = handles.pop(0).result()
            if number + in_flight < count:
                handles.append(model.generate_batch_async(ones, ones, ones))
    took_s = time.monotonic() - start_s
    if check:
        _check(batch, answer)
    return took_s


def _check(batch: object, answer: dict[str, torch.Tensor]) -> None:
    for name in _SENT:
        if not torch.equal(as_bytes(getattr(batch, name)), as_bytes(answer[name])):
            sys.exit(f"{name} is not what the server has")


def main() -> None:
    """Do what the command line says."""
    if sys.argv[1] == "about":
        say(**ABOUT)
        return
    {"serve": _serve, "fetch": _fetch}[sys.argv[1]](json.loads(sys.stdin.readline()))


if __name__ == "__main__":
    main()
