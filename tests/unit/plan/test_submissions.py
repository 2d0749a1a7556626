"""Attempts that Ray knows and the status does not: a lost status, or one from a backup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.unit.plan import build
from tests.unit.plan.build import NOTHING_LEFT, Scene, serving, spec_with
from vllm_ray_operator.api.status import Attempt, VLLMDeploymentStatus
from vllm_ray_operator.plan import engine_job, revision, submissions
from vllm_ray_operator.plan.actions import Action, StopJob, SubmitJob
from vllm_ray_operator.plan.world import AttemptView, JobStatus, Submission

LOST = VLLMDeploymentStatus()


def submission(scene: Scene, attempt: Attempt, replica: int = 0, status: JobStatus = "RUNNING") -> Submission:
    """As Ray lists what we submitted."""
    deployment = scene.world.deployment
    return Submission(attempt.instance_id, status, submissions.metadata(deployment, replica, attempt))


def attempt_of(scene: Scene, number: int, nonce: str = "lost", **changes: Any) -> Attempt:
    """One that was begun after the backup was made."""
    return build.attempt_on(
        scene.target, number=number, nonce=nonce, instance_id=f"chat-1a2b3c4d-a{number}-{nonce}", **changes
    )


def lists(scene: Scene, *listed: Submission) -> None:
    scene.change_cluster(submissions=listed)


def numbers(scene: Scene) -> list[list[int]]:
    return [[a.number for a in r.attempts] for r in scene.status.replicas]


def ids(actions: Sequence[Action], kind: type[StopJob] | type[SubmitJob]) -> list[str]:
    return [a.submission_id for a in actions if isinstance(a, kind)]


def ended(scene: Scene, attempt: Attempt) -> None:
    scene.see(build.view(build.job("STOPPED"), leftovers=NOTHING_LEFT), attempt)


def test_what_a_submission_says_of_itself() -> None:
    scene = build.starting()
    attempt = scene.attempt
    job = engine_job.submission(scene.world.deployment, 0, attempt, revision.render_engine(scene.world.deployment.spec))
    assert job.metadata == {
        "vllm-ray.dev/deployment": "default/chat",
        "vllm-ray.dev/uid": build.UID,
        "vllm-ray.dev/replica": "0",
        "vllm-ray.dev/attempt": "1",
        "vllm-ray.dev/nonce": "n1",
        "vllm-ray.dev/turn": "0",
        "vllm-ray.dev/engine-revision": attempt.engine_revision,
    }
    assert all(isinstance(value, str) for value in job.metadata.values()), "Ray takes nothing else"


def test_a_lost_status_finds_the_engine_that_runs() -> None:
    """It is named, drained, stopped and proven gone before its slot is used; the next number is higher."""
    scene = serving(spec_with(engine={"drainTimeoutSeconds": 20}))
    running = scene.attempt
    lists(scene, submission(scene, running))
    scene.status = LOST
    assert ids(scene.step(), SubmitJob) == []
    assert scene.events() == ["UnknownAttempt"]
    assert (scene.phase, scene.attempt.number, scene.status.last_attempt) == ("Draining", 1, 1)
    assert scene.attempt.model_copy(update={"stop": None, "start_time": running.start_time}) == running.model_copy(
        update={"endpoint": None, "ray_job_ids": [], "ready_time": None}
    )

    assert ids(scene.step(), StopJob) == []
    assert scene.attempt.endpoint is not None, "its clients may finish"
    scene.now += timedelta(seconds=20)
    scene.step()
    assert ids(scene.step(), StopJob) == [running.instance_id]
    ended(scene, running)
    scene.step()
    assert scene.phase == "Pending"
    assert scene.replica.last_fence is not None
    assert scene.replica.last_fence.attempt == 1
    lists(scene, submission(scene, running, status="STOPPED"))
    scene.step()
    assert numbers(scene) == [[2]]


def test_nothing_begins_before_ray_has_told() -> None:
    scene = build.begun()
    scene.change_cluster(submissions=None)
    scene.step()
    assert (numbers(scene), scene.replica.message) == ([[]], "waiting for Ray's list of submissions")
    lists(scene)
    scene.step()
    assert numbers(scene) == [[1]]


def test_no_standby_begins_before_ray_has_told() -> None:
    scene = serving(spec_with(rollout={}))
    scene.change_cluster(submissions=None)
    scene.change(engine={"args": ["--seed=1"]})
    scene.step()
    scene.step()
    assert numbers(scene) == [[1]]
    lists(scene)
    scene.step()
    assert numbers(scene) == [[1, 2]]


def test_a_status_from_a_backup_takes_the_number_from_ray() -> None:
    """All that was begun since has ended, and is proven gone first."""
    scene = serving()
    first = scene.attempt
    newer = [attempt_of(scene, number) for number in (2, 3, 4, 5)]
    ended(scene, first)
    for attempt in newer:
        ended(scene, attempt)
    lists(scene, *(submission(scene, a, status="STOPPED") for a in (first, *newer)))
    for _ in range(12):
        scene.step()
        scene.now += timedelta(seconds=30)
        assert "UnknownAttempt" not in scene.events(), "nothing of it runs"
    assert numbers(scene) == [[6]]
    assert scene.status.last_attempt == 6


def test_of_those_that_ended_only_the_newest_two_may_have_left_something() -> None:
    scene = build.begun()
    old = [attempt_of(scene, number) for number in range(1, 9)]
    lists(scene, *(submission(scene, a, status="FAILED") for a in old))
    scene.step()
    assert (numbers(scene), scene.status.last_attempt) == ([[7, 8]], 8)


def test_one_that_ended_and_left_something_keeps_its_slot() -> None:
    scene = build.begun()
    lost = attempt_of(scene, 7)
    lists(scene, submission(scene, lost, status="FAILED"))
    left = build.Leftovers(complete=True, actors=("worker (ALIVE)",))
    scene.see(build.view(build.job("FAILED"), leftovers=left), lost)
    for _ in range(3):
        assert ids(scene.step(), SubmitJob) == []
    assert (scene.phase, numbers(scene)) == ("Fencing", [[7]])
    scene.see(build.view(build.job("FAILED"), leftovers=NOTHING_LEFT), lost)
    scene.step()
    scene.step()
    assert numbers(scene) == [[8]]


def test_an_attempt_and_its_standby() -> None:
    scene = build.begun()
    old, waiting = attempt_of(scene, 7), attempt_of(scene, 8, turn=1)
    lists(scene, submission(scene, old), submission(scene, waiting))
    for attempt in (old, waiting):
        scene.see(build.view(), attempt)
    scene.step()
    assert numbers(scene) == [[7, 8]]
    assert sorted(ids(scene.step(), StopJob)) == [old.instance_id, waiting.instance_id]
    ended(scene, old)
    scene.step()
    assert numbers(scene) == [[8]], "it does not take over"
    ended(scene, waiting)
    lists(scene, submission(scene, old, status="STOPPED"), submission(scene, waiting, status="STOPPED"))
    scene.step()
    scene.step()
    assert numbers(scene) == [[9]]


def test_a_standby_that_the_status_does_not_know_beside_an_engine_that_it_knows() -> None:
    """The engine serves on."""
    scene = serving(spec_with(rollout={}))
    lost = attempt_of(scene, 7, turn=1)
    lists(scene, submission(scene, scene.attempt), submission(scene, lost))
    scene.see(build.view(build.job(), engine=build.engine(ready=False, phase="Standby")), lost)
    scene.step()
    assert numbers(scene) == [[1, 7]]
    assert ids(scene.step(), StopJob) == [lost.instance_id]
    assert scene.phase == "Ready"
    ended(scene, lost)
    scene.step()
    assert (numbers(scene), scene.phase, scene.replica.standby_failure) == ([[1]], "Ready", None)


def test_the_engine_of_a_replica_that_is_not_asked_for_any_more() -> None:
    scene = serving(spec_with(replicas=2))
    second = scene.status.replicas[1].attempt
    assert second is not None
    lists(scene, submission(scene, second, replica=1))
    scene.status = LOST
    scene.change(replicas=0)
    scene.step()
    assert [(r.index, r.phase) for r in scene.status.replicas] == [(1, "Stopping")]
    assert ids(scene.step(), StopJob) == [second.instance_id]
    ended(scene, second)
    scene.step()
    assert scene.status.replicas == []


def test_a_third_that_has_no_room_waits_and_nothing_begins() -> None:
    scene = build.begun()
    three = [attempt_of(scene, number) for number in (5, 6, 7)]
    for attempt in three:
        scene.see(build.view(), attempt)
    lists(scene, *(submission(scene, a) for a in three))
    scene.step()
    assert (numbers(scene), scene.status.last_attempt) == ([[5, 6]], 6)
    ended(scene, three[0])
    ended(scene, three[1])
    lists(scene, submission(scene, three[2]))
    scene.step()
    scene.step()
    assert (numbers(scene), scene.status.last_attempt) == ([[7]], 7)


STRANGERS: dict[str, dict[str, Any]] = {
    "of another deployment": {"vllm-ray.dev/uid": "9z"},
    "with another number than its id has": {"vllm-ray.dev/attempt": "8"},
    "with a number that is none": {"vllm-ray.dev/attempt": "-7"},
    "with a number without end": {"vllm-ray.dev/attempt": "7" * 5000},
    "for no replica": {"vllm-ray.dev/replica": ""},
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_submission_of_somebody_else_is_left_alone(name: str) -> None:
    scene = build.begun()
    ours = submission(scene, attempt_of(scene, 7))
    lists(scene, replace(ours, metadata={**ours.metadata, **STRANGERS[name]}), replace(ours, metadata={}))
    scene.step()
    assert numbers(scene) == [[1]]


def test_suspended_with_a_lost_status_it_is_drained_before_the_raycluster_goes() -> None:
    scene = serving()
    running = scene.attempt
    lists(scene, submission(scene, running))
    scene.status = LOST
    scene.change(suspend=True)
    actions = [*scene.step(), *scene.step()]
    assert not [a for a in actions if getattr(a, "kind", "") == "RayCluster"]
    assert ids(actions, StopJob) == [running.instance_id]


def test_at_rest_the_list_is_not_needed() -> None:
    scene = serving(spec_with(replicas=2))
    assert not submissions.are_needed(scene.world.deployment, scene.world.clusters)
    scene.change(replicas=3)
    assert submissions.are_needed(scene.world.deployment, scene.world.clusters)


def test_before_a_raycluster_goes_on_which_nothing_is_known_to_run() -> None:
    scene = serving()
    scene.change(replicas=0)
    assert not submissions.are_needed(scene.world.deployment, scene.world.clusters)
    scene.status = LOST
    assert submissions.are_needed(scene.world.deployment, scene.world.clusters)


def test_ray_that_was_never_asked_is_no_obstacle_to_one_that_runs() -> None:
    scene = serving()
    scene.change_cluster(submissions=None)
    assert scene.step() == ()
    assert scene.phase == "Ready"


def test_unsubmitted_numbers_may_come_again_ids_do_not() -> None:
    """What only the lost status knew was never begun; the nonce tells them apart."""
    scene = build.starting()
    before = scene.attempt.instance_id
    scene.status = LOST
    scene.step()
    assert scene.attempt.number == 1
    assert scene.attempt.instance_id != before
    scene.views[scene.attempt.instance_id] = AttemptView(job="absent")
    assert ids(scene.step(), SubmitJob) == [scene.attempt.instance_id]


def test_what_a_backup_was_about_to_submit_waits_for_what_runs_in_its_slot() -> None:
    """In the time that was lost it was given up, and another was begun."""
    scene = build.starting()
    lost = attempt_of(scene, 7)
    scene.see(build.view(), lost)
    lists(scene, submission(scene, lost))
    assert submissions.are_needed(scene.world.deployment, scene.world.clusters)
    assert ids(scene.step(), SubmitJob) == []
    assert numbers(scene) == [[1, 7]]
    actions = scene.step()
    assert (ids(actions, SubmitJob), ids(actions, StopJob)) == ([], [lost.instance_id])
    ended(scene, lost)
    lists(scene, submission(scene, lost, status="STOPPED"))
    scene.step()
    assert ids(scene.step(), SubmitJob) == [scene.attempt.instance_id]
    assert numbers(scene) == [[1]]
