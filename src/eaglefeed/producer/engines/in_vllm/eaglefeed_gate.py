"""The ASGI middleware that vLLM loads by name: it shuts what vLLM's own key does not guard, /invocations above all.

It runs in vLLM's own environment, so nothing of eaglefeed may be imported here.
"""

from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["Gate"]

_App = Callable[[Any, Any, Any], Awaitable[None]]


class Gate:
    """Lets through what lies below /v1, where vLLM asks for its key, and /health; everything else is not there."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve or refuse a request."""
        if scope["type"] == "lifespan" or scope["path"] == "/health" or scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})
