"""VLLMEagle3TargetModel: supervision from a vLLM server that captures layer outputs.

B batch · S sequence · H hidden size · n tokens of a document · K captured layers

vLLM's layer id k is what enters layer k: the output of our layer j is its id j + 1, and its id L, for L layers, is what
enters the final norm, which is applied here. Packed documents are requests of their own.
"""

import json
import sys
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import ConfigError, TargetMismatch, TargetUnavailable
from eaglefeed.logs import get_logger
from eaglefeed.producer.checkpoint import Checkpoint
from eaglefeed.producer.engine import Eagle3Target, checked_layer_ids
from eaglefeed.producer.engines.captures import CaptureFolder, CaptureKind, MissingCapture
from eaglefeed.producer.engines.documents import PROBE, Document, check_probe, documents_of
from eaglefeed.producer.engines.vllm_launch import check_installed, launch_of
from eaglefeed.producer.engines.vllm_server import OwnServer, RunningServer, Server
from eaglefeed.producer.rows import Rows
from eaglefeed.storage.control import ControlClient, Refused

__all__ = ["VLLMEagle3TargetModel", "captured_layers", "open_vllm", "said_token"]

_AT_ONCE = 16
_ATTEMPTS = 3
_SWEEP_S, _ORPHAN_S = 60.0, 900.0
_CACHED_TOKENS = 300
"""More than two blocks of vLLM's cache: those that are full are found again."""
_log = get_logger(__name__)


class VLLMEagle3TargetModel(Eagle3Target):
    """A target behind a vLLM server; Eagle3Target says what its supervision is.

    Args:
        checkpoint: of the same target as the server's; its head, final norm and embeddings are read here.
        aux_layer_ids: as Eagle3Target's.
        compact: supervise with last hidden states.
        device: where the features are made of captures.
        server: where to ask; ended by `close`.
        timeout_s: for one row.
        clock: measures waits.

    Raises:
        SchemaError: impossible aux_layer_ids.
        ConfigError: the server's folder cannot be used.
        TargetMismatch: its final norm cannot be found.
    """

    engine = "vllm"

    def __init__(
        self,
        checkpoint: Checkpoint,
        aux_layer_ids: tuple[int, ...] | None,
        *,
        compact: bool,
        device: str,
        server: Server,
        timeout_s: float = 180.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(checkpoint.parts(device), aux_layer_ids, compact=compact)
        norm = self.parts.norm
        if norm is None:
            raise TargetMismatch("its final norm cannot be found", subject=checkpoint.name, fix="use the engine hf")
        self._norm, self._checkpoint, self._server, self._timeout_s, self._clock = (
            norm,
            checkpoint,
            server,
            timeout_s,
            clock,
        )
        self._layers = captured_layers(self.aux_layer_ids, self.num_layers)
        kind = CaptureKind(self._layers, self.hidden_size, self.parts.head.weight.dtype)
        self._folder = CaptureFolder(server.captures, kind, clock)
        self._client = ControlClient(server.url, token=server.key, max_idle=_AT_ONCE)
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="eaglefeed-vllm")
        self._swept_s = clock.monotonic()

    def connect(self) -> None:
        """Look at what answers: once, before anything is captured.

        Raises:
            ConfigError: it is no vLLM server, or its folder is not the one that was given.
            TargetUnavailable: nobody answers.
            TargetMismatch: it runs another target, or one whose logits are more than its head; or its captures are cut
                short by a prefix cache.
        """
        self._model, self._longest = self._ask_model()
        try:
            self._probe()
            self._probe_cache()
        except MissingCapture as error:
            if not isinstance(self._server, RunningServer):
                raise
            what, fix = "the engine's captures do not come", "pass its shared_storage_path as target.engine_dir"
            raise ConfigError(what, subject=str(self._server.captures), got=error.subject, fix=fix) from None

    @property
    def max_positions(self) -> int | None:
        """Tokens a row may have, here and in the server."""
        own = super().max_positions
        return self._longest if own is None else min(own, self._longest)

    def fingerprint(self) -> str:
        """The RunContract's `target_fingerprint`; the engine hf's, where the checkpoint allows."""
        return self._checkpoint.fingerprint()

    def close(self) -> None:
        """End the server, if it was started here."""
        self._pool.shutdown()
        self._client.close()
        self._server.stop()

    def _forward(self, rows: Rows, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        if self._clock.monotonic() - self._swept_s > _SWEEP_S:
            self._swept_s = self._clock.monotonic()
            self._folder.sweep(_ORPHAN_S)
        size, dtype = self.hidden_size, self.parts.head.weight.dtype
        aux = torch.zeros(*rows.real.shape, len(self.aux_layer_ids) * size, dtype=dtype, device=self.device)
        last = torch.zeros(*rows.real.shape, size, dtype=dtype, device=self.device)
        documents = list(documents_of(rows, position_ids))
        for (row, start, ids), captured in zip(documents, self._capture_all(documents), strict=True):
            place, states = slice(start, start + len(ids)), captured.to(self.device)
            aux[row, place] = states[:, [self._layers.index(layer + 1) for layer in self.aux_layer_ids]].flatten(1)
            last[row, place] = self._normed(states)
        return aux, last

    def _normed(self, states: Tensor) -> Tensor:
        """Last hidden states [n, H] of captured ones [n, K, H]."""
        normed: Tensor = self._norm(states[:, self._layers.index(self.num_layers)])
        return normed

    def _capture_all(self, documents: list[Document]) -> Iterator[Tensor]:
        """Their states, in order; when this ends, also by an error, so have all requests, and their files are gone."""
        futures = deque(self._pool.submit(self._capture, document.ids) for document in documents)
        try:
            while futures:
                states, _ = futures[0].result()
                futures.popleft()  # or all captures of a batch would stay in memory until its end
                yield states
        finally:
            for future in futures:
                _ = future.cancel() or future.exception()

    def _capture(self, ids: list[int], **more: object) -> tuple[Tensor, Any]:
        """States [n, K, H] and the engine's own choice of a next token.

        A server that fails is given another chance, and started again if it is ours.
        """
        for attempt in range(1, _ATTEMPTS):
            try:
                return self._capture_once(ids, more)
            except TargetUnavailable as error:
                _log.warning("capture_failed", attempt=attempt, reason=str(error))
                self._server.revive()
        try:
            return self._capture_once(ids, more)
        except TargetUnavailable as error:
            raise self._server.explain(error) from None

    def _capture_once(self, ids: list[int], more: dict[str, object]) -> tuple[Tensor, Any]:
        request_id, start = f"eaglefeed-{uuid.uuid4().hex}", self._clock.monotonic()
        asked = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0, "ignore_eos": True} | more
        said = self._json("/v1/completions", asked, {"x-request-id": request_id})
        try:
            path, choice = str(said["kv_transfer_params"]["hidden_states_path"]), said["choices"][0]
        except (KeyError, IndexError, TypeError):
            fix = "start the engine with eaglefeed's connector, as target.engine=vllm without engine_url does"
            raise TargetMismatch("the engine captured nothing", subject=self._server.url, fix=fix) from None
        left_s = max(1.0, self._timeout_s - (self._clock.monotonic() - start))
        return self._folder.take(path, request_id, ids, left_s), choice

    def _json(self, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> Any:
        method = "GET" if body is None else "POST"
        data = b"" if body is None else json.dumps(body).encode()
        headers = headers | {"content-type": "application/json"}
        try:
            reply = self._client.call(path, data, method=method, headers=headers, timeout_s=self._timeout_s)
        except Refused as refused:
            raise _refusal(refused, self._server.url) from None
        try:
            return json.loads(reply.body)
        except ValueError:
            raise _no_vllm(self._server.url) from None

    def _ask_model(self) -> tuple[str, int]:
        """The served model's name, and the longest row it takes: one token must be left to generate."""
        try:
            (model,) = self._json("/v1/models", None, {})["data"]
            return str(model["id"]), int(model["max_model_len"]) - 1
        except (TargetMismatch, KeyError, TypeError, ValueError):
            raise _no_vllm(self._server.url) from None

    def _probe(self) -> None:
        """Capture a few tokens, and compare what head and final norm make of them with what the engine says."""
        ids = [token % self.vocab_size for token in PROBE]
        states, choice = self._capture(ids, logprobs=1, return_tokens_as_token_ids=True)
        token, logprob = said_token(choice, self._server.url)
        with torch.no_grad():
            logits = self._logits(self._normed(states.to(self.device))[-1:])[0]
        check_probe(logits, token, logprob, self._checkpoint.name)

    def _probe_cache(self) -> None:
        """Capture one row twice: what a prefix cache leaves out is told before a sample is made."""
        row = [token % self.vocab_size for token in range(min(_CACHED_TOKENS, self._longest))]
        for _ in range(2):
            self._capture(row)


def captured_layers(aux_layer_ids: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Ids of vLLM, ascending, of these layers' outputs and of what enters the final norm; each once."""
    return tuple(sorted({*(layer + 1 for layer in aux_layer_ids), num_layers}))


def said_token(choice: Any, url: str) -> tuple[int, float]:
    """The token that a server chose, and its log probability.

    Raises:
        ConfigError: it says none.
    """
    try:
        said = choice["logprobs"]
        return int(said["tokens"][0].removeprefix("token_id:")), float(said["token_logprobs"][0])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise _no_vllm(url) from None


def open_vllm(
    checkpoint: Checkpoint,
    aux_layer_ids: tuple[int, ...] | None,
    *,
    device: str,
    compact: bool,
    url: str = "",
    folder: Path | None = None,
    python: str = "",
    tp_size: int = 1,
    max_length: int | None = None,
) -> VLLMEagle3TargetModel:
    """Start a server for a checkpoint, or take one that runs at `url`; the parameters are open_target's.

    Raises:
        ConfigError: vLLM is not installed, or the settings do not fit together.
        SchemaError, TargetUnavailable, TargetMismatch: as VLLMEagle3TargetModel's and its `connect`'s.
    """
    # Before the start: a wrong id crashes the engine in its first forward.
    ids = checked_layer_ids(aux_layer_ids, checkpoint.num_layers)
    if url and folder is None:
        fix = "pass its shared_storage_path as target.engine_dir"
        raise ConfigError("a running engine needs the folder of its captures", subject=url, fix=fix)
    if url and folder is not None:
        server: Server = RunningServer(url, folder)
    else:
        check_installed(python or sys.executable)
        layers = captured_layers(ids, checkpoint.num_layers)
        launch = launch_of(
            checkpoint,
            python=python or sys.executable,
            layers=layers,
            tp_size=tp_size,
            max_length=max_length,
            device=device,
        )
        server = OwnServer(launch, folder)
    with ExitStack() as stack:
        stack.callback(server.stop)
        target = VLLMEagle3TargetModel(checkpoint, ids, compact=compact, device=device, server=server)
        stack.callback(target.close)
        target.connect()
        stack.pop_all()
    return target


def _refusal(refused: Refused, url: str) -> TargetUnavailable | TargetMismatch:
    got = refused.error.got
    if refused.status >= 500 or refused.status == 429:
        return TargetUnavailable("the engine failed", subject=url, got=got, fix="see its log")
    return TargetMismatch("the engine refused the request", subject=url, got=got)


def _no_vllm(url: str) -> ConfigError:
    return ConfigError("no vLLM server answers there", subject=url, fix="check target.engine_url")
