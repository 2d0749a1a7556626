"""Launchers in memory, by address."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_ray_operator.clients.protocols import ApiError, Clock, EngineEndpoint, Forbidden


@dataclass
class FakeLauncher:
    """A launcher; ``set`` changes what it says. ``ray_token``: the one whose HMAC it asks for."""

    instance_id: str
    ray_token: str | None = None
    version: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.set("Checking", "starting")

    def set(self, phase: str, message: str = "", **more: Any) -> None:
        self.version += 1
        self.state = {
            "version": self.version,
            "instanceId": self.instance_id,
            "phase": phase,
            "message": message,
            "health": {"ready": False, "reason": message},
            "ranks": [],
            "cause": None,
            **more,
        }
        self.changed.set()
        self.changed = asyncio.Event()

    def serve(self, *node_ips: str) -> None:
        """Become ready, with workers on these nodes."""
        ranks = [{"rank": 0, "instanceId": self.instance_id, "nodeIps": list(node_ips)}]
        self.set("Serving", "serving", health={"ready": True, "reason": ""}, ranks=ranks)


class FakeEngine:
    def __init__(self, clock: Clock) -> None:
        self.launchers: dict[tuple[str, int], FakeLauncher] = {}
        self.drained: list[str] = []  # the instance ids that were told to drain
        self._clock = clock

    def start(self, address: str, port: int, instance_id: str, ray_token: str | None = None) -> FakeLauncher:
        launcher = FakeLauncher(instance_id, ray_token)
        self.launchers[(address, port)] = launcher
        return launcher

    async def state(self, engine: EngineEndpoint, since: int | None, wait_seconds: float) -> Mapping[str, Any]:
        launcher = self._launcher(engine)
        if since == launcher.version and wait_seconds > 0:
            await self._wait(launcher, wait_seconds)
            launcher = self._launcher(engine)
        return launcher.state

    async def drain(self, engine: EngineEndpoint) -> None:
        """From its next look on it has no client any more."""
        launcher = self._launcher(engine)
        self.drained.append(launcher.instance_id)
        said = {name: launcher.state[name] for name in ("health", "ranks")}
        launcher.set(launcher.state["phase"], "drains", **said, drained=True)

    async def _wait(self, launcher: FakeLauncher, seconds: float) -> None:
        tasks = [asyncio.ensure_future(launcher.changed.wait()), asyncio.ensure_future(self._clock.sleep(seconds))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _launcher(self, engine: EngineEndpoint) -> FakeLauncher:
        launcher = self.launchers.get((engine.address, engine.port))
        if launcher is None or launcher.instance_id != engine.instance_id:
            raise ApiError(f"the launcher of {engine.instance_id} does not answer")
        if launcher.ray_token is not None and launcher.ray_token != engine.ray_token:
            raise Forbidden("the launcher refuses our token", 401)
        return launcher
