from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.unit.plan import build
from tests.unit.plan.build import DEFAULTS, NOTHING_LEFT, NOW, Scene, later, serving, spec_with
from vllm_ray_operator.api.status import Session
from vllm_ray_operator.plan import names, planner
from vllm_ray_operator.plan.actions import Create, Delete, PatchCluster
from vllm_ray_operator.plan.revision import Defaults
from vllm_ray_operator.plan.world import AttemptView, Problem, Revision


def deleted(actions: Any, kind: str = "RayCluster") -> list[str]:
    return [a.name for a in actions if isinstance(a, Delete) and a.kind == kind]


def created(actions: Any) -> list[str]:
    return [a.manifest["kind"] for a in actions if isinstance(a, Create)]


def stop_all(scene: Scene) -> None:
    for replica in scene.status.replicas:
        if replica.attempt is not None:
            scene.see(AttemptView(job=build.job("STOPPED"), leftovers=NOTHING_LEFT), replica.attempt)


def test_planning_is_pure() -> None:
    scene = serving(spec_with(replicas=2))
    scene.change(replicas=3, engine={"args": ["--seed=1"]})
    world = scene.world
    plans = [planner.plan(world, later(5), lambda: "n", DEFAULTS) for _ in range(2)]
    assert plans[0] == plans[1]


def test_at_rest_nothing_is_written_whatever_the_time() -> None:
    scene = serving(spec_with(replicas=2))
    for seconds in (0, 1, 3600, 10**8):
        scene.now = later(seconds)
        plan = scene.plan()
        assert (plan.status, plan.actions, plan.wake_after) == (scene.status, (), None)


def test_an_operator_with_other_defaults_does_nothing() -> None:
    scene = serving()
    for defaults in (Defaults("example/engine:99"), Defaults(None)):
        scene.defaults = defaults
        plan = scene.plan()
        assert (plan.status, plan.actions) == (scene.status, ())


def test_the_status_tells_where_and_what() -> None:
    status = serving(spec_with(replicas=2)).status
    assert status.endpoint == "http://chat.default.svc:8000/v1"
    assert (status.replica_summary, status.ready_replicas, status.current_replicas) == ("2/2", 2, 2)
    assert status.selector is not None
    assert status.selector.split(",") == [
        "app.kubernetes.io/managed-by=vllm-ray-operator",
        "ray.io/node-type=worker",
        "vllm-ray.dev/deployment=chat",
    ]
    assert [c.status for c in status.conditions] == ["True", "False", "True", "False"]


# -- RayClusters -------------------------------------------------------------------------------------------------------


def test_a_new_cluster_is_made_after_the_old_one_is_gone() -> None:
    scene = serving()
    old = scene.target
    scene.change(engine={"image": "example/engine:3"})
    scene.step()
    assert deleted(scene.step()) == [], "its attempt is not fenced yet"
    stop_all(scene)
    assert deleted(scene.step()) == [], "what is stored still names it"
    assert deleted(scene.step()) == [old.name]
    scene.clusters[old.name] = replace(old, deleting=True)
    assert created(scene.step()) == [], "its accelerators are not free yet"
    scene.clusters = {}
    assert created(scene.step()) == ["RayCluster"]
    assert scene.status.ray_cluster != old.name


def test_more_replicas_while_the_old_cluster_goes() -> None:
    scene = serving()
    old = scene.target
    scene.change(engine={"image": "example/engine:3"}, replicas=3)
    scene.step()
    scene.step()
    stop_all(scene)
    scene.step()
    scene.clusters[old.name] = replace(old, deleting=True)
    actions = scene.step()
    assert [a for a in actions if isinstance(a, PatchCluster)] == [], "the old cluster gets no new slots"
    assert [r.phase for r in scene.status.replicas] == ["Pending"] * 3
    scene.clusters = {}
    (made,) = [a for a in scene.step() if isinstance(a, Create)]
    assert len(made.manifest["spec"]["workerGroupSpecs"]) == 3


def test_two_clusters_alive_end_as_one() -> None:
    """The spec went there and back: an attempt is left on the other cluster, and asks for no slot in this one."""
    scene = serving(spec_with(replicas=2))
    other = build.cluster(
        "chat-other", [build.head("oh"), build.pod("ow", "slot-5", cluster="chat-other")], revision="r"
    )
    scene.clusters[other.name] = other
    session = Session(head=build.ref(other.pods[0]), slot=[build.ref(other.pods[1])])
    stray = build.attempt_on(other, instance_id="chat-1a2b3c4d-a9-z", number=9, session=session)
    status = scene.status.replicas[1].model_copy(update={"index": 5, "attempt": stray})
    scene.status = scene.status.model_copy(update={"replicas": [*scene.status.replicas, status], "last_attempt": 9})
    scene.see(build.view(), stray)
    actions = scene.step()
    assert [a for a in actions if isinstance(a, PatchCluster)] == []
    assert deleted(actions) == []
    assert scene.status.replicas[2].attempt.stop.reason == "ScaledDown"  # type: ignore[union-attr]
    scene.see(AttemptView(job=build.job("STOPPED"), leftovers=NOTHING_LEFT), stray)
    scene.step()
    assert deleted(scene.step()) == ["chat-other"]
    assert scene.status.replica_summary == "2/2"


def test_an_attempt_that_is_to_go_keeps_its_slot() -> None:
    scene = serving(spec_with(replicas=2))
    scene.change(replicas=1)
    assert [a for a in scene.step() if isinstance(a, PatchCluster)] == []
    stop_all(scene)
    assert len([a for a in scene.step() if isinstance(a, PatchCluster)]) == 1


def test_a_deleted_cluster_is_made_again_with_the_same_name() -> None:
    scene = serving()
    name = scene.status.ray_cluster
    scene.clusters = {}
    scene.views = {}
    actions = scene.step()
    assert [a.manifest["metadata"]["name"] for a in actions if isinstance(a, Create)] == [name]
    assert scene.phase == "Backoff"


def test_scaled_to_zero_and_back() -> None:
    scene = serving()
    scene.change(replicas=0)
    scene.step()
    stop_all(scene)
    scene.step()
    assert scene.status.replicas == []
    assert scene.status.condition("Ready").reason == "ScaledToZero"  # type: ignore[union-attr]
    scene.change_cluster(groups=(), pods=(scene.target.head,))
    assert scene.step() == ()
    assert (scene.plan().status, scene.plan().wake_after) == (scene.status, None)
    scene.change(replicas=1)
    assert [type(a) for a in scene.step()] == [PatchCluster]
    scene.make_cluster()
    scene.step()
    assert scene.attempt.number == 2, "the counter outlives the replicas"


def test_zero_replicas_do_not_hide_a_head_that_is_not_ready() -> None:
    scene = Scene(spec_with(replicas=0))
    scene.step()
    scene.step()
    scene.make_cluster()
    scene.change_cluster(head_ready=False)
    scene.step()
    assert scene.status.condition("ClusterReady").status == "False"  # type: ignore[union-attr]


# -- problems ----------------------------------------------------------------------------------------------------------


def test_no_image_is_said_once() -> None:
    scene = Scene(defaults=Defaults(None))
    assert scene.step() == ()
    assert scene.events() == ["EngineImageMissing"]
    ready = scene.status.condition("Ready")
    assert ready is not None
    assert (ready.status, ready.reason, ready.observed_generation) == ("False", "EngineImageMissing", 1)
    plan = scene.plan()
    assert (plan.status, plan.actions, plan.wake_after) == (scene.status, (), None)


def test_a_spec_that_cannot_be_resolved_leaves_replicas_looked_after() -> None:
    scene = serving(spec_with(engine={"image": "mine:1"}))
    scene.defaults = Defaults(None)
    scene.change(engine={})
    assert scene.step() == ()
    assert scene.events() == ["EngineImageMissing"]
    assert scene.phase == "Ready"
    assert scene.status.condition("Ready").reason == "EngineImageMissing"  # type: ignore[union-attr]
    scene.see(build.view(build.job(), engine=build.engine(ready=False, reason="dead")))
    scene.step()
    assert scene.phase == "NotReady"
    assert scene.slices["chat-0"]["endpoints"][0]["conditions"]["ready"] is False
    scene.change(engine={"image": "mine:1"})
    scene.see(build.view())
    scene.step()
    assert scene.status.condition("Ready").status == "True"  # type: ignore[union-attr]


def test_a_revision_that_cannot_be_stored_is_said_and_leaves_replicas_looked_after() -> None:
    scene = serving()
    scene.change(engine={"args": ["--seed=1"]})
    scene.problems = (Problem("Forbidden", "controllerrevisions is forbidden"),)
    plan = scene.plan()
    assert created(plan.actions) == ["ControllerRevision"]
    assert plan.status.condition("Ready").reason == "Forbidden"  # type: ignore[union-attr]
    scene.see(build.view(build.job(), engine=build.engine(ready=False)))
    assert scene.plan().status.replicas[0].phase == "NotReady"


def test_nor_may_the_first_one_fail_silently() -> None:
    scene = Scene()
    scene.problems = (Problem("Forbidden", "controllerrevisions is forbidden"),)
    plan = scene.plan()
    assert created(plan.actions) == ["ControllerRevision", "ControllerRevision"]
    assert plan.status.condition("Ready").reason == "Forbidden"  # type: ignore[union-attr]


def test_a_problem_comes_and_goes() -> None:
    scene = serving()
    scene.problems = (Problem("KubeRayMissing", "KubeRay is not installed"),)
    scene.step()
    assert scene.events() == ["KubeRayMissing"]
    assert scene.status.condition("Ready").reason == "KubeRayMissing"  # type: ignore[union-attr]
    assert scene.phase == "Ready"
    scene.step()
    assert scene.events() == []
    scene.problems = ()
    scene.step()
    assert scene.status.condition("Ready").status == "True"  # type: ignore[union-attr]


# -- revisions ---------------------------------------------------------------------------------------------------------


def test_revisions_in_use_outlive_the_limit() -> None:
    scene = serving()
    in_use = {r.name for r in scene.revisions}
    old = tuple(Revision(f"old-{n}", "engine", n, {"n": n}, {}) for n in range(2, 14))
    scene.revisions = (*scene.revisions, *old)
    gone = deleted(scene.step(), "ControllerRevision")
    assert gone == ["old-2", "old-3"]
    assert not in_use & set(gone)


def test_a_lost_revision_is_made_again() -> None:
    scene = serving()
    scene.revisions = ()
    assert created(scene.step()) == ["ControllerRevision", "ControllerRevision"]
    assert created(scene.step()) == []
    assert (scene.phase, scene.attempt.number) == ("Ready", 1)


def test_a_lost_revision_made_again_with_other_defaults_is_a_change() -> None:
    scene = serving()
    scene.revisions = ()
    scene.defaults = Defaults("example/engine:99")
    scene.step()
    scene.step()
    assert scene.attempt.stop is not None
    assert scene.attempt.stop.reason == "NewRevision"


def test_names_of_all_that_is_made() -> None:
    scene = serving()
    assert scene.status.ray_cluster is not None
    assert scene.status.ray_cluster.startswith("chat-")
    assert set(scene.services) == {"chat"}
    assert set(scene.slices) == {names.endpoint_slice("chat", 0)}
    assert scene.attempt.start_time == NOW


def test_without_the_kind_nothing_is_concluded_about_pods() -> None:
    """An API server that does not know RayClusters (for a moment) says nothing about the pods: they stay."""
    scene = serving()
    problem = Problem("KubeRayMissing", "KubeRay is not installed")
    world = replace(scene.world, clusters=(), clusters_known=False, problems=(problem,))
    plan = planner.plan(world, later(5), lambda: "n", DEFAULTS)
    assert plan.status.replicas == scene.status.replicas
    assert [type(action).__name__ for action in plan.actions] == ["Emit"]
    assert plan.wake_after == 10, "no event tells when the kind is there again"
    assert plan.status.condition("Ready").reason == "KubeRayMissing"  # type: ignore[union-attr]
