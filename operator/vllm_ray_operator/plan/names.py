"""Names and labels, in one place. What is derived here is never parsed back: facts are carried by labels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from vllm_ray_operator.api import API_VERSION, KIND

MANAGER = "vllm-ray-operator"
MANAGED_BY = "app.kubernetes.io/managed-by"
DEPLOYMENT = "vllm-ray.dev/deployment"
CLUSTER_REVISION = "vllm-ray.dev/cluster-revision"
REPLICA = "vllm-ray.dev/replica"
REVISION_KIND = "vllm-ray.dev/revision-kind"

_CONTROL_PORT = 8070
DASHBOARD_PORT = 8265


def control_port(turn: int) -> int:
    """Return where the launcher of an attempt listens: a standby is on the same node as the attempt before it."""
    return _CONTROL_PORT + turn


def selector(deployment: str) -> dict[str, str]:
    """Return the labels that all objects and pods of one VLLMDeployment carry."""
    return {MANAGED_BY: MANAGER, DEPLOYMENT: deployment}


def worker_selector(deployment: str) -> dict[str, str]:
    """Return the labels of the pods that carry engines: autoscalers take averages over them, without the head."""
    return {**selector(deployment), "ray.io/node-type": "worker"}


def short_hash(value: Mapping[str, Any]) -> str:
    """Return 8 hex digits that name the content of a JSON value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def revision(deployment: str, kind: str, digest: str) -> str:
    """Return the name of a ControllerRevision."""
    return f"{deployment}-{kind}-{digest}"


def ray_cluster(deployment: str, digest: str, replica: int | None = None) -> str:
    """Return the name of the RayCluster of a cluster revision, that of one replica if there is one for each."""
    return f"{deployment}-{digest}" if replica is None else f"{deployment}-{digest}-{replica}"


def slot(replica: int) -> str:
    """Return the worker group that belongs to a replica."""
    return f"slot-{replica}"


def slot_resource(replica: int) -> str:
    """Return the Ray resource that every accelerator of a slot comes with."""
    return f"vd-slot-{replica}"


def driver_resource(replica: int) -> str:
    """Return the Ray resource that pins a replica's launcher to its slot."""
    return f"vd-driver-{replica}"


def endpoint_slice(deployment: str, replica: int) -> str:
    """Return the name of a replica's EndpointSlice."""
    return f"{deployment}-{replica}"


def replicas_budget(deployment: str) -> str:
    """Return the name of the PodDisruptionBudget for the pods of the replicas."""
    return f"{deployment}-replicas"


def heads_budget(deployment: str) -> str:
    """Return the name of the PodDisruptionBudget for the head pods."""
    return f"{deployment}-heads"


def head_service(cluster: str) -> str:
    """Return the Service that KubeRay makes for a head (utils.GenerateHeadServiceName for RayClusters)."""
    return f"{cluster}-head-svc"


def owner_reference(deployment: str, uid: str) -> dict[str, Any]:
    """Return the owner reference through which all objects of a VLLMDeployment go away with it."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": deployment,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
