"""One replica: from what is observed of its attempt to the next step.

Every change of mind is an intent in the status first. Actions come from the *stored* status only (``replica`` as it
came in), so a pass that decides something does not act on it; the next one, which has read it back, does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from vllm_ray_operator.api.status import (
    Attempt,
    Endpoint,
    Failure,
    Fence,
    Rank,
    ReplicaStatus,
    Session,
    Stop,
)
from vllm_ray_operator.plan import engine_job, fence, identity, names, restart
from vllm_ray_operator.plan.actions import Action, Delete, Emit, StopJob
from vllm_ray_operator.plan.raycluster import ResolvedCluster
from vllm_ray_operator.plan.revision import Chosen, ResolvedEngine
from vllm_ray_operator.plan.world import TERMINAL, AttemptView, Cluster, Job, World

POLL_SECONDS = 2.0
STARTING_POLL_SECONDS = 10.0
SLOW_FENCE_SECONDS = 5.0
SILENCE_SECONDS = 6.0


@dataclass(frozen=True)
class Aim:
    """What the deployment's replicas are to be, and the world they are in."""

    world: World
    now: datetime
    cluster: Chosen[ResolvedCluster]
    cluster_name: str
    engine: Chosen[ResolvedEngine]
    take_number: Callable[[], int]
    new_nonce: Callable[[], str]

    def engine_of(self, attempt: Attempt) -> ResolvedEngine:
        """Return the engine revision that an attempt was started from."""
        stored = next((r for r in self.world.revisions if r.name == attempt.engine_revision), None)
        return ResolvedEngine.model_validate(stored.resolved) if stored else self.engine.resolved

    def is_outdated(self, attempt: Attempt) -> bool:
        """Whether the user asks for something else by now. Writing the same in other words is no change."""
        same_engine = attempt.engine_revision == self.engine.name or any(
            r.name == attempt.engine_revision and ResolvedEngine.model_validate(r.resolved) == self.engine.resolved
            for r in self.world.revisions
        )
        return attempt.ray_cluster != self.cluster_name or not same_engine

    @property
    def is_new(self) -> bool:
        """Whether the spec asks for other revisions than the stored status was made from."""
        status = self.world.deployment.status
        return (status.cluster_revision, status.engine_revision) != (self.cluster.name, self.engine.name)


@dataclass(frozen=True)
class Step:
    """The outcome for one replica."""

    status: ReplicaStatus
    actions: tuple[Action, ...] = ()
    wake_after: float | None = None


@dataclass
class _Draft:
    """A step in the making."""

    status: ReplicaStatus
    actions: list[Action] = field(default_factory=list)
    wake_after: float | None = None

    def set(self, **changes: object) -> None:
        self.status = self.status.model_copy(update=changes)

    def wake(self, seconds: float) -> None:
        self.wake_after = seconds if self.wake_after is None else min(self.wake_after, seconds)

    def step(self) -> Step:
        return Step(self.status, tuple(self.actions), self.wake_after)


def plan_replica(aim: Aim, replica: ReplicaStatus, *, wanted: bool) -> Step:
    """Return the next step of a replica. ``wanted`` is false for one that is to go."""
    draft = _Draft(replica)
    if replica.attempt is None:
        _plan_start(aim, draft, wanted=wanted)
        return draft.step()
    view = aim.world.attempts.get(replica.attempt.instance_id) or AttemptView(job=None)
    draft.set(attempt=_learn(aim, replica, view))
    _decide(aim, draft, replica.attempt, view, wanted=wanted)
    if not _close(aim, draft, view):
        _act(aim, draft, replica.attempt, view)
        _show(aim, draft, view)
    return draft.step()


def _plan_start(aim: Aim, draft: _Draft, *, wanted: bool) -> None:
    """No attempt: begin one when everything it needs is there."""
    if not wanted:
        draft.set(phase="Stopped", message="", next_start_time=None)
        return
    if aim.is_new:
        draft.set(failures=0, next_start_time=None)  # a repaired spec is tried at once
    status = draft.status
    if status.next_start_time is not None and aim.now < status.next_start_time:
        draft.set(phase="Backoff", message=_backoff_message(status))
        draft.wake((status.next_start_time - aim.now).total_seconds())
        return
    cluster = aim.world.cluster(aim.cluster_name)
    obstacle = start_obstacle(cluster, status.index, aim.cluster.resolved.pods_per_slot)
    if obstacle or cluster is None or cluster.head is None:
        draft.set(phase="Pending", message=obstacle, next_start_time=None)
        return
    number, nonce = aim.take_number(), aim.new_nonce()
    deployment = aim.world.deployment
    instance_id = identity.instance_id(deployment.name, deployment.uid, number, nonce)
    attempt = Attempt(
        number=number,
        nonce=nonce,
        instance_id=instance_id,
        engine_revision=aim.engine.name,
        ray_cluster=cluster.name,
        session=Session(
            head=fence.reference(cluster.head),
            slot=[fence.reference(pod) for pod in cluster.slot(names.slot(status.index))],
        ),
        start_time=aim.now,
        ranks=[Rank(rank=0, instance_id=instance_id)],
    )
    first = status.last_fence is None
    draft.set(
        attempt=attempt,
        phase="Starting",
        message="submitting the engine job",
        next_start_time=None,
        restarts=status.restarts + (0 if first else 1),
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


def start_obstacle(cluster: Cluster | None, replica: int, pods: int) -> str:
    """Say what a replica lacks for a start; empty when nothing."""
    obstacle = head_obstacle(cluster)
    if cluster is None or obstacle:
        return obstacle
    slot = cluster.slot(names.slot(replica))
    ready = [p for p in slot if p.ready and not p.deleting]
    if len(ready) == len(slot) == pods:
        return ""
    reason = next((p.problem for p in slot if p.problem), "")
    return f"{len(ready)} of {pods} worker pods ready" + (f": {reason}" if reason else "")


def _learn(aim: Aim, replica: ReplicaStatus, view: AttemptView) -> Attempt | None:
    """Take what was observed into the attempt's record."""
    attempt = replica.attempt
    if attempt is None:
        return None
    changes: dict[str, object] = {}
    cluster = aim.world.cluster(attempt.ray_cluster)
    # An address may belong to the next pod already while the last one is still listed.
    pods = {p.ip: p for p in sorted(cluster.pods, key=lambda p: not p.deleting) if p.ip} if cluster else {}
    if _may_have_spread(attempt):
        changes["session"] = _spread(aim, replica.index, attempt)
    if isinstance(view.job, Job):
        ids = [*attempt.ray_job_ids, *(i for i in view.job.ray_job_ids if i not in attempt.ray_job_ids)]
        if ids != attempt.ray_job_ids:
            changes["ray_job_ids"] = ids
        driver = pods.get(view.job.driver_ip or "")
        if attempt.endpoint is None and driver is not None and driver.ip and view.job.status not in TERMINAL:
            changes["endpoint"] = Endpoint(
                address=driver.ip, port=aim.engine_of(attempt).port, pod=driver.name, node=driver.node
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
    if view.engine is not None and attempt.silent_time is not None:
        changes["silent_time"] = None
    if view.engine is None and attempt.silent_time is None and attempt.ready_time is not None:
        changes["silent_time"] = aim.now
    return attempt.model_copy(update=changes) if changes else attempt


def _may_have_spread(attempt: Attempt) -> bool:
    """Whether processes of the attempt may be in containers of its slot that were not there when it was looked at last.

    Also when its job has ended since or its session is lost: nobody may have looked for long. What is recycled is
    settled when that is decided: else the pods that come in their place would be deleted too.
    """
    recycled = attempt.stop is not None and attempt.stop.recycle
    return attempt.end_time is None and not recycled


def _spread(aim: Aim, replica: int, attempt: Attempt) -> Session:
    """Return the attempt's session with the containers that are in its slot now."""
    slot = fence.holders(attempt, aim.world, names.slot(replica))
    return attempt.session.model_copy(update={"slot": slot})


def _decide(aim: Aim, draft: _Draft, stored: Attempt, view: AttemptView, *, wanted: bool) -> None:
    """Write down that the attempt is to end, if there is a reason to."""
    attempt = draft.status.attempt
    if attempt is None or attempt.stop is not None:
        return
    stop = _why_stop(aim, stored, attempt, view, wanted=wanted)
    if stop is None:
        return
    draft.set(attempt=attempt.model_copy(update={"stop": stop}))
    if stop.failure:
        failure = Failure(reason=stop.reason, message=stop.message, time=aim.now, attempt=attempt.number)
        draft.set(last_failure=failure)
        text = f"replica {draft.status.index}, attempt {attempt.number}: {stop.message}"
        draft.actions.append(Emit("Warning", stop.reason, text))


def _why_stop(aim: Aim, stored: Attempt, attempt: Attempt, view: AttemptView, *, wanted: bool) -> Stop | None:
    """Say why the attempt has to end, if it has to. Faults come first: they tell more than a wish that they met."""
    reason, message, failure = "", "", True
    timeout = aim.engine_of(attempt).startup_timeout_seconds
    if isinstance(view.job, Job) and view.job.status in TERMINAL:
        result = view.job.result or {}
        reason = result.get("reason") or "EngineExited"
        message = result.get("message") or view.job.message or f"the engine job ended as {view.job.status}"
    elif fence.head_lost(attempt, aim.world):
        reason, message = "HeadLost", "the head pod of the Ray cluster was lost, and every engine with it"
    elif fence.session_lost(attempt, view, aim.world):
        reason, message = "JobLost", "Ray does not know the engine job any more"
    elif not fence.survivors(stored, aim.world):
        reason, message = "PodsLost", "all pods of the replica were lost"
    elif not wanted:
        reason, message, failure = "ScaledDown", "spec.replicas is smaller", False
    elif aim.is_outdated(attempt):
        reason, message, failure = "NewRevision", "the spec has changed", False
    elif attempt.ready_time is None and (aim.now - attempt.start_time).total_seconds() > timeout:
        last = view.engine.message if view.engine else _silence(view)
        reason, message = "StartupTimeout", f"not ready after {timeout} s (last seen: {last})"
    if not reason:
        return None
    lost = fence.session_lost(attempt, view, aim.world) and not _runs(view)
    return Stop(reason=reason, message=message, time=aim.now, failure=failure, recycle=lost)


def _runs(view: AttemptView) -> bool:
    """Whether Ray has a job of the attempt that has not ended."""
    return isinstance(view.job, Job) and view.job.status not in TERMINAL


def _silence(view: AttemptView) -> str:
    """Say what is known of an attempt whose launcher does not answer."""
    if view.job is None:
        return "Ray does not answer"
    if view.job == "absent":
        return "submitting the engine job"
    return "the engine job waits in Ray" if view.job.status == "PENDING" else "the engine's launcher does not answer"


def _act(aim: Aim, draft: _Draft, stored: Attempt, view: AttemptView) -> None:
    """Carry out what the stored status says."""
    attempt, replica = draft.status.attempt, draft.status.index
    if attempt is None:
        return
    if stored.stop is None:
        if view.job == "absent" and attempt.stop is None:
            engine = aim.engine_of(stored)
            draft.actions.append(engine_job.submission(aim.world.deployment, replica, stored, engine))
        return
    if _runs(view):
        draft.actions.append(StopJob(stored.ray_cluster, stored.instance_id))
    if stored.stop.recycle:
        _recycle(aim, draft, attempt, stored.stop, view)
        return
    lost = fence.session_lost(stored, view, aim.world) and not _runs(view)
    overdue = (aim.now - stored.stop.time).total_seconds() > fence.DEADLINE_SECONDS
    # A job that waits in Ray has no processes, and without a word from Ray new pods do not help: the fence needs it,
    # unless the whole RayCluster is to go.
    helps = (isinstance(view.job, Job) and view.job.status != "PENDING") or stored.ray_cluster != aim.cluster_name
    if lost or (overdue and helps):
        draft.set(attempt=attempt.model_copy(update={"stop": stored.stop.model_copy(update={"recycle": True})}))
        why = "its Ray cluster was lost" if lost else f"it is not gone after {fence.DEADLINE_SECONDS:.0f} s"
        what = fence.describe(stored, view, aim.world)
        text = f"replica {replica}, attempt {stored.number}: deleting its pods, {why} ({what})"
        draft.actions.append(Emit("Warning", "RecyclingPods", text))


def _recycle(aim: Aim, draft: _Draft, attempt: Attempt, stop: Stop, view: AttemptView) -> None:
    """Delete the pods that may hold a part of the attempt; if its job runs elsewhere, begin again with those too."""
    alive = fence.survivors(attempt, aim.world)
    session = _spread(aim, draft.status.index, attempt)
    elsewhere = not alive or (fence.head_lost(attempt, aim.world) and session != attempt.session)
    if _runs(view) and elsewhere and attempt.ray_cluster == aim.cluster_name:
        again = stop.model_copy(update={"recycle": False, "time": aim.now})
        draft.set(attempt=attempt.model_copy(update={"stop": again, "session": session}))
        return
    draft.actions.extend(
        Delete("Pod", pod.name, pod.uid, f"{attempt.instance_id} may be alive in it: {stop.message}")
        for pod in alive
        if not pod.deleting
    )


def _close(aim: Aim, draft: _Draft, view: AttemptView) -> bool:
    """End the attempt if it is proven gone. Returns whether it was."""
    attempt = draft.status.attempt
    if attempt is None or attempt.stop is None:
        return False
    how = fence.judge(attempt, view, aim.world, aim.now)
    if how is None:
        return False
    failures, next_start = 0, None
    if attempt.stop.failure and not aim.is_outdated(attempt):
        failures = restart.failures_after(draft.status.failures, attempt.ready_time, attempt.stop.time)
        next_start = aim.now + restart.backoff(failures, attempt.instance_id)
        draft.wake((next_start - aim.now).total_seconds())
    took = (aim.now - attempt.stop.time).total_seconds()
    if took > SLOW_FENCE_SECONDS:
        text = f"replica {draft.status.index}, attempt {attempt.number} was gone after {took:.0f} s ({how})"
        draft.actions.append(Emit("Normal", "Fenced", text))
    draft.set(
        attempt=None,
        phase="Backoff" if next_start else "Pending",
        message=_backoff_message(draft.status) if next_start else "",
        failures=failures,
        next_start_time=next_start,
        last_fence=Fence(attempt=attempt.number, time=aim.now, how=how),
    )
    return True


def _show(aim: Aim, draft: _Draft, view: AttemptView) -> None:
    """Set phase and message of a replica that has an attempt."""
    attempt = draft.status.attempt
    if attempt is None:
        return
    if attempt.stop is not None:
        ended = attempt.end_time is not None or fence.session_lost(attempt, view, aim.world)
        message = fence.describe(attempt, view, aim.world) if ended else attempt.stop.message
        draft.set(phase="Fencing" if ended else "Stopping", message=message)
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
    if engine is None and draft.status.phase == "Ready" and _is_patient(aim, attempt):
        draft.wake(POLL_SECONDS)
        return
    if attempt.ready_time is not None:
        reason = engine.reason or engine.message if engine else _silence(view)
        draft.set(phase="NotReady", message=reason)
        draft.wake(POLL_SECONDS)
        return
    draft.set(phase="Starting", message=engine.message if engine else _silence(view))
    draft.wake(POLL_SECONDS if engine is None else STARTING_POLL_SECONDS)


def _is_patient(aim: Aim, attempt: Attempt) -> bool:
    """Whether a silent launcher is not yet taken for a dead engine: an answer or two may be lost on the way."""
    cluster = aim.world.cluster(attempt.ray_cluster)
    if cluster is None or attempt.endpoint is None or attempt.silent_time is None:
        return False
    here = any(pod.name == attempt.endpoint.pod and pod.ready and not pod.deleting for pod in cluster.pods)
    return here and (aim.now - attempt.silent_time).total_seconds() < SILENCE_SECONDS


def _forgive(aim: Aim, draft: _Draft, ready_time: datetime) -> None:
    """Forget the failures of a replica that has stayed ready."""
    if not draft.status.failures:
        return
    left = restart.STABLE_SECONDS - (aim.now - ready_time).total_seconds()
    if left <= 0:
        draft.set(failures=0)
    else:
        draft.wake(left)


def _backoff_message(status: ReplicaStatus) -> str:
    failure = f": {status.last_failure.message}" if status.last_failure else ""
    return f"starts again after a failure{failure}"
