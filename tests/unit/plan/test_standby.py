"""Rolls with standbys, as logs: `Ready1+3` serves with attempt 1 while 3 stands by."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.plan import build
from tests.unit.plan.build import NOTHING_LEFT, UNKNOWN, spec_with
from tests.unit.plan.rolls import Play
from vllm_ray_operator.plan.actions import Delete, StopJob, SubmitJob
from vllm_ray_operator.plan.world import AttemptView

NEW = {"args": ["--seed=1"]}


def playing(replicas: int = 1, **rollout: Any) -> Play:
    return Play(spec_with(replicas=replicas, rollout=rollout))


def config(job: SubmitJob) -> Any:
    return json.loads(job.environment["VLLM_RAY_ENGINE_CONFIG"])


def standby_fails(attempt: int) -> Any:
    """The standby of that number fails as it comes up."""
    return lambda job: config(job)["standby"] and config(job)["attempt"] == attempt


def fail_with(play: Play, reason: str) -> None:
    replica = play.scene.status.replicas[0]
    assert replica.standby is not None
    job = build.job("FAILED", result={"reason": reason, "message": "no"})
    play.scene.views[replica.standby.instance_id] = AttemptView(job=job, leftovers=NOTHING_LEFT)


def test_the_next_engine_comes_up_beside_the_one_that_serves() -> None:
    play = playing(2)
    play.scene.change(engine=NEW)
    assert play.until_rest() == [
        "Ready1+3  Ready2",
        "Stopping1+3  Ready2",
        "Starting3  Ready2+4",
        "Ready3  Ready2+4",
        "Ready3  Stopping2+4",
        "Ready3  Starting4",
        "Ready3  Ready4",
    ]
    replica = play.scene.status.replicas[0]
    assert (replica.restarts, replica.revision) == (1, play.scene.status.engine_revision)


def test_what_is_submitted_for_a_standby() -> None:
    play = playing()
    play.scene.change(engine=NEW)
    jobs = [a for _ in range(4) for a in play.step() if isinstance(a, SubmitJob)]
    assert [(c["standby"], c["port"], c["controlPort"]) for c in map(config, jobs)] == [(True, 8001, 8071)]
    play.until_rest()
    assert play.scene.attempt.endpoint is not None
    assert play.scene.attempt.endpoint.port == 8001
    (slice_,) = play.scene.slices.values()
    assert [p["port"] for p in slice_["ports"]] == [8001]
    play.scene.change(engine={})
    jobs = [a for _ in range(4) for a in play.step() if isinstance(a, SubmitJob)]
    assert [(c["standby"], c["port"], c["controlPort"]) for c in map(config, jobs)] == [(True, 8000, 8070)]


def test_ports_that_would_meet() -> None:
    """The spec moves the port by one: the standby would want the one that is in use."""
    play = Play(spec_with(engine={"port": 8001}, rollout={}))
    play.scene.change(engine={"port": 8000})
    assert play.until_rest()[0] == "Stopping1"


def test_its_time_counts_from_when_it_may_take_the_accelerators() -> None:
    play = Play(spec_with(engine={"startupTimeoutSeconds": 100}, rollout={}))
    play.scene.change(engine={**NEW, "startupTimeoutSeconds": 100, "drainTimeoutSeconds": 400})
    play.until("Draining1+2")
    play.until("Starting2", limit=200)
    assert (play.scene.now - play.scene.attempt.start_time).total_seconds() > 400
    play.until("Ready2")


def test_one_that_fails_is_done_without() -> None:
    play = Play(spec_with(replicas=2, rollout={}), breaks=standby_fails(3))
    play.scene.change(engine=NEW)
    assert play.until_rest() == [
        "Ready1+3  Ready2",
        "Stopping1  Ready2+4",
        "Pending  Ready2+4",
        "Starting5  Ready2+4",
        "Ready5  Stopping2+4",
        "Ready5  Starting4",
        "Ready5  Ready4",
    ]


def test_one_that_is_too_slow_is_done_without() -> None:
    play = Play(spec_with(engine={"startupTimeoutSeconds": 60}, rollout={}))
    play.scene.change(engine={**NEW, "startupTimeoutSeconds": 60})
    play.until("Ready1+2")
    standby = play.scene.replica.standby
    assert standby is not None
    for _ in range(14):
        play.scene.views[standby.instance_id] = AttemptView(job=build.job("PENDING", driver_ip=None))
        play.step()
    failure = play.scene.replica.standby_failure
    assert failure is not None
    assert failure.reason == "StartupTimeout"
    assert play.until_rest()[-1] == "Ready3"


def test_one_that_was_ready_once_may_be_silent_for_a_moment_however_long_it_waits() -> None:
    play = Play(spec_with(replicas=3, engine={"startupTimeoutSeconds": 60}, rollout={}))
    for replica in play.scene.status.replicas[1:]:
        play.scene.see(UNKNOWN, replica.attempt)
    play.until("Ready1  NotReady2  NotReady3")
    play.scene.change(engine={**NEW, "startupTimeoutSeconds": 60})
    play.until("Ready1+4  NotReady2  NotReady3")
    play.run(2)
    standby = play.scene.replica.standby
    assert standby is not None
    warm = play.scene.views[standby.instance_id]
    for passes in range(20):
        play.scene.see(UNKNOWN if passes == 15 else warm, standby)
        play.step()
    assert play.log[-1] == "Ready1+4  NotReady2  NotReady3", "too few are ready to take it"
    assert play.scene.replica.standby_failure is None


def test_lost_pods_end_a_standby() -> None:
    play = playing()
    play.scene.change(engine=NEW)
    play.until("Ready1+2")
    play.run(1)
    play.scene.change_pod("w0-0", uid="uid-other")
    play.step()
    failure = play.scene.replica.standby_failure
    assert failure is not None
    assert failure.reason == "PodsLost"


@pytest.mark.parametrize("reason", ["InvalidArguments", "ModelInvalid"])
def test_a_fault_of_the_spec_takes_no_engine_that_serves(reason: str) -> None:
    play = playing(2, progressDeadlineSeconds=60)
    play.scene.change(engine=NEW)
    play.until("Ready1+3  Ready2")
    fail_with(play, reason)
    log = play.run(60)
    assert log == ["Ready1  Ready2"]
    ready, progressing = play.scene.status.condition("Ready"), play.scene.status.condition("Progressing")
    assert ready is not None
    assert (ready.status, ready.reason) == ("False", reason)
    assert progressing is not None
    assert progressing.reason == "ProgressDeadlineExceeded"
    play.scene.change(engine={"args": ["--seed=2"]})
    assert play.until_rest()[-1] == "Ready4  Ready5", "a repaired spec is tried at once"


def hang(play: Play, passes: int) -> list[str]:
    """Let every standby be stuck, and return the reasons of Progressing as they changed."""
    reasons = list[str]()
    for _ in range(passes):
        for replica in play.scene.status.replicas:
            if replica.standby is not None and replica.standby.stop is None:
                stuck = build.engine(ready=False, phase="Checking", message="reading the model")
                play.scene.views[replica.standby.instance_id] = build.view(build.job(), engine=stuck)
        play.step()
        condition = play.scene.status.condition("Progressing")
        assert condition is not None
        if reasons[-1:] != [condition.reason]:
            reasons.append(condition.reason)
    return reasons


def test_one_that_hangs_until_the_deadline_ends_the_roll_once() -> None:
    play = playing(2, progressDeadlineSeconds=60)
    play.scene.change(engine=NEW)
    play.until("Ready1+3  Ready2")
    assert hang(play, 100) == ["RollingUpdate", "ProgressDeadlineExceeded"]
    assert play.log[-1] == "Ready1  Ready2"
    failure = play.scene.status.replicas[0].standby_failure
    assert failure is not None
    assert failure.reason == "ProgressDeadlineExceeded"
    assert "reading the model" in failure.message
    ready = play.scene.status.condition("Ready")
    assert ready is not None
    assert "spec.restartedAt" in ready.message
    play.scene.change(rollout={"progressDeadlineSeconds": 6000})
    assert play.until_rest()[0] == "Ready1+4  Ready2", "a roll that goes on tries another"
    assert play.log[-1] == "Ready4  Ready5"


def test_one_that_began_late_is_not_blamed_for_the_deadline_yet() -> None:
    play = playing(2, progressDeadlineSeconds=60)
    play.scene.change_cluster(ray_error="no route to host")
    play.scene.change(engine=NEW)
    assert play.run(10) == []
    play.scene.change_cluster(ray_error="")
    play.until("Ready1+3  Ready2")
    assert "ProgressDeadlineExceeded" in hang(play, 8)
    assert play.log[-1] == "Ready1+3  Ready2"
    assert hang(play, 30)[-1] == "ProgressDeadlineExceeded"
    assert play.log[-1] == "Ready1  Ready2", "now it has had its time"


def test_one_that_was_ready_at_the_deadline_has_not_failed() -> None:
    play = Play(spec_with(replicas=3, rollout={"progressDeadlineSeconds": 60}))
    for replica in play.scene.status.replicas[1:]:
        play.scene.see(UNKNOWN, replica.attempt)
    play.until("Ready1  NotReady2  NotReady3")
    serve = build.view()
    play.scene.change(engine=NEW)
    play.run(40)
    assert play.log[-1] == "Ready1  NotReady2  NotReady3"
    assert play.scene.replica.standby_failure is None
    for replica in play.scene.status.replicas[1:]:
        play.scene.see(
            build.view(build.job(driver_ip=f"10.0.{1 + replica.index}.1"), engine=serve.engine), replica.attempt
        )
    assert play.until_rest()[-1].startswith("Ready"), "what was in the way is gone"
    assert play.scene.status.rollout is None


def test_a_fault_of_the_spec_that_was_repaired_elsewhere_is_tried_again_after_a_pause() -> None:
    play = playing()
    play.scene.change(engine=NEW)
    play.until("Ready1+2")
    fail_with(play, "ModelAccessDenied")
    play.run(5)
    ready = play.scene.status.condition("Ready")
    assert ready is not None
    assert (ready.reason, ready.message.rpartition("; ")[2]) == (
        "ModelAccessDenied",
        "if the cause was not in the spec and is gone, a new spec.restartedAt tries it again",
    )
    play.scene.change(rollout={"paused": True})
    assert play.run(5) == []
    play.scene.change(rollout={})
    assert play.until_rest() == ["Ready1+3", "Stopping1+3", "Starting3", "Ready3"]


def test_a_fault_of_the_spec_that_was_repaired_elsewhere_is_tried_again_on_demand() -> None:
    play = playing()
    play.scene.change(engine=NEW)
    play.until("Ready1+2")
    fail_with(play, "ModelNotFound")
    assert play.run(5) == ["Ready1"]
    play.scene.change(restartedAt="2026-01-02T03:04:05Z")
    assert play.until_rest()[-1] == "Ready3"


def test_one_that_fails_is_told_in_an_event() -> None:
    play = playing()
    play.scene.change(engine=NEW)
    play.until("Ready1+2")
    fail_with(play, "EngineExited")
    play.step()
    assert play.scene.events() == ["StandbyFailed"]


def test_the_engine_that_serves_dies_and_the_standby_takes_over() -> None:
    play = playing()
    play.scene.change(engine=NEW)
    play.until("Ready1+2")
    play.crash(0)
    assert play.run(2)[0] == "Starting2", "no back-off, no new start"
    assert play.until_rest()[-1] == "Ready2"
    assert play.scene.replica.failures == 0


def test_changed_again_the_standby_goes_first() -> None:
    play = playing()
    play.scene.change(engine=NEW)
    play.until("Ready1+2")
    play.scene.change(engine={"args": ["--seed=2"]})
    log = play.until_rest()
    assert log[:2] == ["Ready1+3", "Stopping1+3"]


def test_changed_back_nothing_is_restarted() -> None:
    play = playing()
    play.scene.change(engine=NEW)
    play.until("Ready1+2")
    play.scene.change(engine={})
    assert play.until_rest() == ["Ready1"]


def test_scaled_down_both_go() -> None:
    play = playing(2)
    play.scene.change(engine=NEW)
    play.until("Ready1+3  Ready2")
    play.scene.change(replicas=0)
    play.until_rest()
    assert play.scene.status.replicas == []


def test_paused_the_standby_goes() -> None:
    play = playing()
    play.scene.change(engine=NEW)
    play.until("Ready1+2")
    play.scene.change(rollout={"paused": True})
    assert play.until_rest() == ["Ready1"]


def test_past_the_deadline_a_standby_still_takes_over_from_an_engine_that_was_retired_before() -> None:
    """Else the replica would start again as it was, serve, and be taken again: for ever (seed 200038)."""
    play = playing(2, progressDeadlineSeconds=60)
    play.scene.change(engine={**NEW, "drainTimeoutSeconds": 200})
    play.until("Draining1+3  Ready2")
    play.until("Starting3  Ready2", limit=100)
    play.until_rest()
    assert play.log[-1] == "Ready3  Ready4"


def test_no_pod_is_deleted_under_an_engine_that_serves() -> None:
    """Ray has forgotten the standby's job: only the end of its pods would prove that it is gone, but they serve."""
    play = playing()
    play.scene.change(engine=NEW)
    play.until("Ready1+2")
    play.run(2)
    standby = play.scene.replica.standby
    assert standby is not None
    assert standby.endpoint is not None
    deleted, log = [], len(play.log)
    for _ in range(60):
        play.scene.views[standby.instance_id] = AttemptView(job="absent")
        if play.scene.replica.phase != "Ready":
            break
        deleted += [a for a in play.step() if isinstance(a, Delete) and a.kind == "Pod"]
    assert deleted == []
    assert play.log[log:] == ["Stopping1+2"], "it is done without one, after a while"
    for _ in range(6):
        play.scene.views[standby.instance_id] = AttemptView(job="absent")
        deleted += [a for a in play.step() if isinstance(a, Delete) and a.kind == "Pod"]
    assert [a.name for a in deleted][:1] == ["w0-0"], "now nothing serves in them"


def test_no_new_attempt_while_a_standby_is_not_gone() -> None:
    play = playing()
    play.scene.change(engine=NEW)
    play.until("Ready1+2")
    standby = play.scene.replica.standby
    assert standby is not None
    play.scene.change(engine={"args": ["--seed=2"]})
    for passes in range(8):
        if passes == 3:
            play.crash(0)
        play.scene.views[standby.instance_id] = build.view(build.job(), engine=build.engine(ready=False))
        actions = play.step()
        assert not [a for a in actions if isinstance(a, SubmitJob)]
    assert play.log[-1] == "Fencing+2"
    assert [a for a in actions if isinstance(a, StopJob)]


def test_it_waits_for_ray_and_for_all_its_pods() -> None:
    play = playing()
    play.scene.change_cluster(ray_error="no route to host")
    play.scene.change(engine=NEW)
    assert play.run(4) == []
    play.scene.change_cluster(ray_error="")
    assert play.run(2) == ["Ready1+2"]


def test_with_recreate_there_is_none() -> None:
    play = playing(type="Recreate")
    play.scene.change(engine=NEW)
    assert play.until_rest() == ["Stopping1", "Pending", "Starting2", "Ready2"]
