"""A vLLM server of the tests: the same requests, replies, captures and locks as the real one, with a tiny model inside.

In this process: `FakeVLLM`. As a process of its own, in place of an interpreter with vLLM: `interpreter(folder)`.
"""

import argparse
import fcntl
import json
import os
import stat
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["BLOCK", "FakeVLLM", "interpreter"]

BLOCK = 16


class FakeVLLM:
    """Listens on loopback; `faults` names what goes wrong with each of the next requests, "" for nothing."""

    def __init__(
        self,
        model: Any,
        layers: list[int],
        captures: Path,
        *,
        port: int = 0,
        max_model_len: int = 129,
        key: str = "",
    ) -> None:
        self.model, self.layers, self.captures, self.max_model_len = model, layers, captures, max_model_len
        self.faults: list[str] = []
        self.delay_s = 0.0
        self.requests: list[dict[str, Any]] = []
        self.caches = False
        """Whether prompts that begin as earlier ones are captured without what they share, in whole blocks."""
        self._lock, self._writers = threading.Lock(), []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def parse_request(self) -> bool:
                """As vLLM's, it guards what lies below /v1 alone."""
                if not super().parse_request():
                    return False
                is_open = not key or not self.path.startswith("/v1")
                if is_open or self.headers["authorization"] == f"Bearer {key}":
                    return True
                self.say(401, {"error": "Unauthorized"})
                return False

            def do_GET(self) -> None:
                listing = {"data": [{"id": "toy", "max_model_len": fake.max_model_len}]}
                self.say(200, {} if self.path == "/health" else listing)

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.say(*fake.complete(asked, self.headers["x-request-id"]))

            def say(self, status: int, body: Any) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> "FakeVLLM":
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self._thread.join()
        for writer in self._writers:
            writer.join()
        self.server.server_close()

    def complete(self, asked: dict[str, Any], request_id: str) -> tuple[int, Any]:
        with self._lock:
            hit = self.cached(asked["prompt"]) if self.caches else 0
            self.requests.append(asked)
            fault = self.faults.pop(0) if self.faults else ""
        if fault == "die":
            sys.stdout.write("RuntimeError: Engine core ran into a wall" + "\n")
            sys.stdout.flush()
            os._exit(1)
        if fault.isdigit():
            return int(fault), {"error": {"message": "no", "code": int(fault)}}
        if fault == "garbage":
            return 200, b"<html>"
        assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("toy", 1, 0)
        assert "n" not in asked
        states, logprobs = self.run(asked["prompt"])
        states = states[hit:]
        name = f"cmpl-{request_id}-0-0a1b2c3d.safetensors"
        if fault == "other request":
            name = f"cmpl-eaglefeed-{'0' * 32}-0-0a1b2c3d.safetensors"
        if fault not in ("no lock", "no path"):
            self.write_later(name, asked["prompt"], states, fault)
        best = int(logprobs.argmax())
        said = {"tokens": [f"token_id:{best}"], "token_logprobs": [float(logprobs[best])]}
        reply: dict[str, Any] = {"choices": [{"logprobs": said if "logprobs" in asked else None}]}
        if fault != "no path":
            reply["kv_transfer_params"] = {"hidden_states_path": f"/elsewhere/in/a/container/{name}"}
        return 200, reply

    def cached(self, ids: list[int]) -> int:
        """Tokens of a prompt that are in the cache; its last one never is."""
        blocks = range((len(ids) - 1) // BLOCK * BLOCK, 0, -BLOCK)
        return next((end for end in blocks if any(seen["prompt"][:end] == ids[:end] for seen in self.requests)), 0)

    def run(self, ids: list[int]) -> tuple[Any, Any]:
        """States [n, K, H] in the order of vLLM's ids, each once, and the next token's log probabilities."""
        import torch

        backbone, kept = self.model.base_model, {}
        hook = backbone.layers[-1].register_forward_hook(lambda _m, _a, out: kept.update(last=out))
        try:
            with torch.no_grad(), self._lock:
                out = self.model(torch.tensor([ids]), output_hidden_states=True)
        finally:
            hook.remove()
        last = kept["last"][0] if isinstance(kept["last"], tuple) else kept["last"]
        entering = [*out.hidden_states[:-1], last]  # what enters layer k; the last one enters the final norm
        states = torch.stack([entering[layer][0] for layer in sorted(set(self.layers))], 1)
        return states, out.logits[0, -1].float().log_softmax(-1)

    def write_later(self, name: str, ids: list[int], states: Any, fault: str) -> None:
        """Lock before the answer, write after it."""
        path = self.captures / name
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            time.sleep(self.delay_s)
            self.write(path, ids, states, fault)
            os.close(lock)

        self._writers.append(threading.Thread(target=write))
        self._writers[-1].start()

    def write(self, path: Path, ids: list[int], states: Any, fault: str) -> None:
        import torch
        from safetensors.torch import save_file

        layers = sorted(set(self.layers))
        if fault == "no file":
            return
        if fault == "short":
            states = states[-1:]
        if fault == "narrow":
            states = states[..., :-1]
        if fault == "half":
            states = states.to(torch.float16)
        tensors = {"hidden_states": states.contiguous(), "token_ids": torch.tensor(ids) + (fault == "other tokens")}
        metadata = {"layers": json.dumps(layers[1:] if fault == "other layers" else layers)}
        save_file(tensors, path, metadata=None if fault == "other connector" else metadata)
        if fault == "cut":
            os.truncate(path, path.stat().st_size // 2)


def interpreter(folder: Path, *, version: str = "0.32.0", fault: str = "") -> str:
    """A program that stands for an interpreter with vLLM."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "{version}" "{fault}" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def main() -> None:
    version, fault, *words = sys.argv[1:]
    if words[0] == "-c":
        sys.stdout.write(version)
        return
    if fault == "at start":
        sys.stdout.write("ValueError: No available memory for the cache blocks")
        sys.exit(1)
    parser = argparse.ArgumentParser()
    for name in ("model", "port", "max-model-len", "speculative-config", "kv-transfer-config"):
        parser.add_argument(f"--{name}")
    options = parser.parse_known_args(words)[0]
    capturing = json.loads(options.speculative_config)["draft_model_config"]["hf_config"]
    handing_out = json.loads(options.kv_transfer_config)["kv_connector_extra_config"]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model).eval()
    fake = FakeVLLM(
        model,
        capturing["eagle_aux_hidden_state_layer_ids"],
        Path(handing_out["shared_storage_path"]),
        port=int(options.port),
        max_model_len=int(options.max_model_len),
        key=os.environ.get("VLLM_API_KEY", ""),
    )
    if fault == "once" and not Path(options.model, "died").exists():
        fake.faults = ["", "", "", "die"]  # the fourth request is the first after the probes
        Path(options.model, "died").touch()
    fake.server.serve_forever()


if __name__ == "__main__":
    main()
