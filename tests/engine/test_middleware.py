"""Clients of a real uvicorn, as vLLM runs it, before and in a drain. No engine is started."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_ray_engine import config, middleware, tally
from vllm_ray_engine.launcher.traffic import QUIET_LOOKS, Drain, idle_seconds, open_connections
from vllm_ray_engine.processes import debris

from .ray_cluster import free_port, wait_for

uvicorn = pytest.importorskip("uvicorn")
websockets = pytest.importorskip("websockets.sync.client")

KEEP_ALIVE_SECONDS = 1
ID = f"middleware-{os.getpid()}"


class Server:
    """An application behind the middleware, served from a thread. `/stream` sends a piece each time it is let."""

    def __init__(self, implementation: str, port: int) -> None:
        self.port = port
        self.pieces: asyncio.Queue[bytes] = asyncio.Queue()
        app = middleware.Drain(self.app)
        self.server = uvicorn.Server(
            uvicorn.Config(
                app, host="127.0.0.1", port=self.port, http=implementation, log_level="error",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
        )  # fmt: skip
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        wait_for("the server", lambda: self.server.started, 30)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.loop = asyncio.get_running_loop()
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            while "text" in (message := await receive()):
                await send({"type": "websocket.send", "text": message["text"]})
        else:
            # As vLLM does. What answers before it has the request arms uvicorn's time-out too early, and never again.
            while (await receive()).get("more_body"):
                pass
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while scope["path"] == "/stream" and (piece := await self.pieces.get()):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"."})

    def let(self, piece: bytes) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

    def client(self) -> http.client.HTTPConnection:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        client.connect()
        return client

    def opened(self) -> int:
        (page,) = tally.read(ID)
        return page.opened

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)


@pytest.fixture(params=["httptools", "h11"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    port = free_port()
    data = {
        "version": 1, "instanceId": ID, "deployment": "d/d", "replica": 0, "attempt": 1, "model": "m",
        "servedName": "m", "port": port, "controlPort": 1, "tensor": 1, "pipeline": 1, "slotResource": "s",
    }  # fmt: skip
    monkeypatch.setenv(config.ENVIRONMENT_VARIABLE, json.dumps(data))
    server = Server(request.param, port)
    try:
        yield server
    finally:
        server.stop()
        (page,) = debris.SHARED_MEMORY.glob(f"{debris.NAME}{debris.tag(ID)}-*")
        page.unlink()


def begin_drain() -> Drain:
    return Drain(config.from_environment(), time.monotonic())


def ask(client: http.client.HTTPConnection) -> bool:
    """Return whether the connection is kept after an answer."""
    client.request("POST", "/v1/completions", body=b"{}")
    response = client.getresponse()
    assert response.read() == b"."
    return not response.will_close


def test_a_client_that_goes_on_sending_is_moved_away_at_its_next_request(server: Server) -> None:
    with contextlib.closing(server.client()) as client:
        assert all(ask(client) for _ in range(3))
        drain, began = begin_drain(), time.monotonic()
        assert not ask(client)
        wait_for("the server to have closed it", lambda: open_connections(server.port) == 0, 5, 0.02)
        looks = [drain.look(began)[1] for _ in range(QUIET_LOOKS)]
        assert looks == [False] * (QUIET_LOOKS - 1) + [True]
    with contextlib.closing(server.client()) as client:
        assert not ask(client), "also one that is new"


def test_a_pool_of_idle_connections_is_closed_by_the_server(server: Server) -> None:
    pool = [server.client() for _ in range(5)]
    assert all(ask(client) for client in pool)
    began = time.monotonic()
    wait_for("them to be closed", lambda: open_connections(server.port) == 0, 10, 0.02)
    print(f"MEASURED idle connections were closed after {time.monotonic() - began:.1f} s of {KEEP_ALIVE_SECONDS}")
    for client in pool:
        client.close()


def test_a_stream_that_began_before_the_drain_is_whole(server: Server) -> None:
    with contextlib.closing(server.client()) as client:
        client.request("POST", "/stream", body=b"{}")
        server.let(b"a")
        response = client.getresponse()
        assert response.read(1) == b"a"
        drain = begin_drain()
        seen, drained = drain.look(time.monotonic() + 100)
        assert (seen.connections, seen.requests, drained) == (1, 1, False), "one is open, however long it takes"
        for piece in (b"b", b"c"):
            server.let(piece)
            assert response.read(1) == piece
        server.let(b"")
        assert response.read() == b"."
        wait_for("the end to be counted", lambda: server.opened() == 0, 5, 0.02)
        assert not ask(client), "the next request on that connection is its last"


def test_a_client_that_goes_away_in_a_stream_is_not_counted_for_ever(server: Server) -> None:
    client = server.client()
    client.request("POST", "/stream", body=b"{}")
    server.let(b"a")
    assert client.getresponse().read(1) == b"a"
    client.close()
    server.let(b"b")
    server.let(b"")
    wait_for("it to be over", lambda: server.opened() == 0, 5, 0.02)


def test_a_client_that_never_lets_go_and_never_asks(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)):
        drain, began = begin_drain(), time.monotonic()
        seen, drained = drain.look(began + idle_seconds() - 1)
        assert (seen.connections, seen.requests, drained) == (1, 0, False)
        assert drain.look(began + idle_seconds())[1]


def test_a_websocket_lives_on_and_holds_the_drain(server: Server) -> None:
    with websockets.connect(f"ws://127.0.0.1:{server.port}/v1/realtime") as client:
        client.send("one")
        assert client.recv(10) == "one"
        drain = begin_drain()
        client.send("two")
        assert client.recv(10) == "two"
        assert not drain.look(time.monotonic() + 100)[1]
    wait_for("it to be over", lambda: server.opened() == 0, 5, 0.02)
