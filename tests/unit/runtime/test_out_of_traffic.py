"""From an engine that says it cannot serve to its endpoint out of the traffic: the operator's share, in virtual time.

All of it is real but the network: long polls, the queue, a worker, observation, plan, actions. Every call takes the
time that a busy cluster takes. To that come, outside of the operator: at most a second until the launcher sees that an
actor of its engine is dead, and about a second until kube-proxy has taken an EndpointSlice to heart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest

from tests.unit.act.test_together import KEY, Lab
from tests.unit.runtime.virtual import VirtualClock, in_virtual_time
from vllm_ray_operator.act import execute
from vllm_ray_operator.clients.engine import CONNECT_SECONDS
from vllm_ray_operator.clients.http import QUESTIONS, SILENT_SECONDS
from vllm_ray_operator.clients.protocols import ENDPOINT_SLICES, RAY_CLUSTERS, ApiError, EngineEndpoint
from vllm_ray_operator.observe import observe
from vllm_ray_operator.plan.actions import Plan
from vllm_ray_operator.plan.planner import plan
from vllm_ray_operator.plan.revision import Defaults
from vllm_ray_operator.plan.world import World
from vllm_ray_operator.runtime.engine_watch import EngineWatch
from vllm_ray_operator.runtime.metrics import Metrics
from vllm_ray_operator.runtime.queue import WorkQueue
from vllm_ray_operator.runtime.reconciler import Reconciler

KUBE_SECONDS, RAY_SECONDS, LAUNCHER_SECONDS = 0.05, 0.3, 0.02
RAY_TIMEOUT_SECONDS = 10.0
KEEP_ALIVE_SECONDS = float(SILENT_SECONDS + QUESTIONS)
LIMIT_SECONDS = 3.0
"""Of the five seconds that it may take in all."""


class Clock(VirtualClock):
    async def advance(self, seconds: float) -> None:
        await self.sleep(seconds)


def slow(calls: object, names: tuple[str, ...], seconds: Callable[[], float]) -> None:
    """Have each of these calls take its time."""

    def slowed(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def run(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(seconds())
            if seconds() >= RAY_TIMEOUT_SECONDS:
                raise ApiError("no answer within 10 s")
            return await call(*args, **kwargs)

        return run

    for name in names:
        setattr(calls, name, slowed(getattr(calls, name)))


@dataclass
class Operator:
    lab: Lab
    queue: WorkQueue[Any]
    ray_seconds: float = RAY_SECONDS

    def in_traffic(self) -> int:
        slices = self.lab.kube.objects(ENDPOINT_SLICES)
        return sum(s["endpoints"][0]["conditions"]["ready"] for s in slices)

    async def until(self, in_traffic: int, most: float) -> float:
        """Return after how long so many replicas are in traffic."""
        clock = self.lab.clock
        began = clock.now()
        while self.in_traffic() != in_traffic:
            assert clock.now() - began < most, f"still {self.in_traffic()} in traffic after {most} s"
            await clock.sleep(0.01)
        return clock.now() - began

    def launcher(self) -> Any:
        attempt = self.lab.replica(0).attempt
        assert attempt is not None
        return next(x for x in self.lab.engine.launchers.values() if x.instance_id == attempt.instance_id)


@asynccontextmanager
async def at_rest() -> AsyncIterator[Operator]:
    """An operator that works by itself, two replicas in traffic, and nothing to do."""
    lab = Lab(clock=Clock())  # type: ignore[arg-type]
    await lab.until_ready()
    queue: WorkQueue[Any] = WorkQueue(lab.clock, lambda: 0.0)
    operator = Operator(lab, queue)
    slow(lab.kube, ("get", "list", "apply", "replace_status", "create", "delete"), lambda: KUBE_SECONDS)
    slow(lab.ray, ("job", "actors", "placement_groups", "stop"), lambda: operator.ray_seconds)
    slow(lab.engine, ("state",), lambda: LAUNCHER_SECONDS)
    watch = EngineWatch(lab.engine, lab.clock, lambda: 0.0, queue.add)

    def planner(world: World, now: datetime) -> Plan:
        return plan(world, now, new_nonce=lambda: next(lab._nonces), defaults=Defaults(engine_image=None))

    reconciler = Reconciler(lab.clients, observe, planner, execute, watch.follow, lambda: True, Metrics())
    worker = asyncio.create_task(reconciler.work(queue))
    queue.add(KEY)
    await lab.clock.sleep(100)
    assert operator.in_traffic() == 2
    try:
        yield operator
    finally:
        queue.close()
        await worker
        await watch.close()


@pytest.mark.parametrize("ray_seconds", [RAY_SECONDS, 5.0, RAY_TIMEOUT_SECONDS])
@in_virtual_time
async def test_a_dead_worker(ray_seconds: float) -> None:
    """Also while the dashboard takes its time, or hangs."""
    async with at_rest() as operator:
        operator.ray_seconds = ray_seconds
        health = {"ready": False, "reason": "1 of 2 workers are alive"}
        operator.launcher().set("Serving", "serving", health=health)
        took = await operator.until(1, LIMIT_SECONDS)
        print(f"MEASURED an engine's word to its endpoint out, Ray answers in {ray_seconds} s: {took:.2f} s")
        await operator.lab.clock.sleep(60)
        assert operator.lab.replica(0).phase == "NotReady"
        assert operator.lab.replica(0).message == "1 of 2 workers are alive"
        assert operator.lab.replica(1).phase == "Ready", "the other is left alone, whatever Ray does"


@in_virtual_time
async def test_a_head_that_is_not_ready_takes_nobody_out_of_traffic() -> None:
    """Kubernetes also marks pods of healthy nodes so, after an outage of its own. A dead engine is noticed as ever."""
    async with at_rest() as operator:
        lab = operator.lab
        (cluster,) = lab.kube.objects(RAY_CLUSTERS)
        unready = {"conditions": [{"type": "HeadPodReady", "status": "False", "reason": "NodeNotReady"}]}
        lab.kube.set_status(RAY_CLUSTERS, "default", cluster["metadata"]["name"], unready)
        for _ in range(120):
            operator.queue.add(KEY)
            await lab.clock.sleep(1)
            assert operator.in_traffic() == 2
        operator.launcher().set("Serving", "serving", health={"ready": False, "reason": "1 of 2 workers are alive"})
        await operator.until(1, LIMIT_SECONDS)


@in_virtual_time
async def test_a_launcher_that_is_killed() -> None:
    """Its connection ends at once, and Ray says within a second that the job failed."""
    async with at_rest() as operator:
        launcher = operator.launcher()
        for where, other in list(operator.lab.engine.launchers.items()):
            if other is launcher:
                del operator.lab.engine.launchers[where]
        launcher.changed.set()
        await operator.lab.clock.sleep(1)
        operator.lab.dashboard.end(launcher.instance_id, "FAILED")
        print(f"MEASURED a job that failed to its endpoint out: {await operator.until(1, LIMIT_SECONDS):.2f} s")


@in_virtual_time
async def test_a_node_that_is_cut_off() -> None:
    """Nothing is refused and nothing answered: each try takes the time that a client gives it."""
    async with at_rest() as operator:
        lab, launcher, cut = operator.lab, operator.launcher(), asyncio.Event()
        ask = lab.engine.state

        async def state(engine: EngineEndpoint, since: int | None, wait_seconds: float) -> Mapping[str, Any]:
            if engine.instance_id != launcher.instance_id:
                return await ask(engine, since, wait_seconds)
            await lab.clock.sleep(KEEP_ALIVE_SECONDS if wait_seconds and not cut.is_set() else CONNECT_SECONDS)
            cut.set()
            raise ApiError("no connection within 3 s")

        lab.engine.state = state  # type: ignore[method-assign]
        launcher.changed.set()  # the poll that is held fails a while later
        print(f"MEASURED a node cut off to its endpoint out: {await operator.until(1, 12):.2f} s")
