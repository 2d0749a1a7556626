"""Every row of what proves an attempt gone, and of what does not (invariants I2 and I3)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.unit.plan import build
from tests.unit.plan.build import NOTHING_LEFT, UNKNOWN, later
from vllm_ray_operator.api.status import Attempt
from vllm_ray_operator.plan import fence
from vllm_ray_operator.plan.world import AttemptView, Cluster, Leftovers, Pod, World

HEAD = build.head()
WORKERS = (build.pod("w0"), build.pod("w1"))
CLUSTER = build.cluster("c", [HEAD, *WORKERS], [("slot-0", 2)])
ATTEMPT = build.attempt_on(CLUSTER, stop=build.stop(), ray_job_ids=["02000000"])
UNSEEN = build.attempt_on(CLUSTER, stop=build.stop())
RUNNING_ON = build.attempt_on(CLUSTER)
ENDED = build.attempt_on(CLUSTER, stop=build.stop(), ray_job_ids=["02000000"], end_time=build.NOW)
RECYCLED = build.attempt_on(CLUSTER, stop=build.stop(recycle=True), ray_job_ids=["02000000"])
ABSENT = AttemptView(job="absent")


def with_pods(*pods: Pod, head: Pod | None = HEAD) -> Cluster:
    return replace(CLUSTER, pods=(*((head,) if head else ()), *pods))


def again(pod: Pod) -> Pod:
    """The pod after its Ray container has restarted."""
    return replace(pod, restarts=pod.restarts + 1)


def anew(pod: Pod) -> Pod:
    """Another pod of the same name."""
    return replace(pod, uid=f"new-{pod.uid}")


def ended(leftovers: Leftovers | None = NOTHING_LEFT, status: str = "FAILED") -> AttemptView:
    return AttemptView(job=build.job(status), leftovers=leftovers)  # type: ignore[arg-type]


ACTORS = Leftovers(complete=True, actors=("worker (ALIVE)",))
GROUP = Leftovers(complete=True, placement_groups=("pg (CREATED)",))
NEW_PODS = with_pods(*map(anew, WORKERS))
NO_PODS = with_pods()
ALL_NEW = with_pods(*map(anew, WORKERS), head=anew(HEAD))
NO_PODS_NO_HEAD = with_pods(head=None)
NEW_HEAD = with_pods(*WORKERS, head=anew(HEAD))
RESTARTED_HEAD = with_pods(*WORKERS, head=again(HEAD))


def outlived(cluster: Cluster) -> Cluster:
    return replace(cluster, outlives_head=True)


@dataclass(frozen=True)
class Case:
    view: AttemptView
    expected: str | None
    cluster: Cluster | None = CLUSTER
    attempt: Attempt = ATTEMPT
    after: float = 0.0
    orphans: tuple[Pod, ...] = ()


CASES: dict[str, Case] = {
    # The Ray that the attempt was made for says that all of it has ended.
    "ended, nothing left": Case(ended(), "JobEnded"),
    "stopped, nothing left": Case(ended(status="STOPPED"), "JobEnded"),
    "succeeded, nothing left": Case(ended(status="SUCCEEDED"), "JobEnded"),
    "several Ray jobs, nothing left": Case(
        ended(), "JobEnded", attempt=ATTEMPT.model_copy(update={"ray_job_ids": ["02", "03"]})
    ),
    # ... but not completely, or not that.
    "running": Case(build.view(build.job("RUNNING")), None),
    "waiting": Case(build.view(build.job("PENDING")), None),
    "running, although nothing is left": Case(AttemptView(job=build.job(), leftovers=NOTHING_LEFT), None),
    "ended, State API not asked": Case(ended(None), None),
    "ended, empty but truncated": Case(ended(Leftovers(complete=False)), None),
    "ended, truncated, later": Case(ended(Leftovers(complete=False)), None, after=10_000),
    "ended, an actor alive": Case(ended(ACTORS), None),
    "ended, an actor alive, later": Case(ended(ACTORS), None, attempt=ENDED, after=10_000),
    "ended, placement group there": Case(ended(GROUP), None),
    # Ray does not answer.
    "unknown": Case(UNKNOWN, None),
    "unknown for long": Case(UNKNOWN, None, after=10_000),
    "unknown, pods gone: the job may wait for the next ones": Case(UNKNOWN, None, cluster=NEW_PODS, after=10_000),
    "unknown, recycled pods there": Case(UNKNOWN, None, attempt=RECYCLED),
    "unknown, recycled pods gone": Case(UNKNOWN, None, cluster=NEW_PODS, attempt=RECYCLED, after=10_000),
    # Never submitted.
    "absent, just stopped": Case(ABSENT, None, attempt=UNSEEN),
    "absent, a submission may be late": Case(ABSENT, None, attempt=UNSEEN, after=59),
    "absent, no submission can be late": Case(ABSENT, "NeverStarted", attempt=UNSEEN, after=60),
    "absent, pods gone: a late one would wait for the next": Case(ABSENT, None, cluster=NEW_PODS, attempt=UNSEEN),
    "absent, no stop decided": Case(ABSENT, None, attempt=RUNNING_ON, after=10_000),
    "unseen and unknown is not absent": Case(UNKNOWN, None, attempt=UNSEEN, after=10_000),
    # Ray forgot a job that it had.
    "forgotten": Case(ABSENT, None, after=10_000),
    "forgotten, nothing left says it": Case(AttemptView("absent", NOTHING_LEFT), None, after=10_000),
    "forgotten, pods gone": Case(ABSENT, "PodsGone", cluster=NEW_PODS),
    "forgotten after its end": Case(ABSENT, None, attempt=ENDED.model_copy(update={"ray_job_ids": []}), after=10_000),
    # Pods: every container that held a part has ended, and the job cannot start on others.
    "ended, pods replaced": Case(ended(None), "PodsGone", cluster=NEW_PODS),
    "ended, containers restarted": Case(ended(None), "PodsGone", cluster=with_pods(*map(again, WORKERS))),
    "ended, pods gone": Case(ended(None), "PodsGone", cluster=NO_PODS),
    "ended, one pod left": Case(ended(None), None, cluster=with_pods(WORKERS[1])),
    "ended, one container not restarted": Case(ended(None), None, cluster=with_pods(again(WORKERS[0]), WORKERS[1])),
    "ended, pods on their way out": Case(
        ended(None), None, cluster=with_pods(*(replace(w, deleting=True) for w in WORKERS))
    ),
    "running, pods replaced": Case(build.view(build.job()), None, cluster=NEW_PODS),
    "waiting, pods recycled": Case(build.view(build.job("PENDING")), None, cluster=NEW_PODS, attempt=RECYCLED),
    "pods replaced, Ray has not noticed": Case(ended(ACTORS), None, cluster=NEW_PODS, attempt=ENDED, after=59),
    "pods replaced, Ray will not notice": Case(ended(ACTORS), "PodsGone", cluster=NEW_PODS, attempt=ENDED, after=60),
    "a container that is not reported is no end": Case(
        ended(None),
        None,
        cluster=with_pods(WORKERS[0]),
        attempt=build.attempt_on(with_pods(replace(WORKERS[0], restarts=2)), stop=build.stop()),
    ),
    # The head was lost: a new GCS knows nothing.
    "new head, absent": Case(ABSENT, None, cluster=NEW_HEAD, attempt=UNSEEN, after=10_000),
    "new head, nothing left says it": Case(AttemptView("absent", NOTHING_LEFT), None, cluster=NEW_HEAD),
    "new head, ended says it": Case(ended(), None, cluster=NEW_HEAD),
    "head restarted, absent": Case(ABSENT, None, cluster=RESTARTED_HEAD),
    "head on its way out": Case(UNKNOWN, None, cluster=with_pods(*WORKERS, head=replace(HEAD, deleting=True))),
    "no head": Case(UNKNOWN, None, cluster=with_pods(*WORKERS, head=None)),
    "head and pods new": Case(UNKNOWN, "PodsGone", cluster=ALL_NEW),
    "head and containers restarted": Case(
        ABSENT, "PodsGone", cluster=with_pods(*map(again, WORKERS), head=again(HEAD))
    ),
    "head new, one pod old": Case(ABSENT, None, cluster=with_pods(anew(WORKERS[0]), WORKERS[1], head=anew(HEAD))),
    "a late submission runs under the new head": Case(build.view(build.job()), None, cluster=ALL_NEW),
    "all new, but a submission may be late": Case(ABSENT, None, cluster=ALL_NEW, attempt=UNSEEN, after=59),
    "all new, no submission can be late": Case(ABSENT, "PodsGone", cluster=ALL_NEW, attempt=UNSEEN, after=60),
    "all new, but Ray does not say what has arrived": Case(
        UNKNOWN, None, cluster=ALL_NEW, attempt=UNSEEN, after=10_000
    ),
    # The head was lost, but what it knew was not: the next one is as good a witness.
    "outlived, running": Case(build.view(build.job()), None, cluster=outlived(NEW_HEAD)),
    "outlived, ended": Case(ended(), "JobEnded", cluster=outlived(NEW_HEAD)),
    "outlived, no head": Case(UNKNOWN, None, cluster=outlived(NO_PODS_NO_HEAD), after=10_000),
    "outlived, forgotten all the same": Case(ABSENT, None, cluster=outlived(NEW_HEAD), after=10_000),
    "outlived, forgotten, pods new": Case(ABSENT, "PodsGone", cluster=outlived(ALL_NEW)),
    "outlived, never seen: the first head may have taken it": Case(
        ABSENT, None, cluster=outlived(NEW_HEAD), attempt=UNSEEN, after=10_000
    ),
    "outlived, never seen, pods new": Case(ABSENT, "PodsGone", cluster=outlived(ALL_NEW), attempt=UNSEEN, after=60),
    "outlived, but the RayCluster goes": Case(
        UNKNOWN, "PodsGone", cluster=replace(outlived(NO_PODS_NO_HEAD), deleting=True)
    ),
    # The RayCluster is gone.
    "cluster gone": Case(UNKNOWN, "PodsGone", cluster=None),
    "cluster gone before the submission was seen": Case(UNKNOWN, None, cluster=None, attempt=UNSEEN),
    "cluster gone for longer than a submission takes": Case(
        UNKNOWN, "PodsGone", cluster=None, attempt=UNSEEN, after=60
    ),
    "cluster gone, its pods not yet": Case(UNKNOWN, None, cluster=None, orphans=WORKERS[:1]),
    "cluster made anew, old pods there": Case(UNKNOWN, None, cluster=with_pods(head=anew(HEAD)), orphans=WORKERS),
    "cluster made anew, old pods gone": Case(ABSENT, "PodsGone", cluster=with_pods(head=anew(HEAD))),
    # Another replica's pods and another cluster's pods do not matter.
    "pods of others": Case(
        ended(None), "PodsGone", cluster=with_pods(build.pod("other", "slot-1")), orphans=(build.pod("x"),)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_judge(name: str) -> None:
    case = CASES[name]
    world = World(build.deployment(), clusters=(case.cluster,) if case.cluster else (), orphans=case.orphans)
    assert fence.judge(case.attempt, case.view, world, later(case.after)) == case.expected
    if case.expected is None:
        assert fence.describe(case.attempt, case.view, world), "an open fence has a reason"


DESCRIPTIONS: dict[str, tuple[AttemptView, Attempt, Cluster, str]] = {
    "actors": (ended(ACTORS), ENDED, CLUSTER, "still alive: worker (ALIVE)"),
    "group": (ended(GROUP), ENDED, CLUSTER, "still alive: placement group pg (CREATED)"),
    "running": (build.view(build.job()), ATTEMPT, CLUSTER, "waiting for the engine job to end"),
    "partial": (ended(None), ENDED, CLUSTER, "waiting for a complete answer of Ray about actors and placement groups"),
    "silent": (UNKNOWN, ATTEMPT, CLUSTER, "waiting for Ray, which does not answer"),
    "late": (ABSENT, UNSEEN, CLUSTER, "waiting until a late submission is ruled out"),
    "late, to a new head": (ABSENT, UNSEEN, ALL_NEW, "waiting until a late submission is ruled out"),
    "late, to no head": (UNKNOWN, UNSEEN, NO_PODS_NO_HEAD, "waiting for Ray, which does not answer"),
    "recycled": (UNKNOWN, RECYCLED, CLUSTER, "waiting for the end of the pods w0, w1"),
    "head lost": (ABSENT, ATTEMPT, NEW_HEAD, "waiting for the end of the pods w0, w1"),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_describe(name: str) -> None:
    view, attempt, cluster, expected = DESCRIPTIONS[name]
    assert fence.describe(attempt, view, World(build.deployment(), clusters=(cluster,))) == expected


def test_new_containers_of_the_slot_join_and_ended_ones_leave() -> None:
    cluster = with_pods(again(WORKERS[0]), WORKERS[1], build.pod("w2"))
    held = fence.holders(ATTEMPT, World(build.deployment(), clusters=(cluster,)), "slot-0")
    assert [(ref.pod, ref.restarts) for ref in held] == [("w1", 0), ("w0", 1), ("w2", 0)]


def test_a_reference_is_kept_while_its_container_is_not_reported() -> None:
    attempt = build.attempt_on(with_pods(replace(WORKERS[0], restarts=2)))
    cluster = with_pods(WORKERS[0])
    held = fence.holders(attempt, World(build.deployment(), clusters=(cluster,)), "slot-0")
    assert [ref.restarts for ref in held] == [2]
