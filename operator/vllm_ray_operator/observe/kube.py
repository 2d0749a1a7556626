"""What the Kubernetes API knows of one VLLMDeployment."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, cast

from vllm_ray_operator.api.spec import VLLMDeploymentSpec
from vllm_ray_operator.api.status import VLLMDeploymentStatus
from vllm_ray_operator.clients.bundle import Key
from vllm_ray_operator.clients.problems import KUBERAY_MISSING
from vllm_ray_operator.clients.protocols import (
    CONTROLLER_REVISIONS,
    CORDONED,
    ENDPOINT_SLICES,
    NODES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    RAY_CLUSTERS,
    SERVICES,
    VLLM_DEPLOYMENTS,
    Forbidden,
    KindMissing,
    Kube,
    NotFound,
    Object,
)
from vllm_ray_operator.observe import words
from vllm_ray_operator.plan import names
from vllm_ray_operator.plan.world import Cluster, Deployment, Manifest, Pod, Problem, Revision

# KubeRay's labels on pods (ray-operator v1.6, controllers/ray/utils/constant.go).
RAY_CLUSTER = "ray.io/cluster"
RAY_GROUP = "ray.io/group"
RAY_NODE_TYPE = "ray.io/node-type"


@dataclass(frozen=True)
class Objects:
    """The objects of one deployment, typed as far as the planner reads them. Clusters come without ``ray_error``.

    ``orphans``: pods whose RayCluster is gone. ``token_secrets``: the Secret with the Ray token, by RayCluster; those
    without token authentication are not in it.
    """

    deployment: Deployment
    clusters: tuple[Cluster, ...]
    orphans: tuple[Pod, ...]
    token_secrets: Mapping[str, str]
    revisions: tuple[Revision, ...]
    services: Mapping[str, Manifest]
    endpoint_slices: Mapping[str, Manifest]
    budgets: Mapping[str, Manifest]
    problems: tuple[Problem, ...]


async def read(kube: Kube, key: Key) -> Objects | None:
    """Return the objects, or None when the deployment is gone or being deleted."""
    try:
        resource = await kube.get(VLLM_DEPLOYMENTS, key.namespace, key.name)
    except NotFound:
        return None
    if resource["metadata"].get("deletionTimestamp"):
        return None
    selector = names.selector(key.name)
    ours = (PODS, SERVICES, ENDPOINT_SLICES, POD_DISRUPTION_BUDGETS, CONTROLLER_REVISIONS)
    (listed, problems), cordoned, (pods, services, slices, budgets, revisions) = await asyncio.gather(
        _clusters(kube, key.namespace, selector),
        _cordoned(kube),
        asyncio.gather(*(kube.list(kind, key.namespace, selector) for kind in ours)),
    )
    clusters = [cluster for cluster in listed if not _is_doomed(cluster, resource)]
    by_cluster: dict[str, list[Object]] = {cluster["metadata"]["name"]: [] for cluster in clusters}
    orphans: list[Object] = []
    for pod in sorted(pods, key=lambda p: str(p["metadata"]["name"])):
        by_cluster.get(_labels(pod).get(RAY_CLUSTER, ""), orphans).append(pod)
    return Objects(
        deployment=parse_deployment(resource),
        clusters=tuple(parse_cluster(c, by_cluster[c["metadata"]["name"]], cordoned) for c in clusters),
        orphans=tuple(parse_pod(pod, cordoned) for pod in orphans),
        token_secrets={c["metadata"]["name"]: token_secret(c) for c in clusters if _token_auth(c)},
        revisions=tuple(
            parse_revision(r) for r in revisions if names.REVISION_KIND in _labels(r) and not _is_doomed(r, resource)
        ),
        services={s["metadata"]["name"]: s for s in services},
        endpoint_slices={s["metadata"]["name"]: s for s in slices},
        budgets={b["metadata"]["name"]: b for b in budgets},
        problems=problems,
    )


async def _cordoned(kube: Kube) -> frozenset[str]:
    """Return the nodes that are cordoned; none where our rights end at namespaces."""
    try:
        return frozenset(node["metadata"]["name"] for node in await kube.list(NODES, "", {}, fields=CORDONED))
    except Forbidden:
        return frozenset()


async def _clusters(
    kube: Kube, namespace: str, selector: Mapping[str, str]
) -> tuple[Sequence[Object], tuple[Problem, ...]]:
    try:
        return await kube.list(RAY_CLUSTERS, namespace, selector), ()
    except KindMissing:
        return (), (KUBERAY_MISSING,)


def _is_doomed(child: Object, deployment: Object) -> bool:
    """Whether an object was left by an earlier deployment of the same name: the garbage collector will take it."""
    owners = child["metadata"].get("ownerReferences") or ()
    return any(o["kind"] == VLLM_DEPLOYMENTS.kind and o["uid"] != deployment["metadata"]["uid"] for o in owners)


def parse_deployment(resource: Object) -> Deployment:
    """Return the resource. pydantic.ValidationError if spec or status cannot be read."""
    metadata = resource["metadata"]
    raw_spec = resource.get("spec") or {}
    return Deployment(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        resource_version=metadata["resourceVersion"],
        spec=VLLMDeploymentSpec.model_validate(raw_spec),
        raw_spec=raw_spec,
        status=VLLMDeploymentStatus.model_validate(resource.get("status") or {}),
    )


def parse_cluster(resource: Object, pods: Sequence[Object], cordoned: Collection[str] = ()) -> Cluster:
    """Return a RayCluster with its pods. ``cordoned``: the names of nodes."""
    metadata, status = resource["metadata"], resource.get("status") or {}
    conditions = words.conditions(status)
    return Cluster(
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        revision=_labels(resource).get(names.CLUSTER_REVISION, ""),
        deleting=bool(metadata.get("deletionTimestamp")),
        head_ready=conditions.get("HeadPodReady", {}).get("status") == "True",
        groups=tuple(
            (group["groupName"], group.get("replicas", 0) * group.get("numOfHosts", 1))
            for group in resource["spec"].get("workerGroupSpecs") or ()
        ),
        pods=tuple(parse_pod(pod, cordoned) for pod in pods),
        outlives_head=bool(resource["spec"].get("gcsFaultToleranceOptions")),
        problem=words.cluster_problem(status),
    )


def _token_auth(resource: Object) -> bool:
    return (resource["spec"].get("authOptions") or {}).get("mode") == "token"


def token_secret(resource: Object) -> str:
    """Return the name of the Secret that KubeRay makes for a RayCluster's token: its own name, if that is short enough
    (utils.CheckName of ray-operator v1.6).
    """
    given = (resource["spec"].get("authOptions") or {}).get("secretName")
    if given:
        return str(given)
    name = str(resource["metadata"]["name"])[-50:]
    return name if name[0].isalpha() else f"r{name[1:]}"


def parse_pod(resource: Object, cordoned: Collection[str] = ()) -> Pod:
    """Return a pod. Ray is its first container: KubeRay's rule. ``cordoned``: the names of nodes."""
    metadata, status = resource["metadata"], resource.get("status") or {}
    container = words.ray_container_status(resource)
    reason, problem = words.pod_problem(resource)
    ends, node = metadata.get("deletionTimestamp"), resource["spec"].get("nodeName") or None
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        cluster=_labels(resource).get(RAY_CLUSTER, ""),
        group=_labels(resource).get(RAY_GROUP, ""),
        is_head=_labels(resource).get(RAY_NODE_TYPE) == "head",
        ip=status.get("podIP") or None,
        node=node,
        ready=bool(container.get("ready")) and not words.node_is_lost(resource),
        deleting=bool(ends),
        restarts=container.get("restartCount", 0),
        problem=problem,
        problem_reason=reason,
        ends=datetime.fromisoformat(ends) if ends else None,
        lost_since=words.lost_since(resource),
        cordoned=node in cordoned and not words.tolerates_cordon(resource),
    )


def parse_revision(resource: Object) -> Revision:
    """Return a ControllerRevision of ours."""
    data = resource.get("data") or {}
    return Revision(
        name=resource["metadata"]["name"],
        kind=cast(Literal["cluster", "engine"], _labels(resource)[names.REVISION_KIND]),
        number=resource["revision"],
        written=data.get("written") or {},
        resolved=data.get("resolved") or {},
    )


def _labels(resource: Object) -> Mapping[str, Any]:
    return resource["metadata"].get("labels") or {}
