"""RayClusters: a cluster revision written out, the manifest made from it, and the slots kept in step.

One RayCluster per cluster revision, or per replica. Each replica has a slot: a worker group of its own, whose pods
advertise Ray resources that only this replica's launcher and placement group ask for.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping
from typing import Any, Literal

from vllm_ray_operator.api.base import ApiModel
from vllm_ray_operator.api.rules import DEFAULT_ACCELERATOR
from vllm_ray_operator.api.spec import GcsFaultTolerance, Head, Resources, VLLMDeploymentSpec, Workers
from vllm_ray_operator.plan import model_uri, names, overlay, pod_end
from vllm_ray_operator.plan.actions import PatchCluster
from vllm_ray_operator.plan.world import Cluster, Deployment, Manifest

DEFAULT_RAY_VERSION = "2.60.0"
DEFAULT_ACCELERATORS_PER_NODE = 8
DEFAULT_SHM_SIZE = "8Gi"
CONTAINER = "ray"

# Of an object's 1.5 MiB, etcd's limit, a RayCluster takes at most this: the rest is for its status and what the API
# server notes on it.
MAX_BYTES = 1_400_000

# Ray kills a stopped job's processes after this many seconds (3 by default). The launcher ends its own tree sooner.
JOB_STOP_WAIT_SECONDS = 60


class Unresolvable(Exception):
    """The spec lacks something that has no default here. ``reason`` is a condition's reason."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ResolvedCluster(ApiModel):
    """A cluster revision, written out. ``head`` and ``worker`` are complete pod templates."""

    policy: Literal["Shared", "PerReplica"]
    ray_version: str
    auth: Literal["Token", "Disabled"]
    gcs_fault_tolerance: GcsFaultTolerance | None = None
    labels: dict[str, str]
    annotations: dict[str, str]
    head: dict[str, Any]
    worker: dict[str, Any]
    accelerators_per_pod: int
    pods_per_slot: int


def accelerators_per_node(spec: VLLMDeploymentSpec) -> int:
    """Return the accelerators of one worker pod."""
    accelerators = (spec.parallelism.tensor or 1) * (spec.parallelism.pipeline or 1)
    workers = spec.cluster.workers or Workers()
    return workers.accelerators_per_node or min(accelerators, DEFAULT_ACCELERATORS_PER_NODE)


def render_cluster(deployment: str, spec: VLLMDeploymentSpec, default_image: str | None) -> ResolvedCluster:
    """Write the defaults of today into a cluster revision.

    Raises:
        Unresolvable: there is no engine image, or a pod has more accelerators than a replica.
    """
    image = spec.engine.image or default_image
    if image is None:
        raise Unresolvable(
            "EngineImageMissing",
            "spec.engine.image is not set and the operator has no default: set it, or install the operator with "
            "defaults.engineImage. The image needs vLLM and Ray; the official vLLM images carry no Ray.",
        )
    accelerators = (spec.parallelism.tensor or 1) * (spec.parallelism.pipeline or 1)
    per_pod = accelerators_per_node(spec)
    if per_pod > accelerators:
        # Admission refuses it too, unless its CRD is older. A standby would start in what the engine leaves over.
        raise Unresolvable(
            "AcceleratorsLeftOver",
            f"spec.cluster.workers.acceleratorsPerNode is {per_pod}, but one replica has {accelerators} "
            f"(spec.parallelism.tensor x pipeline): set it to at most {accelerators}, or leave it out",
        )
    head, workers = spec.cluster.head or Head(), spec.cluster.workers or Workers()
    resource = workers.accelerator_resource
    if resource is None:
        resource = DEFAULT_ACCELERATOR
    accelerator_limits = {resource: per_pod} if resource else {}
    labels = names.selector(deployment)
    return ResolvedCluster(
        policy=spec.cluster.policy or "Shared",
        ray_version=spec.cluster.ray_version or DEFAULT_RAY_VERSION,
        auth=spec.cluster.auth or "Token",
        gcs_fault_tolerance=spec.cluster.gcs_fault_tolerance,
        labels=dict(spec.cluster.labels),
        annotations=dict(spec.cluster.annotations),
        head=_owned(overlay.merge(_pod_template(spec, image, head.resources, {}), head.template or {}), labels),
        worker=_owned(_worker(spec, image, workers, accelerator_limits), labels),
        accelerators_per_pod=per_pod,
        pods_per_slot=math.ceil(accelerators / per_pod),
    )


def _worker(spec: VLLMDeploymentSpec, image: str, workers: Workers, accelerators: Mapping[str, int]) -> dict[str, Any]:
    """Return the pod template of the slots.

    Its grace follows the time for drains as it is now: a change of that alone makes no new revision, so the pods that
    are there keep theirs, and a drain ends before it does.
    """
    base = _pod_template(spec, image, workers.resources, accelerators)
    base["spec"]["containers"][0]["lifecycle"] = pod_end.lifecycle()
    template = overlay.merge(base, workers.template or {})
    return pod_end.with_grace(template, pod_end.grace_seconds(spec.engine.drain_timeout_seconds))


def manifest(
    deployment: Deployment, name: str, revision: str, resolved: ResolvedCluster, replicas: Collection[int]
) -> Manifest:
    """Return the RayCluster of a revision with the slots of ``replicas``."""
    spec: dict[str, Any] = {
        "rayVersion": resolved.ray_version,
        "headGroupSpec": {
            # No accelerator and no work on the head: engines and their launchers live in the slots.
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
            "template": resolved.head,
        },
        "workerGroupSpecs": [slot_group(resolved, replica) for replica in sorted(replicas)],
    }
    if resolved.auth == "Token":
        spec["authOptions"] = {"mode": "token"}
    if resolved.gcs_fault_tolerance is not None:
        spec["gcsFaultToleranceOptions"] = _redis(resolved.gcs_fault_tolerance)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {
            "name": name,
            "namespace": deployment.namespace,
            "labels": {
                **resolved.labels,
                **names.selector(deployment.name),
                names.CLUSTER_REVISION: revision,
            },
            "annotations": resolved.annotations,
            "ownerReferences": [names.owner_reference(deployment.name, deployment.uid)],
        },
        "spec": spec,
    }


def _redis(storage: GcsFaultTolerance) -> dict[str, Any]:
    """Return it in KubeRay's words. Each RayCluster gets a namespace of its own in it; KubeRay clears it at the end."""
    options: dict[str, Any] = {"redisAddress": storage.redis_address}
    if storage.redis_username is not None:
        options["redisUsername"] = {"value": storage.redis_username}
    if (secret := storage.redis_password_secret_ref) is not None:
        options["redisPassword"] = {"valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}}
    return options


def capacity(deployment: Deployment, revision: str, resolved: ResolvedCluster) -> int:
    """Return how many replicas the RayClusters of a revision can hold: a shared one is bounded by its object's size."""
    if resolved.policy == "PerReplica":
        return sys.maxsize
    # The longest name, and an index of four digits: none is longer.
    rest, slot = manifest(deployment, "n" * 53, revision, resolved, ()), slot_group(resolved, 1000)
    return max(0, (MAX_BYTES - _size(rest)) // (_size(slot) + 1))


def _size(part: Mapping[str, Any]) -> int:
    return len(json.dumps(part, separators=(",", ":"), ensure_ascii=False).encode())


def slot_group(resolved: ResolvedCluster, replica: int) -> dict[str, Any]:
    """Return the worker group that belongs to a replica."""
    template = overlay.merge(resolved.worker, {"metadata": {"labels": {names.REPLICA: str(replica)}}})
    return {
        "groupName": names.slot(replica),
        "replicas": resolved.pods_per_slot,
        "minReplicas": resolved.pods_per_slot,
        "maxReplicas": resolved.pods_per_slot,
        "rayStartParams": {},
        "resources": {
            "GPU": str(resolved.accelerators_per_pod),
            names.slot_resource(replica): str(resolved.accelerators_per_pod),
            names.driver_resource(replica): "2",  # an attempt and its standby
        },
        "template": template,
    }


def sync_slots(cluster: Cluster, resolved: ResolvedCluster, wanted: Collection[int]) -> PatchCluster | None:
    """Return the patch that brings the slots to ``wanted``, or None if they are.

    KubeRay forgets the pods of a group that is removed, so a slot is first shrunk to nothing and its entry is removed
    when its last pod is gone. The whole list is atomic for server-side apply, hence a JSON patch with a test.
    """
    desired = {names.slot(replica): replica for replica in wanted}
    present = dict(cluster.groups)
    operations: list[dict[str, Any]] = []
    notes: list[str] = []
    for position, (group, count) in enumerate(cluster.groups):
        size = resolved.pods_per_slot if group in desired else 0
        if count != size:
            for field in ("minReplicas", "replicas", "maxReplicas"):
                path = f"/spec/workerGroupSpecs/{position}/{field}"
                operations.append({"op": "replace", "path": path, "value": size})
            notes.append(f"{group}: {count} to {size} pods")
    for position, (group, count) in reversed(list(enumerate(cluster.groups))):
        if group not in desired and count == 0 and not cluster.slot(group):
            operations.append({"op": "remove", "path": f"/spec/workerGroupSpecs/{position}"})
            notes.append(f"{group}: removed")
    missing = sorted(replica for group, replica in desired.items() if group not in present)
    if missing and not cluster.groups:
        groups = [slot_group(resolved, replica) for replica in missing]
        operations.append({"op": "add", "path": "/spec/workerGroupSpecs", "value": groups})
    elif missing:
        operations.extend(
            {"op": "add", "path": "/spec/workerGroupSpecs/-", "value": slot_group(resolved, replica)}
            for replica in missing
        )
    notes.extend(f"{names.slot(replica)}: added" for replica in missing)
    if not operations:
        return None
    test = {"op": "test", "path": "/metadata/resourceVersion", "value": cluster.resource_version}
    return PatchCluster(cluster.name, (test, *operations), "; ".join(notes))


def _pod_template(
    spec: VLLMDeploymentSpec, image: str, resources: Resources | None, accelerators: Mapping[str, int]
) -> dict[str, Any]:
    requests = dict(resources.requests) if resources else {}
    limits: dict[str, Any] = {**(dict(resources.limits) if resources else {}), **accelerators}
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - the pod's own mount
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": spec.engine.shm_size or DEFAULT_SHM_SIZE}}
    ]
    source = model_uri.parse(spec.model.uri)
    if source.claim:
        mounts.append({"name": "model", "mountPath": source.mount_path, "readOnly": True})
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": source.claim, "readOnly": True}})
    container = {
        "name": CONTAINER,
        "image": image,
        "env": [
            # vLLM compares it with Ray's node addresses; every node has to say its own.
            {"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(JOB_STOP_WAIT_SECONDS)},
        ],
        "resources": {key: value for key, value in (("requests", requests), ("limits", limits)) if value},
        "volumeMounts": mounts,
    }
    return {
        "metadata": {},
        "spec": {
            # A Service called "vllm" in the namespace would inject a VLLM_PORT that breaks vLLM.
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "containers": [container],
            "volumes": volumes,
        },
    }


def _owned(template: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """Put our labels on after the overlay: the watches find the pods by them."""
    return overlay.merge(template, {"metadata": {"labels": dict(labels)}})
