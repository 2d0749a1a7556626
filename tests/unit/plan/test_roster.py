"""Who stays when there are to be fewer, and which index a new one takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.plan import build
from tests.unit.plan.build import PLAIN, spec_with
from tests.unit.plan.rolls import Play
from vllm_ray_operator.plan import raycluster

NEW: dict[str, Any] = {"args": ["--seed=1"]}
SURGE = {**PLAIN, "maxUnavailable": 0, "maxSurge": 1}


def scaled(play: Play, replicas: int) -> list[str]:
    play.scene.change(replicas=replicas)
    return play.until_rest()


def slots(play: Play) -> list[str]:
    return [group for group, _ in play.scene.target.groups]


# -- down --------------------------------------------------------------------------------------------------------------


def test_of_equals_the_highest_index_goes() -> None:
    play = Play(spec_with(replicas=3))
    assert scaled(play, 1) == ["Ready1  Stopping2  Stopping3", "Ready1"]


def test_one_that_does_not_serve_goes_first() -> None:
    play = Play(spec_with(replicas=3))
    play.hang(0)
    assert play.run(1) == ["NotReady1  Ready2  Ready3"]
    assert scaled(play, 2) == ["Stopping1  Ready2  Ready3", "1:Ready2  2:Ready3"]
    assert slots(play) == ["slot-1", "slot-2"]
    assert sorted(play.scene.slices) == ["chat-1", "chat-2"]


def test_one_that_dies_in_the_same_moment_goes_first() -> None:
    """The status says Ready still."""
    play = Play(spec_with(replicas=3))
    play.hang(1)
    assert scaled(play, 2) == ["Ready1  Stopping2  Ready3", "Ready1  2:Ready3"]


def test_of_those_that_do_not_serve_the_failed_go_first() -> None:
    play = Play(spec_with(replicas=3))
    play.crash(0)
    play.until("Backoff  Ready2  Ready3")
    play.hang(2)
    assert play.run(1) == ["Backoff  Ready2  NotReady3"]
    play.scene.change(replicas=2)
    assert play.run(2) == ["1:Ready2  2:NotReady3"]


def test_one_that_has_not_begun_goes_before_one_that_starts() -> None:
    play = Play(spec_with(replicas=1))
    play.scene.change(replicas=3)
    play.until("Ready1  Starting2  Starting3")
    play.scene.change(replicas=4)
    assert play.run(1) == ["Ready1  Starting2  Starting3  Pending"]
    play.scene.change(replicas=3)
    assert play.run(1) == ["Ready1  Starting2  Starting3"]


def test_one_that_leaves_already_is_chosen_again() -> None:
    """Whatever becomes of the others meanwhile."""
    play = Play(spec_with(replicas=3, engine={"drainTimeoutSeconds": 20}))
    play.scene.change(replicas=2)
    play.until("Ready1  Ready2  Draining3")
    play.crash(0)
    log = play.until_rest()
    assert log[-1] == "Ready4  Ready2"
    assert not any("2:" in line for line in log)


def test_one_whose_launcher_is_silent_may_serve_and_stays_before_one_that_does_not() -> None:
    play = Play(spec_with(replicas=3))
    silent = play.scene.status.replicas[2].attempt
    assert silent is not None
    job = play.scene.views[silent.instance_id].job
    play.scene.see(build.view(job), silent)
    play.hang(1)
    assert play.run(3)[-1] == "Ready1  NotReady2  NotReady3"
    play.scene.change(replicas=2)
    assert play.run(1) == ["Ready1  Stopping2  NotReady3"]


# -- up ----------------------------------------------------------------------------------------------------------------


def test_a_new_one_takes_the_lowest_free_index_and_a_new_number() -> None:
    play = Play(spec_with(replicas=3))
    play.hang(0)
    play.run(1)
    scaled(play, 2)
    assert scaled(play, 4) == [
        "Pending  Ready2  Ready3  Pending",
        "Starting4  Ready2  Ready3  Starting5",
        "Ready4  Ready2  Ready3  Ready5",
    ]


def test_one_that_leaves_is_taken_back_before_a_new_slot_is_made() -> None:
    play = Play(spec_with(replicas=2, engine={"drainTimeoutSeconds": 20}))
    play.hang(0)
    play.run(1)
    play.scene.change(replicas=1)
    assert play.run(1) == ["Stopping1  Ready2"]
    play.scene.change(replicas=2)
    assert play.until_rest() == ["Pending  Ready2", "Starting3  Ready2", "Ready3  Ready2"]


def test_to_nothing_and_back() -> None:
    play = Play(spec_with(replicas=2))
    assert scaled(play, 0) == ["Stopping1  Stopping2", ""]
    assert scaled(play, 2)[-1] == "Ready3  Ready4"


# -- in a roll ---------------------------------------------------------------------------------------------------------


def test_the_one_more_of_a_roll_gets_the_lowest_free_index_and_no_place_of_another() -> None:
    play = Play(spec_with(replicas=3, rollout=SURGE))
    play.hang(1)
    play.run(1)
    scaled(play, 2)
    play.scene.change(engine=NEW)
    assert play.until_rest() == [
        "Ready1  Pending  Ready3",
        "Ready1  Starting4  Ready3",
        "Stopping1  Ready4  Ready3",
        "Pending  Ready4  Ready3",
        "Starting5  Ready4  Ready3",
        "Ready5  Ready4  Stopping3",
        "Ready5  Ready4  Pending",
        "Ready5  Ready4  Starting6",
        "Ready5  Ready4  Ready6",
        "Ready5  Ready4  Stopping6",
        "Ready5  Ready4",
    ]


def test_scaled_down_in_a_roll_the_one_that_is_restarted_goes() -> None:
    play = Play(spec_with(replicas=3))
    play.scene.change(engine=NEW)
    play.until("Stopping1  Ready2  Ready3")
    play.scene.change(replicas=2)
    assert play.until_rest()[-1] == "1:Ready4  2:Ready5"


def test_scaled_up_in_a_roll_the_one_more_becomes_one_of_them() -> None:
    play = Play(spec_with(replicas=2, rollout=SURGE))
    play.scene.change(engine=NEW)
    play.until("Stopping1  Ready2  Ready3")
    assert [r.surge for r in play.scene.status.replicas] == [False, False, True]
    play.scene.change(replicas=3)
    play.run(1)
    assert [r.surge for r in play.scene.status.replicas] == [False, False, False, True]
    assert play.until_rest()[-1] == "Ready5  Ready6  Ready3"


def test_when_one_dies_as_the_roll_ends_the_one_more_stays_in_its_place() -> None:
    play = Play(spec_with(replicas=2, rollout=SURGE))
    play.scene.change(engine=NEW)
    play.until("Ready4  Ready5  Ready3")
    play.hang(0)
    assert play.until_rest() == ["Stopping4  Ready5  Ready3", "1:Ready5  2:Ready3"]


@pytest.mark.parametrize("paused", [False, True])
def test_a_pause_keeps_the_one_more_that_is_there(paused: bool) -> None:
    play = Play(spec_with(replicas=2, rollout=SURGE))
    play.scene.change(engine=NEW)
    play.until("Stopping1  Ready2  Ready3")
    play.scene.change(rollout={**SURGE, "paused": paused})
    play.run(4)
    assert play.log[-1].endswith("Ready2  Ready3")


# -- more than a RayCluster holds --------------------------------------------------------------------------------------


def test_what_does_not_fit_into_the_raycluster_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raycluster, "MAX_BYTES", 7200)
    play = Play(spec_with(replicas=1))
    play.scene.change(replicas=9)
    play.until_rest()
    assert play.log[-1] == "Ready1  Ready2  Ready3  Ready4"
    ready = play.scene.status.condition("Ready")
    assert ready is not None
    assert (ready.status, ready.reason) == ("False", "TooManyReplicas")
    assert "spec.replicas is 9, but one RayCluster holds at most 4 slots" in ready.message
    assert play.scene.status.replica_summary == "4/9"
    scaled(play, 4)
    ready = play.scene.status.condition("Ready")
    assert ready is not None
    assert ready.reason == "AllReplicasReady"


def test_a_raycluster_each_has_no_such_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raycluster, "MAX_BYTES", 4200)
    play = Play(spec_with(replicas=1, cluster={"policy": "PerReplica"}))
    assert scaled(play, 4)[-1].startswith("Ready1  Ready2  Ready3  Ready4")


def test_it_rolls_all_the_same_without_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raycluster, "MAX_BYTES", 4200)
    play = Play(spec_with(replicas=2, rollout={**PLAIN, "maxSurge": 1}))
    play.scene.change(engine=NEW)
    assert play.until_rest()[-1] == "Ready3  Ready4"


@pytest.mark.parametrize("variables", [0, 40, 200])
def test_the_capacity_is_what_fits(variables: int) -> None:
    env = [{"name": f"VARIABLE_{i}", "value": "some value"} for i in range(variables)]
    template = {"spec": {"containers": [{"name": "ray", "env": env}]}}
    deployment = build.deployment(spec_with(cluster={"workers": {"template": template}}))
    resolved = raycluster.render_cluster(build.NAME, deployment.spec, "image")
    room = raycluster.capacity(deployment, "chat-cluster-12345678", resolved)
    full = raycluster.manifest(deployment, "chat-12345678", "chat-cluster-12345678", resolved, range(room))
    size = len(json.dumps(full, separators=(",", ":")))
    assert 0.95 * raycluster.MAX_BYTES < size <= raycluster.MAX_BYTES
