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
    ContainerRef,
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
from vllm_ray_operator.plan.world import TERMINAL, AttemptView, Cluster, Job, Pod, World

POLL_SECONDS = 2.0
STARTING_POLL_SECONDS = 10.0
SLOW_FENCE_SECONDS = 5.0


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
    cluster = aim.world.cluster(replica.attempt.ray_cluster)
    draft.set(attempt=_learn(aim, replica.attempt, view, cluster))
    _decide(aim, draft, view, cluster, wanted=wanted)
    if not _close(aim, draft, view, cluster):
        _act(aim, draft, replica.attempt, view, cluster)
        _show(aim, draft, view, cluster)
    return draft.step()


def _plan_start(aim: Aim, draft: _Draft, *, wanted: bool) -> None:
    """No attempt: begin one when everything it needs is there."""
    if not wanted:
        draft.set(phase="Stopped", message="", next_start_time=None)
        return
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
        session=Session(head=_ref(cluster.head), slot=[_ref(p) for p in cluster.slot(names.slot(status.index))]),
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


def start_obstacle(cluster: Cluster | None, replica: int, pods: int) -> str:
    """Say what a replica's slot lacks for a start; empty when nothing."""
    if cluster is None:
        return "waiting for the RayCluster to be created"
    if cluster.deleting:
        return f"waiting for RayCluster {cluster.name} to be deleted"
    if cluster.head is None or not cluster.head_ready:
        reason = cluster.head.problem if cluster.head else cluster.problem
        return "waiting for the head pod" + (f": {reason}" if reason else "")
    slot = cluster.slot(names.slot(replica))
    ready = [p for p in slot if p.ready and not p.deleting]
    if len(ready) != pods or len(slot) != pods:
        reason = next((p.problem for p in slot if p.problem), "")
        return f"{len(ready)} of {pods} worker pods ready" + (f": {reason}" if reason else "")
    if cluster.ray_error:
        return cluster.ray_error
    return ""


def _learn(aim: Aim, attempt: Attempt, view: AttemptView, cluster: Cluster | None) -> Attempt:
    """Take what was observed into the attempt's record."""
    changes: dict[str, object] = {}
    pods = {p.ip: p for p in cluster.pods if p.ip} if cluster else {}
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
    return attempt.model_copy(update=changes) if changes else attempt


def _decide(aim: Aim, draft: _Draft, view: AttemptView, cluster: Cluster | None, *, wanted: bool) -> None:
    """Write down that the attempt is to end, if there is a reason to."""
    attempt = draft.status.attempt
    if attempt is None or attempt.stop is not None:
        return
    stop = _why_stop(aim, attempt, view, cluster, wanted=wanted)
    if stop is None:
        return
    draft.set(attempt=attempt.model_copy(update={"stop": stop}))
    if stop.failure:
        failure = Failure(reason=stop.reason, message=stop.message, time=aim.now, attempt=attempt.number)
        draft.set(last_failure=failure)
        text = f"replica {draft.status.index}, attempt {attempt.number}: {stop.message}"
        draft.actions.append(Emit("Warning", stop.reason, text))


def _why_stop(aim: Aim, attempt: Attempt, view: AttemptView, cluster: Cluster | None, *, wanted: bool) -> Stop | None:
    """Say why the attempt has to end, if it has to. Faults come first: they tell more than a wish that they met."""
    reason, message, failure = "", "", True
    timeout = aim.engine_of(attempt).startup_timeout_seconds
    if isinstance(view.job, Job) and view.job.status in TERMINAL:
        result = view.job.result or {}
        reason = result.get("reason") or "EngineExited"
        message = result.get("message") or view.job.message or f"the engine job ended as {view.job.status}"
    elif fence.session_lost(attempt, cluster):
        reason, message = "HeadLost", "the head pod of the Ray cluster was lost, and every engine with it"
    elif not fence.survivors(attempt, cluster):
        reason, message = "PodsLost", "all pods of the replica were lost"
    elif not wanted:
        reason, message, failure = "ScaledDown", "spec.replicas is smaller", False
    elif attempt.ray_cluster != aim.cluster_name or attempt.engine_revision != aim.engine.name:
        reason, message, failure = "NewRevision", "the spec has changed", False
    elif attempt.ready_time is None and (aim.now - attempt.start_time).total_seconds() > timeout:
        last = view.engine.message if view.engine else _silence(view)
        reason, message = "StartupTimeout", f"not ready after {timeout} s (last seen: {last})"
    return Stop(reason=reason, message=message, time=aim.now, failure=failure) if reason else None


def _silence(view: AttemptView) -> str:
    """Say what is known of an attempt whose launcher does not answer."""
    if view.job is None:
        return "Ray does not answer"
    return "the job was not submitted" if view.job == "absent" else f"job {view.job.status}, launcher silent"


def _act(aim: Aim, draft: _Draft, stored: Attempt, view: AttemptView, cluster: Cluster | None) -> None:
    """Carry out what the stored status says."""
    attempt = draft.status.attempt
    if attempt is None:
        return
    lost = fence.session_lost(stored, cluster)
    if stored.stop is None:
        if view.job == "absent" and attempt.stop is None:
            engine = aim.engine_of(stored)
            draft.actions.append(engine_job.submission(aim.world.deployment, draft.status.index, stored, engine))
        return
    if lost or stored.stop.recycle:
        why = "its Ray cluster was lost" if lost else "its engine could not be stopped"
        draft.actions.extend(
            Delete("Pod", pod.name, pod.uid, why) for pod in fence.survivors(stored, cluster) if not pod.deleting
        )
    elif isinstance(view.job, Job) and view.job.status not in TERMINAL:
        draft.actions.append(StopJob(stored.ray_cluster, stored.instance_id))
    if not stored.stop.recycle and (aim.now - stored.stop.time).total_seconds() > fence.DEADLINE_SECONDS:
        draft.set(attempt=attempt.model_copy(update={"stop": stored.stop.model_copy(update={"recycle": True})}))
        what = fence.describe(view, fence.survivors(stored, cluster))
        who = f"replica {draft.status.index}, attempt {stored.number}"
        text = f"{who} is not gone after {fence.DEADLINE_SECONDS:.0f} s ({what}); deleting its pods"
        draft.actions.append(Emit("Warning", "RecyclingPods", text))


def _close(aim: Aim, draft: _Draft, view: AttemptView, cluster: Cluster | None) -> bool:
    """End the attempt if it is proven gone. Returns whether it was."""
    attempt = draft.status.attempt
    if attempt is None or attempt.stop is None:
        return False
    how = fence.judge(attempt, view, cluster, aim.now)
    if how is None:
        return False
    failures, next_start = 0, None
    if attempt.stop.failure:
        failures = restart.failures_after(draft.status.failures, attempt.ready_time, aim.now)
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


def _show(aim: Aim, draft: _Draft, view: AttemptView, cluster: Cluster | None) -> None:
    """Set phase and message of a replica that has an attempt."""
    attempt = draft.status.attempt
    if attempt is None:
        return
    if attempt.stop is not None:
        ended = attempt.end_time is not None or fence.session_lost(attempt, cluster)
        alive = fence.survivors(attempt, cluster)
        message = fence.describe(view, alive) if ended else attempt.stop.message
        draft.set(phase="Fencing" if ended else "Stopping", message=message)
        draft.wake(POLL_SECONDS)
        return
    engine = view.engine
    if engine is not None and engine.ready:
        if draft.status.phase != "Ready":
            draft.actions.append(Emit("Normal", "ReplicaReady", f"replica {draft.status.index} is ready"))
        draft.set(phase="Ready", message="")
        return
    if attempt.ready_time is not None:
        reason = engine.reason or engine.message if engine else _silence(view)
        draft.set(phase="NotReady", message=reason)
        draft.wake(POLL_SECONDS)
        return
    draft.set(phase="Starting", message=engine.message if engine else "submitting the engine job")
    draft.wake(POLL_SECONDS if engine is None else STARTING_POLL_SECONDS)


def _backoff_message(status: ReplicaStatus) -> str:
    failure = f": {status.last_failure.message}" if status.last_failure else ""
    return f"starts again after a failure{failure}"


def _ref(pod: Pod) -> ContainerRef:
    return ContainerRef(pod=pod.name, uid=pod.uid, restarts=pod.restarts)
