"""Conditions: what a person (or kstatus) reads first.

Messages carry no times, so that an unchanged world writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

from vllm_ray_operator.api.status import (
    Condition,
    ConditionStatus,
    ConditionType,
    ReplicaStatus,
    RolloutStatus,
    VLLMDeploymentStatus,
)
from vllm_ray_operator.plan import standby
from vllm_ray_operator.plan.actions import Emit
from vllm_ray_operator.plan.roster import Roster
from vllm_ray_operator.plan.world import Cluster, Problem

ORDER: tuple[ConditionType, ...] = ("Ready", "Progressing", "ClusterReady", "Degraded")


@dataclass(frozen=True)
class Verdict:
    """A condition without its bookkeeping."""

    status: ConditionStatus
    reason: str
    message: str


@dataclass(frozen=True)
class Place:
    """The RayCluster that carries a replica, and what the replica lacks there for a start ("" when nothing)."""

    name: str
    cluster: Cluster | None
    obstacle: str


def cluster_verdict(places: Sequence[Place], problems: Sequence[Problem], *, suspended: bool) -> Verdict:
    """Judge the RayClusters: heads, the pods of every wanted slot, and whether Ray answers."""
    if problems:
        return Verdict("False", problems[0].reason, problems[0].message)
    if suspended and not places:
        return Verdict("False", "Suspended", "there is no RayCluster while spec.suspend is true")
    several = len({place.name for place in places}) > 1
    found = [_judge_place(place, several) for place in places if place.obstacle]
    # A fault tells more than what only takes its time.
    found.sort(key=lambda verdict: verdict.reason in _HARMLESS)
    return found[0] if found else Verdict("True", "ClusterReady", "head and workers are ready")


def _judge_place(place: Place, several: bool) -> Verdict:
    prefix = f"RayCluster {place.name}: " if several else ""
    if place.cluster is None:
        return Verdict("False", "CreatingCluster", prefix + "the RayCluster is being created")
    verdict = _what_is_waited_for(place.cluster, place.obstacle)
    return replace(verdict, message=prefix + verdict.message)


def _what_is_waited_for(cluster: Cluster, waiting: str) -> Verdict:
    """Name what keeps the pods or Ray from being ready."""
    if waiting == cluster.ray_error:
        return Verdict("False", "RayUnreachable", waiting)
    # The same pod every time, so that the message stays the same when several have the same trouble.
    troubled = sorted((p for p in cluster.pods if p.problem), key=lambda p: (not p.is_head, p.name))
    if troubled:
        return Verdict("False", troubled[0].problem_reason or "WaitingForPods", troubled[0].problem)
    if cluster.problem:
        return Verdict("False", "PodsRefused", cluster.problem)
    return Verdict("False", "WaitingForPods", waiting)


@dataclass(frozen=True)
class Situation:
    """What the replicas are, and the roll they are in.

    ``replicas`` are those that exist, ``roster`` tells which are asked for. ``waits``: the spec has changes that wait
    for the end of a pause. ``crash_loop_after``: failures in a row that are called a crash loop.
    """

    replicas: Sequence[ReplicaStatus]
    roster: Roster
    updated: int
    rollout: RolloutStatus | None
    waits: bool
    crash_loop_after: int

    @cached_property
    def wanted(self) -> list[ReplicaStatus]:
        """The replicas that are asked for."""
        return [r for r in self.replicas if r.index in self.roster.asked]

    @cached_property
    def running(self) -> list[ReplicaStatus]:
        """Those and what a roll has beyond them."""
        return [r for r in self.replicas if r.index in self.roster.running]

    @property
    def count(self) -> int:
        """How many are asked for."""
        return len(self.roster.asked)


def verdicts(situation: Situation, cluster: Verdict, problems: Sequence[Problem]) -> dict[ConditionType, Verdict]:
    """Judge the deployment."""
    if situation.roster.suspended and not problems:
        return _suspended(situation, cluster)
    main = _main(situation, cluster, problems)
    return {
        "Ready": main,
        "ClusterReady": cluster,
        "Degraded": _degraded(situation, main, cluster, problems),
        "Progressing": _progressing(situation, main, problems),
    }


def _suspended(situation: Situation, cluster: Verdict) -> dict[ConditionType, Verdict]:
    """Judge a deployment that is not to run: it is not ready, as it was asked to be, and that is no fault."""
    left = sum(bool(r.attempts) for r in situation.replicas)
    how_far = f"{left} replicas are being stopped" if left else f"none of {situation.count} replicas runs"
    held = situation.waits or (situation.rollout is not None and situation.rollout.paused)
    pause = "; spec.rollout.paused holds changes of the spec back, also when they run again" if held else ""
    main = Verdict("False", "Suspended", f"spec.suspend is true: {how_far}{pause}")
    progressing = main
    if left or cluster.reason != "Suspended":
        progressing = Verdict("True", "Suspending", f"{main.message}; the RayCluster is deleted when all are gone")
    return {
        "Ready": main,
        "ClusterReady": cluster,
        "Degraded": _degraded(replace(situation, rollout=None), main, cluster, ()),
        "Progressing": progressing,
    }


def _main(situation: Situation, cluster: Verdict, problems: Sequence[Problem]) -> Verdict:
    count, rollout = situation.count, situation.rollout
    ready = sum(r.phase == "Ready" for r in situation.wanted)
    unready = [r for r in situation.wanted if r.phase != "Ready"]
    if problems:
        return Verdict("False", problems[0].reason, problems[0].message)
    if count == 0:
        return Verdict("True", "ScaledToZero", "no replica is asked for")
    if ready == count and rollout is None:
        return Verdict("True", "AllReplicasReady", f"{count} of {count} replicas ready")
    figures = f"{ready} of {count} replicas ready"
    if rollout is not None:
        figures += f", {situation.updated} of {count} updated"
    if not unready and rollout is not None:
        refused = _refused(situation)
        if refused is not None:
            return Verdict("False", refused[0], f"{figures}: {refused[1]}")
        unready = [r for r in situation.running if r.phase != "Ready"]
        if not unready or not situation.roster.old:
            return Verdict("False", "RollingUpdate", figures)
    reason, detail = _why_not_ready(unready, cluster)
    if rollout is not None and cluster.status == "True" and not any(_has_failed(r) for r in unready):
        reason = "RollingUpdate"
    return Verdict("False", reason, f"{figures}: {detail}")


def _refused(situation: Situation) -> tuple[str, str] | None:
    """Return reason and words of a standby that failed while all replicas serve."""
    for replica in situation.wanted:
        failure = replica.standby_failure
        if failure is not None and situation.rollout is not None:
            words = f"the new engine of replica {replica.index} failed beside the old: {failure.message}"
            if standby.blames_spec(replica) or situation.rollout.stalled:
                words += "; if the cause was not in the spec and is gone, a new spec.restartedAt tries it again"
            return failure.reason, words
    return None


def _progressing(situation: Situation, main: Verdict, problems: Sequence[Problem]) -> Verdict:
    rollout, leaving = situation.rollout, len(situation.replicas) - len(situation.wanted)
    if not problems and rollout is not None and rollout.paused:
        return Verdict("Unknown", "RolloutPaused", f"{main.message}; the roll is paused by spec.rollout.paused")
    if not problems and rollout is not None and rollout.stalled:
        return Verdict("False", "ProgressDeadlineExceeded", f"{main.message}; no further replica is taken")
    if main.status == "False":
        return Verdict("True", main.reason, main.message)
    if situation.waits:
        return Verdict("Unknown", "RolloutPaused", "changes of the spec wait for the end of spec.rollout.paused")
    if leaving:
        return Verdict("True", "ScalingDown", f"{leaving} replicas are being stopped")
    return Verdict("False", "Complete", "all that the spec asks for is there")


def _degraded(situation: Situation, main: Verdict, cluster: Verdict, problems: Sequence[Problem]) -> Verdict:
    """Say whether something has failed and is not repaired yet: the deployment first, then the worst replica."""
    wanted, rollout = situation.running, situation.rollout
    if problems or (cluster.status == "False" and cluster.reason not in _HARMLESS):
        return Verdict("True", main.reason, main.message)
    # A replica in a crash loop stays one while it is ready for now.
    loop = situation.crash_loop_after
    failed = [r for r in wanted if _has_failed(r) and (not _got_ready(r) or r.failures >= loop)]
    worst = max(failed, key=lambda r: r.failures, default=None)
    if worst is not None and worst.last_failure is not None:
        failure = worst.last_failure
        if worst.failures >= loop:
            return Verdict("True", "CrashLoop", f"replica {worst.index} failed again and again: {failure.message}")
        return Verdict("True", failure.reason, f"replica {worst.index}: {failure.message}")
    if rollout is not None and rollout.stalled and _refused(situation) is None:
        return Verdict("True", "ProgressDeadlineExceeded", f"{main.message}; no further replica is taken")
    if _refused(situation) is not None or any(r.phase == "NotReady" for r in wanted):
        return Verdict("True", main.reason, main.message)
    return Verdict("False", "AsExpected", "nothing has failed")


_HARMLESS = ("CreatingCluster", "WaitingForPods", "Suspended")


def _has_failed(replica: ReplicaStatus) -> bool:
    """Whether a failure is not made good yet; it is counted only when its attempt is gone."""
    stop = replica.attempt.stop if replica.attempt is not None else None
    return replica.failures > 0 or (stop is not None and stop.failure)


def _got_ready(replica: ReplicaStatus) -> bool:
    """Whether the present attempt served, and has not failed: what it may lack now is not what ended the one before."""
    attempt = replica.attempt
    if attempt is not None and attempt.stop is not None:
        return attempt.ready_time is not None and not attempt.stop.failure
    return replica.phase in ("Ready", "NotReady")


def _why_not_ready(unready: Sequence[ReplicaStatus], cluster: Verdict) -> tuple[str, str]:
    failed = next((r for r in unready if r.phase == "Backoff" and r.last_failure), None)
    if failed and failed.last_failure:
        return failed.last_failure.reason, f"replica {failed.index}: {failed.last_failure.message}"
    if cluster.status == "False":
        return cluster.reason, cluster.message
    first = unready[0] if unready else None
    if first is None:
        return "Starting", "waiting for the first replica"
    return (
        "Starting" if first.phase in ("Pending", "Starting") else first.phase
    ), f"replica {first.index}: {first.message}"


def conditions(
    before: VLLMDeploymentStatus, judged: dict[ConditionType, Verdict], generation: int, now: datetime
) -> list[Condition]:
    """Return the conditions; the transition time moves only when the status does."""
    result = []
    for kind in ORDER:
        verdict, old = judged[kind], before.condition(kind)
        same = old is not None and old.status == verdict.status
        result.append(
            Condition(
                type=kind,
                status=verdict.status,
                reason=verdict.reason,
                message=verdict.message,
                observed_generation=generation,
                last_transition_time=old.last_transition_time if same and old else now,
            )
        )
    return result


def news(before: VLLMDeploymentStatus, after: Sequence[Condition], problems: Sequence[Problem]) -> list[Emit]:
    """Return one event for every cluster fault that is new, and for a roll that stalls.

    Faults of replicas have events of their own.
    """
    result = list[Emit]()
    stalled = "ProgressDeadlineExceeded"
    was, now = before.condition("Progressing"), next(c for c in after if c.type == "Progressing")
    if now.reason == stalled and (was is None or was.reason != stalled):
        result.append(Emit("Warning", stalled, now.message))
    old = before.condition("ClusterReady")
    new = next(c for c in after if c.type == "ClusterReady")
    fault = new.status == "False" and (bool(problems) or new.reason not in _HARMLESS)
    if fault and (old is None or old.reason != new.reason):
        result.append(Emit("Warning", new.reason, new.message))
    return result
