"""``spec.suspend``, as logs: each line the phase and the attempt of every replica."""

from __future__ import annotations

from typing import Any

from tests.unit.plan import build
from tests.unit.plan.build import PLAIN, spec_with
from tests.unit.plan.rolls import Play
from vllm_ray_operator.api.status import ConditionType
from vllm_ray_operator.plan.actions import SubmitJob

NEW: dict[str, Any] = {"args": ["--seed=1"]}
WARM = {"maxUnavailable": 1}


def reason(play: Play, kind: ConditionType) -> str:
    found = play.scene.status.condition(kind)
    assert found is not None
    return f"{found.status} {found.reason}"


def ids(play: Play) -> list[str]:
    return [a.instance_id for r in play.scene.status.replicas for a in r.attempts]


def assert_suspended(play: Play) -> None:
    """Nothing runs, and nothing is held; what was asked for is still known."""
    status = play.scene.status
    assert {r.phase for r in status.replicas} == {"Stopped"}
    assert len(status.replicas) == play.scene.raw["replicas"]
    assert ids(play) == []
    assert play.scene.clusters == {}
    assert play.scene.slices == {}
    assert list(play.scene.services) == [build.NAME]
    assert len(play.scene.revisions) >= 2
    assert (status.current_replicas, status.replica_summary) == (0, f"0/{len(status.replicas)}")
    assert (reason(play, "Ready"), reason(play, "Progressing")) == ("False Suspended", "False Suspended")
    assert (reason(play, "ClusterReady"), reason(play, "Degraded")) == ("False Suspended", "False AsExpected")


def test_suspended_and_resumed() -> None:
    play = Play(spec_with(replicas=2))
    play.scene.change(suspend=True)
    assert play.run(2) == ["Stopping1  Stopping2"]
    assert reason(play, "Progressing") == "True Suspending"
    assert play.until_rest() == ["Stopped  Stopped"]
    assert_suspended(play)

    play.scene.change(suspend=False)
    assert play.until_rest() == ["Pending  Pending", "Starting3  Starting4", "Ready3  Ready4"]
    assert play.scene.status.rollout is None
    assert reason(play, "Ready") == "True AllReplicasReady"
    assert [r.restarts for r in play.scene.status.replicas] == [1, 1]


def test_all_drain_at_once_and_no_longer_than_they_may() -> None:
    play = Play(spec_with(replicas=2, engine={"drainTimeoutSeconds": 20}))
    play.scene.change(suspend=True)
    assert play.run(2) == ["Draining1  Draining2"]
    assert play.stopping == set()
    assert [s["endpoints"][0]["conditions"]["ready"] for s in play.scene.slices.values()] == [False, False]
    assert play.until_rest() == ["Stopping1  Stopping2", "Stopped  Stopped"]
    assert_suspended(play)


def test_the_raycluster_stays_until_all_are_fenced() -> None:
    play = Play(spec_with(replicas=2))
    slow = play.scene.status.replicas[1].attempt
    assert slow is not None
    play.scene.change(suspend=True)
    for _ in range(6):
        play.scene.views[slow.instance_id] = build.view()  # it does not end
        play.step()
    assert play.log[-1] == "Stopped  Stopping2"
    assert [groups for c in play.scene.clusters.values() for groups in c.groups] == [("slot-1", 1)]
    assert play.deleted == []
    play.until_rest()
    assert_suspended(play)
    assert len(play.deleted) == 1


def test_in_the_middle_of_a_roll() -> None:
    """When they start again they are all the newest: that is no roll."""
    play = Play(spec_with(replicas=3))
    play.scene.change(engine=NEW)
    play.until("Ready4  Stopping2  Ready3")
    play.scene.change(suspend=True)
    assert play.until_rest() == [
        "Stopping4  Stopping2  Stopping3",
        "Stopping4  Stopped  Stopping3",
        "Stopped  Stopped  Stopped",
    ]
    assert_suspended(play)
    assert play.scene.status.rollout is None
    play.scene.change(suspend=False)
    assert play.until_rest()[-1] == "Ready5  Ready6  Ready7"
    assert {r.revision for r in play.scene.status.replicas} == {play.scene.status.engine_revision}


def test_with_a_standby_up() -> None:
    play = Play(spec_with(replicas=1, rollout=WARM))
    play.scene.change(engine=NEW)
    play.until("Ready1+2")
    play.scene.change(suspend=True)
    assert play.until_rest() == ["Stopping1+2", "Pending+2", "Fencing+2", "Stopped"]
    assert_suspended(play)
    play.scene.change(suspend=False)
    assert play.until_rest()[-1] == "Ready3"


def test_while_a_standby_takes_over() -> None:
    play = Play(spec_with(replicas=1, rollout=WARM))
    play.scene.change(engine=NEW)
    play.until("Starting2")
    play.scene.change(suspend=True)
    assert play.until_rest() == ["Stopping2", "Stopped"]
    assert_suspended(play)


def test_with_one_more_for_the_roll() -> None:
    play = Play(spec_with(replicas=1, rollout={**PLAIN, "maxUnavailable": 0, "maxSurge": 1}))
    play.scene.change(engine=NEW)
    play.until("Ready1  Starting2")
    play.scene.change(suspend=True)
    assert play.until_rest() == ["Stopping1  Stopping2", "Stopped  Stopping2", "Stopped"]
    assert_suspended(play)
    play.scene.change(suspend=False)
    assert play.until_rest() == ["Pending", "Starting3", "Ready3"]


def test_in_the_middle_of_a_scale_up() -> None:
    play = Play(spec_with(replicas=1))
    play.scene.change(replicas=3)
    play.until("Ready1  Starting2  Starting3")
    play.scene.change(suspend=True)
    play.until_rest()
    assert_suspended(play)
    play.scene.change(suspend=False)
    assert play.until_rest()[-1] == "Ready4  Ready5  Ready6"


def test_scaled_while_suspended() -> None:
    play = Play(spec_with(replicas=2))
    play.scene.change(suspend=True)
    play.until_rest()
    play.scene.change(replicas=1)
    assert play.until_rest() == ["Stopped"]
    play.scene.change(replicas=3)
    assert play.until_rest() == ["Stopped  Stopped  Stopped"]
    assert_suspended(play)
    play.scene.change(suspend=False)
    assert play.until_rest()[-1] == "Ready3  Ready4  Ready5"


def test_edited_while_suspended() -> None:
    play = Play(spec_with(replicas=2))
    old = play.scene.status
    play.scene.change(suspend=True)
    play.until_rest()
    play.scene.change(engine=NEW, cluster={"rayVersion": "2.61.0"})
    assert play.until_rest() == []
    assert_suspended(play)
    play.scene.change(suspend=False)
    assert play.until_rest() == ["Pending  Pending", "Starting3  Starting4", "Ready3  Ready4"]
    now = play.scene.status
    assert now.ray_cluster != old.ray_cluster
    assert {r.revision for r in now.replicas} == {now.engine_revision} != {old.engine_revision}
    assert now.updated_replicas == 2


def test_suspended_from_the_beginning() -> None:
    scene = build.Scene(spec_with(replicas=2, suspend=True))
    actions = [action for _ in range(4) for action in scene.step()]
    assert {a.manifest["kind"] for a in actions if hasattr(a, "manifest")} == {"ControllerRevision", "Service"}
    assert [r.phase for r in scene.status.replicas] == ["Stopped", "Stopped"]
    assert scene.last.actions == ()
    assert scene.last.wake_after is None


def test_resumed_before_all_have_stopped() -> None:
    play = Play(spec_with(replicas=1, engine={"drainTimeoutSeconds": 20}))
    play.scene.change(suspend=True)
    play.until("Draining1")
    play.scene.change(suspend=False)
    assert play.until_rest() == ["Stopping1", "Pending", "Starting2", "Ready2"], "what was begun is brought to its end"
    assert play.deleted == []


def test_while_one_is_in_back_off() -> None:
    play = Play(spec_with(replicas=2))
    play.crash(1)
    play.until("Ready1  Backoff")
    play.scene.change(suspend=True)
    assert play.until_rest() == ["Stopping1  Stopped", "Stopped  Stopped"]
    assert_suspended(play)
    play.scene.change(suspend=False)
    play.until_rest()
    assert [r.failures for r in play.scene.status.replicas] == [0, 0], "a wish ends the count"


# -- paused as well, past admission ------------------------------------------------------------------------------------


def test_a_paused_roll_goes_on_where_it_was() -> None:
    play = Play(spec_with(replicas=2))
    play.scene.change(engine=NEW)
    play.until("Ready3  Stopping2")
    play.run(2)
    play.until("Ready3  Pending")
    revisions = [r.revision for r in play.scene.status.replicas]
    play.scene.change(rollout={**PLAIN, "paused": True}, suspend=True)
    play.until_rest()
    assert_suspended(play)
    ready = play.scene.status.condition("Ready")
    assert ready is not None
    assert "spec.rollout.paused holds changes of the spec back" in ready.message
    play.scene.change(suspend=False)
    play.until_rest()
    assert [r.revision for r in play.scene.status.replicas] == revisions
    assert {r.phase for r in play.scene.status.replicas} == {"Ready"}


def test_changes_that_a_pause_holds_back_wait_for_its_end() -> None:
    play = Play(spec_with(replicas=1))
    old = play.scene.status.engine_revision
    play.scene.change(engine=NEW, rollout={**PLAIN, "paused": True}, suspend=True)
    play.until_rest()
    assert_suspended(play)
    play.scene.change(suspend=False)
    play.until_rest()
    assert play.scene.replica.revision == old
    play.scene.change(rollout=PLAIN)
    play.until_rest()
    assert play.scene.replica.revision == play.scene.status.engine_revision != old


def test_the_pause_ends_first() -> None:
    """Then all start as the newest, and no deadline has run meanwhile."""
    play = Play(spec_with(replicas=2, rollout={**PLAIN, "progressDeadlineSeconds": 60}))
    play.scene.change(engine=NEW)
    play.until("Starting3  Ready2")
    play.scene.change(rollout={**PLAIN, "progressDeadlineSeconds": 60, "paused": True})
    play.until_rest()
    play.scene.change(suspend=True)
    play.until_rest()
    play.run(30)
    play.scene.change(rollout={**PLAIN, "progressDeadlineSeconds": 60})
    play.until_rest()
    assert_suspended(play)
    play.scene.change(suspend=False)
    play.until_rest()
    assert [r.revision for r in play.scene.status.replicas] == [play.scene.status.engine_revision] * 2
    assert reason(play, "Progressing") == "False Complete"


def test_a_stalled_roll_is_still_stalled() -> None:
    """What was not taken to a revision that does not start comes back as it was."""

    def breaks(job: SubmitJob) -> bool:
        return "--seed=1" in job.environment["VLLM_RAY_ENGINE_CONFIG"]

    play = Play(spec_with(replicas=2, rollout={**PLAIN, "progressDeadlineSeconds": 60}), breaks=breaks)
    play.scene.change(engine=NEW)
    play.run(60)
    assert reason(play, "Progressing") == "False ProgressDeadlineExceeded"
    play.scene.change(suspend=True)
    play.until_rest()
    assert_suspended(play)
    play.scene.change(suspend=False)
    play.run(60)
    assert reason(play, "Progressing") == "False ProgressDeadlineExceeded"
    assert play.scene.status.replicas[1].phase == "Ready"
