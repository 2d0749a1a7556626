"""Observing: the world of one VLLMDeployment, read live into one typed snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace

from vllm_ray_operator.api.status import Attempt
from vllm_ray_operator.clients.bundle import Clients, Key, Observation
from vllm_ray_operator.clients.problems import KUBERAY_MISSING
from vllm_ray_operator.observe import engine, kube, ray
from vllm_ray_operator.observe.limit import Limit
from vllm_ray_operator.plan import submissions
from vllm_ray_operator.plan.world import AttemptView, Cluster, Problem, Submission, World

__all__ = ["observe"]

CONCURRENT_READS = 16
HASTE_SECONDS = 1.0
"""How long Ray is waited for when a replica has to leave the traffic: its dashboard may take ten seconds."""


async def observe(key: Key, clients: Clients, problems: tuple[Problem, ...]) -> Observation | None:
    """Return what is there of a deployment, or None when it is gone or being deleted.

    ``problems`` are those of the last actions; what is found here comes after them.

    Raises:
        ApiError: the Kubernetes API could not be read. Ray and the launchers may be silent: that is observed.
        pydantic.ValidationError: the stored object cannot be read.
    """
    objects = await kube.read(clients.kube, key)
    if objects is None:
        return None
    limit = Limit(CONCURRENT_READS)
    access = await ray.find_dashboards(clients, key.namespace, objects.clusters, objects.token_secrets, limit)
    replicas = objects.deployment.status.replicas
    attempts = [attempt for replica in replicas for attempt in replica.attempts]
    lists = submissions.are_needed(objects.deployment, objects.clusters)
    reading = asyncio.ensure_future(ray.read_attempts(clients.ray, access.endpoints, attempts, limit, lists=lists))
    try:
        serving = [replica.attempt for replica in replicas if replica.phase == "Ready" and replica.attempt is not None]
        unknown = {attempt.instance_id: AttemptView(job=None) for attempt in attempts}
        asked = engine.endpoints(unknown, serving, access.tokens)
        states = await engine.read_states(clients.engine, asked, limit)
        haste = any(state is not None and not state.ready for state in states.values())
        seen = await _wait(reading, attempts, HASTE_SECONDS if haste else None)
    finally:
        reading.cancel()
    seen = await ray.distrust_after_restart(clients.kube, key.namespace, objects.clusters, seen, limit)
    endpoints = engine.endpoints(seen.views, attempts, access.tokens)
    others = {instance: endpoint for instance, endpoint in endpoints.items() if asked.get(instance) != endpoint}
    states = {**states, **await engine.read_states(clients.engine, others, limit)}
    states = {instance: states[instance] for instance in endpoints}
    views = {
        attempt.instance_id: replace(
            seen.views[attempt.instance_id],
            engine=states.get(attempt.instance_id),
            unasked=attempt.ray_cluster not in access.tokens,
        )
        for attempt in attempts
    }
    world = World(
        deployment=objects.deployment,
        revisions=objects.revisions,
        clusters=tuple(_with_word_of_ray(objects.clusters, seen.submissions, access.errors, seen.errors)),
        clusters_known=KUBERAY_MISSING not in objects.problems,
        services=objects.services,
        endpoint_slices=objects.endpoint_slices,
        budgets=objects.budgets,
        attempts=views,
        problems=tuple(dict.fromkeys((*problems, *objects.problems, *access.problems))),
        orphans=objects.orphans,
    )
    return Observation(world=world, ray=access.endpoints, engines=endpoints)


async def _wait(reading: asyncio.Future[ray.Seen], attempts: Iterable[Attempt], seconds: float | None) -> ray.Seen:
    """Return what Ray says, or that nothing is known of it when it takes longer than that."""
    try:
        async with asyncio.timeout(seconds):
            return await reading
    except TimeoutError:
        clusters = {attempt.instance_id: attempt.ray_cluster for attempt in attempts}
        return ray.Seen({instance: AttemptView(job=None) for instance in clusters}, {}, clusters, {})


def _with_word_of_ray(
    clusters: Iterable[Cluster], listed: Mapping[str, tuple[Submission, ...]], *errors: Mapping[str, str]
) -> Iterable[Cluster]:
    for cluster in clusters:
        error = next((e[cluster.name] for e in errors if cluster.name in e), "")
        yield replace(cluster, ray_error=error, submissions=listed.get(cluster.name))
