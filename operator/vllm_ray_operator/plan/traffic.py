"""The Service without a selector, and one EndpointSlice per replica, which the operator switches itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ray_operator.api.status import Endpoint, ReplicaStatus
from vllm_ray_operator.plan import names
from vllm_ray_operator.plan.actions import Action, Apply, Delete
from vllm_ray_operator.plan.world import Deployment, Manifest, World

PORT_NAME = "http"


def base_url(deployment: Deployment, port: int) -> str:
    """Return the address of the OpenAI-compatible API inside the cluster."""
    return f"http://{deployment.name}.{deployment.namespace}.svc:{port}/v1"


def sync(world: World, replicas: Sequence[ReplicaStatus], port: int) -> list[Action]:
    """Return what brings Service and EndpointSlices in step with the replicas."""
    deployment = world.deployment
    actions: list[Action] = []
    service = service_manifest(deployment, port)
    if not contains(world.services.get(deployment.name), service):
        actions.append(Apply(service))
    others = any(r.phase == "Ready" for r in replicas)
    wanted = set[str]()
    for replica in replicas:
        if replica.attempt is not None and replica.attempt.endpoint is not None:
            name = names.endpoint_slice(deployment.name, replica.index)
            slice_ = slice_manifest(deployment, replica.index, replica.attempt.endpoint, _conditions(replica, others))
            wanted.add(name)
            if not contains(world.endpoint_slices.get(name), slice_):
                actions.append(Apply(slice_))
    actions.extend(
        Delete("EndpointSlice", name, live["metadata"].get("uid"), "its replica has no engine")
        for name, live in world.endpoint_slices.items()
        if name not in wanted
    )
    return actions


def service_manifest(deployment: Deployment, port: int) -> Manifest:
    """Return the Service. It selects nothing: readiness of a pod is not readiness of an engine."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(deployment, deployment.name, {}),
        "spec": {"ports": [{"name": PORT_NAME, "port": port, "targetPort": port, "protocol": "TCP"}]},
    }


def _conditions(replica: ReplicaStatus, others: bool) -> dict[str, bool]:
    """Return an endpoint's conditions. ``others``: another replica serves.

    kube-proxy sends clients to serving endpoints that terminate when none is ready: not to the last one as it goes.
    """
    ready, draining = replica.phase == "Ready", replica.phase == "Draining"
    return {"ready": ready, "serving": ready or (draining and others), "terminating": draining}


def slice_manifest(
    deployment: Deployment, replica: int, endpoint: Endpoint, conditions: Mapping[str, bool]
) -> Manifest:
    """Return the EndpointSlice of a replica: the one address that its API server listens on."""
    target = {"kind": "Pod", "name": endpoint.pod, "namespace": deployment.namespace}
    entry: dict[str, Any] = {
        "addresses": [endpoint.address],
        "conditions": dict(conditions),
        "targetRef": target,
    }
    if endpoint.node:
        entry["nodeName"] = endpoint.node
    labels = {
        "kubernetes.io/service-name": deployment.name,
        "endpointslice.kubernetes.io/managed-by": names.MANAGER,
        names.REPLICA: str(replica),
    }
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": _metadata(deployment, names.endpoint_slice(deployment.name, replica), labels),
        "addressType": "IPv6" if ":" in endpoint.address else "IPv4",
        "endpoints": [entry],
        "ports": [{"name": PORT_NAME, "port": endpoint.port, "protocol": "TCP"}],
    }


def contains(live: Any, wanted: Any) -> bool:
    """Whether a live object has all that is wanted, whatever the API server or others added to it."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        for key, value in wanted.items():
            there = live.get(key)
            if there != value and not contains(there, value):
                return False
        return True
    if isinstance(wanted, list) and isinstance(live, list) and len(live) == len(wanted):
        return all(map(contains, live, wanted))
    return bool(live == wanted)


def _metadata(deployment: Deployment, name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": deployment.namespace,
        "labels": {**names.selector(deployment.name), **labels},
        "ownerReferences": [names.owner_reference(deployment.name, deployment.uid)],
    }
