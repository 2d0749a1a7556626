"""PodDisruptionBudgets, judged as the API server judges an eviction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.unit.plan import build
from tests.unit.plan.build import PLAIN, Scene, spec_with
from tests.unit.plan.rolls import Play
from vllm_ray_operator.plan import names
from vllm_ray_operator.plan.actions import Apply, Delete
from vllm_ray_operator.plan.world import Pod

TWO_PODS = {"workers": {"acceleratorsPerNode": 1}}
ONE_EACH = {**TWO_PODS, "policy": "PerReplica"}


def labels(pod: Pod) -> Mapping[str, str]:
    """A pod's labels, as templates and KubeRay set them."""
    own = {names.REPLICA: pod.group.removeprefix("slot-")} if not pod.is_head else {}
    kind = "head" if pod.is_head else "worker"
    return {**names.selector(build.NAME), "ray.io/cluster": pod.cluster, "ray.io/node-type": kind, **own}


def selects(budget: Any, pod: Pod) -> bool:
    selector, has = budget["spec"]["selector"], labels(pod)
    assert all(e["operator"] == "In" for e in selector["matchExpressions"])
    return selector["matchLabels"].items() <= has.items() and all(
        has.get(e["key"]) in e["values"] for e in selector["matchExpressions"]
    )


def may_go(scene: Scene, pod: Pod) -> bool:
    """Whether the API server would evict the pod now; two budgets for a pod are an error there."""
    chosen = [budget for budget in scene.budgets.values() if selects(budget, pod)]
    assert len(chosen) <= 1, f"{pod.name} has {len(chosen)} budgets"
    pods = [p for p in scene.world.pods.values() if chosen and selects(chosen[0], p)]
    healthy = sum(p.ready and not p.deleting for p in pods)
    return not chosen or healthy > chosen[0]["spec"]["minAvailable"]


def evictable(scene: Scene) -> set[str]:
    return {pod.name for pod in scene.world.pods.values() if may_go(scene, pod)}


def drain(play: Play, *indices: int) -> None:
    """Try to evict all pods of these replicas, one after the other, as `kubectl drain` does; what is refused stays."""
    for index in indices:
        for number, pod in enumerate(play.scene.target.slot(names.slot(index))):
            if not pod.deleting and may_go(play.scene, pod):
                play.evict(index, number)


def test_one_replica_at_a_time_and_each_whole() -> None:
    play = Play(spec_with(replicas=3, cluster=TWO_PODS, engine={"drainTimeoutSeconds": 0}))
    before = {pod.uid for pod in play.scene.world.pods.values()}
    for _ in range(30):
        drain(play, *(i for i in range(3) if {p.uid for p in play.scene.target.slot(names.slot(i))} & before))
        play.step()
    # A slot of two pods is back when both are; in between no pod of another replica goes.
    assert play.log[1:] == [
        "Stopping1  Ready2  Ready3",
        "Pending  Ready2  Ready3",
        "Starting4  Ready2  Ready3",
        "Ready4  Ready2  Ready3",
        "Ready4  Stopping2  Ready3",
        "Ready4  Pending  Ready3",
        "Ready4  Starting5  Ready3",
        "Ready4  Ready5  Ready3",
        "Ready4  Ready5  Stopping3",
        "Ready4  Ready5  Pending",
        "Ready4  Ready5  Starting6",
        "Ready4  Ready5  Ready6",
    ]
    assert not before & {p.uid for p in play.scene.world.pods.values() if not p.is_head}


def test_when_one_pod_is_gone_the_others_of_its_replica_may_go_too() -> None:
    play = Play(spec_with(replicas=2, cluster=TWO_PODS))
    play.step()
    assert evictable(play.scene) == {"w0-0", "w0-1", "w1-0", "w1-1"}
    play.evict(0)
    assert evictable(play.scene) == set(), "before the operator has seen it, nothing more goes"
    play.scene.step()
    assert evictable(play.scene) == {"w0-0", "w0-1"}


def test_as_many_as_may_be_unavailable() -> None:
    play = Play(spec_with(replicas=4, rollout={**PLAIN, "maxUnavailable": 2}))
    for index, left in ((0, True), (1, False)):
        play.evict(index)
        play.scene.step()
        assert may_go(play.scene, play.scene.target.slot("slot-3")[0]) is left


@pytest.mark.parametrize(
    ("rollout", "one"), [({"maxUnavailable": 0, "maxSurge": 1}, False), ({"type": "Recreate"}, True), ({}, True)]
)
def test_by_the_limits_of_a_roll(rollout: dict[str, Any], one: bool) -> None:
    play = Play(spec_with(replicas=2, rollout={**PLAIN, **rollout}))
    assert evictable(play.scene) == ({"w0-0", "w1-0"} if one else set())


def test_a_replica_that_serves_nobody_is_not_protected() -> None:
    play = Play(spec_with(replicas=2))
    play.hang(0)
    play.step()
    assert play.log[-1] == "NotReady1  Ready2"
    assert evictable(play.scene) == {"w0-0"}, "the other is the last one that serves"


def test_no_head_goes_under_its_engines() -> None:
    play = Play(spec_with(replicas=1, engine={"drainTimeoutSeconds": 600}))
    assert evictable(play.scene) == {"w0-0"}
    play.evict(0)
    play.step()
    assert play.log[-1] == "Draining1"
    assert evictable(play.scene) == {"w0-0"}, "requests are finished first"
    play.scene.now = build.later(601)
    play.step()
    assert play.log[-1] == "Stopping1"
    assert play.scene.budgets == {}
    assert evictable(play.scene) == {"w0-0", "head"}


def test_a_head_that_engines_outlive_may_go() -> None:
    scene = build.serving()
    scene.change_cluster(outlives_head=True)
    scene.step()
    assert set(scene.budgets) == {"chat-replicas"}
    assert "head" in evictable(scene)


def test_heads_of_several_rayclusters() -> None:
    play = Play(spec_with(replicas=2, cluster=ONE_EACH))
    (replicas, heads) = (play.scene.budgets[f"chat-{kind}"]["spec"] for kind in ("replicas", "heads"))
    assert (replicas["minAvailable"], heads["minAvailable"]) == (3, 2)
    assert not any(may_go(play.scene, pod) for pod in play.scene.world.pods.values() if pod.is_head)
    play.evict(0)
    play.step()
    free = [pod.cluster for pod in play.scene.world.pods.values() if pod.is_head and may_go(play.scene, pod)]
    assert free == [cluster for cluster in play.scene.clusters if cluster.endswith("-0")]


def test_the_objects() -> None:
    scene = build.serving(spec_with(replicas=2))
    budget = scene.budgets["chat-replicas"]
    assert budget["apiVersion"] == "policy/v1"
    assert budget["metadata"]["labels"] == names.selector("chat")
    (owner,) = budget["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (build.UID, True)
    assert budget["spec"]["minAvailable"] == 1
    scene.plan()
    assert scene.last.actions == (), "at rest nothing is written"
    changed = {**budget, "spec": {**budget["spec"], "minAvailable": 0}}
    scene.budgets["chat-replicas"] = changed
    scene.plan()
    assert [a.manifest["metadata"]["name"] for a in scene.last.actions if isinstance(a, Apply)] == ["chat-replicas"]


def test_what_serves_no_more_has_none() -> None:
    scene = build.serving()
    assert set(scene.budgets) == {"chat-replicas", "chat-heads"}
    scene.change(replicas=0)
    scene.plan()
    gone = [(a.kind, a.name) for a in scene.last.actions if isinstance(a, Delete)]
    assert ("PodDisruptionBudget", "chat-replicas") in gone
    assert ("PodDisruptionBudget", "chat-heads") in gone
