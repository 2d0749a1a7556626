"""The head's node does not answer: a new head is made when nothing is lost with the old one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.unit.plan import build
from tests.unit.plan.build import UNKNOWN, Scene, later, spec_with
from vllm_ray_operator.plan.actions import Delete
from vllm_ray_operator.plan.world import AttemptView, Pod

LOST: dict[str, Any] = {"ready": False, "lost_since": build.NOW, "node": "node-9"}


def losing(replicas: int = 2) -> Scene:
    """All serve when the head's node falls silent."""
    scene = build.serving(spec_with(replicas=replicas))
    scene.change_pod("head", **LOST)
    scene.change_cluster(head_ready=False, ray_error="Ray does not answer")
    return scene


def all_silent(scene: Scene) -> None:
    for instance in scene.views:
        scene.views[instance] = UNKNOWN


def deleted(scene: Scene) -> list[tuple[str, int | None]]:
    return [(a.name, a.grace_seconds) for a in scene.step() if isinstance(a, Delete) and a.kind == "Pod"]


def end(scene: Scene, *names: str) -> None:
    """These pods are gone, and KubeRay has made others."""
    pods = []
    for pod in scene.target.pods:
        fresh: Pod = build.pod(
            pod.name, pod.group, is_head=pod.is_head, cluster=pod.cluster, uid=f"{pod.uid}+", ip=pod.ip
        )
        pods.append(fresh if pod.name in names else pod)
    scene.change_cluster(pods=tuple(pods))


def test_from_the_loss_to_a_new_head() -> None:
    scene = losing()
    all_silent(scene)
    scene.now = later(59)
    assert deleted(scene) == []
    assert [r.phase for r in scene.status.replicas] == ["Ready", "Ready"], "silent for a moment, as far as is known"
    assert scene.last.wake_after is not None
    assert scene.last.wake_after <= 1

    scene.now = later(66)
    assert deleted(scene) == [], "written down first"
    stops = [r.attempt.stop for r in scene.status.replicas if r.attempt]
    assert [stop and (stop.reason, stop.failure, stop.recycle) for stop in stops] == [("HeadLost", True, False)] * 2
    assert scene.replica.last_failure is not None
    assert scene.replica.last_failure.message == (
        "node node-9 of the Ray cluster's head does not answer, and neither does Ray nor the engine"
    )
    assert deleted(scene) == [("head", 0)]
    assert scene.events() == ["PodOnLostNode"]

    end(scene, "head")
    scene.change_cluster(head_ready=True, ray_error="")
    assert deleted(scene) == []
    assert deleted(scene) == [("w0-0", 1), ("w1-0", 1)], "the proof that their engines are gone"
    end(scene, "w0-0", "w1-0")
    scene.step()
    assert [(r.phase, r.last_fence and r.last_fence.how) for r in scene.status.replicas] == [
        ("Backoff", "PodsGone")
    ] * 2
    scene.now += timedelta(seconds=15)
    scene.step()
    assert [r.attempt and r.attempt.number for r in scene.status.replicas] == [3, 4]


def test_what_may_live_on_beside_the_old_head_keeps_its_replica_from_starting() -> None:
    scene = losing()
    scene.change_pod("w1-0", **LOST)
    all_silent(scene)
    scene.now = later(66)
    scene.step()
    assert deleted(scene) == [("head", 0)]
    end(scene, "head")
    scene.change_cluster(head_ready=True, ray_error="")
    scene.step()
    scene.step()
    end(scene, "w0-0")  # the node of the other one confirms nothing
    scene.step()
    scene.now = later(3600)
    scene.step()
    assert [r.phase for r in scene.status.replicas] == ["Starting", "Fencing"]
    assert deleted(scene) == [("w1-0", 1)], "never without the node's word: an engine may hold its accelerators"


@pytest.mark.parametrize("deleting", [False, True])
def test_a_head_is_let_go_too_when_it_is_being_deleted_or_nothing_runs(deleting: bool) -> None:
    scene = build.begun()
    scene.change_pod("head", **LOST, deleting=deleting)
    scene.change_cluster(head_ready=False)
    scene.now = later(59)
    assert deleted(scene) == []
    assert scene.last.wake_after == 1
    scene.now = later(60)
    assert deleted(scene) == [("head", 0)]


def test_engines_that_serve_keep_their_head() -> None:
    """Only its kubelet is away: Ray and the engines answer."""
    scene = losing()
    scene.now = later(3600)
    assert deleted(scene) == []
    assert [r.phase for r in scene.status.replicas] == ["Ready", "Ready"]


def test_an_engine_that_serves_without_its_head_keeps_it_for_the_others() -> None:
    """With GCS fault tolerance engines may outlive it: it is their head that would be replaced under them."""
    scene = losing()
    first, second = (r.attempt for r in scene.status.replicas)
    assert first is not None
    assert second is not None
    scene.views[first.instance_id] = UNKNOWN
    scene.views[second.instance_id] = AttemptView(job=None, engine=build.engine())
    scene.now = later(66)
    scene.step()
    assert deleted(scene) == []
    assert [r.attempt and r.attempt.stop and r.attempt.stop.reason for r in scene.status.replicas] == ["HeadLost", None]


def test_an_engine_that_answers_is_not_given_up_although_it_is_not_ready() -> None:
    """It may be loading, or stutter, in a RayCluster that outlives its head."""
    scene = losing(replicas=1)
    scene.change_cluster(outlives_head=True)
    scene.see(AttemptView(job=None, engine=build.engine(ready=False)))
    scene.now = later(66)
    assert deleted(scene) == []
    assert scene.attempt.stop is None
    scene.see(AttemptView(job=None, engine=build.engine()))
    scene.step()
    assert scene.phase == "Ready"


def test_a_lost_head_that_is_being_deleted_is_let_go_although_a_replica_cannot_be_fenced() -> None:
    """As after an eviction by its taint: the head is gone for us at once, and for Kubernetes never."""
    scene = losing()
    scene.change_pod("head", deleting=True)
    scene.change_pod("w1-0", **LOST)
    all_silent(scene)
    scene.now = later(66)
    scene.step()
    assert ("head", 0) in deleted(scene)


def test_a_ray_that_answers_is_asked_about_the_end_first() -> None:
    scene = losing(replicas=1)
    scene.change(replicas=0)
    scene.now = later(66)
    scene.step()
    assert deleted(scene) == [], "its job is stopped, and Ray says when it is gone"


def test_launchers_that_cannot_be_asked_are_not_taken_for_silent() -> None:
    scene = losing(replicas=1)
    scene.see(AttemptView(job=None, unasked=True))
    scene.now = later(66)
    assert deleted(scene) == []
    assert scene.attempt.stop is None
