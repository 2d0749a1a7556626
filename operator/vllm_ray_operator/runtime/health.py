"""Probes and metrics over HTTP, and the judgement that stands behind the liveness probe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from vllm_ray_operator.clients.bundle import Key
from vllm_ray_operator.runtime.metrics import Metrics
from vllm_ray_operator.runtime.queue import WorkQueue


@dataclass(frozen=True)
class Limits:
    """Seconds after which waiting for a worker, or one pass, is no longer load but a fault."""

    wait: float = 600.0
    work: float = 300.0


def stuck(queue: WorkQueue[Key], limits: Limits = Limits()) -> str:
    """Return why the process should be restarted; "" if it is well."""
    if (work := queue.oldest_work()) > limits.work:
        return f"a worker has been busy with one deployment for {work:.0f} s"
    if (wait := queue.oldest_wait()) > limits.wait:
        return f"a deployment has been waiting for a worker for {wait:.0f} s"
    return ""


class HealthServer:
    """Serves /healthz and /readyz on one port, /metrics on another.

    ``ill`` and ``unready`` return a reason, or "" when all is well.
    """

    def __init__(self, metrics: Metrics, ill: Callable[[], str], unready: Callable[[], str]) -> None:
        self._metrics = metrics
        self._ill = ill
        self._unready = unready
        self._runners: list[web.AppRunner] = []

    async def start(self, health_port: int, metrics_port: int, host: str | None = None) -> None:
        """Listen. OSError if a port cannot be had."""
        health = web.Application()
        health.router.add_get("/healthz", self._healthz)
        health.router.add_get("/readyz", self._readyz)
        metrics = web.Application()
        metrics.router.add_get("/metrics", self._render)
        for app, port in ((health, health_port), (metrics, metrics_port)):
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
            self._runners.append(runner)
            await runner.setup()
            await web.TCPSite(runner, host, port).start()

    async def close(self) -> None:
        """Stop listening."""
        for runner in self._runners:
            await runner.cleanup()
        self._runners.clear()

    async def _healthz(self, _: web.Request) -> web.Response:
        return _verdict(self._ill())

    async def _readyz(self, _: web.Request) -> web.Response:
        return _verdict(self._ill() or self._unready())

    async def _render(self, request: web.Request) -> web.Response:
        body, content_type = self._metrics.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})


def _verdict(fault: str) -> web.Response:
    return web.Response(status=503, text=fault + "\n") if fault else web.Response(text="ok\n")
