"""Conditions: what a person (or kstatus) reads first.

Messages carry no times, so that an unchanged world writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from vllm_ray_operator.api.status import Condition, ConditionStatus, ConditionType, ReplicaStatus, VLLMDeploymentStatus
from vllm_ray_operator.plan import restart
from vllm_ray_operator.plan.actions import Emit
from vllm_ray_operator.plan.world import Cluster, Problem

ORDER: tuple[ConditionType, ...] = ("Ready", "Progressing", "ClusterReady", "Degraded")


@dataclass(frozen=True)
class Verdict:
    """A condition without its bookkeeping."""

    status: ConditionStatus
    reason: str
    message: str


def cluster_verdict(cluster: Cluster | None, obstacles: Sequence[str], problems: Sequence[Problem]) -> Verdict:
    """Judge the RayCluster: its head, the pods of every wanted slot, and whether Ray answers."""
    if problems:
        return Verdict("False", problems[0].reason, problems[0].message)
    if cluster is None:
        return Verdict("False", "CreatingCluster", "the RayCluster is being created")
    waiting = next((o for o in obstacles if o), "")
    if waiting:
        return _what_is_waited_for(cluster, waiting)
    return Verdict("True", "ClusterReady", "head and workers are ready")


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


def verdicts(
    replicas: Sequence[ReplicaStatus], count: int, cluster: Verdict, problems: Sequence[Problem]
) -> dict[ConditionType, Verdict]:
    """Judge the deployment. ``count`` is how many replicas are asked for, ``replicas`` those that exist."""
    wanted = [r for r in replicas if r.index < count]
    leaving = len(replicas) - len(wanted)
    ready = sum(r.phase == "Ready" for r in wanted)
    unready = [r for r in wanted if r.phase != "Ready"]
    if problems:
        main = Verdict("False", problems[0].reason, problems[0].message)
    elif count == 0:
        main = Verdict("True", "ScaledToZero", "no replica is asked for")
    elif ready == count:
        main = Verdict("True", "AllReplicasReady", f"{count} of {count} replicas ready")
    else:
        reason, detail = _why_not_ready(unready, cluster)
        main = Verdict("False", reason, f"{ready} of {count} replicas ready: {detail}")
    result: dict[ConditionType, Verdict] = {"Ready": main, "ClusterReady": cluster}
    result["Degraded"] = _degraded(wanted, main, cluster, problems)
    if main.status == "False":
        result["Progressing"] = Verdict("True", main.reason, main.message)
    elif leaving:
        result["Progressing"] = Verdict("True", "ScalingDown", f"{leaving} replicas are being stopped")
    else:
        result["Progressing"] = Verdict("False", "Complete", "all that the spec asks for is there")
    return result


def _degraded(wanted: Sequence[ReplicaStatus], main: Verdict, cluster: Verdict, problems: Sequence[Problem]) -> Verdict:
    """Say whether something has failed and is not repaired yet: the deployment first, then the worst replica."""
    if problems or (cluster.status == "False" and cluster.reason not in _HARMLESS):
        return Verdict("True", main.reason, main.message)
    # A replica in a crash loop stays one while it is ready for now.
    loop = restart.CRASH_LOOP_FAILURES
    failed = [r for r in wanted if _has_failed(r) and (r.phase != "Ready" or r.failures >= loop)]
    worst = max(failed, key=lambda r: r.failures, default=None)
    if worst is not None and worst.last_failure is not None:
        failure = worst.last_failure
        if worst.failures >= loop:
            return Verdict("True", "CrashLoop", f"replica {worst.index} failed again and again: {failure.message}")
        return Verdict("True", failure.reason, f"replica {worst.index}: {failure.message}")
    if any(r.phase == "NotReady" for r in wanted):
        return Verdict("True", main.reason, main.message)
    return Verdict("False", "AsExpected", "nothing has failed")


_HARMLESS = ("CreatingCluster", "WaitingForPods")


def _has_failed(replica: ReplicaStatus) -> bool:
    """Whether a failure is not made good yet; it is counted only when its attempt is gone."""
    stop = replica.attempt.stop if replica.attempt is not None else None
    return replica.failures > 0 or (stop is not None and stop.failure)


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
    """Return one event for every cluster fault that is new. Faults of replicas have events of their own."""
    old = before.condition("ClusterReady")
    new = next(c for c in after if c.type == "ClusterReady")
    fault = new.status == "False" and (bool(problems) or new.reason not in _HARMLESS)
    if fault and (old is None or old.reason != new.reason):
        return [Emit("Warning", new.reason, new.message)]
    return []
