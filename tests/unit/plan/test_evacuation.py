"""Nodes are cordoned and pods deleted, as logs: replicas drain first, and start again elsewhere."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.unit.plan import build
from tests.unit.plan.build import PLAIN, later, spec_with
from tests.unit.plan.rolls import Play
from vllm_ray_operator.plan.actions import Delete, StopJob, SubmitJob

NEW = {"args": ["--seed=1"]}
DRAIN = {"drainTimeoutSeconds": 600}


def deleted(play: Play) -> list[str]:
    return [a.name for a in play.scene.last.actions if isinstance(a, Delete) and a.kind == "Pod"]


def test_a_replica_leaves_a_cordoned_node() -> None:
    play = Play(spec_with(replicas=2))
    play.cordon(1)
    assert play.run(1) == ["Ready1  Stopping2"]
    assert play.scene.events() == ["NodeDrained"]
    assert play.scene.status.replicas[1].message == "node node-1 of its pod w1-0 is cordoned"
    play.until("Ready1  Pending")
    play.step()
    assert (deleted(play), play.scene.events()) == (["w1-0"], ["PodOnCordonedNode"])
    play.until("Ready1  Ready3")
    assert play.until_rest() == []
    assert play.scene.status.replicas[1].last_failure is None
    assert play.scene.status.replicas[1].next_start_time is None


def test_no_more_at_a_time_than_may_be_unavailable() -> None:
    play = Play(spec_with(replicas=3))
    play.cordon(0, 1, 2)
    assert play.until_rest() == [
        "Stopping1  Ready2  Ready3",
        "Pending  Ready2  Ready3",
        "Starting4  Ready2  Ready3",
        "Ready4  Stopping2  Ready3",
        "Ready4  Pending  Ready3",
        "Ready4  Starting5  Ready3",
        "Ready4  Ready5  Stopping3",
        "Ready4  Ready5  Pending",
        "Ready4  Ready5  Starting6",
        "Ready4  Ready5  Ready6",
    ]


def test_the_others_say_why_they_stay() -> None:
    play = Play(spec_with(replicas=2))
    play.cordon(0, 1)
    play.step()
    text = "node node-1 of its pod w1-0 is cordoned: it leaves when at least 1 others are ready"
    assert play.scene.status.replicas[1].message == text
    play.cordon(1, back=True)
    play.step()
    assert play.scene.status.replicas[1].message == ""


def test_none_that_serves_leaves_where_none_may_be_unavailable() -> None:
    play = Play(spec_with(replicas=2, rollout={**PLAIN, "maxUnavailable": 0, "maxSurge": 1}))
    play.cordon(0)
    assert play.until_rest() == []
    assert play.scene.status.replicas[0].message.endswith("it leaves when at least 2 others are ready")
    play.scene.change(engine=NEW)
    log = play.until_rest()
    assert log[-1] == "Ready4  Ready5", "with one more for the roll it may"
    assert not play.scene.target.pods[1].cordoned


def test_without_room_elsewhere_it_waits_and_nothing_goes_round() -> None:
    play = Play(spec_with(replicas=2))
    play.full = True
    play.cordon(0, 1)
    assert play.until_rest() == ["Stopping1  Ready2", "Pending  Ready2"]
    assert play.scene.status.replicas[0].message == "0 of 1 worker pods ready: no node can take it"
    condition = play.scene.status.condition("ClusterReady")
    assert condition is not None
    assert (condition.reason, condition.message) == ("Unschedulable", "no node can take it")


def test_an_engine_that_is_only_starting_starts_elsewhere() -> None:
    play = Play(spec_with(replicas=2))
    play.scene.change(engine=NEW)
    play.until("Starting3  Ready2")
    play.step()
    play.cordon(0)
    assert play.run(6) == ["Stopping3  Ready2", "Pending  Ready2", "Starting4  Ready2"]


def test_a_pod_that_is_deleted_leaves_no_choice() -> None:
    play = Play(spec_with(replicas=2))
    play.evict(0)
    play.evict(1)
    assert play.until_rest() == [
        "Stopping1  Stopping2",
        "Pending  Pending",
        "Starting3  Starting4",
        "Ready3  Ready4",
    ]


def test_it_leaves_the_traffic_at_once_and_drains() -> None:
    play = Play(spec_with(replicas=2, engine=DRAIN))
    play.evict(0)
    play.step()
    assert play.log[-1] == "Draining1  Ready2"
    assert play.scene.events() == ["PodDeleted"]
    ready = {name: slice_["endpoints"][0]["conditions"]["ready"] for name, slice_ in play.scene.slices.items()}
    assert ready == {"chat-0": False, "chat-1": True}
    assert not [a for a in play.step() if isinstance(a, StopJob)]
    (first, _) = play.scene.status.replicas
    assert first.attempt is not None
    view = play.scene.views[first.attempt.instance_id]
    play.scene.see(build.view(view.job, engine=build.engine(drained=True)), first.attempt)
    assert play.until_rest() == ["Stopping1  Ready2", "Pending  Ready2", "Starting3  Ready2", "Ready3  Ready2"]
    assert first.last_failure is None


@pytest.mark.parametrize(("grace", "drain"), [(3600.0, 600.0), (100.0, 90.0), (10.0, None)])
def test_a_drain_ends_before_the_pod_does(grace: float, drain: float | None) -> None:
    play = Play(spec_with(engine=DRAIN))
    play.evict(0, grace=grace)
    play.step()
    stop = play.scene.attempt.stop
    assert stop is not None
    assert (stop.reason, stop.drain_deadline) == ("PodDeleted", None if drain is None else later(drain))


@pytest.mark.parametrize("grace", [90.0, 20.0])
def test_a_drain_that_has_begun_ends_before_the_pod_does(grace: float) -> None:
    """As in kubectl drain: the cordon first, then the eviction, with the grace that the pod was made with."""
    play = Play(spec_with(engine=DRAIN))
    play.cordon(0)
    play.step()
    assert play.scene.attempt.stop is not None
    assert play.scene.attempt.stop.drain_deadline == later(600)
    play.evict(0, grace=grace)
    last = play.scene.now + timedelta(seconds=grace - 10)
    play.scene.now = last - timedelta(seconds=1)
    assert not [a for a in play.step() if isinstance(a, StopJob)]
    assert play.scene.last.wake_after is not None
    assert play.scene.last.wake_after <= 1
    play.scene.now = last
    play.step()
    assert [a for a in play.step() if isinstance(a, StopJob)]


def test_fewer_replicas_are_those_whose_pods_go_anyway() -> None:
    play = Play(spec_with(replicas=3))
    play.evict(0)
    play.scene.change(replicas=2)
    assert play.until_rest() == ["Stopping1  Ready2  Ready3", "1:Ready2  2:Ready3"]


def test_of_several_pods_one_is_deleted() -> None:
    """The engine goes whole; the pods that stay take part in the next one."""
    play = Play(spec_with(replicas=1, cluster={"policy": "PerReplica", "workers": {"acceleratorsPerNode": 1}}))
    before = play.scene.attempt.session.slot
    play.evict(0, number=1)
    assert play.until_rest() == ["Stopping1 | A0", "Pending | A0", "Starting2 | A0", "Ready2 | A0"]
    after = play.scene.attempt.session.slot
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False]


@pytest.mark.parametrize("leave", [Play.cordon, Play.evict])
def test_no_standby_stays_behind(leave: object) -> None:
    play = Play(spec_with(replicas=1, rollout={}))
    play.scene.change(engine=NEW)
    play.until("Ready1+2")
    play.cordon(0) if leave is Play.cordon else play.evict(0)
    log = play.until_rest()
    assert log[0] == "Stopping1+2"
    assert log[-2:] == ["Starting3", "Ready3"]
    assert play.scene.replica.standby_failure is None
    assert play.scene.replica.revision == play.scene.status.engine_revision, "the roll is over with it"
    assert play.scene.status.rollout is None


def test_no_standby_comes_up_where_it_would_have_to_leave() -> None:
    play = Play(spec_with(replicas=2, rollout={}))
    play.cordon(0, 1)
    play.scene.change(engine=NEW)
    log = play.until_rest()
    assert not any("+" in line for line in log)
    assert log[-1] == "Ready3  Ready4"


# -- the node of the head ----------------------------------------------------------------------------------------------


def test_all_leave_a_head_on_a_cordoned_node_together_when_they_may() -> None:
    play = Play(spec_with(replicas=2, rollout={**PLAIN, "maxUnavailable": 2}))
    play.cordon_head()
    assert play.until_rest() == ["Stopping1  Stopping2", "Pending  Pending", "Starting3  Starting4", "Ready3  Ready4"]
    assert play.scene.target.head is not None
    assert not play.scene.target.head.cordoned, "another was made elsewhere"
    assert play.scene.status.replicas[0].last_failure is None, "none was lost with it"


def test_they_stay_when_they_may_not() -> None:
    play = Play(spec_with(replicas=2))
    play.cordon_head()
    assert play.until_rest() == []
    text = (
        "node node-1 of the Ray cluster's head is cordoned: the 2 replicas on it leave together when at least 1 others"
    )
    assert play.scene.replica.message == f"{text} are ready"
    play.crash(0)
    assert play.until_rest()[-1] == "Ready3  Ready2", "one that fails starts again where the others are"


def test_with_a_head_each_they_leave_one_by_one() -> None:
    play = Play(spec_with(replicas=2, cluster={"policy": "PerReplica"}))
    play.cordon_head()
    assert play.until_rest() == [
        "Stopping1  Ready2 | A0 A1",
        "Pending  Ready2 | A0 A1",
        "Starting3  Ready2 | A0 A1",
        "Ready3  Stopping2 | A0 A1",
        "Ready3  Pending | A0 A1",
        "Ready3  Starting4 | A0 A1",
        "Ready3  Ready4 | A0 A1",
    ]


def test_engines_that_outlive_their_head_stay() -> None:
    play = Play(spec_with(replicas=1))
    play.scene.change_cluster(outlives_head=True)
    play.cordon_head()
    assert play.until_rest() == []


def test_a_standby_of_a_replica_that_leaves_with_its_head_ends_too() -> None:
    play = Play(spec_with(replicas=1, rollout={}))
    play.scene.change(engine=NEW)
    play.until("Ready1+2")
    play.cordon_head()
    log = play.until_rest()
    assert log[0] == "Stopping1+2"
    assert log[-1] == "Ready3"
    assert not any(line.startswith(("Starting2", "Ready2")) for line in log)


def test_pods_are_not_deleted_while_an_engine_may_run_that_the_status_has_lost() -> None:
    scene = build.begun()
    scene.change_cluster(submissions=None)
    scene.change_pod("w0-0", cordoned=True)
    assert not [a for a in scene.step() if isinstance(a, Delete)]
    scene.change_cluster(submissions=())
    assert [a.name for a in scene.step() if isinstance(a, Delete)] == ["w0-0"]
    assert scene.replica.message == "node node-1 of its pod w0-0 is cordoned"


def test_a_pod_is_replaced_while_its_replica_waits_after_a_failure() -> None:
    play = Play(spec_with(replicas=1))
    play.crash(0)
    play.until("Backoff")
    play.cordon(0)
    play.step()
    assert (deleted(play), play.log[-1]) == (["w0-0"], "Backoff")
    play.scene.now += timedelta(seconds=10)
    assert play.until_rest() == ["Starting2", "Ready2"]


def test_what_fails_while_its_pod_is_deleted_is_a_failure() -> None:
    play = Play(spec_with(replicas=1))
    play.evict(0)
    play.crash(0)
    play.step()
    failure = play.scene.replica.last_failure
    assert failure is not None
    assert failure.reason == "WorkerDied"
    assert not [a for a in play.step() if isinstance(a, SubmitJob)]


def test_an_engine_that_hangs_does_not_get_all_the_time_of_its_evicted_pod() -> None:
    scene = build.serving()
    scene.change_pod("w0-0", deleting=True, ends=later(3600))
    scene.change_pod("head", restarts=1)
    scene.see(build.UNKNOWN)
    scene.step()
    (action,) = (a for a in scene.step() if isinstance(a, Delete) and a.kind == "Pod")
    assert (action.name, action.grace_seconds) == ("w0-0", 1)
    scene.change_pod("w0-0", ends=scene.now)
    assert not [a for a in scene.step() if isinstance(a, Delete)], "it ends as fast as it can"
