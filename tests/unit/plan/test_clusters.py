"""Changes of the image or the pods, as logs: the replicas, and the RayClusters that there are."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.plan import build
from tests.unit.plan.build import PLAIN, UNKNOWN, serving, spec_with
from tests.unit.plan.rolls import Play
from vllm_ray_operator.api.status import ConditionType
from vllm_ray_operator.plan.actions import SubmitJob

OWN = {"policy": "PerReplica"}
NEW, NEWER = {**OWN, "rayVersion": "2.61.0"}, {**OWN, "rayVersion": "2.62.0"}


def reason(play: Play, kind: ConditionType) -> str:
    found = play.scene.status.condition(kind)
    assert found is not None
    return f"{found.status} {found.reason}"


def is_at(version: str) -> Any:
    """Whether a RayCluster is of a Ray version."""
    return lambda manifest: manifest["spec"]["rayVersion"] == version


# -- a RayCluster for each replica -------------------------------------------------------------------------------------


def test_each_replica_has_its_own() -> None:
    scene = serving(spec_with(replicas=2, cluster=OWN))
    assert [r.phase for r in scene.status.replicas] == ["Ready", "Ready"]
    assert [list(c.groups) for c in scene.clusters.values()] == [[("slot-0", 1)], [("slot-1", 1)]]
    attempts = [r.attempt for r in scene.status.replicas if r.attempt is not None]
    assert [a.ray_cluster for a in attempts] == list(scene.clusters)
    assert [name[-2:] for name in scene.clusters] == ["-0", "-1"]
    assert scene.status.ray_cluster is None, "there is none for all"
    plan = scene.plan()
    assert (plan.status, plan.actions, plan.wake_after) == (scene.status, (), None)


def test_scaled_up_down_and_to_nothing() -> None:
    play = Play(spec_with(replicas=1, cluster=OWN))
    play.scene.change(replicas=2)
    assert play.until_rest() == [
        "Ready1  Pending | A0",
        "Ready1  Starting2 | A0 A1",
        "Ready1  Ready2 | A0 A1",
    ]
    play.scene.change(replicas=1)
    assert play.until_rest() == ["Ready1  Stopping2 | A0 A1", "Ready1 | A0 A1", "Ready1 | A0"]
    play.scene.change(replicas=0)
    assert play.until_rest()[-1] == " | "
    assert reason(play, "Ready") == "True ScaledToZero"


def test_the_loss_of_one_takes_one_replica() -> None:
    play = Play(spec_with(replicas=2, cluster=OWN))
    first = play.scene.attempt
    del play.scene.clusters[first.ray_cluster]
    play.scene.see(UNKNOWN)
    log = play.until_rest()
    assert log[-1] == "Ready3  Ready2 | A0 A1"
    assert all("Ready2" in line for line in log)
    assert play.scene.replica.last_failure is not None
    assert (play.scene.replica.last_failure.reason, play.scene.replica.last_failure.attempt) == ("HeadLost", 1)
    assert first.ray_cluster == play.scene.attempt.ray_cluster


# -- rolls -------------------------------------------------------------------------------------------------------------


def test_one_after_the_other_the_old_one_goes_first() -> None:
    play = Play(spec_with(replicas=2, cluster=OWN))
    play.scene.change(cluster=NEW)
    assert play.until_rest() == [
        "Stopping1  Ready2 | A0 A1",
        "Pending  Ready2 | A0 A1",
        "Pending  Ready2 | A1",
        "Starting3  Ready2 | A1 B0",
        "Ready3  Stopping2 | A1 B0",
        "Ready3  Pending | A1 B0",
        "Ready3  Pending | B0",
        "Ready3  Starting4 | B0 B1",
        "Ready3  Ready4 | B0 B1",
    ]
    assert reason(play, "Ready") == "True AllReplicasReady"
    assert play.scene.status.updated_replicas == 2


def test_one_more_for_the_time_of_the_roll() -> None:
    play = Play(spec_with(replicas=2, cluster=OWN, rollout={**PLAIN, "maxUnavailable": 0, "maxSurge": 1}))
    play.scene.change(cluster=NEW)
    assert play.until_rest() == [
        "Ready1  Ready2  Pending | A0 A1",
        "Ready1  Ready2  Starting3 | A0 A1 B2",
        "Stopping1  Ready2  Ready3 | A0 A1 B2",
        "Pending  Ready2  Ready3 | A0 A1 B2",
        "Pending  Ready2  Ready3 | A1 B2",
        "Starting4  Ready2  Ready3 | A1 B0 B2",
        "Ready4  Stopping2  Ready3 | A1 B0 B2",
        "Ready4  Pending  Ready3 | A1 B0 B2",
        "Ready4  Pending  Ready3 | B0 B2",
        "Ready4  Starting5  Ready3 | B0 B1 B2",
        "Ready4  Ready5  Ready3 | B0 B1 B2",
        "Ready4  Ready5  Stopping3 | B0 B1 B2",
        "Ready4  Ready5 | B0 B1 B2",
        "Ready4  Ready5 | B0 B1",
    ]


def test_all_at_once() -> None:
    play = Play(spec_with(replicas=2, cluster=OWN, rollout={**PLAIN, "type": "Recreate"}))
    play.scene.change(cluster=NEW)
    assert play.until_rest() == [
        "Stopping1  Stopping2 | A0 A1",
        "Pending  Pending | A0 A1",
        "Pending  Pending | ",
        "Starting3  Starting4 | B0 B1",
        "Ready3  Ready4 | B0 B1",
    ]


def test_a_new_engine_comes_with_the_new_pods() -> None:
    """A standby cannot be in pods that are not there yet; once they are, the next engine has one."""
    play = Play(spec_with(replicas=2, cluster=OWN, rollout={}))
    play.scene.change(cluster=NEW, engine={"args": ["--seed=1"]})
    log = play.until_rest()
    assert log[0] == "Stopping1  Ready2 | A0 A1"
    assert log[-1] == "Ready3  Ready4 | B0 B1"
    play.scene.change(engine={"args": ["--seed=2"]})
    assert play.until_rest()[:2] == ["Ready3+5  Ready4 | B0 B1", "Stopping3+5  Ready4 | B0 B1"]


def test_changed_in_the_middle_it_goes_straight_to_the_newest() -> None:
    play = Play(spec_with(replicas=3, cluster=OWN))
    play.scene.change(cluster=NEW)
    play.until("Starting4  Ready2  Ready3 | A1 A2 B0")
    play.scene.change(cluster=NEWER)
    log = play.until_rest()
    assert log[:4] == [
        "Stopping4  Ready2  Ready3 | A1 A2 B0",
        "Pending  Ready2  Ready3 | A1 A2 B0",
        "Pending  Ready2  Ready3 | A1 A2",
        "Starting5  Ready2  Ready3 | A1 A2 C0",
    ]
    assert log[-1] == "Ready5  Ready6  Ready7 | C0 C1 C2"


def test_back_in_the_middle_only_those_that_were_taken_go_back() -> None:
    play = Play(spec_with(replicas=3, cluster=OWN))
    play.scene.change(cluster=NEW)
    play.until("Starting4  Ready2  Ready3 | A1 A2 B0")
    play.scene.change(cluster=OWN)
    assert play.until_rest() == [
        "Stopping4  Ready2  Ready3 | A1 A2 B0",
        "Pending  Ready2  Ready3 | A1 A2 B0",
        "Pending  Ready2  Ready3 | A1 A2",
        "Starting5  Ready2  Ready3 | A0 A1 A2",
        "Ready5  Ready2  Ready3 | A0 A1 A2",
    ]


def test_one_that_waits_goes_at_once() -> None:
    """It costs nothing. It tells why it failed until it is ready again."""
    play = Play(spec_with(replicas=2, cluster=OWN))
    play.crash(1)
    play.until("Ready1  Backoff | A0 A1")
    play.scene.change(cluster=NEW)
    assert play.until_rest()[:4] == [
        "Ready1  Pending | A0 A1",
        "Ready1  Pending | A0",
        "Ready1  Starting3 | A0 B1",
        "Stopping1  Ready3 | A0 B1",
    ]


def test_pods_that_never_come_up_cost_no_more_than_they_may() -> None:
    rollout = {**PLAIN, "progressDeadlineSeconds": 60}
    play = Play(spec_with(replicas=3, cluster=OWN, rollout=rollout), lame=is_at("2.61.0"))
    play.scene.change(cluster=NEW)
    play.run(60)
    assert play.log[-1] == "Pending  Ready2  Ready3 | A1 A2 B0"
    assert reason(play, "Progressing") == "False ProgressDeadlineExceeded"
    assert reason(play, "ClusterReady") == "False ErrImagePull"

    play.crash(1)
    play.run(20)
    assert play.log[-1] == "Pending  Ready4  Ready3 | A1 A2 B0", "one that fails starts again where it was"

    play.scene.change(cluster=OWN)
    assert play.until_rest()[-1] == "Ready5  Ready4  Ready3 | A0 A1 A2"
    assert reason(play, "Ready") == "True AllReplicasReady"


def test_paused_in_the_middle_one_that_fails_starts_again_where_it_was() -> None:
    play = Play(spec_with(replicas=3, cluster=OWN))
    play.scene.change(cluster=NEW, engine={"args": ["--seed=1"]})
    play.until("Starting4  Ready2  Ready3 | A1 A2 B0")
    play.scene.change(rollout={**PLAIN, "paused": True})
    play.until_rest()
    play.crash(1)
    lost = play.scene.status.replicas[2].attempt
    assert lost is not None
    del play.scene.clusters[lost.ray_cluster]
    play.scene.see(UNKNOWN, lost)
    for _ in range(30):
        for action in play.step():
            if isinstance(action, SubmitJob):
                args = json.loads(action.environment["VLLM_RAY_ENGINE_CONFIG"])["args"]
                assert args == [], "a new engine would not fit the old pods"
    assert play.log[-1] == "Ready4  Ready5  Ready6 | A1 A2 B0", "its RayCluster is made again as it was"
    assert reason(play, "Progressing") == "Unknown RolloutPaused"
    play.scene.change(rollout=PLAIN)
    assert play.until_rest()[-1] == "Ready4  Ready7  Ready8 | B0 B1 B2"


# -- from one policy to the other --------------------------------------------------------------------------------------


def test_from_a_shared_one_slot_by_slot() -> None:
    play = Play(spec_with(replicas=2))
    play.names_clusters = True
    play.note()
    play.scene.change(cluster=OWN)
    assert play.until_rest() == [
        "Stopping1  Ready2 | A",
        "Pending  Ready2 | A",
        "Starting3  Ready2 | A B0",
        "Ready3  Stopping2 | A B0",
        "Ready3  Pending | A B0",
        "Ready3  Pending | B0",
        "Ready3  Starting4 | B0 B1",
        "Ready3  Ready4 | B0 B1",
    ]


def test_to_a_shared_one_all_at_once() -> None:
    play = Play(spec_with(replicas=2, cluster=OWN))
    old = set(play.scene.clusters)
    play.scene.change(cluster={})
    assert play.until_rest() == [
        "Stopping1  Stopping2 | A0 A1",
        "Pending  Pending | A0 A1",
        "Pending  Pending | ",
        "Starting3  Starting4 | B",
        "Ready3  Ready4 | B",
    ]
    (made,) = play.scene.clusters.values()
    assert made.name == play.scene.status.ray_cluster
    assert made.name not in old
    assert made.groups == (("slot-0", 1), ("slot-1", 1))


def test_the_policy_in_other_words_changes_nothing() -> None:
    play = Play(spec_with(replicas=2))
    play.scene.change(cluster={"policy": "Shared"})
    assert play.until_rest() == []
    assert {r.cluster_revision for r in play.scene.status.replicas} == {play.scene.status.cluster_revision}


# -- undone ------------------------------------------------------------------------------------------------------------


def test_undone() -> None:
    play = Play(spec_with(replicas=2, cluster=OWN))
    first = play.scene.status.cluster_revision
    play.scene.change(cluster=NEW)
    play.until_rest()
    play.scene.change(rollout={**PLAIN, "toClusterRevision": first})
    assert play.until_rest()[-1] == "Ready5  Ready6 | A0 A1"
    assert play.scene.status.cluster_revision == first
    assert reason(play, "Ready") == "True AllReplicasReady"
    play.scene.change(rollout=PLAIN)
    assert play.until_rest()[-1] == "Ready7  Ready8 | B0 B1"


def test_undone_in_the_middle_of_a_roll_that_does_not_come_up() -> None:
    play = Play(spec_with(replicas=2, cluster=OWN), lame=is_at("2.61.0"))
    first = play.scene.status.cluster_revision
    play.scene.change(cluster=NEW)
    play.run(10)
    assert play.log[-1] == "Pending  Ready2 | A1 B0"
    play.scene.change(rollout={**PLAIN, "toClusterRevision": first})
    assert play.until_rest() == [
        "Pending  Ready2 | A1",
        "Starting3  Ready2 | A0 A1",
        "Ready3  Ready2 | A0 A1",
    ]


def test_undo_to_one_that_is_gone() -> None:
    play = Play(spec_with(replicas=1, cluster=OWN))
    engine = play.scene.status.engine_revision
    play.scene.change(rollout={**PLAIN, "toClusterRevision": engine})
    assert play.until_rest() == [], "what runs is left alone"
    assert reason(play, "Ready") == "False RevisionNotFound"
    ready = play.scene.status.condition("Ready")
    assert ready is not None
    assert "toClusterRevision: there is no cluster revision" in ready.message
    assert str(play.scene.status.cluster_revision) in ready.message, "those that there are"


def test_engine_and_pods_that_fit_only_together_are_undone_together() -> None:
    play = Play(spec_with(replicas=1, cluster=OWN))
    before = play.scene.status
    play.scene.change(parallelism={"tensor": 4})
    play.until_rest()
    play.scene.change(rollout={**PLAIN, "toClusterRevision": before.cluster_revision})
    assert play.until_rest() == [], "four accelerators do not fit into two"
    assert reason(play, "Ready") == "False RevisionDoesNotFit"
    both = {"toClusterRevision": before.cluster_revision, "toRevision": before.engine_revision}
    play.scene.change(rollout={**PLAIN, **both})
    assert play.until_rest()[-1] == "Ready3 | A0"
    assert reason(play, "Ready") == "True AllReplicasReady"


# -- beside the old ----------------------------------------------------------------------------------------------------

BESIDE = {**PLAIN, "clusterUpgrade": "BlueGreen"}


def blue(**parts: Any) -> dict[str, Any]:
    """A spec with two replicas whose RayClusters are made anew beside the old ones."""
    return spec_with(**{"replicas": 2, "rollout": BESIDE, **parts})


def slow(play: Play, index: int, *, still: bool = True) -> None:
    """The engine of a replica is not ready yet, until it is said to be."""
    (attempt,) = (r.attempt for r in play.scene.status.replicas if r.index == index)
    assert attempt is not None
    job = build.job(driver_ip=build.worker_ip(f"slot-{index}"))
    play.scene.see(build.view(job, engine=build.engine(ready=not still, phase="Slow" if still else "Serving")), attempt)


def test_a_second_cluster_beside_the_old() -> None:
    play = Play(blue())
    play.scene.change(cluster={"rayVersion": "2.61.0"})
    assert play.until_rest() == [
        "Ready1  Ready2  Pending  Pending | A",
        "Ready1  Ready2  Starting3  Starting4 | A B",
        "Ready1  Ready2  Ready3  Ready4 | A B",
        "Stopping1  Stopping2  Ready3  Ready4 | A B",
        "2:Ready3  3:Ready4 | A B",
        "2:Ready3  3:Ready4 | B",
    ]
    assert reason(play, "Ready") == "True AllReplicasReady"
    assert play.scene.status.replica_summary == "2/2"
    play.scene.change(cluster={"rayVersion": "2.62.0"})
    assert play.until_rest()[-1] == "Ready5  Ready6 | C", "the next ones take the indices that are free again"


def test_one_of_the_old_goes_for_each_new_one_that_is_ready() -> None:
    play = Play(blue())
    play.scene.change(cluster={"rayVersion": "2.61.0"})
    play.until("Ready1  Ready2  Starting3  Starting4 | A B")
    play.step()
    slow(play, 3)
    log = play.run(8)
    assert log == [
        "Ready1  Ready2  Ready3  Starting4 | A B",
        "Ready1  Stopping2  Ready3  Starting4 | A B",
        "Ready1  2:Ready3  3:Starting4 | A B",
    ]
    assert (reason(play, "Ready"), play.scene.status.replica_summary) == ("False RollingUpdate", "2/2")
    assert play.scene.status.updated_replicas == 1
    slow(play, 3, still=False)
    assert play.until_rest() == [
        "Ready1  2:Ready3  3:Ready4 | A B",
        "Stopping1  2:Ready3  3:Ready4 | A B",
        "2:Ready3  3:Ready4 | A B",
        "2:Ready3  3:Ready4 | B",
    ]


def test_a_cluster_for_each_replica_beside_its_old_one() -> None:
    play = Play(blue(cluster=OWN))
    play.scene.change(cluster=NEW)
    assert play.until_rest() == [
        "Ready1  Ready2  Pending  Pending | A0 A1",
        "Ready1  Ready2  Starting3  Starting4 | A0 A1 B2 B3",
        "Ready1  Ready2  Ready3  Ready4 | A0 A1 B2 B3",
        "Stopping1  Stopping2  Ready3  Ready4 | A0 A1 B2 B3",
        "2:Ready3  3:Ready4 | A0 A1 B2 B3",
        "2:Ready3  3:Ready4 | B2 B3",
    ]


def test_set_back_before_one_is_ready_nothing_was_lost() -> None:
    play = Play(blue())
    play.scene.change(cluster={"rayVersion": "2.61.0"})
    play.until("Ready1  Ready2  Starting3  Starting4 | A B")
    play.scene.change(cluster={})
    assert play.until_rest() == [
        "Ready1  Ready2  Stopping3  Stopping4 | A B",
        "Ready1  Ready2 | A B",
        "Ready1  Ready2 | A",
    ]


def test_set_back_in_the_middle_the_old_cluster_takes_over_again() -> None:
    play = Play(blue())
    play.scene.change(cluster={"rayVersion": "2.61.0"})
    play.until("Ready1  Ready2  Starting3  Starting4 | A B")
    play.step()
    slow(play, 3)
    play.until("Ready1  2:Ready3  3:Starting4 | A B")
    play.scene.change(cluster={})
    assert play.until_rest() == [
        "Ready1  Pending  Ready3  Stopping4 | A B",
        "Ready1  Starting5  Ready3  Stopping4 | A B",
        "Ready1  Starting5  Ready3 | A B",
        "Ready1  Ready5  Ready3 | A B",
        "Ready1  Ready5  Stopping3 | A B",
        "Ready1  Ready5 | A B",
        "Ready1  Ready5 | A",
    ]


def test_new_pods_that_never_come_up_leave_the_old_serving_and_are_told() -> None:
    play = Play(blue(rollout={**BESIDE, "progressDeadlineSeconds": 60}), lame=is_at("2.61.0"))
    play.scene.change(cluster={"rayVersion": "2.61.0"})
    play.run(40)
    assert play.log[-1] == "Ready1  Ready2  Pending  Pending | A B"
    assert reason(play, "Ready") == "False ErrImagePull"
    assert reason(play, "Progressing") == "False ProgressDeadlineExceeded"
    assert reason(play, "Degraded") == "True ErrImagePull"
    assert play.scene.status.replica_summary == "2/2"
    play.crash(1)
    play.run(20)
    assert play.log[-1] == "Ready1  Ready3  Pending  Pending | A B", "one that fails starts again where it was"
    play.scene.change(cluster={})
    assert play.until_rest()[-1] == "Ready1  Ready3 | A"
    assert reason(play, "Ready") == "True AllReplicasReady"


def test_new_engines_that_fail_leave_the_old_serving_and_it_goes_on_when_they_do_not() -> None:
    broken = [True]
    rollout = {**BESIDE, "progressDeadlineSeconds": 60}
    play = Play(blue(rollout=rollout), breaks=lambda _: broken[0])
    play.scene.change(cluster={"rayVersion": "2.61.0"})
    play.run(60)
    assert {line.partition("  ")[0] for line in play.log} == {"Ready1"}
    assert (reason(play, "Ready"), reason(play, "Degraded")) == ("False OutOfMemory", "True CrashLoop")
    assert reason(play, "Progressing") == "False ProgressDeadlineExceeded"
    broken[0] = False
    assert play.until_rest()[-1].endswith("| B")
    assert reason(play, "Ready") == "True AllReplicasReady"


def test_paused_in_the_middle_none_of_the_old_is_taken() -> None:
    play = Play(blue())
    play.scene.change(cluster={"rayVersion": "2.61.0"})
    play.until("Ready1  Ready2  Starting3  Starting4 | A B")
    play.scene.change(rollout={**BESIDE, "paused": True})
    assert play.until_rest() == ["Ready1  Ready2  Ready3  Ready4 | A B"]
    assert reason(play, "Progressing") == "Unknown RolloutPaused"
    play.scene.change(rollout=BESIDE)
    assert play.until_rest()[-1] == "2:Ready3  3:Ready4 | B"


def test_changed_to_a_third_in_the_middle() -> None:
    play = Play(blue())
    play.scene.change(cluster={"rayVersion": "2.61.0"})
    play.until("Ready1  Ready2  Starting3  Starting4 | A B")
    play.scene.change(cluster={"rayVersion": "2.62.0"})
    log = play.until_rest()
    assert log[0] == "Ready1  Ready2  Stopping3  Stopping4  Pending  Pending | A B", "what does not serve goes at once"
    assert log[-1].endswith("| C")
    assert all(line.startswith("Ready1  Ready2") for line in log if "Ready5" not in line)


def test_changed_to_a_third_those_that_never_began_move_themselves() -> None:
    play = Play(blue(cluster=OWN), lame=is_at("2.61.0"))
    play.scene.change(cluster=NEW)
    play.run(20)
    assert play.log[-1] == "Ready1  Ready2  Pending  Pending | A0 A1 B2 B3"
    play.scene.change(cluster=NEWER)
    log = play.until_rest()
    assert log[:2] == [
        "Ready1  Ready2  Pending  Pending | A0 A1",
        "Ready1  Ready2  Starting3  Starting4 | A0 A1 C2 C3",
    ], "nothing comes up beside what has nothing to lose"
    assert log[-1] == "2:Ready3  3:Ready4 | C2 C3"


def test_scaled_and_suspended_in_the_middle() -> None:
    play = Play(blue())
    play.scene.change(cluster={"rayVersion": "2.61.0"})
    play.until("Ready1  Ready2  Starting3  Starting4 | A B")
    play.scene.change(replicas=1)
    log = play.until_rest()
    assert log[-1] == "2:Ready3 | B"
    play.scene.change(cluster={"rayVersion": "2.62.0"})
    play.run(2)
    play.scene.change(suspend=True)
    assert play.until_rest()[-1].endswith("Stopped | ")
    play.scene.change(suspend=False)
    assert play.until_rest()[-1].endswith("| C")


def test_undone_beside_the_new() -> None:
    play = Play(blue())
    first = play.scene.status.cluster_revision
    play.scene.change(cluster={"rayVersion": "2.61.0"})
    play.until_rest()
    play.scene.change(rollout={**BESIDE, "toClusterRevision": first})
    assert play.until_rest()[-1] == "Ready5  Ready6 | A"


# -- what the random schedules found -----------------------------------------------------------------------------------


def test_a_slot_that_is_gone_is_not_made_again_for_an_attempt_that_ends() -> None:
    """A shared RayCluster is deleted while replicas move out of it, and made again for those that are still at home."""
    play = Play(spec_with(replicas=2))
    play.names_clusters = True
    play.note()
    play.scene.change(cluster=OWN)
    play.until("Stopping1  Ready2 | A")
    name = play.scene.attempt.ray_cluster
    play.scene.orphans = tuple(p for p in play.scene.clusters.pop(name).pods if p.group == "slot-0")
    for replica in play.scene.status.replicas:
        play.scene.see(UNKNOWN, replica.attempt)
    seen = []
    for _ in range(8):
        play.step()
        for view in [v for v in play.scene.views if v == play.scene.attempt.instance_id]:
            play.scene.views[view] = UNKNOWN
        seen += [group for group, _ in play.scene.clusters[name].groups] if name in play.scene.clusters else []
    assert play.scene.attempt.number == 1, "its pod is still there"
    assert set(seen) == {"slot-1"}


def test_paused_none_of_the_old_is_taken_though_the_way_to_upgrade_is_changed_too() -> None:
    play = Play(blue())
    play.scene.change(cluster={"rayVersion": "2.61.0"})
    play.until("Ready1  Ready2  Starting3  Starting4 | A B")
    play.scene.change(rollout={**PLAIN, "clusterUpgrade": "Recreate", "paused": True})
    assert play.until_rest()[-1] == "Ready1  Ready2 | A B"
    play.scene.change(rollout={**PLAIN, "clusterUpgrade": "Recreate"})
    assert play.until_rest()[-1] == "Ready5  Ready6 | B"
