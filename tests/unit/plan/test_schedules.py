"""Random schedules: whatever breaks, and wherever the operator dies, the invariants hold and all ends well.

A failing seed is in the name of the test; ``PLAN_SCHEDULES=2000`` tries more of them than usual.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from tests.unit.plan import build
from tests.unit.plan.model import EPOCH, Refused, World, written
from vllm_ray_operator.api.status import VLLMDeploymentStatus
from vllm_ray_operator.plan import names
from vllm_ray_operator.plan.actions import SubmitJob

SCHEDULES = int(os.environ.get("PLAN_SCHEDULES", "60"))
STEPS = 70
POLICIES: list[dict[str, Any]] = [
    {"maxUnavailable": 1},
    {"maxUnavailable": 1, "standby": False},
    {"maxUnavailable": 1, "progressDeadlineSeconds": 120},
    {"maxUnavailable": 2},
    {"maxUnavailable": 0, "maxSurge": 1},
    {"maxUnavailable": 1, "maxSurge": 2},
    {"type": "Recreate"},
    {"maxUnavailable": 1, "clusterUpgrade": "BlueGreen"},
    {"maxUnavailable": 1, "clusterUpgrade": "BlueGreen", "standby": False, "progressDeadlineSeconds": 120},
    {"maxUnavailable": 0, "maxSurge": 1, "clusterUpgrade": "BlueGreen"},
]
SETTLE_STEPS = 1500
ONE_EACH = {"workers": {"acceleratorsPerNode": 1}}  # so that a slot has two pods
KEPT = {"gcsFaultTolerance": {"redisAddress": "redis:6379"}}
CLUSTERS: list[dict[str, Any]] = [
    {},
    {"policy": "Shared"},
    {"policy": "Shared", **KEPT},
    {"policy": "PerReplica"},
    {"policy": "PerReplica"},
    {"policy": "PerReplica", **KEPT},
]


def one_pass(world: World, faults: Sequence[str] = ()) -> bool:
    """One pass of the operator: observe, plan, write the status, act. With faults it may also go wrong anywhere.

    Returns whether there was nothing to do, now or at a known time.
    """
    random, mishaps = world.random, bool(faults)
    observed = world.observe()
    generation = world.generation
    plan = world.plan(observed)
    world.check_roll(observed, plan)
    at_rest = plan.status == world.status and not plan.actions and plan.wake_after is None
    slow = mishaps and random.random() < 0.15
    if slow:
        world.note("slow pass")
        if random.random() < 0.5:
            break_something(world, faults)
        world.advance(random.uniform(0, 20))
    if world.generation != generation or (mishaps and random.random() < 0.1):
        world.note("status conflict")
        return False
    world.write_status(plan)
    for action in plan.actions:
        if mishaps and random.random() < 0.05:
            world.note("operator dies")
            return False
        try:
            late = mishaps and isinstance(action, SubmitJob) and random.random() < 0.2
            world.execute(action, observed, late=late)
        except Refused:
            world.note("  refused")
    if not slow and world.status.engine_revision is not None:  # else nothing was concluded of what there is
        world.check_traffic()
    return at_rest


def break_something(world: World, faults: Sequence[str]) -> None:
    name = world.random.choice(faults)
    world.note(f"! {name}")
    FAULTS[name](world)


def _some_pod(world: World, *, head: bool) -> Any:
    pods = [p for p in world.pods.values() if p.is_head == head and p.gone_at is None]
    return world.random.choice(pods) if pods else None


def _on_pod(head: bool, what: Callable[[World, Any], None]) -> Callable[[World], None]:
    def fault(world: World) -> None:
        pod = _some_pod(world, head=head)
        if pod is not None:
            world.note(f"  {pod.name} {pod.uid}")
            what(world, pod)

    return fault


def _on_job(what: Callable[[World, Any], None]) -> Callable[[World], None]:
    def fault(world: World) -> None:
        if world.records:
            what(world, world.random.choice(list(world.records.values())))

    return fault


def _job_dies(world: World, job: Any) -> None:
    if not job.terminal:
        job.end_at, job.end_as = world.time, world.random.choice(("FAILED", "SUCCEEDED", "STOPPED"))


def _record_deleted(world: World, job: Any) -> None:
    """Somebody deletes the record of an ended job. One never seen would be taken for one never submitted."""
    ended = {a.instance_id for a in written(world.status) if a.end_time}
    ended -= {action.submission_id for _, action, _ in world.late}  # else it would be accepted again
    if job.terminal and job.id in ended:
        world.records.pop((job.session, job.id), None)


def _on_cluster(what: Callable[[World, Any], None]) -> Callable[[World], None]:
    def fault(world: World) -> None:
        if world.clusters:
            what(world, world.random.choice(list(world.clusters.values())))

    return fault


def _silence(world: World, cluster: Any) -> None:
    cluster.silent_until = world.time + world.random.uniform(5, 150)


def _forget(world: World, cluster: Any) -> None:
    """What is kept outside of the head is lost with it: raylets of a control store that is no more end."""
    if cluster.outlives_head:
        world.records = {key: job for key, job in world.records.items() if key[0] != (cluster.uid, 0)}
        for pod in list(world.pods.values()):
            if pod.owner == cluster.uid and pod.gone_at is None:
                world.restart_container(pod)


def _partial(world: World, cluster: Any) -> None:
    cluster.partial_until = world.time + world.random.uniform(5, 150)


def _delete_cluster(world: World, cluster: Any) -> None:
    cluster.gone_at = cluster.gone_at or world.time


def _touch_cluster(_: World, cluster: Any) -> None:
    cluster.version += 1


def _silent_launchers(world: World) -> None:
    world.deaf_engines = {j.id for j in world.jobs if world.random.random() < 0.5}


def _edit(**parts: Any) -> Callable[[World], None]:
    def fault(world: World) -> None:
        world.raw = {**world.raw, **parts}
        world.generation += 1
        world.note(f"  {parts}")

    return fault


def _scale(world: World) -> None:
    _edit(replicas=world.random.randrange(4))(world)


def _engine(world: World) -> None:
    args = world.random.choice(([], ["--seed=1"], ["--seed=2"]))
    _edit(engine={**world.raw["engine"], "args": args})(world)


def _restarted(world: World) -> None:
    _edit(restartedAt=world.now.isoformat())(world)


def _paused(world: World) -> None:
    _edit(rollout={**world.raw["rollout"], "paused": not world.raw["rollout"].get("paused", False)})(world)


def _suspended(world: World) -> None:
    """Also in a pause: admission may have been by-passed."""
    _edit(suspend=not world.raw.get("suspend", False))(world)


def _undone(world: World) -> None:
    """Back to a revision that is kept, or that was once."""
    kind, field = world.random.choice((("engine", "toRevision"), ("cluster", "toClusterRevision")))
    kept = sorted(r.name for r in world.revisions.values() if r.kind == kind)
    if kept:
        _edit(rollout={**world.raw["rollout"], field: world.random.choice(kept)})(world)


def _image(world: World) -> None:
    _edit(cluster={**world.raw["cluster"], "rayVersion": world.random.choice(("2.60.0", "2.61.0", "2.62.0"))})(world)


def _policy(world: World) -> None:
    _edit(cluster={**ONE_EACH, **world.random.choice(CLUSTERS)})(world)


def _upgrade(world: World) -> None:
    kind = world.random.choice(("Recreate", "BlueGreen"))
    _edit(rollout={**world.raw["rollout"], "clusterUpgrade": kind})(world)


def _cordon(world: World) -> None:
    node = world.random.choice(list(world.cordoned))
    world.cordoned[node] = not world.cordoned[node]
    world.note(f"  {world.cordoned}")


def _on_slot(what: Callable[[World, Any], None]) -> Callable[[World], None]:
    """A node goes, and all pods of a slot with it."""

    def fault(world: World) -> None:
        pod = _some_pod(world, head=False)
        for other in list(world.pods.values()):
            if pod is not None and (other.owner, other.group) == (pod.owner, pod.group):
                what(world, other)

    return fault


FAULTS: dict[str, Callable[[World], None]] = {
    "a job dies": _on_job(_job_dies),
    "the record of an ended job is deleted": _on_job(_record_deleted),
    "head container restarts": _on_pod(True, World.restart_container),
    "head pod deleted": _on_pod(True, World.delete_pod),
    "worker container restarts": _on_pod(False, World.restart_container),
    "worker pod deleted": _on_pod(False, World.delete_pod),
    "all containers of a slot restart": _on_slot(World.restart_container),
    "all pods of a slot deleted": _on_slot(World.delete_pod),
    "Ray is silent": _on_cluster(_silence),
    "what outlives the head is lost": _on_cluster(_forget),
    "State API is partial": _on_cluster(_partial),
    "RayCluster deleted": _on_cluster(_delete_cluster),
    "RayCluster touched": _on_cluster(_touch_cluster),
    "launchers are silent": _silent_launchers,
    "a node is cordoned or not": _cordon,
    "scaled": _scale,
    "engine changed": _engine,
    "cluster changed": _image,
    "cluster policy changed": _policy,
    "cluster upgrade changed": _upgrade,
    "restart asked for": _restarted,
    "paused or resumed": _paused,
    "undone": _undone,
    "suspended or resumed": _suspended,
}


def settle(world: World) -> None:
    """No more faults: everything asked for gets ready within bounded steps, and then nothing is left to do."""
    world.note("no more faults")
    rollout = {k: v for k, v in world.raw["rollout"].items() if k not in ("paused", "toRevision", "toClusterRevision")}
    _edit(rollout=rollout, suspend=False)(world)
    world.deaf_engines = set()
    world.cordoned[world.random.choice(list(world.cordoned))] = False  # so that there is room
    for cluster in world.clusters.values():
        cluster.silent_until = cluster.partial_until = 0.0
    if world.random.random() < 0.3:
        _settle_suspended(world)
    rest(world)
    wanted = world.raw["replicas"]
    status = world.status
    assert [r.phase for r in status.replicas] == ["Ready"] * wanted, status.replicas
    assert status.ready_replicas == wanted
    assert [c.status for c in status.conditions] == ["True", "False", "True", "False"], status.conditions
    slots = {name: sorted(cluster.groups) for name, cluster in world.clusters.items()}
    there = [(r.attempt.ray_cluster, (f"slot-{r.index}", 2)) for r in status.replicas if r.attempt]
    if world.is_per_replica:
        assert slots == {name: [slot] for name, slot in there}
    else:
        assert slots == {status.ray_cluster: [slot for _, slot in there]}
    revisions = {cluster.manifest["metadata"]["labels"][names.CLUSTER_REVISION] for cluster in world.clusters.values()}
    assert {world.revisions[name].resolved["rayVersion"] for name in revisions} <= {
        world.raw["cluster"].get("rayVersion", "2.60.0")
    }
    alive = {j.id for j in world.jobs if j.processes}
    assert alive == {r.attempt.instance_id for r in status.replicas if r.attempt}, "an engine runs that nobody knows"
    world.check_traffic()
    if world.policy("maxUnavailable") or world.raw["rollout"].get("type") == "Recreate":
        left = [p.name for p in world.pods.values() if not p.is_head and world.is_cordoned(p)]
        assert not left, f"{left} are on cordoned nodes"
    world.time += 86400
    plan = world.plan(world.observe())
    assert plan.status == status
    assert plan.actions == ()
    assert plan.wake_after is None


def _settle_suspended(world: World) -> None:
    """All stops, nothing is left, and what was asked for is still known."""
    _edit(suspend=True)(world)
    rest(world)
    status = world.status
    assert [r.phase for r in status.replicas] == ["Stopped"] * world.raw["replicas"], status.replicas
    assert (status.current_replicas, status.ready_replicas) == (0, 0)
    assert [f"{c.status} {c.reason}" for c in status.conditions] == [
        "False Suspended",
        "False Suspended",
        "False Suspended",
        "False AsExpected",
    ]
    assert (world.clusters, world.pods, world.slices) == ({}, {}, {}), "something is held"
    assert not [j.id for j in world.jobs if j.processes]
    assert len(world.services) == 1
    world.time += 86400
    plan = world.plan(world.observe())
    assert (plan.status, plan.actions, plan.wake_after) == (status, (), None)
    _edit(suspend=False)(world)


def rest(world: World) -> None:
    """Pass after pass until there is nothing left to do."""
    for step in range(SETTLE_STEPS):
        if one_pass(world) and not moving(world):
            return
        world.advance(3.0 if step < 200 else 20.0)


def moving(world: World) -> bool:
    """Whether the world itself is still on its way."""
    changing = any(p.gone_at is not None or not world.is_ready(p) for p in world.pods.values())
    desired = {(c.uid, g): n for c in world.clusters.values() for g, n in (("headgroup", 1), *c.groups) if n}
    there = Counter((p.owner, p.group) for p in world.pods.values())
    return changing or desired != there or any(c.gone_at is not None for c in world.clusters.values())


# Not those with which Ray itself forgets (also a head that leaves a cordoned node), or whose pods outlive their
# RayCluster: then nobody knows what ran. For the same reason all replicas share a RayCluster: one of their own goes
# with each that leaves, and its Ray with it.
WHILE_RAY_KNOWS = (
    "a job dies",
    "worker pod deleted",
    "worker container restarts",
    "Ray is silent",
    "State API is partial",
    "launchers are silent",
    "scaled",
    "engine changed",
    "restart asked for",
    "paused or resumed",
)


SHARED = {"policy": "Shared"}


def run(seed: int, *, backups: bool = False) -> World:
    """Play one schedule. ``backups``: now and then the status is replaced by an older one, or by none."""
    random = Random(seed)  # noqa: S311 - a schedule, not a secret
    raw = build.spec_with(
        replicas=random.randrange(1, 4),
        cluster={**ONE_EACH, **(SHARED if backups else random.choice(CLUSTERS))},
        engine={"drainTimeoutSeconds": random.choice((0, 10, 90))},
        rollout=random.choice(POLICIES),
    )
    world = World(random, raw)
    try:
        # A few kinds of faults at a time go deeper than all of them at once.
        among = list(WHILE_RAY_KNOWS) if backups else list(FAULTS)
        faults, rate = random.sample(among, 4), random.choice((0.1, 0.3, 0.6))
        older = [world.status]
        for _ in range(STEPS):
            one_pass(world, faults)
            older.append(world.status)
            if backups and random.random() < 0.05:
                world.note("! an older status is restored")
                world.restore(random.choice((VLLMDeploymentStatus(), random.choice(older))))
            if random.random() < rate:
                break_something(world, faults)
            world.advance(random.choice((0.0, 0.0, 1.0, 3.0, 10.0, 20.0, 70.0)))
        settle(world)
    except Exception:
        print(f"seed {seed}, from {EPOCH}", *world.log, sep="\n")
        raise
    return world


@pytest.mark.parametrize("seed", range(SCHEDULES // 2))
def test_with_a_status_from_a_backup(seed: int) -> None:
    run(seed, backups=True)


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_invariants_hold_and_all_gets_ready(seed: int) -> None:
    run(seed)
