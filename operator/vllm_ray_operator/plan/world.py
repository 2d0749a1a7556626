"""What was observed: one typed, immutable snapshot for one VLLMDeployment.

``None`` for a part that can fail to be read means *not known*, never *not there*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

from vllm_ray_operator.api.spec import VLLMDeploymentSpec
from vllm_ray_operator.api.status import VLLMDeploymentStatus

Manifest = Mapping[str, Any]
JobStatus = Literal["PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]
TERMINAL: frozenset[JobStatus] = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})


@dataclass(frozen=True)
class Deployment:
    """The resource itself. ``raw_spec`` is exactly what the user wrote (no defaults added by us)."""

    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str
    spec: VLLMDeploymentSpec
    raw_spec: Mapping[str, Any]
    status: VLLMDeploymentStatus


@dataclass(frozen=True)
class Pod:
    """A head or worker pod. ``restarts`` and ``ready`` are those of its Ray container.

    ``ends``: of one that is being deleted, when its containers are killed at the latest. ``lost_since``: from when on
    its node has not answered, if it does not. ``cordoned``: no pod like it would get to its node now.
    """

    name: str
    uid: str
    cluster: str
    group: str
    is_head: bool
    ip: str | None
    node: str | None
    ready: bool
    deleting: bool
    restarts: int
    problem: str = ""  # why it does not run, in words: image pull, unschedulable, crash
    problem_reason: str = ""  # the same as a CamelCase reason
    ends: datetime | None = None
    lost_since: datetime | None = None
    cordoned: bool = False


Slots = Mapping[tuple[str, str], tuple[Pod, ...]]  # by RayCluster and worker group


def _slots(pods: Iterable[Pod]) -> Slots:
    slots: dict[tuple[str, str], list[Pod]] = {}
    for pod in pods:
        if not pod.is_head:
            slots.setdefault((pod.cluster, pod.group), []).append(pod)
    return {key: tuple(members) for key, members in slots.items()}


@dataclass(frozen=True)
class Submission:
    """A submission in Ray's list, whoever made it."""

    id: str
    status: JobStatus
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class Cluster:
    """A RayCluster of ours. ``head_ready`` is KubeRay's HeadPodReady, never its sticky ``state``.

    ``outlives_head``: what its head knows is kept elsewhere (GCS fault tolerance), and so its jobs outlive the head.
    """

    name: str
    uid: str
    resource_version: str
    revision: str
    deleting: bool
    head_ready: bool
    groups: tuple[tuple[str, int], ...]  # (group name, desired pods), in the object's order
    pods: tuple[Pod, ...]
    outlives_head: bool = False
    problem: str = ""  # what KubeRay reports, such as a failed pod creation
    ray_error: str = ""  # why its dashboard could not be read ("" when it was)
    submissions: tuple[Submission, ...] | None = None  # all that Ray knows; None when not asked for or not answered

    @cached_property
    def head(self) -> Pod | None:
        """The live head pod, if there is one."""
        return next((p for p in self.pods if p.is_head and not p.deleting), None)

    @cached_property
    def lost_head(self) -> Pod | None:
        """The head pod if its node does not answer, also one that is being deleted, for ever."""
        return next((p for p in self.pods if p.is_head and p.lost_since is not None), None)

    @cached_property
    def pods_by_ip(self) -> Mapping[str, Pod]:
        """An address may belong to the next pod already while the last one is still listed: then it is the next's."""
        return {p.ip: p for p in sorted(self.pods, key=lambda p: not p.deleting) if p.ip}

    @cached_property
    def _slots(self) -> Slots:
        return _slots(self.pods)

    def slot(self, group: str) -> tuple[Pod, ...]:
        """The worker pods of one slot, those being deleted too."""
        return self._slots.get((self.name, group), ())


@dataclass(frozen=True)
class Job:
    """A submission as Ray's Jobs API tells it."""

    status: JobStatus
    message: str = ""
    ray_job_ids: tuple[str, ...] = ()
    driver_ip: str | None = None
    result: Mapping[str, str] | None = None  # the launcher's last words (outcome, reason, message), from the log


@dataclass(frozen=True)
class Leftovers:
    """What the State API still knows alive of an attempt. ``complete`` only if the answer was whole."""

    complete: bool
    actors: tuple[str, ...] = ()  # "name (state) on node id, pid n"
    placement_groups: tuple[str, ...] = ()

    @property
    def some(self) -> bool:
        """Whether something is known to be left."""
        return bool(self.actors or self.placement_groups)

    @property
    def none(self) -> bool:
        """Whether it is proven that nothing is left."""
        return self.complete and not self.some


@dataclass(frozen=True)
class EngineState:
    """What the attempt's launcher says on its control endpoint."""

    phase: str
    message: str
    ready: bool
    reason: str = ""
    ranks: tuple[tuple[int, str, tuple[str, ...]], ...] = ()  # (rank, instance id, node ips)
    cause: Mapping[str, str] | None = None
    drained: bool | None = None  # whether its clients are gone; None as long as it was not told to drain


@dataclass(frozen=True)
class AttemptView:
    """What was observed of one attempt.

    ``job``: the submission; ``"absent"`` when Ray answered that it does not know it; None when Ray did not answer.
    ``leftovers`` and ``engine``: None when not asked for or not answered. ``unasked``: the launcher could not be asked
    for want of the Ray token, so that its silence says nothing.
    """

    job: Job | Literal["absent"] | None
    leftovers: Leftovers | None = None
    engine: EngineState | None = None
    unasked: bool = False


@dataclass(frozen=True)
class Problem:
    """Something that stands in the way of the whole deployment, found by observing or by the last action."""

    reason: str
    message: str


@dataclass(frozen=True)
class Revision:
    """A ControllerRevision: what the user wrote (``written``) and what it was resolved to (``resolved``)."""

    name: str
    kind: Literal["cluster", "engine"]
    number: int
    written: Mapping[str, Any]
    resolved: Mapping[str, Any]


@dataclass(frozen=True)
class World:
    """All of it."""

    deployment: Deployment
    revisions: tuple[Revision, ...] = ()
    clusters: tuple[Cluster, ...] = ()
    clusters_known: bool = True  # false when the API server does not know the kind: that says nothing about pods
    services: Mapping[str, Manifest] = field(default_factory=dict)  # ours, by name
    endpoint_slices: Mapping[str, Manifest] = field(default_factory=dict)  # ours, by name
    budgets: Mapping[str, Manifest] = field(default_factory=dict)  # PodDisruptionBudgets of ours, by name
    attempts: Mapping[str, AttemptView] = field(default_factory=dict)  # by instance id
    problems: tuple[Problem, ...] = ()
    orphans: tuple[Pod, ...] = ()  # pods of ours whose RayCluster is gone; they go too, but not at once

    @cached_property
    def pods(self) -> Mapping[str, Pod]:
        """All pods of ours, by uid."""
        listed = (*(pod for cluster in self.clusters for pod in cluster.pods), *self.orphans)
        return {pod.uid: pod for pod in listed}

    @cached_property
    def some_go(self) -> bool:
        """Whether any pod is being deleted, or on a cordoned node."""
        return any(pod.deleting or pod.cordoned for pod in self.pods.values())

    @cached_property
    def _orphan_slots(self) -> Slots:
        return _slots(self.orphans)

    def slot(self, cluster: str, group: str) -> tuple[Pod, ...]:
        """The worker pods of one slot, whether or not its RayCluster is still there."""
        known = self.cluster(cluster)
        return (known.slot(group) if known else ()) + self._orphan_slots.get((cluster, group), ())

    def cluster(self, name: str) -> Cluster | None:
        """Return the RayCluster of that name, or None."""
        return self._clusters.get(name)

    @cached_property
    def _clusters(self) -> Mapping[str, Cluster]:
        return {cluster.name: cluster for cluster in self.clusters}
