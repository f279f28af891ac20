"""TargetServer: a target that answers clients on other machines. `python -m eaglefeed.producer.server` starts one."""

import argparse
import json
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from eaglefeed.access import check_listen, read_token
from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import ConfigError, EaglefeedError, SchemaError, TargetError
from eaglefeed.logs import get_logger
from eaglefeed.producer.batcher import Batcher
from eaglefeed.producer.engine import Eagle3Target
from eaglefeed.producer.loading import DEFAULT_TARGET
from eaglefeed.producer.opening import ENGINES, info_of, open_target
from eaglefeed.producer.sessions import Sessions
from eaglefeed.producer.work import BatcherStats
from eaglefeed.schema.protocol import ModelInfo
from eaglefeed.signals import stop_on_signals

if TYPE_CHECKING:
    from starlette.types import ASGIApp

__all__ = ["TargetServer", "check_server", "main", "ready_report", "stats_line"]

_LOOK_S = 0.2
_NCCL_PORT_OFFSET = 100
log = get_logger(__name__)


class TargetServer:
    """Serves a target over HTTP.

    Args:
        target: what it serves.
        info: what it says of it, from `info_of`.
        host: address to listen on; beyond this machine only with a token.
        port: 0 for a free one.
        nccl_port: where pair groups meet; by default port + 100, or a free one beside a free port.
        token: what clients must show.
        batch_tokens: requests share a forward up to this many tokens.
        max_in_flight: answers in memory at a time.
        max_waiting: requests that wait for a forward.
        max_request_bytes: of one request's body.
        max_tokens: B x S of one request, which bounds its answer.
        warm_up_tokens: of the row that it runs before it is ready; no more than the target and a request may have.
        session_idle_s: how long a client's vocabulary map is kept without a sign of it.
        clock: measures deadlines.
    """

    def __init__(
        self,
        target: Eagle3Target,
        info: ModelInfo,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        nccl_port: int | None = None,
        token: str = "",
        batch_tokens: int = 8192,
        max_in_flight: int = 4,
        max_waiting: int = 256,
        max_request_bytes: int = 64 * 2**20,
        max_tokens: int = 65_536,
        warm_up_tokens: int = 2048,
        session_idle_s: float = 3600.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._target, self._info, self._clock = target, info, clock
        self._host, self._port, self._token = host, port, token
        self._nccl_port = _nccl_port(port, nccl_port)
        self._max_request_bytes, self._session_idle_s = max_request_bytes, session_idle_s
        self._max_tokens = max_tokens
        self._warm_up_tokens = min(warm_up_tokens, max_tokens, info.max_positions or max_tokens)
        self._batcher = Batcher(
            target, batch_tokens=batch_tokens, max_in_flight=max_in_flight, max_waiting=max_waiting, clock=clock
        )
        self._forwards = threading.Thread(target=self._run, name="target", daemon=True)
        self._settled = threading.Event()
        self._failure: EaglefeedError | None = None

    @property
    def info(self) -> ModelInfo:
        """What it says of its target."""
        return self._info

    @property
    def url(self) -> str:
        """Where this machine reaches it, once it has started."""
        return self._http.url

    @property
    def nccl_port(self) -> int:
        """Where pair groups meet, once it has started."""
        return self._pairs.port

    def start(self) -> None:
        """Listen, and warm the target up meanwhile; requests that come before it is warm wait.

        Raises:
            ConfigError: it cannot listen there.
        """
        check_server(self._host, self._token)
        from eaglefeed.storage.pair_host import PairHost
        from eaglefeed.storage.serving import MAX_BODY_BYTES, HttpServer

        backends, max_body_bytes = self._info.data_planes, max(MAX_BODY_BYTES, self._max_request_bytes)
        self._pairs = PairHost(self._host, self._nccl_port, backends, device=self._target.device, clock=self._clock)
        self._http = HttpServer(self._app(), token=self._token, max_body_bytes=max_body_bytes, clock=self._clock)
        try:
            self._http.start(self._host, self._port)
        except BaseException:
            self._pairs.close()
            raise
        self._forwards.start()

    def _app(self) -> "ASGIApp":
        from eaglefeed.producer.serving_app import TargetApp

        return TargetApp(
            self._target,
            self._info,
            batcher=self._batcher,
            sessions=Sessions(idle_s=self._session_idle_s, clock=self._clock),
            pairs=self._pairs,
            max_request_bytes=self._max_request_bytes,
            max_tokens=self._max_tokens,
            clock=self._clock,
        ).asgi()

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether the warm-up is through, waiting for it.

        Raises:
            EaglefeedError: it failed.
        """
        settled = self._settled.wait(timeout_s)
        if self._failure is not None:
            raise self._failure
        return settled

    def stop(self, grace_s: float = 30.0) -> BatcherStats:
        """Take no more requests, answer those that are there, within the grace, and end; what it did."""
        self._batcher.close()
        self._http.stop(grace_s)
        self._pairs.close()
        self._batcher.stop()
        self._forwards.join(grace_s)
        if self._forwards.is_alive():
            log.warning("forward_left_running", grace_s=grace_s)
        return self._batcher.stats()

    def serve(self, stop: threading.Event, on_ready: Callable[[], None], *, grace_s: float = 30.0) -> BatcherStats:
        """Start, serve until `stop` is set, and drain; what it did.

        Args:
            stop: set by a signal.
            on_ready: called after the warm-up.
            grace_s: see `stop`.

        Raises:
            ConfigError: see `start`.
            EaglefeedError: the warm-up failed, every forward does by now, or a thread ended.
        """
        self.start()
        try:
            while not stop.is_set() and not self.wait_ready(_LOOK_S):
                pass
            if not stop.is_set():
                on_ready()
            while not stop.wait(_LOOK_S):
                if not (self._forwards.is_alive() and self._http.is_alive):
                    ended = TargetError("a thread of the server's ended", fix="see the log, and start it again")
                    raise self._failure or ended
        finally:
            stats = self.stop(grace_s)
        return stats

    def _run(self) -> None:
        try:
            self._batcher.warm_up(self._warm_up_tokens)
        except EaglefeedError as error:
            self._failure = error
            self._batcher.stop()
        self._settled.set()
        self._batcher.run()
        self._failure = self._failure or self._batcher.failure


def check_server(host: str, token: str, port: int = 0, nccl_port: int | None = None) -> None:
    """Check what can be checked before a target is loaded.

    Raises:
        ConfigError: a package is missing, it would listen beyond this machine without a token, or a port is in use.
    """
    try:
        from eaglefeed.producer import serving_app  # noqa: F401 - whether all that it needs is there
        from eaglefeed.storage.pair_store import MeetingPlace
        from eaglefeed.storage.serving import listen
    except ModuleNotFoundError as error:
        fix = "pip install 'eaglefeed[serve]'"
        raise ConfigError("a package is missing", subject="a target server", wanted=error.name, fix=fix) from None
    check_listen(host, token)
    with listen(host, port):
        MeetingPlace(host, _nccl_port(port, nccl_port)).close()


def _nccl_port(port: int, nccl_port: int | None) -> int:
    return nccl_port if nccl_port is not None else port and port + _NCCL_PORT_OFFSET


def ready_report(server: TargetServer) -> tuple[dict[str, object], str]:
    """What to say when it is ready: a document, and a line."""
    document = {"url": server.url, "nccl_port": server.nccl_port, "model": server.info.model_dump(mode="json")}
    return document, f"serving {server.info.target} on {server.url}, pair groups on port {server.nccl_port}"


def stats_line(stats: BatcherStats) -> str:
    """What to say at the end."""
    return (
        f"answered {stats.answered} requests ({stats.num_tokens} tokens) by {stats.forwards} forwards, "
        f"{stats.failed} failed, {stats.refused} refused, {stats.timed_out} late, {stats.cancelled} given up"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Serve a target until a signal, as `eaglefeed serve-target` does, without settings and variables."""
    options = _parser().parse_args(argv)
    try:
        _serve(options)
    except EaglefeedError as error:
        sys.stderr.write(f"eaglefeed: {error}\n")
        sys.exit(_exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _exit_code(error: EaglefeedError) -> int:
    """As the command line's."""
    if isinstance(error, ConfigError):
        return 2
    return 3 if isinstance(error, SchemaError) else 4 if error.retryable else 1


def _serve(options: argparse.Namespace) -> None:
    token = read_token(options.token_file) if options.token_file else ""
    check_server(options.host, token, options.port, options.nccl_port)
    stop = threading.Event()
    with stop_on_signals(stop.set):
        target = open_target(
            options.target,
            engine=options.engine,
            dtype=options.dtype,
            device=options.device,
            aux_layer_ids=tuple(options.aux_layer_ids) if options.aux_layer_ids else None,
            tp_size=options.tp_size,
            trust_remote_code=options.trust_remote_code,
        )
        with closing(target):
            ports = {"port": options.port, "nccl_port": options.nccl_port}
            server = TargetServer(target, info_of(target, options.target), host=options.host, token=token, **ports)
            stats = server.serve(stop, lambda: _say(options.json, *ready_report(server)))
    _say(options.json, asdict(stats), stats_line(stats))


def _say(as_json: bool, document: dict[str, object], line: str) -> None:
    sys.stdout.write(f"{json.dumps(document) if as_json else line}\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eaglefeed.producer.server", description=main.__doc__)
    add = parser.add_argument
    add("--target", default=DEFAULT_TARGET, help="Hugging Face id or local folder of the target")
    add("--engine", default="hf", choices=ENGINES, help="what runs it")
    add("--tp-size", default=1, type=int, help="GPUs that share it")
    add("--dtype", default="bfloat16", help="of weights and features")
    add("--device", default="cpu", help="where features are made")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", default=8001, type=int, help="0 for a free one")
    add("--nccl-port", default=None, type=int, help="where pair groups meet; port + 100 by default")
    add("--aux-layer-ids", default=None, type=int, nargs=3, help="three 0-based decoder layers")
    add("--trust-remote-code", action="store_true", help="run code that comes with the checkpoint")
    add("--token-file", default=None, type=Path, help="a file with the token that clients must show")
    add("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    main()
