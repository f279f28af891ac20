"""RemoteEagle3TargetModel: supervision from target servers, instead of from a target in this process.

B batch · S sequence · H target hidden size · V target vocabulary · D draft vocabulary
"""

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from eaglefeed.consumer.fleet import Fleet, GiveUp
from eaglefeed.consumer.remote_rows import RowsRequest, VocabSession
from eaglefeed.consumer.remote_server import DataPlane, RemoteServer
from eaglefeed.consumer.workers import Workers
from eaglefeed.errors import ConfigError, TargetError, TargetMismatch
from eaglefeed.logs import get_logger
from eaglefeed.schema.batch import Eagle3TargetBackend, Eagle3TargetBatch, EmbeddingHolder
from eaglefeed.schema.protocol import INPUT_EMBEDDINGS, TARGET_ASSETS, ModelInfo
from eaglefeed.storage.buffers import BufferRing, refuse_in_worker

__all__ = ["RemoteEagle3TargetModel", "RemoteHandle"]

_CLOSE_S = 3.0
_SPARE_BUFFERS = 2

log = get_logger(__name__)


class RemoteHandle:
    """A batch that is on its way from a target server."""

    def __init__(self) -> None:
        self.given_up = GiveUp()
        self._future: Future[Eagle3TargetBatch] = Future()

    def result(self, timeout: float | None = None) -> Eagle3TargetBatch:
        """Wait for it, at most `timeout` seconds; if it does not come in time it goes on, and can be waited for again.

        Raises:
            TimeoutError: it did not come in time.
            concurrent.futures.CancelledError: `cancel` gave it up.
            EaglefeedError: see RemoteEagle3TargetModel.generate_batch.
        """
        return self._future.result(timeout)

    def cancel(self) -> bool:
        """Give it up, also when it is on its way; False if it was done already."""
        is_cancelled = self._future.cancel()
        if is_cancelled:
            self.given_up.set()
        return is_cancelled

    def settle(self, batch: Eagle3TargetBatch) -> None:
        """Here it is, unless it was given up."""
        with suppress(InvalidStateError):
            self._future.set_result(batch)

    def fail(self, error: Exception) -> None:
        """It will not come; whoever works on it is to stop."""
        with suppress(InvalidStateError):
            self._future.set_exception(error)
        self.given_up.set()


class RemoteEagle3TargetModel(Eagle3TargetBackend):
    """Asks target servers (`eaglefeed serve-target`) for what HFEagle3TargetModel makes in this process.

    The numbers are equal: bit for bit where the server runs on the same kind of machine with the same dtype. Servers
    are used in turn, several requests on the way to each. One that fails is out, and its requests go to the others;
    every two seconds it is asked whether it is well again. Nothing is contacted before it is needed.

    Args:
        urls: http(s)://host:port of each server.
        device: where batches go; "cuda" is the device that is current now.
        timeout: seconds that an answer may take.
        max_retries: further attempts of a request, each on the next server.
        token: the servers', if they have one.
        data_plane: how tensors travel: "http" in the body of the reply, "gloo" or "nccl" over a pair group; by default
            NCCL to a CUDA device, else HTTP.
        exact: whether each request has a forward of its own, which alone keeps it equal bit for bit; without, servers
            run requests together.
        in_flight: requests on the way at a time, for each server; more of them wait here.

    Raises:
        ConfigError: no servers, an address that is none, a device, a data plane or a number that cannot be.
    """

    supports_async = True

    def __init__(
        self,
        urls: Sequence[str],
        *,
        device: torch.device | str,
        timeout: float = 120.0,
        max_retries: int = 3,
        token: str = "",
        data_plane: DataPlane = "auto",
        exact: bool = True,
        in_flight: int = 4,
    ) -> None:
        if isinstance(urls, str) or not urls:
            raise ConfigError("no target servers", wanted="a list of addresses", got=urls)
        if not (0 < timeout <= threading.TIMEOUT_MAX and max_retries >= 0 and in_flight > 0):
            wanted = "a finite timeout > 0, max_retries >= 0, in_flight > 0"
            got = f"timeout={timeout}, max_retries={max_retries}, in_flight={in_flight}"
            raise ConfigError("impossible numbers", wanted=wanted, got=got)
        self._device, self._exact, self._pid = _indexed(torch.device(device)), exact, os.getpid()
        ring = BufferRing(len(urls) * in_flight + _SPARE_BUFFERS, deadline_s=0.0, device=self._device)
        options = {"token": token, "device": self._device, "data_plane": data_plane, "in_flight": in_flight}
        servers = [RemoteServer(url, **options, timeout_s=timeout, ring=ring) for url in urls]  # type: ignore[arg-type]
        self._fleet = Fleet(servers, max_retries=max_retries)
        self._workers = Workers(len(servers) * in_flight)
        self._lock, self._embeddings_lock = threading.Lock(), threading.Lock()
        self._pending: set[RemoteHandle] = set()
        self._session: VocabSession | None = None
        self._embeddings: nn.Embedding | None = None
        self._is_closed = False
        self.num_remote_servers = len(servers)

    @classmethod
    def from_urls(cls, urls: Sequence[str], *, device: torch.device | str, **kwargs: Any) -> "RemoteEagle3TargetModel":
        """The same as the class; see there."""
        return cls(urls, device=device, **kwargs)

    def generate_batch(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, **packing: Tensor | None
    ) -> Eagle3TargetBatch:
        """Run the target on a server, as Eagle3TargetBackend says; rows that are not packed may be padded on the left.

        Returns:
            A batch on `device`, padded on the right as every shard is, with target_probs and position_mask, or logits
            while no vocabulary map is set.

        Raises:
            SchemaError: rows that the contract or the target does not allow.
            TargetUnavailable: every server is out; names each with its error.
            TargetMismatch: the servers' targets differ.
            ConfigError: a wrong token.
            TargetError: the target failed; or `close` was called.
            StorageError: the last attempt's answer broke on its way.
        """
        handle = self.generate_batch_async(input_ids, attention_mask, loss_mask, **packing)
        try:
            return handle.result()
        except BaseException:
            handle.cancel()  # Ctrl-C: nobody is going to ask for it
            raise

    def generate_batch_async(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, **packing: Tensor | None
    ) -> RemoteHandle:
        """Start `generate_batch`; the caller's tensors are free when this returns.

        An answer is in memory until its handle is dropped, so handles bound how far ahead a trainer may be.

        Raises:
            SchemaError: ids and masks that are not of one shape, no rows or tokens, or incomplete packing.
            TargetError: `close` was called.
        """
        request = RowsRequest(input_ids, attention_mask, loss_mask, session=self._session, **packing)
        handle = self._open_handle()
        self._workers.submit(partial(self._answer, request, handle))
        for index in self._fleet.due():
            self._workers.submit(partial(self._probe, index))
        return handle

    def _open_handle(self) -> RemoteHandle:
        if os.getpid() != self._pid:  # its threads are the parent's: nobody would ever answer
            fix = "make another one in this process"
            raise TargetError("cannot be used after fork", subject=type(self).__name__, fix=fix)
        handle = RemoteHandle()
        with self._lock:
            if self._is_closed:
                raise _closed()
            self._pending.add(handle)
        return handle

    def _answer(self, request: RowsRequest, handle: RemoteHandle) -> None:
        given_up, exact = handle.given_up, self._exact

        def generate(server: RemoteServer, info: ModelInfo) -> Eagle3TargetBatch:
            return server.generate(request, info, exact=exact, abort=given_up.abort)

        try:
            if not (given_up.is_set or self._is_closed):
                handle.settle(self._fleet.call(generate, given_up).to(self._device))
        except Exception as error:  # noqa: BLE001  whatever it is, it belongs to whoever waits
            handle.fail(error)
        finally:
            with self._lock:
                self._pending.discard(handle)

    def set_vocab_mapping(self, selected_token_ids: Tensor, selected_token_mask: Tensor) -> None:
        """Make `target_probs` and `position_mask` over these tokens in every batch that is asked for from now on.

        A server that is out gets the map with its next request.

        Args:
            selected_token_ids: [D] int64, ascending.
            selected_token_mask: [V] bool, true at those ids.

        Raises:
            SchemaError: the two are no tensors, disagree, or are not of the target's vocabulary.
            EaglefeedError: see generate_batch.
        """
        session = VocabSession.of(selected_token_ids, selected_token_mask)
        with self._call() as given_up:
            self._fleet.call_all(lambda server, _: server.set_vocab_mapping(session, given_up.abort), given_up)
        before, self._session = self._session, session
        self._end(before)

    def get_input_embeddings(self) -> EmbeddingHolder:
        """The target's input embeddings, [V, H] (or taller) on `device`; fetched once.

        Raises:
            EaglefeedError: see generate_batch.
        """
        with self._embeddings_lock:
            if self._embeddings is None:
                weight = self._weights(INPUT_EMBEDDINGS)[0].get("weight")
                if weight is None or weight.ndim != 2 or not weight.is_floating_point():
                    raise TargetMismatch("no input embeddings", wanted="weight, [V, H] float", got=weight)
                self._embeddings = nn.Embedding.from_pretrained(weight.to(self._device))  # type: ignore[no-untyped-call]
        return cast("EmbeddingHolder", self._embeddings)

    def target_assets(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What trainers need of the target, on the CPU; see HFEagle3TargetModel.target_assets.

        Raises:
            EaglefeedError: see generate_batch.
        """
        return self._weights(TARGET_ASSETS)

    def check_ready(self) -> None:
        """Ask whether a server takes requests now: one that is loading, or compiling, would let them grow old.

        Raises:
            EaglefeedError: see generate_batch.
        """
        with self._call() as given_up:
            self._fleet.call(lambda server, _: server.check_ready(given_up.abort), given_up)

    def model_info(self) -> dict[str, Any]:
        """What the servers' target is: the fields of ModelInfo. Asks every server that is well.

        Raises:
            EaglefeedError: see generate_batch.
        """
        found: list[ModelInfo] = []
        with self._call() as given_up:
            self._fleet.call_all(lambda _, info: found.append(info), given_up)
        return found[0].model_dump()

    def close(self) -> None:
        """Give up what is on its way, end the session on the servers that are well, and hang up; within seconds."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            pending = list(self._pending)
        if was_closed:
            return
        for handle in pending:
            handle.fail(_closed())
        if not self._workers.close(_CLOSE_S):
            log.warning("remote_target_left_behind", reason="a transfer does not end before its timeout")
        self._end(self._session)
        self._fleet.close()

    def _weights(self, path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        with self._call() as given_up:
            return self._fleet.call(lambda server, info: server.weights(path, info, given_up.abort), given_up)

    def _probe(self, index: int) -> None:
        with suppress(TargetError), self._call() as given_up:  # closed meanwhile
            self._fleet.probe(index, given_up)

    @contextmanager
    def _call(self) -> Iterator[GiveUp]:
        """A call in the caller's thread, which `close` gives up too."""
        handle = self._open_handle()
        try:
            yield handle.given_up
        finally:
            with self._lock:
                self._pending.discard(handle)

    def _end(self, session: VocabSession | None) -> None:
        if session is not None:
            for server in self._fleet.well():
                server.end(session)


def _indexed(device: torch.device) -> torch.device:
    """The device, "cuda" with its index: in the threads that fetch answers another one is current."""
    if device.type != "cuda":
        return device
    refuse_in_worker(str(device))
    if (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError("no such device", subject=str(device), got=f"{count} CUDA devices", fix="use cpu")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def _closed() -> TargetError:
    return TargetError("closed", subject="RemoteEagle3TargetModel", fix="make another one")
