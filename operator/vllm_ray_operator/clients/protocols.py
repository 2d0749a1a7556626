"""The three walls between the operator and the world. A simulator implements the same protocols.

No method retries on its own and none hides a failure: the caller runs in a loop that comes again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

Object = dict[str, Any]
RowT = TypeVar("RowT")


class ApiError(Exception):
    """An API answered with an error, or did not answer (``status`` None: the effect is unknown)."""

    def __init__(self, message: str, status: int | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class NotFound(ApiError):
    """404 of the object."""


class KindMissing(NotFound):
    """The API server does not know the kind: its CRD is not installed."""


class Conflict(ApiError):
    """409: changed by somebody else meanwhile, or exists already (``reason`` is AlreadyExists)."""


class Invalid(ApiError):
    """400 or 422: refused for what is in it; trying again does not help."""


class Forbidden(ApiError):
    """401 or 403: our own rights do not suffice, or an admission policy refuses."""


@dataclass(frozen=True)
class Resource:
    """A kind as the API server serves it."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True


VLLM_DEPLOYMENTS = Resource("vllm-ray.dev/v1alpha1", "VLLMDeployment", "vllmdeployments")
RAY_CLUSTERS = Resource("ray.io/v1", "RayCluster", "rayclusters")
PODS = Resource("v1", "Pod", "pods")
NODES = Resource("v1", "Node", "nodes", namespaced=False)
CORDONED = "spec.unschedulable=true"  # a field selector of nodes
SERVICES = Resource("v1", "Service", "services")
SECRETS = Resource("v1", "Secret", "secrets")
ENDPOINT_SLICES = Resource("discovery.k8s.io/v1", "EndpointSlice", "endpointslices")
CONTROLLER_REVISIONS = Resource("apps/v1", "ControllerRevision", "controllerrevisions")
POD_DISRUPTION_BUDGETS = Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
LEASES = Resource("coordination.k8s.io/v1", "Lease", "leases")
EVENTS = Resource("events.k8s.io/v1", "Event", "events")


class Kube(Protocol):
    """The Kubernetes API. Every method raises ApiError or one of its kinds."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Return the object; NotFound if there is none."""
        ...

    async def list(
        self, resource: Resource, namespace: str, selector: Mapping[str, str], *, fields: str = ""
    ) -> Sequence[Object]:
        """Return all objects whose labels match, whole (all pages). ``fields``: a field selector, of the few that the
        API server has for a kind.
        """
        ...

    async def create(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        """Create; Conflict with reason AlreadyExists if the name is taken."""
        ...

    async def apply(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        """Server-side apply as field manager ``vllm-ray-operator``, by force."""
        ...

    async def replace(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        """Replace; the resourceVersion in ``obj`` is the precondition."""
        ...

    async def json_patch(
        self, resource: Resource, namespace: str, name: str, operations: Sequence[Mapping[str, Any]]
    ) -> Object:
        """Apply a JSON patch. A failed ``test`` raises Conflict."""
        ...

    async def replace_status(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        """Replace the status subresource; the resourceVersion in ``obj`` is the precondition."""
        ...

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str | None, *, grace_seconds: int | None = None
    ) -> None:
        """Delete in the background, only if the uid matches when one is given. NotFound if there is none.

        ``grace_seconds``: of a pod, if not its own; with 0 it goes without its node's word that it has ended.
        """
        ...


@dataclass(frozen=True)
class RayEndpoint:
    """A Ray dashboard. The token never shows in a repr; ``token_source`` tells people where it was read."""

    url: str
    token: str | None = field(default=None, repr=False)
    token_source: str = ""


@dataclass(frozen=True)
class ActorRow:
    """A row of the State API's actors."""

    actor_id: str
    name: str
    namespace: str
    job_id: str
    state: str
    node_id: str
    pid: int


@dataclass(frozen=True)
class PlacementGroupRow:
    """A row of the State API's placement groups."""

    placement_group_id: str
    name: str
    creator_job_id: str
    state: str


@dataclass(frozen=True)
class JobRow:
    """A submission. ``job_id`` is the *last* Ray job that any of its processes opened, not the one it began with."""

    submission_id: str
    status: Literal["PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]
    message: str
    job_id: str | None
    driver_ip: str | None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rows(Generic[RowT]):
    """Rows of the State API; ``complete`` is false if any were cut off or a part did not answer."""

    rows: tuple[RowT, ...]
    complete: bool


class Ray(Protocol):
    """A Ray cluster's dashboard. Every method raises ApiError when there is no answer or a bad one."""

    async def job(self, ray: RayEndpoint, submission_id: str) -> JobRow | None:
        """Return the submission; None if Ray answered that it does not know it."""
        ...

    async def jobs(self, ray: RayEndpoint) -> tuple[JobRow, ...]:
        """Return all submissions since the head started, whoever made them."""
        ...

    async def job_log_tail(self, ray: RayEndpoint, submission_id: str, limit: int) -> str:
        """Return the last ``limit`` characters of the submission's log."""
        ...

    async def submit(
        self,
        ray: RayEndpoint,
        submission_id: str,
        entrypoint: str,
        resources: Mapping[str, float],
        runtime_env: Mapping[str, Any],
        metadata: Mapping[str, str],
    ) -> None:
        """Submit a job. A submission id in use raises Conflict."""
        ...

    async def stop(self, ray: RayEndpoint, submission_id: str) -> bool:
        """Ask for a stop; false if the job had ended already."""
        ...

    async def has_package(self, ray: RayEndpoint, name: str) -> bool:
        """Whether GCS holds the package ``name`` (``_ray_pkg_<hash>.zip``)."""
        ...

    async def put_package(self, ray: RayEndpoint, name: str, content: bytes) -> None:
        """Upload a package to GCS."""
        ...

    async def actors(self, ray: RayEndpoint, filters: Mapping[str, str]) -> Rows[ActorRow]:
        """List the actors whose fields equal all ``filters`` (``ray_namespace``, ``job_id``)."""
        ...

    async def placement_groups(self, ray: RayEndpoint, filters: Mapping[str, str]) -> Rows[PlacementGroupRow]:
        """List the placement groups whose fields equal all ``filters`` (``name``)."""
        ...


@dataclass(frozen=True)
class EngineEndpoint:
    """The control endpoint of an attempt's launcher."""

    address: str
    port: int
    instance_id: str
    ray_token: str | None = field(default=None, repr=False)


class Engine(Protocol):
    """A launcher's control endpoint."""

    async def state(self, engine: EngineEndpoint, since: int | None, wait_seconds: float) -> Mapping[str, Any]:
        """Return the launcher's state; wait up to ``wait_seconds`` for a version other than ``since``."""
        ...

    async def drain(self, engine: EngineEndpoint) -> None:
        """Tell the launcher that its engine has left the traffic. ApiError if it may not have heard it."""
        ...


class Clock(Protocol):
    """Time, so that it can be simulated."""

    def now(self) -> float:
        """Seconds since the epoch."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        ...
