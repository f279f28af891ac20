"""An HTTP server in a thread: uvicorn, with a token, and with bounds on what an unknown client may hold of it."""

import asyncio
import contextlib
import hmac
import resource
import socket
import threading
import traceback

import uvicorn
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from eaglefeed.access import bearer, check_listen
from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import ConfigError, EaglefeedError, TargetError
from eaglefeed.logs import get_logger
from eaglefeed.schema.protocol import HEALTH
from eaglefeed.storage.replies import CUT, BodyLimit, TensorReply, cut, read_body, refusal_reply

__all__ = [
    "CUT",
    "MAX_BODY_BYTES",
    "HttpServer",
    "TensorReply",
    "TokenGuard",
    "cut",
    "listen",
    "read_body",
    "refusal_reply",
]

MAX_BODY_BYTES = 2**30
"""Of the requests that a server holds at a time, by default."""
_MAX_HEAD_BYTES = 64 * 1024
_HEAD_S = 30
_KEEP_ALIVE_S = 75
_BACKLOG = 2048
_START_S, _STOP_S = 30.0, 10.0
_SPARE_FILES = 512
_log = get_logger(__name__)


class TokenGuard:
    """Lets nobody in without the token, except to `/health`.

    Args:
        app: what is guarded.
        token: nothing is guarded without one.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._wanted = app, bearer(token).encode() if token else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse a request."""
        if not self._wanted or scope["type"] != "http" or scope["path"] == HEALTH or self._is_let_in(scope):
            await self._app(scope, receive, send)
            return
        wanted, fix = "authorization: Bearer …", "give the client the server's token (access.token_file)"
        await refusal_reply(ConfigError("wrong or missing token", wanted=wanted, fix=fix))(scope, receive, send)

    def _is_let_in(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._wanted)


class HttpServer:
    """Serves an ASGI app to whoever has the token.

    Args:
        app: a starlette Router, not a Starlette: that would answer errors before this sees them. Ours are said to the
            client, others are logged and said without their text.
        token: of TokenGuard; "" for none.
        max_connections: at a time; more are told to come again.
        max_body_bytes: of the bodies of all requests that are not answered yet; more are told to come again.
        clock: measures how long starting takes.

    Raises:
        ConfigError: an unusable token.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str = "",
        max_connections: int = 4096,
        max_body_bytes: int = MAX_BODY_BYTES,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._app = TokenGuard(_Edge(BodyLimit(app, max_body_bytes)), token)
        self._token, self._max_connections, self._clock = token, max_connections, clock
        self._server: uvicorn.Server | None = None
        self.host, self.port = "", 0

    @property
    def url(self) -> str:
        """Where this machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)  # noqa: S104 - compared
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def start(self, host: str, port: int) -> None:
        """Listen, and serve in a thread.

        Args:
            host: an address, or a name of one that is IPv4.
            port: 0 for a free one.

        Raises:
            ConfigError: beyond this machine without a token, or it cannot listen there.
        """
        check_listen(host, self._token)
        listener = listen(host, port)
        self.host, self.port = host, listener.getsockname()[1]
        _allow_files(self._max_connections + _SPARE_FILES)
        self._server = server = uvicorn.Server(self._config())
        self._thread = threading.Thread(target=server.run, args=([listener],), name="http-server", daemon=True)
        self._thread.start()
        deadline = self._clock.monotonic() + _START_S
        while not server.started:
            if not self._thread.is_alive() or self._clock.monotonic() > deadline:
                raise ConfigError("the HTTP server did not start", subject=self.url)
            self._clock.sleep(0.005)

    @property
    def is_alive(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive()

    def stop(self, grace_s: float = 5.0) -> None:
        """Take no more requests; those under way may end within the grace, then everybody is cut."""
        if self._server is not None:
            self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment] # any float will do
            self._server.should_exit = True
            self._thread.join(grace_s + _STOP_S)
            if self._thread.is_alive():  # a thread of the app's does not end; this one is a daemon
                _log.warning("http_server_still_stopping", url=self.url)

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._app,
            loop="auto",
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # what it would say of clients; what our code raises never gets there
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            limit_concurrency=self._max_connections,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes a free one.

    Raises:
        ConfigError: it cannot, since the port is in use or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not 0 <= port < 2**16:  # else create_server leaves its socket open
        raise _cannot_listen(host, port, "no port")
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, (isinstance(error, OSError) and error.strerror) or str(error)) from None


def _cannot_listen(host: str, port: int, reason: str) -> ConfigError:
    fix = "stop what listens there, or give another host or port (0 takes a free one)"
    return ConfigError("cannot listen", subject=f"{host} port {port}", got=reason, fix=fix)


def _allow_files(wanted: int) -> None:
    """Raise the soft limit on open files, which is 1024 in most shells, for each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


class _Edge:
    """The last to see an error: ours are said to the client, others logged too; a client that left is none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_begun = False

        async def watched(message: Message) -> None:
            nonlocal is_begun
            is_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            scope[CUT]()
        except Exception as error:  # noqa: BLE001 - whatever it is, the server goes on
            said = _said(error, scope)
            if is_begun:
                _log.warning("reply_cut", path=scope["path"], reason=str(said))
                await cut(scope, receive)
            else:
                await refusal_reply(said)(scope, receive, send)


def _said(error: Exception, scope: Scope) -> EaglefeedError:
    if isinstance(error, EaglefeedError):
        return error
    # As text: a renderer that shows the frames' variables would show the token.
    _log.error("request_failed", path=scope["path"], exception="".join(traceback.format_exception(error)))
    return TargetError("the server failed", got=type(error).__name__, fix="see the server's log")


class _Protocol(HttpToolsProtocol):
    """uvicorn's, which by itself bounds neither the size of a request's head nor the time that it takes."""

    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # `send` waits until the kernel has all that was sent before
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CUT] = self.transport.abort  # type: ignore[literal-required]
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        was_in_head = self._head_timer is not None
        super().data_received(data)
        if not was_in_head and self.cycle and self.cycle.response_complete:
            self._begin_head()  # no request, but an empty line or the rest of a body that nobody read
        if was_in_head and self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self.transport.abort()

    def _begin_head(self) -> None:
        self._end_head()
        self._head_bytes, self._head_timer = 0, self.loop.call_later(_HEAD_S, self.transport.abort)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
