"""When a replica without an attempt starts, and what an attempt begins with."""

from __future__ import annotations

from vllm_ray_operator.api.status import Attempt, Rank, ReplicaStatus
from vllm_ray_operator.plan import adoption, fence, identity, names, pods
from vllm_ray_operator.plan.aim import Aim, Draft
from vllm_ray_operator.plan.world import Cluster, Pod


def plan_start(aim: Aim, draft: Draft, *, wanted: bool) -> None:
    """Begin an attempt when everything it needs is there."""
    if not wanted:
        rest(aim, draft)
        return
    if aim.is_new:
        draft.set(failures=0, next_start_time=None)  # a repaired spec is tried at once
    status = draft.status
    cluster = aim.world.cluster(aim.home(status).name)
    if cluster is not None:
        pods.let_go(aim, draft, cluster)
    if status.next_start_time is not None and aim.now < status.next_start_time:
        draft.set(phase="Backoff", message=backoff_message(status))
        draft.wake((status.next_start_time - aim.now).total_seconds())
        return
    obstacle = (
        start_obstacle(aim, status) or adoption.obstacle(aim, cluster) or pods.obstacle(aim, cluster, status.index)
    )
    if obstacle or cluster is None or cluster.head is None:
        draft.set(phase="Pending", message=obstacle, next_start_time=None)
        return
    revision = aim.next_revision(status)
    first = status.last_fence is None
    draft.set(
        attempt=begin(aim, status.index, cluster, cluster.head, revision),
        revision=revision,
        standby_failure=None,
        phase="Starting",
        message="submitting the engine job",
        next_start_time=None,
        restarts=status.restarts + (0 if first else 1),
    )


def rest(aim: Aim, draft: Draft) -> None:
    """Leave a replica without attempts as it is."""
    draft.set(phase="Stopped", message="", failures=0, next_start_time=None)
    if not aim.held:
        draft.set(revision=None, standby_failure=None)  # when it starts again, it is no part of a roll


def begin(
    aim: Aim, replica: int, cluster: Cluster, head: Pod, revision: str, *, turn: int = 0, standby: bool = False
) -> Attempt:
    """Return a new attempt, to be written down before anything is done for it."""
    number, nonce = aim.take_number(), aim.new_nonce()
    deployment = aim.world.deployment
    instance_id = identity.instance_id(deployment.name, deployment.uid, number, nonce)
    return Attempt(
        number=number,
        nonce=nonce,
        instance_id=instance_id,
        engine_revision=revision,
        ray_cluster=cluster.name,
        turn=turn,
        standby=standby,
        session=fence.session(head, cluster.slot(names.slot(replica))),
        start_time=aim.now,
        ranks=[Rank(rank=0, instance_id=instance_id)],
    )


def head_obstacle(cluster: Cluster | None) -> str:
    """Say what the RayCluster and its head lack; empty when nothing."""
    if cluster is None:
        return "waiting for the RayCluster to be created"
    if cluster.deleting:
        return f"waiting for RayCluster {cluster.name} to be deleted"
    if cluster.head is None or not cluster.head_ready:
        reason = cluster.head.problem if cluster.head else cluster.problem
        return "waiting for the head pod" + (f": {reason}" if reason else "")
    return cluster.ray_error


def start_obstacle(aim: Aim, replica: ReplicaStatus) -> str:
    """Say what a replica lacks for a start where it is carried; empty when nothing."""
    home = aim.home(replica)
    cluster, wanted = aim.world.cluster(home.name), home.revision.resolved.pods_per_slot
    obstacle = head_obstacle(cluster)
    if cluster is None or obstacle:
        return obstacle
    slot = cluster.slot(names.slot(replica.index))
    ready = [p for p in slot if p.ready and not p.deleting]
    if len(ready) == len(slot) == wanted:
        return ""
    reason = next((p.problem for p in slot if p.problem), "")
    return f"{len(ready)} of {wanted} worker pods ready" + (f": {reason}" if reason else "")


def backoff_message(status: ReplicaStatus) -> str:
    """Say why a replica waits before its next start."""
    failure = f": {status.last_failure.message}" if status.last_failure else ""
    return f"starts again after a failure{failure}"
