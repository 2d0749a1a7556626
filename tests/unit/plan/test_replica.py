"""Sequences of steps of one replica: what is written down first, and what is done about it after."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.unit.plan import build
from tests.unit.plan.build import NOTHING_LEFT, UNKNOWN, Scene, begun, later, serving, spec_with, starting
from vllm_ray_operator.api.status import Phase
from vllm_ray_operator.plan.actions import Apply, Create, Delete, StopJob, SubmitJob
from vllm_ray_operator.plan.world import AttemptView, JobStatus, Leftovers

ABSENT = AttemptView(job="absent")


def kinds(actions: Any) -> list[str]:
    """The actions in short, without what keeps the traffic in step."""
    return [type(a).__name__ for a in actions if not isinstance(a, Apply) and getattr(a, "kind", "") != "EndpointSlice"]


def ended(status: JobStatus = "FAILED", leftovers: Leftovers | None = NOTHING_LEFT, **changes: Any) -> AttemptView:
    return AttemptView(job=build.job(status, **changes), leftovers=leftovers)


def crash(scene: Scene, reason: str = "OutOfMemory") -> None:
    """The engine dies and is fenced; the replica waits for its next start."""
    scene.see(ended(result={"reason": reason, "message": "out of memory"}))
    scene.step()
    assert scene.phase == "Backoff"


# -- start -------------------------------------------------------------------------------------------------------------


def test_happy_path() -> None:
    scene = Scene()
    assert kinds(scene.step()) == ["Create", "Create"], "revisions come first"
    made = scene.step()
    assert [a.manifest["kind"] for a in made if isinstance(a, Create)] == ["RayCluster"]
    assert (scene.phase, scene.replica.message) == ("Pending", "waiting for the RayCluster to be created")
    scene.make_cluster()

    assert scene.step() == (), "the intent is written; nothing is submitted from what is not stored"
    assert (scene.phase, scene.status.last_attempt, scene.attempt.number) == ("Starting", 1, 1)
    assert scene.last.wake_after is None or scene.last.wake_after <= 2

    scene.see(ABSENT)
    (submit,) = scene.step()
    assert isinstance(submit, SubmitJob)
    assert (submit.submission_id, submit.cluster) == (scene.attempt.instance_id, scene.target.name)

    scene.see(build.view(build.job("PENDING", driver_ip=None)))
    assert scene.step() == ()
    assert (scene.phase, scene.replica.message) == ("Starting", "the engine job waits in Ray")

    scene.see(build.view(build.job(), engine=build.engine(ready=False)))
    (slice_,) = scene.step()
    assert isinstance(slice_, Apply)
    assert slice_.manifest["endpoints"][0]["conditions"]["ready"] is False
    assert (scene.phase, scene.replica.message) == ("Starting", "loading weights")

    scene.see(build.view())
    (slice_,) = scene.step()
    assert isinstance(slice_, Apply)
    assert slice_.manifest["endpoints"][0]["conditions"]["ready"] is True
    assert scene.events() == ["ReplicaReady"]
    assert (scene.phase, scene.replica.restarts, scene.status.replica_summary) == ("Ready", 0, "1/1")
    assert scene.step() == ()
    assert scene.last.wake_after is None


def test_what_is_submitted() -> None:
    scene = starting(
        spec_with(engine={"args": ["--max-model-len", "256"], "env": [{"name": "A", "value": "1"}], "port": 9000})
    )
    (submit,) = scene.step()
    assert isinstance(submit, SubmitJob)
    assert submit.entrypoint == "exec python3 -m vllm_ray_engine.guard"
    assert submit.resources == {"vd-driver-0": 1}
    assert submit.environment["A"] == "1"
    config = json.loads(submit.environment["VLLM_RAY_ENGINE_CONFIG"])
    assert config == {
        "version": 1,
        "instanceId": "chat-1a2b3c4d-a1-n1",
        "deployment": "default/chat",
        "replica": 0,
        "attempt": 1,
        "model": "org/tiny",
        "revision": None,
        "servedName": "org/tiny",
        "host": "0.0.0.0",
        "port": 9000,
        "controlPort": 8070,
        "tensor": 2,
        "pipeline": 1,
        "acceleratorKey": "GPU",
        "acceleratorsPerNode": 2,
        "slotResource": "vd-slot-0",
        "args": ["--max-model-len", "256"],
        "startupTimeoutSeconds": 1785,
        "stopGraceSeconds": 20,
        "standby": False,
        "probePeriodSeconds": 30,
        "probeTimeoutSeconds": 60,
        "probeFailureThreshold": 2,
    }


def test_no_input_of_the_user_reaches_the_entrypoint() -> None:
    poison = "$(reboot)"
    scene = starting(
        spec_with(
            model={"uri": poison, "servedName": poison},
            engine={"args": [poison], "env": [{"name": "A", "value": poison}]},
        )
    )
    (submit,) = scene.step()
    assert isinstance(submit, SubmitJob)
    assert poison not in submit.entrypoint + submit.submission_id + "".join(submit.resources)


def test_a_submission_is_planned_again_until_it_is_seen() -> None:
    scene = starting()
    first = scene.step()
    assert scene.step() == first, "the same id each time: twice submitted is once run"
    scene.see(UNKNOWN)
    assert scene.step() == (), "not known is not absent"
    assert scene.last.wake_after == 2


OBSTACLES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # changes of the cluster, changes of its worker; what the replica waits for
    "head not ready": ({"head_ready": False}, {}, "waiting for the head pod"),
    "cluster on its way out": ({"deleting": True}, {}, "to be deleted"),
    "Ray silent": ({"ray_error": "no route to host"}, {}, "no route to host"),
    "pod not ready": ({}, {"ready": False}, "0 of 1 worker pods ready"),
    "pod with a problem": ({}, {"ready": False, "problem": "image x cannot be pulled"}, "image x cannot be pulled"),
    "pod on its way out": ({}, {"deleting": True}, "0 of 1 worker pods ready"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_no_start_without_all_it_takes(name: str) -> None:
    of_cluster, of_pod, message = OBSTACLES[name]
    scene = begun()
    scene.change_cluster(**of_cluster)
    scene.change_pod("w0-0", **of_pod)
    scene.step()
    assert scene.phase == "Pending"
    assert message in scene.replica.message
    assert scene.status.last_attempt == 0


def test_a_slot_that_is_ready_in_part_is_not_ready() -> None:
    scene = begun(spec_with(cluster={"workers": {"acceleratorsPerNode": 1}}))
    scene.make_cluster(pods=1)
    scene.step()
    assert scene.replica.message == "1 of 2 worker pods ready"
    scene.make_cluster(pods=2)
    extra = build.pod("old", "slot-0", deleting=True, cluster=scene.target.name)
    scene.change_cluster(pods=(*scene.target.pods, extra))
    scene.step()
    assert scene.phase == "Pending", "a pod on its way out may still hold accelerators"
    scene.make_cluster(pods=2)
    scene.step()
    assert scene.phase == "Starting"
    assert [ref.pod for ref in scene.attempt.session.slot] == ["w0-0", "w0-1"]


def test_a_pod_on_a_lost_node_is_waited_for_a_minute_and_then_let_go() -> None:
    scene = begun(spec_with(cluster={"workers": {"acceleratorsPerNode": 1}}))
    scene.make_cluster(pods=2)
    lost = {"ready": False, "lost_since": build.NOW, "problem": "its node does not answer", "deleting": True}
    scene.change_pod("w0-1", **lost)
    scene.now = later(59)
    assert kinds(scene.step()) == []
    assert scene.replica.message == "1 of 2 worker pods ready: its node does not answer"
    assert scene.last.wake_after == 1
    scene.now = later(60)
    (action,) = (a for a in scene.step() if isinstance(a, Delete))
    assert (action.kind, action.name, action.uid, action.grace_seconds) == ("Pod", "w0-1", "uid-w0-1", 0)
    assert scene.events() == ["PodOnLostNode"]


def test_an_engine_on_a_node_that_does_not_answer_keeps_its_pod_as_long_as_it_is_not_proven_gone() -> None:
    scene = serving()
    scene.change_pod("w0-0", ready=False, lost_since=build.NOW)
    scene.now = later(3600)
    assert kinds(scene.step()) == []
    assert scene.phase == "Ready", "only its kubelet may be away: the engine itself answers"


def test_replicas_start_together_with_numbers_of_their_own() -> None:
    scene = starting(spec_with(replicas=3))
    attempts = [r.attempt for r in scene.status.replicas if r.attempt]
    assert [a.number for a in attempts] == [1, 2, 3]
    assert len({a.instance_id for a in attempts}) == 3
    submits = [a for a in scene.step() if isinstance(a, SubmitJob)]
    assert [dict(s.resources) for s in submits] == [{"vd-driver-0": 1}, {"vd-driver-1": 1}, {"vd-driver-2": 1}]


# -- ready and not -----------------------------------------------------------------------------------------------------


def test_an_engine_that_loses_a_worker_leaves_traffic_and_comes_back() -> None:
    scene = serving()
    scene.see(build.view(build.job(), engine=build.engine(ready=False, reason="worker 1 is dead")))
    (slice_,) = scene.step()
    assert isinstance(slice_, Apply)
    assert slice_.manifest["endpoints"][0]["conditions"]["ready"] is False
    assert (scene.phase, scene.replica.message) == ("NotReady", "worker 1 is dead")
    assert scene.last.wake_after == 2
    scene.see(build.view())
    scene.step()
    assert scene.phase == "Ready"
    assert scene.events() == ["ReplicaReady"]


def test_a_launcher_that_is_silent_for_a_moment_keeps_its_traffic() -> None:
    scene = serving()
    scene.see(build.view(build.job()))
    scene.step()
    assert scene.phase == "Ready"
    assert scene.last.wake_after == 0.5
    scene.now += timedelta(seconds=2.9)
    scene.step()
    assert scene.phase == "Ready"
    scene.see(build.view())
    scene.step()
    assert scene.attempt.silent_time is None
    assert scene.plan().actions == ()


def test_a_silent_launcher_loses_its_traffic() -> None:
    scene = serving()
    scene.see(build.view(build.job()))
    scene.step()
    scene.now += timedelta(seconds=3)
    scene.step()
    assert (scene.phase, scene.replica.message) == ("NotReady", "the engine's launcher does not answer")
    assert scene.attempt.stop is None, "silence is no reason to stop"


def test_a_silent_launcher_on_a_pod_that_is_not_ready_loses_its_traffic_at_once() -> None:
    scene = serving()
    scene.see(build.view(build.job()))
    pods = next(iter(scene.clusters.values())).pods
    scene.change_cluster(pods=tuple(replace(pod, ready=pod.is_head) for pod in pods))
    scene.step()
    assert scene.phase == "NotReady"


def test_a_launcher_that_cannot_be_asked_is_not_silent() -> None:
    scene = serving()
    scene.see(AttemptView(job=None, unasked=True))
    for _ in range(3):
        scene.step()
        assert (scene.phase, scene.attempt.silent_time, scene.last.wake_after) == ("Ready", None, 2)
        scene.now += timedelta(seconds=60)
    scene.change_pod("w0-0", ready=False)
    scene.step()
    assert scene.phase == "NotReady", "its pod tells enough"


def test_a_silent_ray_does_not_stop_an_engine_that_answers() -> None:
    scene = serving()
    scene.see(AttemptView(job=None, engine=build.engine()))
    scene.change_cluster(ray_error="no route to host")
    scene.step()
    assert scene.phase == "Ready"
    assert scene.status.condition("ClusterReady").reason == "RayUnreachable"  # type: ignore[union-attr]
    assert scene.last.wake_after == 5


def test_silent_altogether() -> None:
    scene = serving()
    scene.see(UNKNOWN)
    scene.step()
    scene.now += timedelta(seconds=3)
    scene.step()
    assert (scene.phase, scene.replica.message) == ("NotReady", "Ray does not answer")
    assert scene.attempt.stop is None


def test_ready_is_not_said_before_the_address_is_known() -> None:
    scene = starting()
    scene.see(build.view(build.job(driver_ip="10.9.9.9"), engine=build.engine()))
    scene.step()
    assert scene.phase != "Ready"
    assert scene.slices == {}


def test_ranks_are_told_with_pods_and_nodes() -> None:
    scene = starting()
    ranks = ((0, "chat-1a2b3c4d-a1-n1", ("10.0.1.1", "10.0.0.1", "10.9.9.9")),)
    scene.see(build.view(build.job(), engine=build.engine(ranks=ranks)))
    scene.step()
    (rank,) = scene.attempt.ranks
    assert (rank.instance_id, rank.pods, rank.nodes) == ("chat-1a2b3c4d-a1-n1", ["head", "w0-0"], ["node-1"])


def test_every_ray_job_id_is_remembered() -> None:
    scene = serving()
    scene.see(build.view(build.job(ray_job_ids=("03000000", "02000000")), engine=build.engine()))
    scene.step()
    assert scene.attempt.ray_job_ids == ["02000000", "03000000"]
    scene.see(build.view(build.job(ray_job_ids=()), engine=build.engine()))
    scene.step()
    assert scene.attempt.ray_job_ids == ["02000000", "03000000"]


# -- failure -----------------------------------------------------------------------------------------------------------


def test_crash_backoff_restart() -> None:
    scene = serving()
    old = scene.attempt
    scene.see(ended(leftovers=None, result={"reason": "OutOfMemory", "message": "out of memory: lower X"}))
    assert kinds(scene.step()) == []
    assert scene.events() == ["OutOfMemory"]
    assert scene.phase == "Fencing"
    assert scene.replica.last_failure is not None
    assert (scene.replica.last_failure.reason, scene.replica.last_failure.attempt) == ("OutOfMemory", 1)
    assert scene.slices["chat-0"]["endpoints"][0]["conditions"]["ready"] is False

    scene.see(ended(leftovers=Leftovers(complete=True, actors=("worker (ALIVE)",))))
    assert scene.step() == ()
    assert (scene.phase, scene.replica.message) == ("Fencing", "still alive: worker (ALIVE)")

    scene.see(ended())
    assert [a.kind for a in scene.step() if isinstance(a, Delete)] == ["EndpointSlice"]
    assert (scene.phase, scene.replica.failures, scene.replica.attempt) == ("Backoff", 1, None)
    assert scene.replica.last_fence is not None
    assert (scene.replica.last_fence.how, scene.replica.last_fence.attempt) == ("JobEnded", 1)
    waits = scene.last.wake_after
    assert waits is not None
    assert 10 <= waits <= 12

    scene.now = later(waits - 0.5)
    assert scene.step() == ()
    assert scene.phase == "Backoff"
    assert scene.last.wake_after == pytest.approx(0.5)
    scene.now = later(waits)
    assert scene.step() == ()
    assert (scene.phase, scene.replica.restarts, scene.attempt.number) == ("Starting", 1, 2)
    assert scene.attempt.instance_id != old.instance_id
    assert kinds(scene.step()) == [], "nothing is known of the new attempt yet"


ENDINGS: dict[str, tuple[AttemptView, str, str]] = {
    "told by the launcher": (ended(result={"reason": "PortInUse", "message": "port 8000"}), "PortInUse", "port 8000"),
    "told by Ray": (ended(message="runtime_env failed"), "EngineExited", "runtime_env failed"),
    "told by nobody": (ended(), "EngineExited", "the engine job ended as FAILED"),
    "stopped by somebody else": (ended("STOPPED"), "EngineExited", "the engine job ended as STOPPED"),
    "ended by itself": (ended("SUCCEEDED"), "EngineExited", "the engine job ended as SUCCEEDED"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_why_it_ended(name: str) -> None:
    view, reason, message = ENDINGS[name]
    scene = serving()
    scene.see(view)
    scene.step()
    assert scene.replica.last_failure is not None
    assert (scene.replica.last_failure.reason, scene.replica.last_failure.message) == (reason, message)
    assert scene.phase == "Backoff"


def test_crash_loop_is_named_and_forgiven() -> None:
    scene = starting()
    waits = []
    for failures in (1, 2, 3):
        crash(scene)
        assert scene.replica.failures == failures
        waits.append(scene.last.wake_after or 0)
        scene.now = scene.replica.next_start_time or scene.now
        scene.step()
        scene.see(ABSENT)
    assert waits == sorted(waits)
    assert waits[2] >= 40
    assert scene.status.condition("Degraded").reason == "CrashLoop"  # type: ignore[union-attr]

    scene.see(build.view())
    scene.step()
    assert scene.phase == "Ready"
    assert scene.status.condition("Degraded").reason == "CrashLoop"  # type: ignore[union-attr]
    assert scene.last.wake_after == 600, "somebody has to look again"
    scene.now = later((scene.now - build.NOW).total_seconds() + 600)
    scene.step()
    assert scene.replica.failures == 0
    assert scene.status.condition("Degraded").status == "False"  # type: ignore[union-attr]
    assert scene.plan().wake_after is None


def test_a_failure_after_a_long_time_ready_is_the_first() -> None:
    scene = starting()
    crash(scene)
    scene.now = scene.replica.next_start_time or scene.now
    scene.step()
    scene.see(build.view())
    scene.step()
    scene.now = later(1000)
    scene.see(ended(leftovers=None))
    scene.step()
    scene.see(ended())
    scene.step()
    assert scene.replica.failures == 1


def test_the_time_a_fence_takes_is_no_time_ready() -> None:
    scene = starting()
    crash(scene)
    scene.now = scene.replica.next_start_time or scene.now
    scene.step()
    scene.see(build.view())
    scene.step()
    scene.see(ended(leftovers=None))
    scene.step()
    scene.now = later(10_000)
    scene.see(ended())
    scene.step()
    assert scene.replica.failures == 2


def test_startup_timeout() -> None:
    scene = starting(spec_with(engine={"startupTimeoutSeconds": 60}))
    scene.see(build.view(build.job(), engine=build.engine(ready=False)))
    scene.step()
    scene.now = later(60)
    scene.step()
    assert scene.attempt.stop is None
    scene.now = later(61)
    assert kinds(scene.step()) == [], "written down first"
    assert scene.attempt.stop is not None
    assert scene.attempt.stop.failure
    assert scene.attempt.stop.message == "not ready after 60 s (last seen: loading weights)"
    (stop,) = scene.step()
    assert stop == StopJob(scene.target.name, scene.attempt.instance_id)


def test_an_engine_that_gets_ready_at_the_last_moment_stays() -> None:
    scene = starting(spec_with(engine={"startupTimeoutSeconds": 60}))
    scene.now = later(3600)
    scene.see(build.view())
    scene.step()
    assert scene.phase == "Ready"


def test_head_lost() -> None:
    scene = serving()
    scene.change_pod("head", restarts=1)
    scene.see(ABSENT)
    assert kinds(scene.step()) == [], "written down first"
    assert scene.attempt.stop is not None
    assert (scene.attempt.stop.reason, scene.attempt.stop.recycle) == ("HeadLost", True)
    (action,) = scene.step()
    assert isinstance(action, Delete)
    assert (action.kind, action.name, action.uid) == ("Pod", "w0-0", "uid-w0-0")
    assert action.grace_seconds == 1, "the pod's own is for drains: its hook would wait for engines that hang"
    scene.change_pod("w0-0", deleting=True)
    assert scene.step() == ()
    assert (scene.phase, scene.replica.message) == ("Fencing", "waiting for the end of the pods w0-0")
    scene.change_pod("w0-0", deleting=False, uid="uid-new")
    scene.step()
    assert (scene.phase, scene.replica.last_fence.how) == ("Backoff", "PodsGone")  # type: ignore[union-attr]


def test_a_head_whose_knowledge_is_kept_elsewhere_takes_nothing_along() -> None:
    scene = serving()
    scene.change_cluster(outlives_head=True)
    scene.change_pod("head", deleting=True)
    scene.change_cluster(head_ready=False)
    scene.see(AttemptView(job=None, engine=build.engine()))
    scene.now = later(300)
    assert (scene.step(), scene.phase) == ((), "Ready")
    assert scene.status.condition("ClusterReady").message == "waiting for the head pod"  # type: ignore[union-attr]
    scene.change_pod("head", deleting=False, uid="uid-new")
    scene.change_cluster(head_ready=True)
    scene.see(build.view())
    assert (scene.step(), scene.phase) == ((), "Ready")
    scene.see(ABSENT)
    scene.step()
    assert scene.attempt.stop is not None
    assert (scene.attempt.stop.reason, scene.attempt.stop.recycle) == ("JobLost", True)


def test_head_lost_while_the_intent_is_not_submitted() -> None:
    scene = starting()
    scene.change_pod("head", uid="uid-new")
    assert kinds(scene.step()) == [], "an attempt of the old head is not submitted to the new one"
    assert scene.attempt.stop is not None


def test_head_lost_during_a_stop() -> None:
    scene = serving()
    scene.change(replicas=0)
    scene.step()
    scene.change_pod("head", uid="uid-new")
    scene.see(ABSENT)
    assert kinds(scene.step()) == [], "to delete pods is an intent of its own"
    assert scene.attempt.stop is not None
    assert (scene.attempt.stop.reason, scene.attempt.stop.recycle) == ("ScaledDown", True)
    assert kinds(scene.step()) == ["Delete"]


SUPERVISOR_DIED = "Job supervisor actor died: ... ip: 10.0.1.1 The actor died because its node has died. Node Id: e48"
LOST_DRIVERS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "its node is silent": (
        {"lost_since": later(-5), "ready": False}, {}, "NodeLost",
        "node node-1 of pod w0-0 does not answer, and Ray has given it up",
    ),
    "its node is silent, but it told why": (
        {"lost_since": later(-5)}, {"result": {"reason": "PortInUse", "message": "used"}}, "PortInUse", "used",
    ),
    "its pod is being deleted": (
        {"deleting": True}, {}, "PodsLost", "pod w0-0 on node node-1 is gone, and the engine's launcher with it",
    ),
    "only Ray lost it": ({}, {}, "NodeLost", "Ray lost its node in pod w0-0 on node node-1"),
    "neither": ({}, {"message": "it died"}, "EngineExited", "it died"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST_DRIVERS)
def test_a_launcher_that_was_lost_with_its_pod_or_node(name: str) -> None:
    pod, told, reason, message = LOST_DRIVERS[name]
    scene = serving()
    scene.change_pod("w0-0", **pod)
    scene.see(ended(**{"message": SUPERVISOR_DIED, **told}))
    scene.step()
    assert scene.replica.last_failure is not None
    assert (scene.replica.last_failure.reason, scene.replica.last_failure.message) == (reason, message)


def test_all_pods_lost() -> None:
    scene = serving()
    scene.change_pod("w0-0", uid="uid-new")
    scene.step()
    assert scene.attempt.stop is not None
    assert scene.attempt.stop.reason == "PodsLost"
    assert scene.phase == "Stopping", "Ray has not said that the job ended"
    assert kinds(scene.step()) == ["StopJob"]
    scene.see(ended(leftovers=None))
    scene.step()
    assert scene.phase == "Fencing", "the new pod joined while the job was running"
    scene.see(ended())
    scene.step()
    assert scene.phase == "Backoff"


def test_a_job_that_waits_is_not_forgotten_with_its_pods() -> None:
    """It would start on the pods that come next, beside the next attempt."""
    scene = starting()
    scene.see(UNKNOWN)
    scene.change_pod("w0-0", uid="uid-new")
    for _ in range(3):
        scene.now = later(1000)
        scene.step()
    assert scene.attempt.stop is not None, "fenced although Ray was not heard"
    scene.see(build.view(build.job("PENDING", driver_ip=None, ray_job_ids=())))
    assert kinds(scene.step()) == ["StopJob"]


def test_containers_that_join_the_slot_are_fenced_too() -> None:
    """An engine that started on a replaced pod does not end with the pods that the attempt was written down with."""
    scene = starting(spec_with(cluster={"workers": {"acceleratorsPerNode": 1}}, replicas=0))
    scene.change(replicas=1)
    scene.make_cluster(pods=2)
    scene.step()
    scene.see(ABSENT)
    scene.change_pod("w0-1", uid="uid-new")
    scene.step()
    scene.see(build.view())
    scene.step()
    assert [ref.uid for ref in scene.attempt.session.slot] == ["uid-w0-0", "uid-new"]
    scene.change_pod("head", uid="uid-new-head")
    scene.see(ABSENT)
    scene.step()
    deleted = [a.uid for a in scene.step() if isinstance(a, Delete) and a.kind == "Pod"]
    assert deleted == ["uid-w0-0", "uid-new"]


def test_head_lost_after_nobody_looked_for_long() -> None:
    """The job may have started on pods that came meanwhile, and its Ray cannot be asked any more."""
    scene = starting()
    scene.step()
    scene.change_pod("w0-0", uid="uid-new")
    scene.change_pod("head", restarts=1)
    scene.step()
    assert scene.attempt.stop is not None
    assert [a.uid for a in scene.step() if isinstance(a, Delete)] == ["uid-new"]


def test_a_job_that_ended_where_nobody_saw_it() -> None:
    """It ran in the next life of its container, and ended there before anybody looked."""
    scene = starting()
    scene.step()
    scene.change_pod("w0-0", restarts=1)
    scene.see(ended(leftovers=Leftovers(complete=False)))
    scene.step()
    assert scene.phase == "Fencing"
    scene.change_pod("w0-0", restarts=2)
    scene.step()
    assert scene.phase == "Backoff"


def test_a_job_that_ray_forgot_is_not_run_again() -> None:
    scene = serving()
    scene.see(ABSENT)
    assert kinds(scene.step()) == []
    assert scene.attempt.stop is not None
    assert (scene.attempt.stop.reason, scene.attempt.stop.recycle) == ("JobLost", True)
    assert kinds(scene.step()) == ["Delete"]
    scene.change_pod("w0-0", uid="uid-new")
    scene.step()
    assert scene.replica.last_fence is not None
    assert scene.replica.last_fence.how == "PodsGone"


# -- stops on purpose --------------------------------------------------------------------------------------------------


def test_scaled_down() -> None:
    scene = serving(spec_with(replicas=2))
    scene.change(replicas=1)
    assert kinds(scene.step()) == [], "written down first"
    assert scene.slices["chat-1"]["endpoints"][0]["conditions"]["ready"] is False, "out of traffic before it is stopped"
    leaving = scene.status.replicas[1]
    assert leaving.attempt is not None
    assert leaving.attempt.stop is not None
    assert (leaving.phase, leaving.attempt.stop.failure) == ("Stopping", False)
    assert scene.status.replica_summary == "1/1"
    assert kinds(scene.step()) == ["StopJob"]
    scene.see(ended("STOPPED"), leaving.attempt)
    assert "PatchCluster" in kinds(scene.step()), "the slot shrinks once the attempt is fenced"
    assert [r.index for r in scene.status.replicas] == [0]
    assert scene.phase == "Ready"


def test_down_and_up_again_at_once() -> None:
    scene = serving()
    scene.change(replicas=0)
    scene.step()
    old = scene.attempt
    scene.change(replicas=1)
    assert kinds(scene.step()) == ["StopJob"], "a stop that was decided is carried out"
    scene.see(ended("STOPPED"), old)
    scene.step()
    assert (scene.phase, scene.replica.failures) == ("Pending", 0)
    scene.step()
    assert scene.attempt.number == 2
    assert scene.phase == "Starting"


def test_new_engine_revision_stops_and_starts_in_the_same_cluster() -> None:
    scene = serving()
    before = scene.status.ray_cluster
    scene.change(engine={"args": ["--seed=1"]})
    assert kinds(scene.step()) == ["Create"]
    assert scene.phase == "Ready"
    assert scene.status.observed_generation == 1, "not yet this generation's status"
    scene.step()
    assert scene.status.observed_generation == 2
    assert scene.attempt.stop is not None
    assert scene.attempt.stop.reason == "NewRevision"
    assert kinds(scene.step()) == ["StopJob"]
    scene.see(ended("STOPPED"))
    scene.step()
    scene.step()
    assert (scene.phase, scene.attempt.engine_revision) == ("Starting", scene.status.engine_revision)
    assert scene.status.ray_cluster == before
    assert scene.replica.last_failure is None


def test_the_spec_flips_there_and_back() -> None:
    scene = serving()
    first = scene.status.engine_revision
    scene.change(engine={"args": ["--seed=1"]})
    scene.step()
    scene.step()
    assert scene.attempt.stop is not None
    scene.change(engine={})
    assert kinds(scene.step()) == ["StopJob"]
    scene.see(ended("STOPPED"))
    scene.step()
    scene.step()
    assert scene.attempt.engine_revision == first
    assert scene.attempt.number == 2


def test_the_same_in_other_words_restarts_nothing() -> None:
    scene = serving()
    scene.change(engine={"image": build.DEFAULTS.engine_image, "port": 8000})
    assert kinds(scene.step()) == ["Create", "Create"]
    assert kinds(scene.step()) == []
    assert kinds(scene.step()) == []
    assert (scene.phase, scene.attempt.number) == ("Ready", 1)
    assert scene.status.observed_generation == 2
    assert scene.plan().status == scene.status


def test_a_repaired_spec_is_tried_at_once() -> None:
    scene = starting()
    crash(scene)
    scene.change(engine={"args": ["--seed=1"]})
    scene.step()
    scene.step()
    assert (scene.phase, scene.replica.failures) == ("Starting", 0)


def test_also_when_it_is_repaired_before_the_fence_closes() -> None:
    scene = serving()
    scene.see(ended(leftovers=None))
    scene.step()
    scene.change(engine={"args": ["--seed=1"]})
    scene.step()
    scene.see(ended())
    scene.step()
    assert (scene.phase, scene.replica.next_start_time) == ("Pending", None)


def test_scaling_does_not_shorten_a_backoff() -> None:
    scene = starting()
    crash(scene)
    scene.change(replicas=2)
    scene.step()
    assert scene.phase == "Backoff"


# -- fences that do not close ------------------------------------------------------------------------------------------


def overdue(view: AttemptView, phase: Phase = "Stopping", **changes: Any) -> Scene:
    """A replica whose stop was decided a little more than a minute ago."""
    scene = serving()
    scene.change(replicas=0, **changes)
    scene.step()
    scene.step()
    scene.see(view)
    scene.now = later(30)
    scene.step()
    scene.now = later(61)
    scene.step()
    assert scene.phase == phase
    return scene


def test_recycled_after_the_deadline() -> None:
    scene = overdue(build.view(build.job()))
    assert scene.events() == ["RecyclingPods"]
    assert scene.attempt.stop is not None
    assert scene.attempt.stop.recycle
    assert kinds(scene.last.actions) == ["StopJob", "Emit"], "to delete pods is written down first"
    assert kinds(scene.step()) == ["StopJob", "Delete"]
    scene.change_pod("w0-0", uid="uid-new")
    scene.see(ended(leftovers=None))
    assert kinds(scene.step()) == ["PatchCluster"], "the pod that came in its place is let alone"
    assert scene.status.replicas == []


def test_recycled_after_the_deadline_although_its_job_has_ended() -> None:
    scene = overdue(ended(leftovers=Leftovers(complete=False)), "Fencing")
    assert kinds(scene.step()) == ["Delete"]


def test_not_recycled_before() -> None:
    scene = serving()
    scene.change(replicas=0)
    scene.step()
    scene.now = later(60)
    assert kinds(scene.step()) == ["StopJob"]
    assert scene.attempt.stop is not None
    assert not scene.attempt.stop.recycle


def test_new_pods_do_not_help_when_ray_is_silent() -> None:
    scene = overdue(UNKNOWN)
    assert scene.attempt.stop is not None
    assert not scene.attempt.stop.recycle
    assert scene.events() == []


def test_but_they_do_when_the_cluster_is_to_go() -> None:
    """The cluster goes before the attempt is fenced, once its pods are gone: then the spec may flip as it likes."""
    scene = serving()
    scene.change(engine={"image": "example/engine:3"})
    scene.step()
    scene.step()
    old = next(iter(scene.clusters.values()))
    scene.see(UNKNOWN)
    scene.now = later(61)
    scene.step()
    assert [a.name for a in scene.step() if isinstance(a, Delete)] == ["w0-0"]
    scene.clusters[old.name] = build.cluster(old.name, [build.head(cluster=old.name)])
    assert [a.name for a in scene.step() if isinstance(a, Delete)] == [old.name]
    assert scene.phase == "Stopping", "Ray has not said that it is gone"
    scene.clusters = {}
    assert kinds(scene.step()) == ["Create"]
    assert (scene.phase, scene.replica.last_fence.how) == ("Pending", "PodsGone")  # type: ignore[union-attr]


def test_a_job_that_waits_is_not_recycled() -> None:
    scene = overdue(build.view(build.job("PENDING", driver_ip=None)))
    assert kinds(scene.last.actions) == ["StopJob"]
    assert scene.attempt.stop is not None
    assert not scene.attempt.stop.recycle


def test_a_job_that_runs_on_beyond_its_pods_is_given_another_time() -> None:
    scene = overdue(build.view(build.job()))
    scene.change_pod("w0-0", uid="uid-new")
    scene.step()
    assert scene.attempt.stop is not None
    assert (scene.attempt.stop.recycle, scene.attempt.stop.time) == (False, scene.now)
    assert [ref.uid for ref in scene.attempt.session.slot] == ["uid-new"]
    scene.now = later(61 + 61)
    scene.step()
    assert [a.uid for a in scene.step() if isinstance(a, Delete)] == ["uid-new"]


def test_one_that_was_drained_is_given_another_time_too() -> None:
    scene = serving(spec_with(engine={"drainTimeoutSeconds": 10}))
    scene.change(replicas=0)
    scene.step()
    scene.step()
    scene.see(build.view(build.job()))
    for seconds in (11, 12, 11 + 61):
        scene.now = later(seconds)
        scene.step()
    assert scene.attempt.stop is not None
    assert scene.attempt.stop.recycle
    scene.change_pod("w0-0", uid="uid-new")
    scene.step()
    assert kinds(scene.step()) == ["StopJob"], "its time in the new pods has just begun"
    assert not scene.attempt.stop.recycle
    scene.now = later(11 + 61 + 60)
    assert kinds(scene.step()) == ["StopJob"]
    scene.now = later(11 + 61 + 61)
    scene.step()
    assert [a.uid for a in scene.step() if isinstance(a, Delete)] == ["uid-new"]


def test_a_submission_that_reached_a_new_head_is_stopped_there() -> None:
    scene = starting()
    scene.change_pod("head", uid="uid-new-head")
    scene.step()
    scene.change_pod("w0-0", uid="uid-new")
    scene.see(build.view(build.job()))
    assert kinds(scene.step()) == ["StopJob"]
    assert [ref.uid for ref in scene.attempt.session.slot] == ["uid-new"], "what it may be in now"
    scene.see(ended())
    scene.step()
    assert scene.phase == "Fencing", "a Ray that is not its own cannot say that nothing is left"
    assert [a.uid for a in scene.step() if isinstance(a, Delete) and a.kind == "Pod"] == ["uid-new"]


def test_one_that_cannot_be_stopped_there_loses_its_pods() -> None:
    scene = starting()
    scene.change_pod("head", uid="uid-new-head")
    scene.step()
    scene.see(build.view(build.job()))
    scene.step()
    scene.now = later(61)
    scene.step()
    assert [a.uid for a in scene.step() if isinstance(a, Delete) and a.kind == "Pod"] == ["uid-w0-0"]


def test_never_submitted() -> None:
    scene = starting()
    scene.change(replicas=0)
    scene.step()
    scene.now = later(59)
    assert kinds(scene.step()) == []
    assert scene.replica.attempt is not None
    scene.now = later(60)
    scene.step()
    assert scene.status.replicas == []
    assert scene.events() == ["Fenced"]


def test_a_late_submission_is_stopped() -> None:
    scene = starting()
    scene.change(replicas=0)
    scene.step()
    scene.now = later(50)
    scene.see(build.view(build.job("PENDING", driver_ip=None)))
    assert kinds(scene.step()) == ["StopJob"]
    scene.now = later(60)
    scene.step()
    assert scene.replica.attempt is not None


@pytest.mark.parametrize("status", ["STOPPED", "SUCCEEDED", "FAILED"])
def test_an_ended_job_is_not_stopped_again(status: JobStatus) -> None:
    scene = serving()
    scene.change(replicas=0)
    scene.step()
    scene.see(ended(status, leftovers=None))
    assert kinds(scene.step()) == []


def test_a_cluster_deleted_by_somebody_takes_its_pods_into_account() -> None:
    scene = serving()
    workers = scene.target.slot("slot-0")
    scene.orphans = tuple(p for p in scene.target.pods if not p.is_head)
    scene.clusters = {}
    scene.see(UNKNOWN)
    assert kinds(scene.step()) == ["Create"]
    assert (scene.phase, scene.attempt.stop.reason) == ("Fencing", "HeadLost")  # type: ignore[union-attr]
    assert [a.name for a in scene.step() if isinstance(a, Delete)] == [workers[0].name]
    scene.orphans = ()
    scene.step()
    assert scene.phase == "Backoff"
