"""The fence: the proof that an attempt is gone (invariant I2). It is observed, never assumed."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from vllm_ray_operator.api.status import Attempt, ContainerRef
from vllm_ray_operator.plan.world import TERMINAL, AttemptView, Cluster, Job, Pod

How = Literal["JobEnded", "NeverStarted", "PodsGone"]

# Not closed after this long: the slot's pods are recycled.
DEADLINE_SECONDS = 60.0
# A submission whose reply was lost can still arrive as long as the client that sent it may be waiting for the reply.
LATE_SUBMISSION_SECONDS = 60.0


def judge(attempt: Attempt, view: AttemptView, cluster: Cluster | None, now: datetime) -> How | None:
    """Return how the attempt is proven gone, or None while it is not.

    Every engine process lives in a container of the slot, so an attempt whose containers have all ended is gone
    whatever Ray says. Otherwise Ray itself has to say, completely, that job, actors and placement group have ended.
    """
    if not survivors(attempt, cluster):
        return "PodsGone"
    if session_lost(attempt, cluster):
        return None  # a new GCS knows nothing of the old processes
    if isinstance(view.job, Job):
        ended = view.job.status in TERMINAL and view.leftovers is not None and view.leftovers.none
        return "JobEnded" if ended else None
    if view.job == "absent" and attempt.stop is not None:
        waited = (now - attempt.stop.time).total_seconds()
        return "NeverStarted" if waited >= LATE_SUBMISSION_SECONDS else None
    return None


def session_lost(attempt: Attempt, cluster: Cluster | None) -> bool:
    """Whether the Ray cluster that the attempt was made for is no more: no head, or another life of one."""
    head = cluster.head if cluster else None
    return head is None or not _same_life(attempt.session.head, head)


def survivors(attempt: Attempt, cluster: Cluster | None) -> list[Pod]:
    """Return the pods whose Ray container still is the one that may hold a part of the attempt."""
    pods = {pod.uid: pod for pod in cluster.pods} if cluster else {}
    return [pods[ref.uid] for ref in attempt.session.slot if ref.uid in pods and _same_life(ref, pods[ref.uid])]


def describe(view: AttemptView, alive: list[Pod]) -> str:
    """Say what keeps the fence open."""
    if view.leftovers is not None and view.leftovers.complete:
        left = [*view.leftovers.actors, *(f"placement group {g}" for g in view.leftovers.placement_groups)]
        if left:
            return f"still alive: {', '.join(left)}"
    if view.job is None:
        pods = ", ".join(sorted(pod.name for pod in alive))
        return f"Ray does not answer; waiting for it, or for the end of the pods {pods}"
    return "waiting for the engine job to end"


def _same_life(ref: ContainerRef, pod: Pod) -> bool:
    return ref.uid == pod.uid and ref.restarts == pod.restarts
