"""``VLLMDeployment.status``: what the operator knows, and the intents it writes down before it acts."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from vllm_ray_operator.api.base import ApiModel

ConditionType = Literal["Ready", "Progressing", "ClusterReady", "Degraded"]
ConditionStatus = Literal["True", "False", "Unknown"]
Phase = Literal["Pending", "Starting", "Ready", "NotReady", "Draining", "Stopping", "Fencing", "Backoff", "Stopped"]


class Condition(ApiModel):
    """A Kubernetes condition."""

    type: ConditionType
    status: ConditionStatus
    reason: str
    message: str
    observed_generation: int
    last_transition_time: datetime


class Failure(ApiModel):
    """Why an attempt ended, in words that say what to do."""

    reason: str
    message: str
    time: datetime
    attempt: int


class Fence(ApiModel):
    """The proof that an attempt is gone."""

    attempt: int
    time: datetime
    how: Literal["JobEnded", "NeverStarted", "PodsGone"] = Field(
        description=(
            "JobEnded: its Ray job is terminal, its actors are dead, its placement group is removed. NeverStarted: "
            "it was never submitted. PodsGone: every container that could hold a part of it has ended."
        )
    )


class ContainerRef(ApiModel):
    """One life of a pod's Ray container."""

    pod: str
    uid: str
    restarts: int


class Session(ApiModel):
    """The life of the Ray cluster an attempt was made for: its head container and the containers of its slot."""

    head: ContainerRef
    slot: list[ContainerRef]


class Endpoint(ApiModel):
    """Where the replica's API server listens."""

    address: str
    port: int
    pod: str
    node: str | None = None


class Rank(ApiModel):
    """One data-parallel rank of an attempt and the pods it runs on."""

    rank: int
    instance_id: str
    pods: list[str] = Field(default_factory=list)
    nodes: list[str] = Field(default_factory=list)


class Stop(ApiModel):
    """A stop that was decided: written before it is carried out. ``failure`` tells a fault from a wish."""

    reason: str
    message: str
    time: datetime
    failure: bool
    drain_deadline: datetime | None = Field(
        default=None, description="Until when it may finish its requests; absent when there is nothing to finish."
    )
    drained_time: datetime | None = Field(default=None, description="When its requests were done, or time was up.")
    recycle: bool = Field(default=False, description="The slot's pods are deleted because the fence did not close.")


class Attempt(ApiModel):
    """One start of a replica: from the moment its number was taken until it is fenced."""

    number: int
    nonce: str
    instance_id: str = Field(description="Also the submission id, the Ray namespace and the placement group's name.")
    engine_revision: str
    ray_cluster: str
    turn: int = Field(
        default=0, description="Which of its replica's two pairs of ports it has: those of the spec, or the next ones."
    )
    standby: bool = Field(default=False, description="It began as a standby.")
    session: Session
    ray_job_ids: list[str] = Field(
        default_factory=list, description="Every Ray job id ever seen for the submission; there may be several."
    )
    start_time: datetime
    warm_time: datetime | None = Field(
        default=None, description="When a standby was first seen to wait for nothing but accelerators."
    )
    takeover_time: datetime | None = Field(
        default=None, description="When a standby became the replica's attempt: the other had left the accelerators."
    )
    ready_time: datetime | None = None
    silent_time: datetime | None = Field(
        default=None, description="Since when the launcher of an engine that was ready has not answered."
    )
    endpoint: Endpoint | None = None
    ranks: list[Rank] = Field(default_factory=list)
    stop: Stop | None = None
    end_time: datetime | None = Field(default=None, description="When its Ray job was first seen terminal or lost.")


class ReplicaStatus(ApiModel):
    """One replica."""

    index: int = Field(description="Its number, from 0.")
    surge: bool = Field(default=False, description="A roll has it beyond `spec.replicas`, for its time.")
    phase: Phase = Field(
        default="Pending",
        description=(
            "Pending: waits for its pods. Starting: an attempt is on its way. Ready: it serves. NotReady: it runs and "
            "does not serve. Draining: out of traffic, it finishes its requests. Stopping, Fencing: an attempt ends. "
            "Backoff: waits before the next. Stopped: by wish (`spec.suspend`)."
        ),
    )
    message: str = Field(default="", description="What it waits for or what is wrong, in plain words.")
    attempt: Attempt | None = Field(default=None, description="The attempt that is not fenced yet, if any.")
    standby: Attempt | None = Field(
        default=None, description="The next attempt, up beside the one that serves, waiting for its accelerators."
    )
    standby_failure: Failure | None = Field(
        default=None,
        description="Why the last standby ended; the roll goes on without one, unless the spec is at fault.",
    )
    cluster_revision: str | None = Field(
        default=None, description="Cluster revision whose pods it is on, or is taken to."
    )
    revision: str | None = Field(default=None, description="The engine revision that it runs, or is taken to.")
    restarts: int = Field(default=0, description="Attempts after the first.")
    failures: int = Field(default=0, description="Failures in a row; a replica that stays ready resets it.")
    next_start_time: datetime | None = Field(default=None, description="When the next attempt may start.")
    last_failure: Failure | None = None
    last_fence: Fence | None = None

    @property
    def attempts(self) -> list[Attempt]:
        """Return the attempts that are not fenced yet: the one that serves, or is to, and its standby."""
        attempt, standby = self.attempt, self.standby
        if standby is None:
            return [] if attempt is None else [attempt]
        return [standby] if attempt is None else [attempt, standby]


class RolloutStatus(ApiModel):
    """A roll that is not complete yet."""

    cluster_revision: str = Field(description="The cluster revision that the replicas are taken to.")
    revision: str = Field(description="The engine revision that the replicas are taken to.")
    updated_ready: int = Field(description="Replicas that serve with it: most that there were at once.")
    progress_time: datetime = Field(description="When it began, went on after a pause, or last got one more ready.")
    paused: bool = False
    stalled: bool = Field(default=False, description="Past its progress deadline: no further replica is taken.")


class VLLMDeploymentStatus(ApiModel):
    """What the operator reports."""

    observed_generation: int = Field(default=0, description="The generation of the spec that this status is about.")
    last_attempt: int = Field(default=0, description="Number of the newest attempt of any replica. Only grows.")
    cluster_revision: str | None = Field(
        default=None, description="ControllerRevision of what decides how pods look: image, resources, templates."
    )
    engine_revision: str | None = Field(
        default=None, description="ControllerRevision of what decides how engines run: model, arguments, environment."
    )
    ray_cluster: str | None = Field(
        default=None,
        description="The RayCluster of all replicas; absent when each has its own (replicas[].attempt.rayCluster).",
    )
    endpoint: str | None = Field(default=None, description="Base URL of the OpenAI-compatible API in the cluster.")
    current_replicas: int = Field(default=0, description="Replicas that exist and are not Stopped, ready or not.")
    ready_replicas: int = Field(default=0, description="Replicas that serve.")
    updated_replicas: int = Field(default=0, description="Replicas whose engine is what the spec asks for.")
    replica_summary: str = Field(default="", description="Ready of wanted replicas, as shown by kubectl get.")
    selector: str | None = Field(default=None, description="Label selector of the pods, for the scale subresource.")
    rollout: RolloutStatus | None = Field(default=None, description="The roll that is under way, if any.")
    replicas: list[ReplicaStatus] = Field(default_factory=list)
    conditions: list[Condition] = Field(default_factory=list)

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return the condition of a type, or None."""
        return next((c for c in self.conditions if c.type == kind), None)
