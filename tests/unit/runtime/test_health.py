"""Probes and metrics over HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.unit.runtime.virtual import VirtualClock, in_virtual_time
from vllm_ray_operator.clients.bundle import Key
from vllm_ray_operator.runtime.health import HealthServer, Limits, stuck
from vllm_ray_operator.runtime.metrics import Metrics
from vllm_ray_operator.runtime.queue import WorkQueue

KEY = Key("default", "chat")


@in_virtual_time
async def test_a_queue_is_stuck_when_a_key_waits_or_a_worker_works_too_long() -> None:
    queue: WorkQueue[Key] = WorkQueue(VirtualClock(), lambda: 0.0)
    limits = Limits(wait=60, work=30)
    queue.add(KEY)
    queue.add_after(Key("default", "later"), 50)
    await asyncio.sleep(60)
    assert stuck(queue, limits) == ""
    await asyncio.sleep(1)
    assert stuck(queue, limits) == "a deployment has been waiting for a worker for 61 s"
    assert await queue.get() == KEY
    assert await queue.get() == Key("default", "later")
    assert stuck(queue, limits) == ""
    await asyncio.sleep(31)
    assert stuck(queue, limits) == "a worker has been busy with one deployment for 31 s"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    ill = ""
    unready = ""

    def __init__(self) -> None:
        self.health, self.metrics = free_port(), free_port()
        self.server = HealthServer(Metrics(), lambda: self.ill, lambda: self.unready)

    async def get(self, path: str, port: int, accept: str = "*/*") -> tuple[int, str, str]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept}) as response,
        ):
            return response.status, await response.text(), response.headers["Content-Type"]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    await server.server.start(server.health, server.metrics, "127.0.0.1")
    yield server
    await server.server.close()


@pytest.mark.parametrize(
    ("ill", "unready", "healthz", "readyz"),
    [("", "", 200, 200), ("", "not yet", 200, 503), ("stuck", "", 503, 503)],
)
async def test_probes_tell_the_reason(server: Server, ill: str, unready: str, healthz: int, readyz: int) -> None:
    server.ill, server.unready = ill, unready
    status, text, _ = await server.get("/healthz", server.health)
    assert (status, text) == (healthz, (ill or "ok") + "\n")
    status, text, _ = await server.get("/readyz", server.health)
    assert (status, text) == (readyz, (ill or unready or "ok") + "\n")


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text; version=1.0.0"])
async def test_metrics_come_in_the_format_that_is_asked_for(server: Server, accept: str) -> None:
    status, text, content_type = await server.get("/metrics", server.metrics, accept)
    assert status == 200
    assert "vllm_ray_operator_attempts_total 0.0" in text
    assert ("openmetrics" in content_type) == ("openmetrics" in accept)


async def test_a_taken_port_is_an_error_at_once(server: Server) -> None:
    other = HealthServer(Metrics(), str, str)
    with pytest.raises(OSError, match="address already in use"):
        await other.start(server.health, free_port(), "127.0.0.1")
    await other.close()
