"""Rolls, as logs: each line the phase and the attempt of every replica."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.plan import build
from tests.unit.plan.build import PLAIN, UNKNOWN, serving, spec_with
from tests.unit.plan.rolls import Play
from vllm_ray_operator.api.spec import Rollout, VLLMDeploymentSpec
from vllm_ray_operator.api.status import ConditionType
from vllm_ray_operator.plan import revision, rollout
from vllm_ray_operator.plan.actions import DrainEngine, SubmitJob
from vllm_ray_operator.plan.rollout import Limits

NEW, NEWER = {"args": ["--seed=1"]}, {"args": ["--seed=2"]}


def runs(what: dict[str, Any]) -> Any:
    """Whether a submission has these arguments."""
    return lambda job: json.loads(job.environment["VLLM_RAY_ENGINE_CONFIG"])["args"] == what["args"]


def reason(play: Play, kind: ConditionType) -> str:
    found = play.scene.status.condition(kind)
    assert found is not None
    return f"{found.status} {found.reason}"


def updated(play: Play) -> list[bool]:
    """Of each replica, whether it is at the newest engine revision."""
    return [r.revision == play.scene.status.engine_revision for r in play.scene.status.replicas]


# -- the order ---------------------------------------------------------------------------------------------------------


def test_one_after_the_other() -> None:
    play = Play(spec_with(replicas=2))
    play.scene.change(engine=NEW)
    assert play.until_rest() == [
        "Stopping1  Ready2",
        "Pending  Ready2",
        "Starting3  Ready2",
        "Ready3  Stopping2",
        "Ready3  Pending",
        "Ready3  Starting4",
        "Ready3  Ready4",
    ]
    assert updated(play) == [True, True]
    assert play.scene.status.rollout is None
    assert play.scene.status.updated_replicas == 2


def test_two_at_a_time() -> None:
    play = Play(spec_with(replicas=4, rollout={**PLAIN, "maxUnavailable": "50%"}))
    play.scene.change(engine=NEW)
    assert play.until_rest() == [
        "Stopping1  Stopping2  Ready3  Ready4",
        "Pending  Pending  Ready3  Ready4",
        "Starting5  Starting6  Ready3  Ready4",
        "Ready5  Ready6  Stopping3  Stopping4",
        "Ready5  Ready6  Pending  Pending",
        "Ready5  Ready6  Starting7  Starting8",
        "Ready5  Ready6  Ready7  Ready8",
    ]


def test_all_at_once() -> None:
    play = Play(spec_with(replicas=2, rollout={**PLAIN, "type": "Recreate"}))
    play.scene.change(engine=NEW)
    assert play.until_rest() == [
        "Stopping1  Stopping2",
        "Pending  Pending",
        "Starting3  Starting4",
        "Ready3  Ready4",
    ]


def test_one_more_for_the_time_of_the_roll() -> None:
    play = Play(spec_with(replicas=2, rollout={**PLAIN, "maxUnavailable": 0, "maxSurge": 1}))
    play.scene.change(engine=NEW)
    assert play.until_rest() == [
        "Ready1  Ready2  Pending",
        "Ready1  Ready2  Starting3",
        "Stopping1  Ready2  Ready3",
        "Pending  Ready2  Ready3",
        "Starting4  Ready2  Ready3",
        "Ready4  Stopping2  Ready3",
        "Ready4  Pending  Ready3",
        "Ready4  Starting5  Ready3",
        "Ready4  Ready5  Ready3",
        "Ready4  Ready5  Stopping3",
        "Ready4  Ready5",
    ]


def test_those_that_do_not_serve_go_first() -> None:
    play = Play(spec_with(replicas=3))
    third = play.scene.status.replicas[2].attempt
    assert third is not None
    view = play.scene.views[third.instance_id]
    play.scene.see(build.view(view.job, engine=build.engine(ready=False, phase="Serving")), third)
    assert play.run(1) == ["Ready1  Ready2  NotReady3"]
    play.scene.change(engine=NEW)
    assert play.until_rest()[:4] == [
        "Ready1  Ready2  Stopping3",
        "Ready1  Ready2  Pending",
        "Ready1  Ready2  Starting4",
        "Stopping1  Ready2  Ready4",
    ]


def test_changed_in_the_middle_it_goes_straight_to_the_newest() -> None:
    play = Play(spec_with(replicas=3))
    play.scene.change(engine=NEW)
    play.until("Starting4  Ready2  Ready3")
    play.scene.change(engine=NEWER)
    log = play.until_rest()
    assert log[:4] == [
        "Stopping4  Ready2  Ready3",
        "Pending  Ready2  Ready3",
        "Starting5  Ready2  Ready3",
        "Ready5  Stopping2  Ready3",
    ]
    assert log[-1] == "Ready5  Ready6  Ready7", "nobody passed through the one in between"


def test_back_in_the_middle_only_those_that_were_taken_go_back() -> None:
    play = Play(spec_with(replicas=3))
    play.scene.change(engine=NEW)
    play.until("Starting4  Ready2  Ready3")
    play.scene.change(engine={})
    assert play.until_rest()[-1] == "Ready5  Ready2  Ready3"


def test_while_one_is_away_for_another_reason_no_other_is_taken() -> None:
    play = Play(spec_with(replicas=2))
    play.crash(1)
    play.scene.change(engine=NEW)
    log = play.until_rest()
    assert log[:4] == ["Ready1  Backoff", "Ready1  Starting3", "Stopping1  Ready3", "Pending  Ready3"]


def test_silent_ones_are_not_taken_all_for_lost() -> None:
    """It may be us who are cut off."""
    play = Play(spec_with(replicas=3))
    for view in list(play.scene.views):
        play.scene.views[view] = UNKNOWN
    play.run(4)
    assert play.log[-1] == "NotReady1  NotReady2  NotReady3"
    play.scene.change(engine=NEW)
    assert play.run(5) == []


def test_scaled_in_the_middle() -> None:
    play = Play(spec_with(replicas=3))
    play.scene.change(engine=NEW)
    play.run(4)
    play.scene.change(replicas=2)
    assert play.until_rest()[-1] == "1:Ready4  2:Ready5", "the one that did not serve has left"


# -- a revision that is no good ----------------------------------------------------------------------------------------


def test_a_bad_revision_takes_no_more_than_it_may_and_says_so() -> None:
    play = Play(spec_with(replicas=3, rollout={**PLAIN, "progressDeadlineSeconds": 60}), breaks=runs(NEW))
    play.scene.change(engine=NEW)
    play.run(60)
    assert {line.partition("  ")[2] for line in play.log} == {"Ready2  Ready3"}, "the others serve on"
    assert (reason(play, "Ready"), reason(play, "Progressing")) == (
        "False OutOfMemory",
        "False ProgressDeadlineExceeded",
    )
    assert reason(play, "Degraded") == "True CrashLoop"

    play.crash(1)
    play.run(20)
    assert updated(play) == [True, False, False], "past the deadline one that fails starts again as it was"
    assert play.scene.status.replicas[1].phase == "Ready"

    play.scene.change(engine=NEWER)
    play.until_rest()
    assert updated(play) == [True, True, True]
    assert (reason(play, "Ready"), reason(play, "Degraded")) == ("True AllReplicasReady", "False AsExpected")


def test_one_event_tells_of_the_deadline() -> None:
    play = Play(spec_with(replicas=2, rollout={**PLAIN, "progressDeadlineSeconds": 60}), breaks=runs(NEW))
    play.scene.change(engine=NEW)
    events = []
    for _ in range(60):
        play.step()
        events += play.scene.events()
    assert events.count("ProgressDeadlineExceeded") == 1


def test_it_goes_on_when_what_was_in_the_way_is_gone() -> None:
    broken = [True]
    play = Play(
        spec_with(replicas=2, rollout={**PLAIN, "progressDeadlineSeconds": 60}),
        breaks=lambda job: runs(NEW)(job) and broken[0],
    )
    play.scene.change(engine=NEW)
    play.run(60)
    assert reason(play, "Progressing") == "False ProgressDeadlineExceeded"
    broken[0] = False
    play.until_rest()
    assert updated(play) == [True, True]


def test_the_deadline_is_that_of_a_start_and_some_more() -> None:
    spec = VLLMDeploymentSpec.model_validate(
        spec_with(engine={"startupTimeoutSeconds": 100, "drainTimeoutSeconds": 10}, rollout=PLAIN)
    )
    engine = revision.render_engine(spec)
    assert rollout.deadline(spec, engine).total_seconds() == 710
    shorter = spec.model_copy(update={"rollout": Rollout(progress_deadline_seconds=60)})
    assert rollout.deadline(shorter, engine).total_seconds() == 60


# -- paused, restarted, undone -----------------------------------------------------------------------------------------


def test_paused_changes_wait() -> None:
    play = Play(spec_with(replicas=2))
    play.scene.change(engine=NEW, cluster={"rayVersion": "2.61.0"}, rollout={**PLAIN, "paused": True})
    assert play.until_rest() == []
    assert reason(play, "Progressing") == "Unknown RolloutPaused"
    assert reason(play, "Ready") == "True AllReplicasReady"
    play.scene.change(rollout=PLAIN, cluster={})
    assert play.until_rest()[-1] == "Ready3  Ready4"


def test_paused_in_the_middle_it_stays_where_it_is() -> None:
    play = Play(spec_with(replicas=3))
    play.scene.change(engine=NEW)
    play.until("Starting4  Ready2  Ready3")
    play.scene.change(rollout={**PLAIN, "paused": True})
    assert play.until_rest() == ["Ready4  Ready2  Ready3"]
    assert reason(play, "Progressing") == "Unknown RolloutPaused"
    play.crash(2)
    play.run(20)
    assert play.log[-1] == "Ready4  Ready2  Ready5"
    assert updated(play) == [True, False, False], "what fails is restarted as it was"
    play.scene.change(rollout=PLAIN)
    assert play.until_rest()[-1] == "Ready4  Ready6  Ready7"


def test_paused_one_that_was_taken_already_comes_back_as_what_it_was_taken_to() -> None:
    play = Play(spec_with(replicas=2))
    play.scene.change(engine=NEW)
    play.until("Stopping1  Ready2")
    play.scene.change(rollout={**PLAIN, "paused": True})
    play.until_rest()
    assert updated(play) == [True, False]


def test_a_pause_does_not_count_for_the_deadline() -> None:
    play = Play(spec_with(replicas=2, rollout={**PLAIN, "progressDeadlineSeconds": 60}), breaks=runs(NEW))
    play.scene.change(engine=NEW)
    play.run(4)
    play.scene.change(rollout={**PLAIN, "progressDeadlineSeconds": 60, "paused": True})
    play.run(60)
    assert reason(play, "Progressing") == "Unknown RolloutPaused"
    play.scene.change(rollout={**PLAIN, "progressDeadlineSeconds": 60})
    play.run(2)
    assert not reason(play, "Progressing").endswith("ProgressDeadlineExceeded")


def test_restarted_on_demand() -> None:
    play = Play(spec_with(replicas=2))
    play.scene.change(restartedAt="2026-01-02T03:04:05Z")
    assert play.until_rest()[-1] == "Ready3  Ready4"
    play.scene.change(restartedAt="2026-01-02T04:04:05+01:00")
    assert play.until_rest() == [], "the same moment"


def test_undone() -> None:
    play = Play(spec_with(replicas=2))
    first = play.scene.status.engine_revision
    play.scene.change(engine=NEW)
    play.until_rest()
    play.scene.change(rollout={**PLAIN, "toRevision": first})
    play.until_rest()
    assert play.scene.status.engine_revision == first
    assert [r.revision for r in play.scene.status.replicas] == [first, first]
    play.scene.change(rollout=PLAIN)
    play.until_rest()
    assert updated(play) == [True, True]
    assert play.scene.status.engine_revision != first


def test_undo_to_a_revision_that_is_gone() -> None:
    play = Play(spec_with(replicas=2))
    play.scene.change(rollout={**PLAIN, "toRevision": "chat-engine-00000000"})
    assert play.until_rest() == [], "what runs is left alone"
    ready = play.scene.status.condition("Ready")
    assert ready is not None
    assert (ready.status, ready.reason) == ("False", "RevisionNotFound")
    assert str(play.scene.status.engine_revision) in ready.message, "those that there are"


def test_undo_to_a_revision_that_does_not_fit_the_pods() -> None:
    play = Play(spec_with(replicas=1))
    first = play.scene.status.engine_revision
    play.scene.raw = {**play.scene.raw, "parallelism": {"tensor": 4}, "rollout": {**PLAIN, "toRevision": first}}
    play.scene.generation += 1
    play.until_rest()
    ready = play.scene.status.condition("Ready")
    assert ready is not None
    assert ready.reason == "RevisionDoesNotFit"
    assert "tensor 2" in ready.message
    assert "set spec.rollout.toClusterRevision to a revision of the same time" in ready.message


# -- limits ------------------------------------------------------------------------------------------------------------

LIMITS: dict[str, tuple[dict[str, Any], int, Limits]] = {
    "default": ({}, 4, Limits(3, 0, 1)),
    "one replica": ({}, 1, Limits(0, 0, 1)),
    "none": ({}, 0, Limits(0, 0, 1)),
    "shares are rounded down": ({"maxUnavailable": "30%"}, 10, Limits(7, 0, 3)),
    "and up for more": ({"maxUnavailable": 0, "maxSurge": "25%"}, 5, Limits(5, 2, 2)),
    "of few nothing is left": ({"maxUnavailable": "25%"}, 3, Limits(2, 0, 1)),
    "all": ({"maxUnavailable": "100%"}, 3, Limits(0, 0, 3)),
    "more than there are": ({"maxUnavailable": 9}, 3, Limits(0, 0, 3)),
    "both": ({"maxUnavailable": 1, "maxSurge": 1}, 3, Limits(2, 1, 2)),
    "recreate": ({"type": "Recreate", "maxUnavailable": 0, "maxSurge": 3}, 3, Limits(0, 0, 3)),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name: str) -> None:
    policy, replicas, expected = LIMITS[name]
    assert rollout.limits(Rollout.model_validate(policy), replicas) == expected


# -- draining ----------------------------------------------------------------------------------------------------------


def endpoints(play: Play) -> list[dict[str, bool]]:
    return [s["endpoints"][0]["conditions"] for _, s in sorted(play.scene.slices.items())]


GOING = {"ready": False, "serving": True, "terminating": True}
LAST = {"ready": False, "serving": False, "terminating": True}
IN = {"ready": True, "serving": True, "terminating": False}


def test_out_of_traffic_then_drained_then_stopped() -> None:
    play = Play(spec_with(replicas=2, engine={"drainTimeoutSeconds": 20}))
    play.scene.change(engine={**NEW, "drainTimeoutSeconds": 20})
    play.run(2)
    assert play.log[-1] == "Draining1  Ready2"
    assert endpoints(play) == [GOING, IN]
    assert play.run(3) == [], "20 s of nothing but finishing"
    assert play.stopping == set()
    play.run(2)
    assert play.log[-1] == "Stopping1  Ready2"
    assert len(play.stopping) == 1


def test_the_last_one_gets_no_new_clients_as_it_goes() -> None:
    play = Play(spec_with(engine={"drainTimeoutSeconds": 20}))
    play.scene.change(engine={**NEW, "drainTimeoutSeconds": 20})
    play.run(2)
    assert endpoints(play) == [LAST]


def test_a_launcher_that_counts_ends_the_drain() -> None:
    scene = serving(spec_with(engine={"drainTimeoutSeconds": 600}))
    scene.change(replicas=0)
    scene.step()
    assert scene.phase == "Draining"
    scene.see(build.view(build.job(), engine=build.engine(drained=True)))
    assert [a for a in scene.step() if not isinstance(a, SubmitJob)] == [], "clients may still be sent to it"
    scene.now = build.later(4)
    assert [a for a in scene.step() if not isinstance(a, SubmitJob)] == [], "not every kube-proxy may know yet"
    scene.now = build.later(5)
    scene.see(build.view(build.job(), engine=build.engine(drained=False)))
    scene.step()
    assert scene.phase == "Draining", "one is still connected"
    scene.see(build.view(build.job(), engine=build.engine(drained=True)))
    scene.step()
    assert [type(a).__name__ for a in scene.step()] == ["StopJob"]


def test_a_launcher_is_told_to_drain_until_it_says_that_it_does() -> None:
    scene = serving(spec_with(engine={"drainTimeoutSeconds": 600}))
    scene.change(replicas=0)
    assert [type(a).__name__ for a in scene.step()] == ["Apply"], "first it leaves the traffic"
    told = DrainEngine(scene.attempt.instance_id)
    assert [scene.step(), scene.step()] == [(told,), (told,)]
    scene.see(build.view(build.job(), engine=build.engine(drained=False)))
    assert scene.step() == ()
    scene.see(build.view(build.job(), engine=None))
    assert scene.step() == (), "nobody is there to hear it"


def test_an_engine_that_dies_while_it_drains_is_fenced_at_once() -> None:
    scene = serving(spec_with(engine={"drainTimeoutSeconds": 600}))
    scene.change(replicas=0)
    scene.step()
    scene.see(build.view(build.job("FAILED"), leftovers=build.NOTHING_LEFT))
    scene.step()
    assert scene.status.replicas == []


def test_the_time_for_the_fence_begins_after_the_drain() -> None:
    scene = serving(spec_with(engine={"drainTimeoutSeconds": 600}))
    scene.change(engine={**NEW, "drainTimeoutSeconds": 600})
    for seconds in (0, 0, 300, 599, 600, 601, 659):
        scene.now = build.later(seconds)
        scene.step()
        assert scene.events() == []
    scene.now = build.later(661)
    scene.step()
    assert scene.events() == ["RecyclingPods"]
