"""Observing: the world of one VLLMDeployment, read live into one typed snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from vllm_ray_operator.clients.bundle import Clients, Key, Observation
from vllm_ray_operator.clients.problems import KUBERAY_MISSING
from vllm_ray_operator.observe import engine, kube, ray
from vllm_ray_operator.observe.limit import Limit
from vllm_ray_operator.plan import submissions
from vllm_ray_operator.plan.world import Cluster, Problem, Submission, World

__all__ = ["observe"]

CONCURRENT_READS = 16


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
    attempts = [attempt for replica in objects.deployment.status.replicas for attempt in replica.attempts]
    lists = submissions.are_needed(objects.deployment, objects.clusters)
    seen = await ray.read_attempts(clients.ray, access.endpoints, attempts, limit, lists=lists)
    seen = await ray.distrust_after_restart(clients.kube, key.namespace, objects.clusters, seen, limit)
    endpoints = engine.endpoints(seen.views, attempts, access.endpoints)
    states = await engine.read_states(clients.engine, endpoints, limit)
    views = {instance: replace(view, engine=states.get(instance)) for instance, view in seen.views.items()}
    world = World(
        deployment=objects.deployment,
        revisions=objects.revisions,
        clusters=tuple(_with_word_of_ray(objects.clusters, seen.submissions, access.errors, seen.errors)),
        clusters_known=KUBERAY_MISSING not in objects.problems,
        services=objects.services,
        endpoint_slices=objects.endpoint_slices,
        attempts=views,
        problems=tuple(dict.fromkeys((*problems, *objects.problems, *access.problems))),
        orphans=objects.orphans,
    )
    return Observation(world=world, ray=access.endpoints, engines=endpoints)


def _with_word_of_ray(
    clusters: Iterable[Cluster], listed: Mapping[str, tuple[Submission, ...]], *errors: Mapping[str, str]
) -> Iterable[Cluster]:
    for cluster in clusters:
        error = next((e[cluster.name] for e in errors if cluster.name in e), "")
        yield replace(cluster, ray_error=error, submissions=listed.get(cluster.name))
