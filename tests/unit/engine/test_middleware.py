"""Requests are counted and clients let go: the middleware alone, and the page that it shares with the launcher.

`tests/engine/test_middleware.py` has it in real uvicorn, and in vLLM.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_ray_engine import config, middleware, tally
from vllm_ray_engine.processes import debris

from .conftest import DATA, OPERATOR, wait_for

ID = str(DATA["instanceId"])
Headers = list[tuple[bytes, bytes]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(config.ENVIRONMENT_VARIABLE, json.dumps(DATA))
    make = tally.make
    monkeypatch.setattr(tally, "make", lambda instance_id: make(instance_id, tmp_path))
    return tmp_path


class App:
    """An ASGI application that answers when it is let, and notes what is counted meanwhile."""

    def __init__(self, folder: Path, headers: Headers | None = None) -> None:
        self.folder = folder
        self.headers = headers or [(b"x-theirs", b"1")]
        self.counted: list[int] = []
        self.fails = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.counted += [page.opened for page in tally.read(ID, self.folder)]
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": self.headers})
            await send({"type": "http.response.body", "body": b"x"})
        if self.fails:
            raise RuntimeError("the application failed")


def ask(app: middleware.Drain, kind: str = "http", path: str = "/v1/completions") -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": f"{kind}.disconnect"}

    scope = {"type": kind, "path": path} if kind != "lifespan" else {"type": kind}
    asyncio.run(app(scope, receive, send))
    return sent


def headers(sent: list[Any]) -> Headers:
    return list(sent[0]["headers"])


def test_requests_and_websockets_count_while_they_are_open(folder: Path) -> None:
    app = App(folder)
    drain = middleware.Drain(app)
    for kind in ("http", "websocket"):
        ask(drain, kind)
    assert app.counted == [1, 1]
    (page,) = tally.read(ID, folder)
    assert page.opened == 0
    assert page.moved > 0


@pytest.mark.parametrize(("kind", "path"), [("lifespan", ""), ("http", "/metrics"), ("http", "/v1/models")])
def test_what_nobody_waits_for_does_not_count(folder: Path, kind: str, path: str) -> None:
    app = App(folder)
    ask(middleware.Drain(app), kind, path)
    (page,) = tally.read(ID, folder)
    assert (app.counted, page.moved) == ([0], 0.0)


def test_a_request_that_fails_is_over(folder: Path) -> None:
    app = App(folder)
    app.fails = True
    with pytest.raises(RuntimeError, match="the application failed"):
        ask(middleware.Drain(app))
    assert [page.opened for page in tally.read(ID, folder)] == [0]


def test_connections_are_closed_in_a_drain_only(folder: Path) -> None:
    app = App(folder, [(b"Connection", b"keep-alive"), (b"x-theirs", b"1")])
    drain = middleware.Drain(app)
    assert headers(ask(drain)) == app.headers
    tally.tell_draining(ID, folder)
    for path in ("/v1/completions", "/metrics"):
        assert headers(ask(drain, path=path)) == [(b"x-theirs", b"1"), (b"connection", b"close")]
    assert len(app.headers) == 2, "what the application holds is left as it is"
    assert ask(drain, "websocket") == []


def test_each_server_process_has_a_page(folder: Path) -> None:
    script = f"""if True:
        import sys
        from pathlib import Path
        from vllm_ray_engine import tally
        page = tally.make({ID!r}, Path({str(folder)!r}))
        page.begin()
        print("counted", flush=True)
        while not page.draining:
            pass
        page.end()"""
    environment = {"PYTHONPATH": str(OPERATOR)}
    servers = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) for _ in range(2)
    ]
    for server in servers:
        assert server.stdout is not None
        assert server.stdout.readline() == b"counted\n"
    assert [page.opened for page in tally.read(ID, folder)] == [1, 1]
    tally.tell_draining(ID, folder)
    wait_for("both to hear it", lambda: [page.opened for page in tally.read(ID, folder)] == [0, 0])
    for server in servers:
        assert server.wait(10) == 0
        assert server.stdout is not None
        server.stdout.close()


def test_a_server_without_a_page_serves_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Path, "write_bytes", _full)
    app = App(folder)
    assert headers(ask(middleware.Drain(app))) == app.headers
    assert tally.read(ID, folder) == []
    assert "a drain goes by connections only" in capsys.readouterr().out


def _full(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_pages_are_among_what_is_swept(folder: Path) -> None:
    middleware.Drain(App(folder))
    (page,) = folder.iterdir()
    assert page.name.startswith(f"{debris.NAME}{debris.tag(ID)}-"), "the place of the attempt"
