from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.unit.plan import build
from tests.unit.plan.build import NOW, later
from vllm_ray_operator.api.status import (
    ConditionType,
    Failure,
    Phase,
    ReplicaStatus,
    RolloutStatus,
    Stop,
    VLLMDeploymentStatus,
)
from vllm_ray_operator.plan import status
from vllm_ray_operator.plan.roster import Roster
from vllm_ray_operator.plan.status import Place, Situation, Verdict
from vllm_ray_operator.plan.world import Cluster, Problem

GOOD = Verdict("True", "ClusterReady", "head and workers are ready")
WAITING = Verdict("False", "WaitingForPods", "0 of 1 worker pods ready")
BROKEN = Verdict("False", "ErrImagePull", "image x cannot be pulled")
FAILURE = Failure(reason="OutOfMemory", message="out of memory", time=NOW, attempt=3)


def replica(
    phase: Phase, index: int = 0, failures: int = 0, message: str = "busy", stop: Stop | None = None
) -> ReplicaStatus:
    last = FAILURE if failures or (stop and stop.failure) else None
    cluster = build.cluster("c", [build.head(), build.pod("w0")])
    attempt = build.attempt_on(cluster, stop=stop, ready_time=NOW) if stop else None
    return ReplicaStatus(
        index=index, phase=phase, message=message, failures=failures, last_failure=last, attempt=attempt
    )


@dataclass(frozen=True)
class Case:
    replicas: list[ReplicaStatus]
    ready: str  # status and reason
    progressing: str
    degraded: str
    count: int = 1
    cluster: Verdict = GOOD
    problems: tuple[Problem, ...] = ()
    words: str = ""  # in the message of Ready
    rollout: RolloutStatus | None = None
    updated: int = 1
    waits: bool = False
    suspended: bool = False

    @property
    def roster(self) -> Roster:
        return Roster(frozenset(range(self.count)), frozenset(), self.suspended)


ROLL = RolloutStatus(cluster_revision="c", revision="chat-engine-2", updated_ready=0, progress_time=NOW)
PAUSED, STALLED = ROLL.model_copy(update={"paused": True}), ROLL.model_copy(update={"stalled": True})
WISH = build.stop("Suspended", failure=False)
NO_CLUSTER = Verdict("False", "Suspended", "there is no RayCluster while spec.suspend is true")
HALF = [replica("Stopping"), replica("Ready", index=1)]

CASES: dict[str, Case] = {
    "all ready, none updated": Case(
        [replica("Ready")],
        "False RollingUpdate",
        "True RollingUpdate",
        "False AsExpected",
        rollout=ROLL,
        updated=0,
        words="1 of 1 replicas ready, 0 of 1 updated",
    ),
    "one is restarted": Case(
        HALF,
        "False RollingUpdate",
        "True RollingUpdate",
        "False AsExpected",
        count=2,
        rollout=ROLL,
        words="1 of 2 replicas ready, 1 of 2 updated: replica 0: busy",
    ),
    "the new one fails": Case(
        [replica("Backoff", failures=1), replica("Ready", index=1)],
        "False OutOfMemory",
        "True OutOfMemory",
        "True OutOfMemory",
        count=2,
        rollout=ROLL,
        words="1 of 2 replicas ready, 1 of 2 updated",
    ),
    "no progress for too long": Case(
        HALF,
        "False RollingUpdate",
        "False ProgressDeadlineExceeded",
        "True ProgressDeadlineExceeded",
        count=2,
        rollout=STALLED,
    ),
    "paused in the middle": Case(
        HALF, "False RollingUpdate", "Unknown RolloutPaused", "False AsExpected", count=2, rollout=PAUSED
    ),
    "changes wait": Case(
        [replica("Ready")], "True AllReplicasReady", "Unknown RolloutPaused", "False AsExpected", waits=True
    ),
    "all ready": Case([replica("Ready")], "True AllReplicasReady", "False Complete", "False AsExpected"),
    "starting": Case(
        [replica("Starting")], "False Starting", "True Starting", "False AsExpected", words="replica 0: busy"
    ),
    "waiting for pods": Case(
        [replica("Pending")], "False WaitingForPods", "True WaitingForPods", "False AsExpected", cluster=WAITING
    ),
    "a pod that will not run": Case(
        [replica("Pending")],
        "False ErrImagePull",
        "True ErrImagePull",
        "True ErrImagePull",
        cluster=BROKEN,
        words="pulled",
    ),
    "no replica yet": Case([], "False Starting", "True Starting", "False AsExpected"),
    "one of two ready": Case(
        [replica("Ready"), replica("Starting", 1)],
        "False Starting",
        "True Starting",
        "False AsExpected",
        count=2,
        words="1 of 2 replicas ready: replica 1",
    ),
    "failed": Case(
        [replica("Backoff", failures=1)],
        "False OutOfMemory",
        "True OutOfMemory",
        "True OutOfMemory",
        words="0 of 1 replicas ready: replica 0: out of memory",
    ),
    "starting after a failure": Case(
        [replica("Starting", failures=1)], "False Starting", "True Starting", "True OutOfMemory"
    ),
    "the first failure is not fenced yet": Case(
        [replica("Fencing", stop=build.stop())], "False Fencing", "True Fencing", "True OutOfMemory"
    ),
    "stopped on purpose": Case(
        [replica("Stopping", stop=build.stop(failure=False))], "False Stopping", "True Stopping", "False AsExpected"
    ),
    "stopped on purpose, and the attempt before has failed": Case(
        [replica("Draining", failures=1, stop=build.stop(failure=False))],
        "False Draining",
        "True Draining",
        "False AsExpected",
    ),
    "crash loop": Case([replica("Backoff", failures=3)], "False OutOfMemory", "True OutOfMemory", "True CrashLoop"),
    "ready after a crash loop, for now": Case(
        [replica("Ready", failures=3)], "True AllReplicasReady", "False Complete", "True CrashLoop"
    ),
    "not ready": Case([replica("NotReady")], "False NotReady", "True NotReady", "True NotReady"),
    "not ready, and the attempt before has failed": Case(
        [replica("NotReady", failures=1)], "False NotReady", "True NotReady", "True NotReady"
    ),
    "suspended, on the way": Case(
        [replica("Draining", stop=WISH), replica("Stopped", 1)],
        "False Suspended",
        "True Suspending",
        "False AsExpected",
        count=2,
        suspended=True,
        words="1 replicas are being stopped",
    ),
    "suspended, the RayCluster still there": Case(
        [replica("Stopped")], "False Suspended", "True Suspending", "False AsExpected", suspended=True
    ),
    "suspended": Case(
        [replica("Stopped"), replica("Stopped", 1)],
        "False Suspended",
        "False Suspended",
        "False AsExpected",
        count=2,
        cluster=NO_CLUSTER,
        suspended=True,
        words="none of 2 replicas runs",
    ),
    "suspended, and paused past admission": Case(
        [replica("Stopped")],
        "False Suspended",
        "False Suspended",
        "False AsExpected",
        cluster=NO_CLUSTER,
        suspended=True,
        waits=True,
        words="spec.rollout.paused holds changes of the spec back",
    ),
    "suspended, but something is in the way of it": Case(
        [replica("Stopping", stop=WISH)],
        "False Forbidden",
        "True Forbidden",
        "True Forbidden",
        suspended=True,
        problems=(Problem("Forbidden", "may not delete"),),
    ),
    "scaled to nothing": Case([], "True ScaledToZero", "False Complete", "False AsExpected", count=0),
    "one leaves": Case(
        [replica("Ready"), replica("Stopping", 1)], "True AllReplicasReady", "True ScalingDown", "False AsExpected"
    ),
    "a problem beats all": Case(
        [replica("Ready")],
        "False Forbidden",
        "True Forbidden",
        "True Forbidden",
        problems=(Problem("Forbidden", "no"),),
        words="no",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_verdicts(name: str) -> None:
    case = CASES[name]
    situation = Situation(case.replicas, case.roster, case.updated, case.rollout, case.waits, crash_loop_after=3)
    judged = status.verdicts(situation, case.cluster, case.problems)
    kinds: tuple[ConditionType, ...] = ("Ready", "Progressing", "Degraded")
    assert [f"{judged[kind].status} {judged[kind].reason}" for kind in kinds] == [
        case.ready,
        case.progressing,
        case.degraded,
    ]
    assert case.words in judged["Ready"].message
    assert all(verdict.message for verdict in judged.values())


PULL = build.pod("w0", ready=False, problem="image x cannot be pulled", problem_reason="ErrImagePull")
CLUSTERS: dict[str, tuple[Cluster | None, list[str], tuple[Problem, ...], str]] = {
    "none yet": (None, ["waiting"], (), "False CreatingCluster"),
    "ready": (build.cluster("c", [build.head()]), [""], (), "True ClusterReady"),
    "pods on their way": (build.cluster("c", [build.head()]), ["", "0 of 1"], (), "False WaitingForPods"),
    "a pod with a problem": (build.cluster("c", [build.head(), PULL]), ["0 of 1: image"], (), "False ErrImagePull"),
    "pods refused": (build.cluster("c", [build.head()], problem="quota"), ["0 of 1"], (), "False PodsRefused"),
    "Ray silent": (build.cluster("c", [build.head()], ray_error="boom"), ["boom"], (), "False RayUnreachable"),
    "a problem": (build.cluster("c", [build.head()]), [""], (Problem("Forbidden", "no"),), "False Forbidden"),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_cluster_verdict(name: str) -> None:
    cluster, obstacles, problems, expected = CLUSTERS[name]
    places = [Place("c", cluster, obstacle) for obstacle in obstacles]
    verdict = status.cluster_verdict(places, problems, suspended=False)
    assert f"{verdict.status} {verdict.reason}" == expected


def test_of_several_clusters_the_worst_is_told_by_name() -> None:
    slow, troubled = build.cluster("a", [build.head()]), build.cluster("b", [build.head(), PULL])
    places = [Place("a", slow, "0 of 1"), Place("b", troubled, "0 of 1: image"), Place("c", None, "waiting")]
    verdict = status.cluster_verdict(places, (), suspended=False)
    assert (verdict.reason, verdict.message) == ("ErrImagePull", "RayCluster b: image x cannot be pulled")
    assert status.cluster_verdict([], (), suspended=False).status == "True", "no replica has a RayCluster"


def judge(main: Verdict) -> dict[ConditionType, Verdict]:
    return {"Ready": main, "Progressing": WAITING, "ClusterReady": GOOD, "Degraded": WAITING}


def test_the_transition_time_moves_only_with_the_status() -> None:
    first = status.conditions(VLLMDeploymentStatus(), judge(Verdict("False", "A", "a")), 1, NOW)
    before = VLLMDeploymentStatus(conditions=first)
    said_otherwise = status.conditions(before, judge(Verdict("False", "B", "b")), 2, later(60))
    assert [c.last_transition_time for c in said_otherwise] == [NOW] * 4
    assert (said_otherwise[0].reason, said_otherwise[0].message, said_otherwise[0].observed_generation) == ("B", "b", 2)
    flipped = status.conditions(VLLMDeploymentStatus(conditions=said_otherwise), judge(GOOD), 2, later(90))
    assert [c.last_transition_time for c in flipped] == [later(90), NOW, NOW, NOW]


def test_the_same_verdict_later_changes_nothing() -> None:
    first = status.conditions(VLLMDeploymentStatus(), judge(WAITING), 1, NOW)
    assert status.conditions(VLLMDeploymentStatus(conditions=first), judge(WAITING), 1, later(3600)) == first


def test_every_condition_once_in_a_fixed_order() -> None:
    made = status.conditions(VLLMDeploymentStatus(), judge(GOOD), 1, NOW)
    assert [c.type for c in made] == ["Ready", "Progressing", "ClusterReady", "Degraded"]


def test_a_fault_of_the_cluster_is_news_once() -> None:
    def after(before: VLLMDeploymentStatus, cluster: Verdict) -> tuple[VLLMDeploymentStatus, list[str]]:
        made = status.conditions(before, {**judge(GOOD), "ClusterReady": cluster}, 1, NOW)
        return VLLMDeploymentStatus(conditions=made), [e.reason for e in status.news(before, made, ())]

    waiting, nothing = after(VLLMDeploymentStatus(), WAITING)
    assert nothing == [], "waiting is no fault"
    broken, news = after(waiting, BROKEN)
    assert news == ["ErrImagePull"]
    still, nothing = after(broken, BROKEN)
    assert nothing == []
    assert after(still, GOOD)[1] == []
