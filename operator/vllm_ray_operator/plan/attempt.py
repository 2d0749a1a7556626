"""One attempt: what is learned of it, and where parts of it may be."""

from __future__ import annotations

from vllm_ray_operator.api.status import Attempt, Endpoint, Rank, Session
from vllm_ray_operator.plan import fence, names
from vllm_ray_operator.plan.aim import Aim
from vllm_ray_operator.plan.world import TERMINAL, AttemptView, Job


def learn(aim: Aim, replica: int, attempt: Attempt, view: AttemptView) -> Attempt:
    """Take what was observed into the attempt's record."""
    changes: dict[str, object] = {}
    cluster = aim.world.cluster(attempt.ray_cluster)
    pods = cluster.pods_by_ip if cluster else {}
    if _may_have_spread(attempt) and (session := spread(aim, replica, attempt)) is not attempt.session:
        changes["session"] = session
    if isinstance(view.job, Job):
        new = [i for i in view.job.ray_job_ids if i not in attempt.ray_job_ids]
        if new:
            changes["ray_job_ids"] = [*attempt.ray_job_ids, *new]
        driver = pods.get(view.job.driver_ip or "") if attempt.endpoint is None else None
        if driver is not None and driver.ip and view.job.status not in TERMINAL:
            changes["endpoint"] = Endpoint(
                address=driver.ip, port=aim.engine_of(attempt).port + attempt.turn, pod=driver.name, node=driver.node
            )
        if view.job.status in TERMINAL and attempt.end_time is None:
            changes["end_time"] = aim.now
    if view.engine is not None:
        if view.engine.ranks:
            ranks = [
                Rank(
                    rank=rank,
                    instance_id=instance_id,
                    pods=sorted(pods[ip].name for ip in ips if ip in pods),
                    nodes=sorted({pods[ip].node or "" for ip in ips if ip in pods} - {""}),
                )
                for rank, instance_id, ips in view.engine.ranks
            ]
            if ranks != attempt.ranks:
                changes["ranks"] = ranks
        if view.engine.ready and attempt.ready_time is None:
            changes["ready_time"] = aim.now
    if (view.engine is not None or view.unasked) and attempt.silent_time is not None:
        changes["silent_time"] = None
    if view.engine is None and not view.unasked and attempt.silent_time is None and attempt.ready_time is not None:
        changes["silent_time"] = aim.now
    return attempt.model_copy(update=changes) if changes else attempt


def _may_have_spread(attempt: Attempt) -> bool:
    """Whether processes of the attempt may be in containers of its slot that were not there when it was looked at last.

    Also when its job has ended since or its session is lost: nobody may have looked for long. What is recycled is
    settled when that is decided: else the pods that come in their place would be deleted too.
    """
    recycled = attempt.stop is not None and attempt.stop.recycle
    return attempt.end_time is None and not recycled


def spread(aim: Aim, replica: int, attempt: Attempt) -> Session:
    """Return the attempt's session with the containers that are in its slot now: the same one if they are the same."""
    slot = fence.holders(attempt, aim.world, names.slot(replica))
    return attempt.session if slot == attempt.session.slot else attempt.session.model_copy(update={"slot": slot})


def runs(view: AttemptView) -> bool:
    """Whether Ray has a job of the attempt that has not ended."""
    return isinstance(view.job, Job) and view.job.status not in TERMINAL


def silence(view: AttemptView) -> str:
    """Say what is known of an attempt whose launcher does not answer."""
    if view.job is None:
        return "Ray does not answer"
    if view.job == "absent":
        return "submitting the engine job"
    return "the engine job waits in Ray" if view.job.status == "PENDING" else "the engine's launcher does not answer"
