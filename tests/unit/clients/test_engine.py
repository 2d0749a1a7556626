"""The client of the launchers' control endpoint."""

from __future__ import annotations

import hashlib
import hmac
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from tests.unit.clients.conftest import Served
from vllm_ray_operator.clients.engine import EngineClient
from vllm_ray_operator.clients.protocols import ApiError, EngineEndpoint, Forbidden

ID = "chat-1a2b3c4d-a7-x9k2q1"
RAY_TOKEN = "ray-token"
STATE = {"version": 12, "instanceId": ID, "phase": "Serving", "health": {"ready": True}}


@pytest.fixture
async def engine() -> AsyncIterator[EngineClient]:
    async with EngineClient() as client:
        yield client


def endpoint(served: Served, token: str | None = RAY_TOKEN) -> EngineEndpoint:
    port = urlsplit(served.url).port
    assert port is not None
    return EngineEndpoint("127.0.0.1", port, ID, token)


@pytest.mark.parametrize(("since", "query"), [(None, {"waitSeconds": "0"}), (12, {"since": "12", "waitSeconds": "0"})])
async def test_state(engine: EngineClient, served: Served, since: int | None, query: dict[str, str]) -> None:
    served.answers(web.json_response(STATE))
    assert await engine.state(endpoint(served), since, 0) == STATE
    assert (served.last.path, dict(served.last.query)) == ("/v1/state", query)


async def test_drain(engine: EngineClient, served: Served) -> None:
    served.answers(web.json_response(STATE))
    await engine.drain(endpoint(served))
    assert (served.last.method, served.last.path) == ("POST", "/v1/drain")
    assert served.last.headers.get("content-length", "0") == "0"
    assert served.last.headers["authorization"].startswith("Bearer ")


async def test_a_launcher_that_knows_no_drain(engine: EngineClient, served: Served) -> None:
    served.answers(web.Response(status=501))
    with pytest.raises(ApiError, match=r"HTTP 501"):
        await engine.drain(endpoint(served))


async def test_the_token_is_of_this_attempt_and_never_the_ray_token_itself(
    engine: EngineClient, served: Served
) -> None:
    served.answers(web.json_response(STATE))
    await engine.state(endpoint(served), None, 0)
    expected = hmac.new(b"ray-token", f"vllm-ray-control/{ID}".encode(), hashlib.sha256).hexdigest()
    assert served.last.headers["authorization"] == f"Bearer {expected}"


async def test_without_token_authentication_none_is_sent(engine: EngineClient, served: Served) -> None:
    served.answers(web.json_response(STATE))
    await engine.state(endpoint(served, token=None), None, 0)
    assert "authorization" not in served.last.headers


@pytest.mark.parametrize(
    ("response", "kind", "words"),
    [
        pytest.param({"status": 401}, Forbidden, "refuses our token", id="token refused"),
        pytest.param({"status": 503, "text": "starting"}, ApiError, "unexpected answer .HTTP 503.", id="not up"),
        pytest.param({"text": "<html>"}, ApiError, "unexpected answer", id="not JSON"),
        pytest.param({"text": "[1]"}, ApiError, "unexpected answer", id="no object"),
        pytest.param({"text": '{"instanceId": "chat-x-a6-y"}'}, ApiError, "is another one: chat-x-a6-y", id="other"),
    ],
)
async def test_what_is_no_state(
    engine: EngineClient, served: Served, response: dict[str, Any], kind: type[ApiError], words: str
) -> None:
    served.answers(web.Response(**response))
    with pytest.raises(ApiError, match=words) as caught:
        await engine.state(endpoint(served), None, 0)
    assert type(caught.value) is kind
    assert "ray-token" not in str(caught.value)


async def test_nobody_listens(engine: EngineClient, unused_tcp_port: int) -> None:
    with pytest.raises(ApiError, match=f"the launcher of {ID} .*no connection") as caught:
        await engine.state(EngineEndpoint("127.0.0.1", unused_tcp_port, ID), None, 0)
    assert caught.value.status is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's settings of Linux")
async def test_the_kernel_asks_a_silent_peer_and_gives_up_within_seconds(engine: EngineClient, served: Served) -> None:
    served.answers(web.Response(body=b"x" * 4_000_000))
    async with engine.session.get(served.url) as response:
        assert response.connection is not None
        assert response.connection.transport is not None
        connected = response.connection.transport.get_extra_info("socket")
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, every, most = (
            connected.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + every * most <= 5
