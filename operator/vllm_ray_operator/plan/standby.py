"""The standby of a replica: its next attempt, up beside the one that serves, without accelerators.

Ray gives it the accelerators when the other attempt has left them: its placement group waits until then. So the two
never hold them at once, and the replica is away only for what is left to load.
"""

from __future__ import annotations

from vllm_ray_operator.api.status import Attempt, Failure, Fence, ReplicaStatus
from vllm_ray_operator.plan import adoption, engine_job, fence, pods, starting, stopping
from vllm_ray_operator.plan import attempt as attempts
from vllm_ray_operator.plan.actions import Emit
from vllm_ray_operator.plan.aim import Aim, Draft

POLL_SECONDS = 5.0

# What a launcher says while it waits for nothing but accelerators.
PHASE = "Standby"

# Found out by a standby, these would end any start: no engine that serves is given up for them.
FAULTS_OF_THE_SPEC = frozenset(
    {"InvalidArguments", "OwnedArgument", "ModelNotFound", "ModelAccessDenied", "ModelInvalid", "UnsupportedVersion"}
)


def prepare(aim: Aim, draft: Draft) -> bool:
    """Begin a standby if everything it needs is there. Returns whether it was."""
    replica = draft.status
    cluster = aim.world.cluster(aim.home(replica).name)
    if starting.start_obstacle(aim, replica) or adoption.obstacle(aim, cluster):
        return False
    if pods.obstacle(aim, cluster, replica.index):
        return False
    if cluster is None or cluster.head is None or replica.attempt is None:
        return False
    if replica.standby is not None or replica.standby_failure is not None:
        return False
    turn = 1 - replica.attempt.turn
    attempt = starting.begin(aim, replica.index, cluster, cluster.head, aim.engine.name, turn=turn, standby=True)
    draft.set(standby=attempt)
    draft.wake(POLL_SECONDS)
    return True


def fits(aim: Aim, replica: ReplicaStatus) -> bool:
    """Whether the ports of a standby would be others than those of the engine that serves."""
    attempt = replica.attempt
    if attempt is None:
        return False
    return aim.engine.resolved.port + 1 - attempt.turn != aim.engine_of(attempt).port + attempt.turn


def is_ready(aim: Aim, replica: ReplicaStatus) -> bool:
    """Whether the standby waits for nothing but the accelerators."""
    standby = replica.standby
    if standby is None or standby.stop is not None or not aim.is_newest(standby.engine_revision):
        return False
    engine = aim.view(standby).engine
    return engine is not None and engine.phase == PHASE


def look_after(aim: Aim, draft: Draft, *, wanted: bool) -> None:
    """Make the next step of the standby that is stored."""
    stored, replica = draft.status.standby, draft.status.index
    if _may_try_again(aim, draft.status):
        draft.set(standby_failure=None)
    if stored is None:
        return
    view = aim.view(stored)
    learned = attempts.learn(aim, replica, stored, view)
    if learned.warm_time is None and view.engine is not None and view.engine.phase == PHASE:
        learned = learned.model_copy(update={"warm_time": aim.now})
    draft.set(standby=learned)
    _decide(aim, draft, stored, wanted=wanted)
    standby = draft.status.standby
    if standby is None:
        return
    if standby.stop is not None and (how := fence.judge(standby, view, aim.world, aim.now)) is not None:
        draft.set(standby=None, last_fence=Fence(attempt=standby.number, time=aim.now, how=how))
        return
    draft.wake(POLL_SECONDS)
    if stored.stop is not None:
        recyclable = _slot_is_free(draft.status)
        draft.set(standby=stopping.carry_out(aim, draft, standby, stored.stop, view, recyclable=recyclable))
    elif view.job == "absent" and standby.stop is None:
        draft.actions.append(engine_job.submission(aim.world.deployment, replica, stored, aim.engine_of(stored)))


def _may_try_again(aim: Aim, replica: ReplicaStatus) -> bool:
    """Whether what the last standby failed of may be gone: another spec, the end of a pause, a roll that goes on."""
    failure = replica.standby_failure
    if failure is None:
        return False
    goes_on = failure.reason == "ProgressDeadlineExceeded" and not aim.held
    return aim.is_new or aim.is_resumed or goes_on


def _decide(aim: Aim, draft: Draft, stored: Attempt, *, wanted: bool) -> None:
    """Write down that the standby is to end, if there is a reason to."""
    standby = draft.status.standby
    if standby is None or standby.stop is not None:
        return
    view = aim.view(standby)
    since = standby.start_time if standby.warm_time is None else None
    found = stopping.fault(aim, stored, standby, view, since)
    failed = found is not None
    if found is not None:
        reason, message = found
        draft.set(standby_failure=Failure(reason=reason, message=message, time=aim.now, attempt=standby.number))
        text = f"replica {draft.status.index}, standby {standby.number}: {reason}: {message}"
        draft.actions.append(Emit("Warning", "StandbyFailed", text))
    elif not wanted:
        found = aim.dismissal(draft.status)
    elif (attempt := draft.status.attempt) and attempt.stop and attempt.stop.reason == stopping.NODE_DRAINED:
        found = attempt.stop.reason, attempt.stop.message
    elif leaving := fence.deleted(standby, aim.world):
        found = stopping.POD_DELETED, pods.why_deleted(leaving)
    elif leaving := fence.cordoned(standby, aim.world):
        found = stopping.NODE_DRAINED, pods.why_cordoned(leaving)
    elif aim.is_outdated(draft.status.index, standby):
        found = "NewRevision", "the spec has changed"
    elif aim.held and (draft.status.attempt is None or draft.status.attempt.stop is None):
        hangs = not aim.world.deployment.spec.rollout.paused and not is_ready(aim, draft.status)
        if hangs and _began_late(aim, standby):
            return
        found = "RolloutHeld", "the roll is paused or past its deadline"
        if hangs:
            last = view.engine.message if view.engine else attempts.silence(view)
            message = f"not up when the roll passed its deadline (last seen: {last})"
            failure = Failure(reason="ProgressDeadlineExceeded", message=message, time=aim.now, attempt=standby.number)
            draft.set(standby_failure=failure)  # else all would look well again, and the roll begin anew
    if found is None:
        return
    stop = stopping.stop_of(aim, standby, view, *found, failure=failed)
    if not _slot_is_free(draft.status):
        stop = stop.model_copy(update={"recycle": False})
    draft.set(standby=standby.model_copy(update={"stop": stop}))


def _began_late(aim: Aim, standby: Attempt) -> bool:
    """Whether a standby has not had all the time of the roll: then it is not what the roll passed its deadline for."""
    roll = aim.world.deployment.status.rollout
    return roll is not None and standby.start_time > roll.progress_time


def _slot_is_free(replica: ReplicaStatus) -> bool:
    """Whether the slot's pods may be deleted for the standby's sake: nothing serves in them."""
    stop = replica.attempt.stop if replica.attempt is not None else None
    return replica.attempt is None or (stop is not None and not stopping.is_draining(stop))


def blames_spec(replica: ReplicaStatus) -> bool:
    """Whether the replica's last standby found that its revision cannot start anywhere."""
    return replica.standby_failure is not None and replica.standby_failure.reason in FAULTS_OF_THE_SPEC


def is_given_up(aim: Aim, replica: ReplicaStatus) -> bool:
    """Whether the roll goes on without a standby: it failed, for no fault of the spec, or its end takes too long."""
    standby = replica.standby
    if blames_spec(replica):
        return False
    if standby is None:
        return replica.standby_failure is not None
    return standby.stop is not None and (aim.now - standby.stop.time).total_seconds() > fence.DEADLINE_SECONDS


def take_over(aim: Aim, draft: Draft) -> None:
    """Make the standby, if there is one, the replica's attempt, now that there is no other."""
    standby = draft.status.standby
    if standby is None or standby.stop is not None:
        return
    draft.set(
        attempt=standby.model_copy(update={"takeover_time": aim.now}),
        standby=None,
        standby_failure=None,
        revision=standby.engine_revision,
        phase="Starting",
        message="the standby takes over",
        restarts=draft.status.restarts + 1,
        failures=0,
        next_start_time=None,
    )
    draft.wake(POLL_SECONDS)
