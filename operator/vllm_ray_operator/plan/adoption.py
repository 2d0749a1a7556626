"""Attempts that only Ray knows are taken into the status, to be stopped and fenced before their slot is used (I2)."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from vllm_ray_operator.api.status import Attempt, Rank, Stop
from vllm_ray_operator.plan import fence, names
from vllm_ray_operator.plan.actions import Emit
from vllm_ray_operator.plan.aim import Aim, Draft
from vllm_ray_operator.plan.submissions import NONCE, REVISION, TURN, Found
from vllm_ray_operator.plan.world import Cluster

_WHY = "but the status does not know it: it is stopped before its slot is used"


def obstacle(aim: Aim, cluster: Cluster | None) -> str:
    """Say why no attempt may begin on a RayCluster yet; empty when its Ray has told all, and the status has it."""
    if cluster is None or cluster.submissions is None:
        return "waiting for Ray's list of submissions"
    if aim.census.unknown:
        return f"waiting for the end of {aim.census.unknown[0].submission.id}, which Ray knows and the status does not"
    return ""


def adopt(aim: Aim, drafts: Iterable[Draft]) -> int:
    """Write down the attempts that only Ray knows, to be stopped: where their replica has room for them.

    Returns up to which number all are known now.
    """
    by_index = {draft.status.index: draft for draft in drafts}
    left = [one.number for one in aim.census.unknown if not _take_in(aim, by_index[one.replica], one)]
    return min(left) - 1 if left else aim.census.highest


def _take_in(aim: Aim, draft: Draft, found: Found) -> bool:
    if draft.status.attempt is not None and draft.status.standby is not None:
        return False
    attempt = _attempt(aim, found)
    if draft.status.attempt is not None:
        draft.set(standby=attempt)
    else:
        draining = attempt.stop is not None and attempt.stop.drain_deadline is not None
        draft.set(attempt=attempt, phase="Draining" if draining else "Stopping", message=f"it runs, {_WHY}")
    if not found.ended:
        text = f"replica {found.replica}: {attempt.instance_id} runs on RayCluster {found.cluster.name}, {_WHY}"
        draft.actions.append(Emit("Warning", "UnknownAttempt", text))
    return True


def _attempt(aim: Aim, found: Found) -> Attempt:
    """Return the record of an attempt as far as it can be made again, with its stop."""
    data, cluster = found.submission.metadata, found.cluster
    timeout = timedelta(seconds=aim.world.deployment.spec.engine.drain_timeout_seconds)
    drain = aim.now + timeout if timeout and not found.ended else None
    return Attempt(
        number=found.number,
        nonce=data[NONCE],
        instance_id=found.submission.id,
        engine_revision=data[REVISION],
        ray_cluster=cluster.name,
        turn=int(data[TURN]),
        session=fence.session(found.head, cluster.slot(names.slot(found.replica))),
        start_time=aim.now,
        ranks=[Rank(rank=0, instance_id=found.submission.id)],
        stop=Stop(
            reason="UnknownAttempt", message=f"it runs, {_WHY}", time=aim.now, failure=False, drain_deadline=drain
        ),
    )
