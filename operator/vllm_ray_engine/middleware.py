"""The ASGI middleware of vLLM's API servers: it counts requests, and has keep-alive clients let go in a drain.

kube-proxy leaves established connections where they are, so a client that keeps one goes on sending to an engine that
has left the traffic. An answer with `Connection: close` ends the connection, and the client's next one goes elsewhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vllm_ray_engine import tally
from vllm_ray_engine.config import from_environment

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

PATH = "vllm_ray_engine.middleware.Drain"
"""For vLLM's `--middleware`."""

LOOKING = frozenset({"/health", "/ping", "/load", "/metrics", "/version", "/v1/models"})
"""What monitors ask, and the launcher itself: nobody waits for an answer of the model."""


class Drain:
    """A page of the tally for this process, and a look at it for each answer."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._page = tally.make(from_environment().engine_id)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass everything on; websockets are counted like requests, the server's own lifespan is not."""
        kind = scope["type"]
        if kind == "http":
            send = self._closing(send)
        if kind == "lifespan" or scope["path"] in LOOKING:
            await self._app(scope, receive, send)
            return
        self._page.begin()
        try:
            await self._app(scope, receive, send)
        finally:
            self._page.end()

    def _closing(self, send: Send) -> Send:
        """Return `send` that says `Connection: close` when the engine drains, as it is when the answer begins."""

        def wrapped(message: Message) -> Awaitable[None]:  # not a coroutine of its own: it is called for every token
            if self._page.draining and message["type"] == "http.response.start":
                kept = [header for header in message.get("headers", ()) if header[0].lower() != b"connection"]
                message = {**message, "headers": [*kept, (b"connection", b"close")]}
            return send(message)

        return wrapped
