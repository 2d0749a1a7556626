"""Puts the process together from its real parts."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import secrets
import signal
import string

from kubernetes.aio.config.config_exception import ConfigException

from vllm_ray_operator.act import execute
from vllm_ray_operator.clients.bundle import Clients, Key
from vllm_ray_operator.clients.engine import EngineClient
from vllm_ray_operator.clients.kube import KubeClient
from vllm_ray_operator.clients.protocols import CORDONED, NODES, Forbidden, KindMissing, Kube, Resource
from vllm_ray_operator.clients.ray import RayClient
from vllm_ray_operator.observe import observe
from vllm_ray_operator.plan import names
from vllm_ray_operator.plan.planner import plan
from vllm_ray_operator.plan.revision import Defaults
from vllm_ray_operator.runtime import health
from vllm_ray_operator.runtime.clock import SteadyClock, WallClock
from vllm_ray_operator.runtime.engine_watch import EngineWatch
from vllm_ray_operator.runtime.lease import LeaderLease
from vllm_ray_operator.runtime.metrics import Metrics
from vllm_ray_operator.runtime.process import Process
from vllm_ray_operator.runtime.queue import WorkQueue
from vllm_ray_operator.runtime.reconciler import Reconciler
from vllm_ray_operator.runtime.settings import Settings
from vllm_ray_operator.runtime.watches import Watches

log = logging.getLogger(__name__)

LEASE_NAME = "vllm-ray-operator"


class CannotStart(Exception):
    """What the process needs from its surroundings is not there."""


async def run(settings: Settings) -> int:
    """Run the operator process. Return its exit code. CannotStart if a port is taken or no API server is configured."""
    try:
        kube = await KubeClient.connect()
    except ConfigException as error:
        raise CannotStart(f"neither a service account nor a usable kubeconfig: {error}") from error
    ray, engine = RayClient(), EngineClient()
    try:
        return await _run(settings, Clients(kube=kube, ray=ray, engine=engine, clock=WallClock()))
    finally:
        await engine.close()
        await ray.close()
        await kube.close()


async def _run(settings: Settings, clients: Clients) -> int:
    stop = asyncio.Event()
    take_signals(stop)
    steady = SteadyClock()
    queue: WorkQueue[Key] = WorkQueue(steady, random.random)
    metrics = Metrics()
    lease = LeaderLease(clients.kube, settings.pod_namespace, LEASE_NAME, settings.identity, steady)
    engine_watch = EngineWatch(clients.engine, steady, random.random, queue.add)
    reconciler = Reconciler(
        clients,
        observe=observe,
        planner=functools.partial(plan, new_nonce=new_nonce, defaults=Defaults(engine_image=settings.engine_image)),
        execute=execute,
        follow=engine_watch.follow,
        leads=lease.leads,
        metrics=metrics,
    )
    namespace = settings.namespaces[0] if settings.namespaces else settings.pod_namespace
    watches = Watches(
        settings.namespaces,
        changed=queue.add,
        is_served=functools.partial(is_served, clients.kube, namespace),
        may_see_nodes=functools.partial(may_see_nodes, clients.kube),
        take_signals=functools.partial(take_signals, stop),
    )
    process = Process(
        lease=lease,
        watcher=watches,
        queue=queue,
        reconciler=reconciler,
        engine_watch=engine_watch,
        workers=settings.workers,
        ill=functools.partial(health.stuck, queue),
        stop=stop,
    )
    metrics.gauge("leader", "Whether this process leads.", lease.leads)
    metrics.gauge("queue_depth", "Deployments that wait for a worker.", queue.depth)
    metrics.gauge("queue_oldest_seconds", "How long the oldest of them has waited.", queue.oldest_wait)
    metrics.gauge("engines_watched", "Launchers whose state is watched.", engine_watch.count)
    server = health.HealthServer(metrics, functools.partial(health.stuck, queue), process.unready)
    try:
        try:
            await server.start(settings.health_port, settings.metrics_port)
        except OSError as error:
            raise CannotStart(str(error)) from error
        return await process.run()
    finally:
        await server.close()


async def may_see_nodes(kube: Kube) -> bool:
    """Return whether we have the right to see which nodes are cordoned; say what is done without it."""
    try:
        await kube.list(NODES, "", {}, fields=CORDONED)
    except Forbidden as error:
        log.warning("replicas leave no node that is cordoned, only when their pods are deleted: %s", error)
        return False
    return True


async def is_served(kube: Kube, namespace: str, resource: Resource) -> bool:
    """Return whether the API server knows the kind, by the right that watching it takes anyway."""
    try:
        await kube.list(resource, namespace, {names.DEPLOYMENT: "is-the-kind-served"})
    except KindMissing:
        return False
    return True


def take_signals(stop: asyncio.Event) -> None:
    """Have SIGTERM and SIGINT set ``stop``."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


def new_nonce() -> str:
    """Return six characters that keep instance ids apart even when the attempt counter was lost."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(6))
