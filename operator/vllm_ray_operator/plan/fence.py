"""The fence: the proof that an attempt is gone (invariant I2). It is observed, never assumed."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Literal

from vllm_ray_operator.api.status import Attempt, ContainerRef, Session
from vllm_ray_operator.plan.world import TERMINAL, AttemptView, Cluster, Job, Pod, World

How = Literal["JobEnded", "NeverStarted", "PodsGone"]

# Not closed after this long: the slot's pods are recycled.
DEADLINE_SECONDS = 60.0
# A submission whose reply was lost can still arrive as long as the client that sent it may be waiting for the reply.
LATE_SUBMISSION_SECONDS = 60.0


def judge(attempt: Attempt, view: AttemptView, world: World, now: datetime) -> How | None:
    """Return how the attempt is proven gone, or None while it is not.

    A job that waits in Ray starts on whatever pods come next, so pods alone prove nothing while the Ray that knows it
    lives. Any Ray may say that something is there; that there is nothing, only the Ray the attempt was made for can
    say, and only completely.
    """
    if _is_alive(attempt, view, now) or _may_arrive(attempt, view, world, now):
        return None
    lost = session_lost(attempt, view, world)
    if (lost or isinstance(view.job, Job)) and not survivors(attempt, world):
        return "PodsGone"
    return None if lost else _word_of_ray(view)


def _is_alive(attempt: Attempt, view: AttemptView, now: datetime) -> bool:
    """Whether Ray says that something of the attempt is there.

    Of actors and placement groups it may be wrong for ever; after the end of the job it gets time to notice.
    """
    if isinstance(view.job, Job) and view.job.status not in TERMINAL:
        return True
    noticing = attempt.end_time is None or (now - attempt.end_time).total_seconds() < DEADLINE_SECONDS
    return noticing and view.leftovers is not None and view.leftovers.some


def _may_arrive(attempt: Attempt, view: AttemptView, world: World, now: datetime) -> bool:
    """Whether a submission of which nothing was seen may be on its way or there already, even at a new head."""
    if isinstance(view.job, Job) or was_seen(attempt):
        return False
    if attempt.stop is None or (now - attempt.stop.time).total_seconds() < LATE_SUBMISSION_SECONDS:
        return True
    return view.job is None and world.cluster(attempt.ray_cluster) is not None


def _word_of_ray(view: AttemptView) -> How | None:
    """Return what the Ray that the attempt was made for proves."""
    if isinstance(view.job, Job):
        return "JobEnded" if view.leftovers is not None and view.leftovers.none else None
    return "NeverStarted" if view.job == "absent" else None


def session_lost(attempt: Attempt, view: AttemptView, world: World) -> bool:
    """Whether the Ray that the attempt was made for is no more: no head, another life of it, or it lost its memory."""
    return head_lost(attempt, world) or memory_lost(attempt, view, world)


def memory_lost(attempt: Attempt, view: AttemptView, world: World) -> bool:
    """Whether Ray does not know a job that it once was given."""
    # Of a job that was never seen, the head that was there must say it: another may have lost what the first one took.
    return view.job == "absent" and (was_seen(attempt) or _head_changed(attempt, world.cluster(attempt.ray_cluster)))


def head_lost(attempt: Attempt, world: World) -> bool:
    """Whether the head that the attempt was made for is gone or lives another life, and its Ray is lost with it."""
    cluster = world.cluster(attempt.ray_cluster)
    kept = cluster is not None and cluster.outlives_head and not cluster.deleting
    return not kept and _head_changed(attempt, cluster)


def _head_changed(attempt: Attempt, cluster: Cluster | None) -> bool:
    head = cluster.head if cluster else None
    return head is None or not _same_life(attempt.session.head, head)


def was_seen(attempt: Attempt) -> bool:
    """Whether Ray once knew the attempt's job: then it never is submitted again, whatever Ray says."""
    return bool(attempt.ray_job_ids) or attempt.endpoint is not None or attempt.end_time is not None


def survivors(attempt: Attempt, world: World) -> list[Pod]:
    """Return the pods whose Ray container still is the one that may hold a part of the attempt."""
    return [world.pods[ref.uid] for ref in attempt.session.slot if _lives(ref, world)]


def deleted(attempt: Attempt, world: World) -> list[Pod]:
    """Return the pods that hold a part of an attempt and are being deleted, by an eviction for instance."""
    return [pod for pod in survivors(attempt, world) if pod.deleting] if world.some_go else []


def cordoned(attempt: Attempt, world: World) -> list[Pod]:
    """Return the pods that hold a part of an attempt and whose nodes are to be emptied."""
    return [pod for pod in survivors(attempt, world) if pod.cordoned] if world.some_go else []


def holders(attempt: Attempt, world: World, group: str) -> list[ContainerRef]:
    """Return the containers that hold a part of the attempt or, as long as its job runs, may come to hold one."""
    kept = [ref for ref in attempt.session.slot if _lives(ref, world)]
    known = {ref.uid for ref in kept}
    return kept + [reference(pod) for pod in world.slot(attempt.ray_cluster, group) if pod.uid not in known]


def describe(attempt: Attempt, view: AttemptView, world: World) -> str:
    """Say what keeps the fence open."""
    if view.leftovers is not None and view.leftovers.some:
        left = [*view.leftovers.actors, *(f"placement group {g}" for g in view.leftovers.placement_groups)]
        return f"still alive: {', '.join(left)}"
    alive = sorted(pod.name for pod in survivors(attempt, world))
    if alive and (session_lost(attempt, view, world) or (attempt.stop is not None and attempt.stop.recycle)):
        return f"waiting for the end of the pods {', '.join(alive)}"
    if view.job is None and world.cluster(attempt.ray_cluster) is not None:
        return "waiting for Ray, which does not answer"
    if not isinstance(view.job, Job):
        return "waiting until a late submission is ruled out"
    if view.job.status in TERMINAL:
        return "waiting for a complete answer of Ray about actors and placement groups"
    return "waiting for the engine job to end"


def session(head: Pod, slot: Iterable[Pod]) -> Session:
    """Return the life of Ray that an attempt is made for, by its head and the pods of its slot."""
    return Session(head=reference(head), slot=[reference(pod) for pod in slot])


def reference(pod: Pod) -> ContainerRef:
    """Return what names this life of a pod's Ray container."""
    return ContainerRef(pod=pod.name, uid=pod.uid, restarts=pod.restarts)


def _lives(ref: ContainerRef, world: World) -> bool:
    pod = world.pods.get(ref.uid)
    return pod is not None and _same_life(ref, pod)


def _same_life(ref: ContainerRef, pod: Pod) -> bool:
    # A count that shrinks is no proof of an end: the kubelet may not have reported the container yet.
    return ref.uid == pod.uid and pod.restarts <= ref.restarts
