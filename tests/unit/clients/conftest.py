from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass(frozen=True)
class Request:
    """What a server was asked."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...]
    headers: dict[str, str]
    body: bytes


@dataclass
class Served:
    """A loopback server that answers with what ``answer`` returns and keeps what it was asked."""

    url: str = ""
    requests: list[Request] = field(default_factory=list)
    answer: Callable[[Request], web.StreamResponse | Awaitable[web.StreamResponse]] = lambda _: web.Response()

    def answers(self, *responses: web.Response) -> None:
        """Answer with these in turn; more requests are a fault of the test."""
        left = list(responses)
        self.answer = lambda _: left.pop(0)

    @property
    def last(self) -> Request:
        return self.requests[-1]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    state = Served()

    async def handle(request: web.Request) -> web.StreamResponse:
        asked = Request(
            request.method,
            request.path,
            tuple(request.query.items()),
            {key.lower(): value for key, value in request.headers.items()},
            await request.read(),
        )
        state.requests.append(asked)
        answer = state.answer(asked)
        return await answer if isinstance(answer, Awaitable) else answer

    app = web.Application(client_max_size=16 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", handle)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    state.url = f"http://127.0.0.1:{server.port}"
    yield state
    await server.close()


@pytest.fixture
def unused_tcp_port() -> int:
    """A port of the loopback address on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
