"""One target server, as its clients see it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal, get_args

import torch
from torch import Tensor

from eaglefeed.consumer.remote_rows import RowsRequest, VocabSession
from eaglefeed.errors import ConfigError, EaglefeedError, TargetUnavailable
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.protocol import (
    DISCONNECT,
    EXACT_HEADER,
    GENERATE,
    MODEL_INFO,
    READY,
    REQUEST_HEADER,
    SESSION_HEADER,
    SET_VOCAB_MAPPING,
    ModelInfo,
)
from eaglefeed.storage.buffers import BufferRing
from eaglefeed.storage.control import Abort, ControlClient, Fetched, Refused
from eaglefeed.storage.exchange import TensorExchange
from eaglefeed.storage.header import MAX_HEADER_BYTES
from eaglefeed.storage.pair_pool import PairPool

__all__ = ["DataPlane", "RemoteServer"]

DataPlane = Literal["auto", "http", "gloo", "nccl"]
_UNKNOWN_SESSION = 409
_PROBE_S, _FAREWELL_S = 2.0, 1.0
_WIDEST_ITEM_BYTES = 8
_LABELS = ("request", "model")


class RemoteServer:
    """A target server; any number of threads may share it.

    Args:
        url: http(s)://host:port.
        token: the server's, if it has one.
        device: where answers go.
        data_plane: how they travel there; by default over NCCL to a CUDA device, else as the HTTP body.
        in_flight: connections, and pairs, kept for later.
        timeout_s: for each exchange.
        ring: memory that answers are read into while it has some free, fresh memory then.

    Raises:
        ConfigError: no such address or data plane, or an unusable token.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str,
        device: torch.device,
        data_plane: DataPlane,
        in_flight: int,
        timeout_s: float,
        ring: BufferRing,
    ) -> None:
        self._client = ControlClient(url, token=token, max_idle=in_flight + 1)
        self.url, self._timeout_s = self._client.url, timeout_s
        self._pool = _pool_of(self._client, data_plane, device, in_flight, timeout_s)
        self._exchange = TensorExchange(self._client, self._pool, ring)
        self._info: ModelInfo | None = None

    def forget(self) -> None:
        """Ask for its target anew before the next request: it may come back as another's."""
        self._info = None

    def check_ready(self, abort: Abort) -> None:
        """Ask whether it takes requests.

        Raises:
            EaglefeedError: it does not, or does not say so within two seconds.
        """
        with _errors():
            self._client.call(READY, method="GET", timeout_s=min(_PROBE_S, self._timeout_s), abort=abort)

    def model_info(self, abort: Abort) -> ModelInfo:
        """What its target is, asked for once.

        Raises:
            EaglefeedError: it does not say; see ControlClient.call.
        """
        if (info := self._info) is None:
            with _errors():
                reply = self._client.call(MODEL_INFO, timeout_s=self._timeout_s, abort=abort)
            self._info = info = ModelInfo.from_json(reply.body, self.url)
        return info

    def set_vocab_mapping(self, session: VocabSession, abort: Abort) -> None:
        """Have the session's requests answered over its map.

        Raises:
            SchemaError: no map of this server's target.
            EaglefeedError: see ControlClient.call.
        """
        headers = {SESSION_HEADER: session.name}
        with _errors():
            self._client.call(SET_VOCAB_MAPPING, session.body, headers=headers, timeout_s=self._timeout_s, abort=abort)

    def generate(self, request: RowsRequest, info: ModelInfo, *, exact: bool, abort: Abort) -> Eagle3TargetBatch:
        """The answer to a request. A server that does not know the request's map (any more) gets it again, once.

        Args:
            request: the rows.
            info: the target that is to answer.
            exact: they are to share no forward.
            abort: ends it from another thread.

        Raises:
            TargetUnavailable: no answer, or not the one to this request.
            PeerGone: the pair that it was to come over broke.
            SampleCorrupt: damaged on the way.
            EaglefeedError: the server's own word.
        """
        headers = {REQUEST_HEADER: request.id, EXACT_HEADER: str(int(exact))}
        try:
            fetched = self._generate(request, info, headers, abort)
        except Refused as refused:
            if refused.status != _UNKNOWN_SESSION or request.session is None:
                raise refused.error from None
            self.set_vocab_mapping(request.session, abort)
            with _errors():
                fetched = self._generate(request, info, headers, abort)
        return request.answer(fetched.tensors, fetched.metadata, info, self.url)

    def _generate(self, request: RowsRequest, info: ModelInfo, headers: dict[str, str], abort: Abort) -> Fetched:
        session = {SESSION_HEADER: request.session.name} if request.session else {}
        return self._exchange.fetch(
            GENERATE,
            request.body,
            headers=headers | session,
            timeout_s=self._timeout_s,
            subject=f"{self.url} {request.id}",
            max_bytes=request.max_bytes(info),
            abort=abort,
        )

    def weights(self, path: str, info: ModelInfo, abort: Abort) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Weights of the target on the CPU, at most embeddings and head of twice V tokens; and their metadata.

        Raises:
            TargetUnavailable: of another target than `info` describes.
            EaglefeedError: see ControlClient.fetch.
        """
        max_bytes = MAX_HEADER_BYTES + 4 * info.vocab_size * info.hidden_size * _WIDEST_ITEM_BYTES
        with _errors():
            fetched = self._client.fetch(
                path, timeout_s=self._timeout_s, subject=f"{self.url} {path}", max_bytes=max_bytes, abort=abort
            )
        if (got := fetched.metadata.get("model")) != info.id:
            raise TargetUnavailable("weights of another target", subject=self.url, wanted=info.id, got=got)
        return fetched.tensors, {name: text for name, text in fetched.metadata.items() if name not in _LABELS}

    def end(self, session: VocabSession) -> None:
        """Say that a session's map is not needed any more; a server that does not hear it forgets it by itself."""
        with suppress(Refused, EaglefeedError):
            self._client.call(DISCONNECT, headers={SESSION_HEADER: session.name}, timeout_s=_FAREWELL_S)

    def close(self) -> None:
        """Hang up."""
        if self._pool is not None:
            self._pool.close()
        self._client.close()


@contextmanager
def _errors() -> Iterator[None]:
    """Raise what a server says as it says it."""
    try:
        yield
    except Refused as refused:
        raise refused.error from None


def _pool_of(
    client: ControlClient, data_plane: DataPlane, device: torch.device, in_flight: int, timeout_s: float
) -> PairPool | None:
    if data_plane not in get_args(DataPlane):
        raise ConfigError("unknown data_plane", wanted=" or ".join(get_args(DataPlane)), got=data_plane)
    if data_plane == "nccl" and device.type != "cuda":
        raise ConfigError("NCCL moves tensors to CUDA devices alone", subject=str(device), fix="use http or gloo")
    if data_plane == "http" or (data_plane == "auto" and device.type != "cuda"):
        return None
    if data_plane == "gloo":
        return PairPool(client, backend="gloo", device=torch.device("cpu"), max_pairs=in_flight, timeout_s=timeout_s)
    return PairPool(client, backend="nccl", device=device, max_pairs=in_flight, timeout_s=timeout_s)
