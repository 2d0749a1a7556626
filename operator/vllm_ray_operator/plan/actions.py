"""What a plan may ask for. Each action is idempotent: carried out twice, or after a lost reply, it does no harm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vllm_ray_operator.api.status import VLLMDeploymentStatus

Kind = Literal["RayCluster", "Pod", "Service", "EndpointSlice", "ControllerRevision", "PodDisruptionBudget"]


@dataclass(frozen=True)
class Create:
    """Create an object; one of the same name that is there already is left as it is."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class Apply:
    """Server-side apply an object with our field manager."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class PatchCluster:
    """JSON-patch a RayCluster. The operations hold a ``test`` of the resourceVersion that was observed."""

    name: str
    operations: Sequence[Mapping[str, Any]]
    why: str


@dataclass(frozen=True)
class Delete:
    """Delete one object of that uid; one that is gone already is fine.

    ``grace_seconds``: how long a pod gets to end, if not as long as it has by itself; with 0 its node need not confirm
    its end.
    """

    kind: Kind
    name: str
    uid: str | None
    why: str
    grace_seconds: int | None = None


@dataclass(frozen=True)
class SubmitJob:
    """Submit an engine job. A submission id that Ray knows already is success."""

    cluster: str
    submission_id: str
    entrypoint: str
    resources: Mapping[str, float]
    environment: Mapping[str, str]
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class StopJob:
    """Ask Ray to stop a submission."""

    cluster: str
    submission_id: str


@dataclass(frozen=True)
class DrainEngine:
    """Tell an attempt's launcher that its engine has left the traffic; once told, it stays told."""

    instance_id: str


@dataclass(frozen=True)
class Emit:
    """Post a Kubernetes event on the VLLMDeployment."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


Action = Create | Apply | PatchCluster | Delete | SubmitJob | StopJob | DrainEngine | Emit


@dataclass(frozen=True)
class Plan:
    """The outcome of planning: the status to write, then the actions, then when to look again (seconds)."""

    status: VLLMDeploymentStatus
    actions: tuple[Action, ...]
    wake_after: float | None
