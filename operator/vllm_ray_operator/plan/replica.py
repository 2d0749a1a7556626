"""One replica: from what is observed of its attempt to the next step.

Every change of mind is an intent in the status first. Actions come from the *stored* status only (``replica`` as it
came in), so a pass that decides something does not act on it; the next one, which has read it back, does.
"""

from __future__ import annotations

from datetime import datetime

from vllm_ray_operator.api.status import Attempt, ReplicaStatus
from vllm_ray_operator.plan import adoption, clusters, engine_job, fence, restart, standby, starting, stopping
from vllm_ray_operator.plan import attempt as attempts
from vllm_ray_operator.plan.actions import Emit
from vllm_ray_operator.plan.aim import Aim, Draft
from vllm_ray_operator.plan.world import AttemptView

POLL_SECONDS = 2.0
STARTING_POLL_SECONDS = 10.0
SILENT_POLL_SECONDS = 0.5
SILENCE_SECONDS = 3.0  # after a look that got no answer: time for another, which may take as long itself


def plan_replica(aim: Aim, replica: ReplicaStatus, *, wanted: bool) -> Draft:
    """Return the next step of a replica. ``wanted`` is false for one that is to go."""
    draft, stored = Draft(replica), replica.attempt
    clusters.settle(aim, draft)
    standby.look_after(aim, draft, wanted=wanted)
    if stored is None and draft.status.standby is not None:
        draft.set(phase="Fencing", message=f"waiting for the end of standby {draft.status.standby.number}")
        return draft
    if stored is None:
        starting.plan_start(aim, draft, wanted=wanted)
        return draft
    view = aim.view(stored)
    draft.set(attempt=attempts.learn(aim, replica.index, stored, view))
    stopping.decide(aim, draft, stored, view, wanted=wanted)
    if stopping.close(aim, draft, view):
        standby.take_over(aim, draft)
        if not wanted and not draft.status.attempts:
            starting.rest(aim, draft)
    else:
        _act(aim, draft, stored, view)
        _show(aim, draft, view)
    return draft


def _act(aim: Aim, draft: Draft, stored: Attempt, view: AttemptView) -> None:
    """Carry out what the stored status says."""
    attempt = draft.status.attempt
    if attempt is None:
        return
    if stored.stop is not None:
        draft.set(attempt=stopping.carry_out(aim, draft, attempt, stored.stop, view))
    elif view.job == "absent" and attempt.stop is None and _may_be_submitted(aim, draft.status, stored):
        engine = aim.engine_of(stored)
        draft.actions.append(engine_job.submission(aim.world.deployment, draft.status.index, stored, engine))


def _may_be_submitted(aim: Aim, replica: ReplicaStatus, attempt: Attempt) -> bool:
    """Whether nothing else can be in the slot. A status from a backup may be older than what runs there.

    An attempt that is not submitted yet has no standby of its own.
    """
    return replica.standby is None and not adoption.obstacle(aim, aim.world.cluster(attempt.ray_cluster))


def _show(aim: Aim, draft: Draft, view: AttemptView) -> None:
    """Set phase and message of a replica that has an attempt."""
    attempt = draft.status.attempt
    if attempt is None:
        return
    if attempt.stop is not None:
        ended = attempt.end_time is not None or fence.session_lost(attempt, view, aim.world)
        message = fence.describe(attempt, view, aim.world) if ended else attempt.stop.message
        phase = "Fencing" if ended else "Draining" if stopping.is_draining(attempt.stop) else "Stopping"
        draft.set(phase=phase, message=message)
        draft.wake(POLL_SECONDS)
        return
    engine = view.engine
    if engine is not None and engine.ready and attempt.ready_time is not None and attempt.endpoint is not None:
        if draft.status.phase != "Ready":
            text = f"replica {draft.status.index}, attempt {attempt.number} is ready"
            draft.actions.append(Emit("Normal", "ReplicaReady", text))
        draft.set(phase="Ready", message="")
        _forgive(aim, draft, attempt.ready_time)
        return
    if engine is None and draft.status.phase == "Ready" and _is_patient(aim, attempt, view):
        draft.wake(POLL_SECONDS if view.unasked else SILENT_POLL_SECONDS)
        return
    if attempt.ready_time is not None:
        reason = engine.reason or engine.message if engine else attempts.silence(view)
        draft.set(phase="NotReady", message=reason)
        draft.wake(POLL_SECONDS)
        return
    draft.set(phase="Starting", message=engine.message if engine else attempts.silence(view))
    draft.wake(POLL_SECONDS if engine is None else STARTING_POLL_SECONDS)


def _is_patient(aim: Aim, attempt: Attempt, view: AttemptView) -> bool:
    """Whether a silent launcher is not yet taken for a dead engine: an answer or two may be lost on the way."""
    cluster = aim.world.cluster(attempt.ray_cluster)
    if cluster is None or attempt.endpoint is None:
        return False
    here = any(pod.name == attempt.endpoint.pod and pod.ready and not pod.deleting for pod in cluster.pods)
    since = attempt.silent_time
    brief = since is not None and (aim.now - since).total_seconds() < SILENCE_SECONDS
    return here and (view.unasked or brief)


def _forgive(aim: Aim, draft: Draft, ready_time: datetime) -> None:
    """Forget the failures of a replica that has stayed ready."""
    if not draft.status.failures:
        return
    left = restart.STABLE_SECONDS - (aim.now - ready_time).total_seconds()
    if left <= 0:
        draft.set(failures=0)
    else:
        draft.wake(left)
