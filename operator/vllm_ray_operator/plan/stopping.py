"""How an attempt ends: the reason, the drain, the stop, the recycling of its pods, the fence.

Each is an intent in the status first; what is done here follows from the stored one.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from vllm_ray_operator.api.status import Attempt, Failure, Fence, Stop
from vllm_ray_operator.plan import fence, lost_head, pods, restart
from vllm_ray_operator.plan.actions import Delete, DrainEngine, Emit, StopJob
from vllm_ray_operator.plan.aim import Aim, Draft
from vllm_ray_operator.plan.attempt import runs, silence, spread
from vllm_ray_operator.plan.starting import backoff_message
from vllm_ray_operator.plan.world import TERMINAL, AttemptView, Job, Pod

NODE_DRAINED = "NodeDrained"
POD_DELETED = "PodDeleted"

SLOW_FENCE_SECONDS = 5.0
# In Ray's message when the job's supervisor was lost with its Ray node, which is a pod (Ray 2.60, ActorDiedError).
NODE_DIED = "its node has died"
# How long it may take until no client is sent to an endpoint any more that has left the traffic: each kube-proxy learns
# of the EndpointSlice by a watch, and gathers changes for about a second before it rewrites its rules.
PROPAGATION_SECONDS = 5.0
# Of the time that a pod which is being deleted still has: kept for what comes after the drain.
STOP_SECONDS = 10.0
# What a pod that is recycled gets: nothing in it is worth waiting for, and its hook would wait for what hangs.
RECYCLE_SECONDS = 1
# Between two looks at a launcher whose drain is waited for. Its verdict wakes us; but it may not have been told yet.
DRAIN_POLL_SECONDS = 2.0


def decide(aim: Aim, draft: Draft, stored: Attempt, view: AttemptView, *, wanted: bool) -> None:
    """Write down that the attempt is to end, if there is a reason to. Rolls have theirs elsewhere."""
    attempt = draft.status.attempt
    if attempt is None or attempt.stop is not None:
        return
    # Faults come first: they tell more than a wish that they met.
    since = (attempt.takeover_time or attempt.start_time) if attempt.ready_time is None else None
    found = fault(aim, stored, attempt, view, since)
    if found is not None:
        stop = stop_of(aim, attempt, view, *found, failure=True)
        draft.set(
            attempt=attempt.model_copy(update={"stop": stop}),
            last_failure=Failure(reason=stop.reason, message=stop.message, time=aim.now, attempt=attempt.number),
        )
        text = f"replica {draft.status.index}, attempt {attempt.number}: {stop.message}"
        draft.actions.append(Emit("Warning", stop.reason, text))
    elif not wanted:
        retire(aim, draft, *aim.dismissal(draft.status))
    elif attempt.ray_cluster != aim.home(draft.status).name:
        retire(aim, draft, "NewRevision", "the spec has changed")
    elif leaving := fence.deleted(attempt, aim.world):
        why = pods.why_deleted(leaving)
        retire(aim, draft, POD_DELETED, why)
        draft.actions.append(Emit("Normal", "PodDeleted", f"replica {draft.status.index} leaves: {why}"))


def retire(aim: Aim, draft: Draft, reason: str, message: str) -> None:
    """Write down that the replica's attempt is to end by wish. One that serves finishes its requests first, as long as
    its pods live.
    """
    attempt = draft.status.attempt
    if attempt is None or attempt.stop is not None:
        return
    stop = stop_of(aim, attempt, aim.view(attempt), reason, message, failure=False)
    timeout = timedelta(seconds=aim.world.deployment.spec.engine.drain_timeout_seconds)
    deadline = _within_pods(aim, attempt, aim.now + timeout)
    if draft.status.phase == "Ready" and deadline > aim.now:
        stop = stop.model_copy(update={"drain_deadline": deadline})
    draft.set(
        attempt=attempt.model_copy(update={"stop": stop}),
        phase="Stopping" if stop.drain_deadline is None else "Draining",
        message=message,
    )


def fault(
    aim: Aim, stored: Attempt, attempt: Attempt, view: AttemptView, since: datetime | None
) -> tuple[str, str] | None:
    """Return reason and message of what is wrong with an attempt, if it cannot go on.

    ``since``: from when on the time for its start counts, if it does.
    """
    reason, message = "", ""
    timeout = aim.engine_of(attempt).startup_timeout_seconds
    if isinstance(view.job, Job) and view.job.status in TERMINAL:
        result = view.job.result or {}
        reason = result.get("reason") or "EngineExited"
        message = result.get("message") or view.job.message or f"the engine job ended as {view.job.status}"
        if not result and (lost := _lost_driver(aim, attempt, view.job)) is not None:
            reason, message = lost
    elif fence.head_lost(attempt, aim.world):
        reason, message = "HeadLost", "the head pod of the Ray cluster was lost, and every engine with it"
    elif fence.memory_lost(attempt, view, aim.world):
        reason, message = "JobLost", "Ray does not know the engine job any more"
    elif lost_node := lost_head.fault(aim, attempt, view):
        reason, message = "HeadLost", lost_node
    elif not fence.survivors(stored, aim.world):
        reason, message = "PodsLost", "all pods of the replica were lost"
    elif since is not None and (aim.now - since).total_seconds() > timeout:
        last = view.engine.message if view.engine else silence(view)
        reason, message = "StartupTimeout", f"not ready after {timeout} s (last seen: {last})"
    return (reason, message) if reason else None


def _lost_driver(aim: Aim, attempt: Attempt, job: Job) -> tuple[str, str] | None:
    """Return reason and message if the launcher, which said nothing, was lost with its pod or node."""
    cluster, endpoint = aim.world.cluster(attempt.ray_cluster), attempt.endpoint
    if cluster is None or endpoint is None:
        return None
    pod = next((pod for pod in cluster.pods if pod.name == endpoint.pod), None)
    reason, message = "NodeLost", ""
    if pod is not None and pod.lost_since is not None:
        message = f"node {pod.node} of pod {pod.name} does not answer, and Ray has given it up"
    elif NODE_DIED in job.message:
        where = f"pod {endpoint.pod} on node {endpoint.node}"
        if pod is None or pod.deleting:
            reason, message = "PodsLost", f"{where} is gone, and the engine's launcher with it"
        else:
            message = f"Ray lost its node in {where}"
    return (reason, message) if message else None


def stop_of(aim: Aim, attempt: Attempt, view: AttemptView, reason: str, message: str, *, failure: bool) -> Stop:
    """Return the stop of an attempt, to be written down. Its pods are recycled at once when its Ray is no more."""
    lost = _is_lost(aim, attempt, view)
    return Stop(reason=reason, message=message, time=aim.now, failure=failure, recycle=lost)


def _is_lost(aim: Aim, attempt: Attempt, view: AttemptView) -> bool:
    """Whether the Ray that the attempt was made in is no more, and no other runs its job."""
    return fence.session_lost(attempt, view, aim.world) and not runs(view)


def carry_out(
    aim: Aim, draft: Draft, attempt: Attempt, stored: Stop, view: AttemptView, *, recyclable: bool = True
) -> Attempt:
    """Carry out the stored stop of an attempt. Returns the attempt with what comes next written down.

    ``recyclable``: the pods of the slot may be deleted for its sake.
    """
    if is_draining(stored):
        return _drain(aim, draft, attempt, stored, view)
    if runs(view):
        draft.actions.append(StopJob(attempt.ray_cluster, attempt.instance_id))
    if stored.recycle:
        return _recycle(aim, draft, attempt, stored, view)
    lost = _is_lost(aim, attempt, view)
    overdue = (aim.now - begun(stored)).total_seconds() > fence.DEADLINE_SECONDS
    # A job that waits in Ray has no processes, and without a word from Ray new pods do not help: the fence needs it,
    # unless the whole RayCluster is to go.
    helps = (isinstance(view.job, Job) and view.job.status != "PENDING") or aim.is_given_up(attempt.ray_cluster)
    if not recyclable or not (lost or (overdue and helps)):
        return attempt
    why = "its Ray cluster was lost" if lost else f"it is not gone after {fence.DEADLINE_SECONDS:.0f} s"
    what = fence.describe(attempt, view, aim.world)
    text = f"replica {draft.status.index}, attempt {attempt.number}: deleting its pods, {why} ({what})"
    draft.actions.append(Emit("Warning", "RecyclingPods", text))
    return attempt.model_copy(update={"stop": stored.model_copy(update={"recycle": True})})


def is_draining(stop: Stop) -> bool:
    """Whether a stop still gives the engine time to finish its requests."""
    return stop.drain_deadline is not None and stop.drained_time is None


def begun(stop: Stop) -> datetime:
    """Return since when Ray has been asked to end the job."""
    return stop.drained_time or stop.time


def _drain(aim: Aim, draft: Draft, attempt: Attempt, stored: Stop, view: AttemptView) -> Attempt:
    """Wait until the engine's clients are gone: the launcher says so, time is up, or there is no engine any more."""
    gone = fence.head_lost(attempt, aim.world) or (view.job is not None and not runs(view))
    settled = (aim.now - stored.time).total_seconds() >= PROPAGATION_SECONDS
    drained = settled and view.engine is not None and view.engine.drained is True
    deadline = _within_pods(aim, attempt, stored.drain_deadline or aim.now)
    left = (deadline - aim.now).total_seconds()
    if gone or drained or left <= 0:
        return attempt.model_copy(update={"stop": stored.model_copy(update={"drained_time": aim.now})})
    if view.engine is not None and view.engine.drained is None:
        draft.actions.append(DrainEngine(attempt.instance_id))
    draft.wake(min(left, DRAIN_POLL_SECONDS))
    return attempt


def _within_pods(aim: Aim, attempt: Attempt, deadline: datetime) -> datetime:
    """Return the end of a drain: earlier if pods of the attempt are being deleted and are killed before."""
    ends = (pod.ends - timedelta(seconds=STOP_SECONDS) for pod in fence.deleted(attempt, aim.world) if pod.ends)
    return min([deadline, *ends])


def _recycle(aim: Aim, draft: Draft, attempt: Attempt, stored: Stop, view: AttemptView) -> Attempt:
    """Delete the pods that may hold a part of the attempt; if its job runs elsewhere, begin again with those too."""
    alive = fence.survivors(attempt, aim.world)
    session = spread(aim, draft.status.index, attempt)
    elsewhere = not alive or (fence.head_lost(attempt, aim.world) and session != attempt.session)
    if runs(view) and elsewhere and not aim.is_given_up(attempt.ray_cluster):
        anew = {"recycle": False, "time": aim.now, "drain_deadline": None, "drained_time": None}
        again = stored.model_copy(update=anew)
        return attempt.model_copy(update={"stop": again, "session": session})
    draft.actions.extend(
        Delete("Pod", pod.name, pod.uid, f"{attempt.instance_id} may be alive in it: {stored.message}", RECYCLE_SECONDS)
        for pod in alive
        if not pod.deleting or _may_live(aim, pod)
    )
    return attempt


def _may_live(aim: Aim, pod: Pod) -> bool:
    """Whether a pod that is being deleted, by an eviction for instance, was given time that nobody needs any more."""
    return pod.ends is not None and (pod.ends - aim.now).total_seconds() > RECYCLE_SECONDS


def close(aim: Aim, draft: Draft, view: AttemptView) -> bool:
    """End the attempt if it is proven gone. Returns whether it was."""
    attempt = draft.status.attempt
    if attempt is None or attempt.stop is None:
        return False
    how = fence.judge(attempt, view, aim.world, aim.now)
    if how is None:
        return False
    failures, next_start = 0, None
    if attempt.stop.failure and _starts_alike(aim, draft, attempt):
        policy = aim.world.deployment.spec.restart
        failures = restart.failures_after(draft.status.failures, attempt.ready_time, attempt.stop.time)
        next_start = aim.now + restart.backoff(failures, attempt.instance_id, policy)
        draft.wake((next_start - aim.now).total_seconds())
    took = (aim.now - begun(attempt.stop)).total_seconds()
    if took > SLOW_FENCE_SECONDS:
        text = f"replica {draft.status.index}, attempt {attempt.number} was gone after {took:.0f} s ({how})"
        draft.actions.append(Emit("Normal", "Fenced", text))
    draft.set(
        attempt=None,
        phase="Backoff" if next_start else "Pending",
        message=backoff_message(draft.status) if next_start else "",
        failures=failures,
        next_start_time=next_start,
        last_fence=Fence(attempt=attempt.number, time=aim.now, how=how),
    )
    return True


def _starts_alike(aim: Aim, draft: Draft, attempt: Attempt) -> bool:
    """Whether the next attempt is to run what this one ran: only then its failures tell something of the next."""
    same = aim.is_newest(attempt.engine_revision) or aim.next_revision(draft.status) == attempt.engine_revision
    return attempt.ray_cluster == aim.home(draft.status).name and same
