"""What a reconcile is given: the key it works on, the clients it reads and acts through, what it saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm_ray_operator.clients.protocols import Clock, Engine, EngineEndpoint, Kube, Ray, RayEndpoint
from vllm_ray_operator.plan import names
from vllm_ray_operator.plan.world import World

# The URL of a dashboard, from the namespace and the RayCluster's name.
DashboardUrl = Callable[[str, str], str]


def dashboard_in_cluster(namespace: str, cluster: str) -> str:
    """Return the dashboard's URL as pods reach it, whatever the cluster's DNS domain is."""
    return f"http://{names.head_service(cluster)}.{namespace}.svc:{names.DASHBOARD_PORT}"


@dataclass(frozen=True, order=True)
class Key:
    """One VLLMDeployment."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Clients:
    """All I/O. ``dashboard_url`` is replaced where the operator does not run in the cluster."""

    kube: Kube
    ray: Ray
    engine: Engine
    clock: Clock
    dashboard_url: DashboardUrl = dashboard_in_cluster


@dataclass(frozen=True)
class Observation:
    """The world as it was seen, and where the Ray dashboards (by RayCluster) and launchers (by instance id) answer.

    A RayCluster whose head is not ready, or whose token cannot be read, has no endpoint.
    """

    world: World
    ray: Mapping[str, RayEndpoint]
    engines: Mapping[str, EngineEndpoint]
