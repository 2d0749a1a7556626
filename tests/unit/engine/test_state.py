from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from vllm_ray_engine.launcher import state as phases
from vllm_ray_engine.launcher.state import State
from vllm_ray_engine.reasons import WORKER_DIED, Cause

from .conftest import configure


def test_version_grows_only_with_a_real_change() -> None:
    state = State(configure())
    first = state.read()
    state.update(placement=dict(first["placement"]))
    state.enter(first["phase"], first["message"])
    assert state.read() == first
    state.enter(phases.PLACING, "waiting")
    assert state.read()["version"] == first["version"] + 1


def test_clients_that_come_and_go_wake_no_reader() -> None:
    state = State(configure())
    before = state.read()
    state.update(drained=False)
    told = state.read()["version"]
    state.observe_drain(2, 1, drained=False)
    seen = {"openConnections": 2, "openRequests": 1, "drained": False}
    assert state.read(since=told, wait_seconds=0.05) == before | seen | {"version": told}
    state.observe_drain(0, 0, drained=True)
    assert state.read(since=told, wait_seconds=10)["version"] > told, "but the last one that goes does"


def test_a_message_does_not_change_the_time_of_the_phase() -> None:
    state = State(configure())
    state.update(since="2026-01-01T00:00:00Z")
    state.enter(phases.CHECKING, "still at it")
    assert state.read()["since"] == "2026-01-01T00:00:00Z"
    state.enter(phases.PLACING, "next")
    assert state.read()["since"] != "2026-01-01T00:00:00Z"


def test_failure_shows_phase_and_cause_in_one_change() -> None:
    state = State(configure())
    version = state.read()["version"]
    state.fail(Cause(WORKER_DIED, "gone", "line"))
    seen = state.read()
    assert seen["version"] == version + 1
    assert (seen["phase"], seen["message"]) == ("Failed", "gone")
    assert seen["cause"] == {"reason": "WorkerDied", "message": "gone", "line": "line"}


@pytest.mark.parametrize("end", [State.stop, lambda state: state.fail(Cause(WORKER_DIED, "gone", ""))])
def test_an_attempt_that_ends_is_not_ready_whatever_its_engine_answers(end: Callable[[State], None]) -> None:
    state = State(configure())
    fine = {**state.read()["health"], "ready": True, "reason": ""}
    state.update(health=fine)
    version = state.read()["version"]
    end(state)
    seen = state.read()
    assert seen["version"] == version + 1
    assert seen["health"] == fine | {"ready": False, "reason": seen["message"]}
    state.update(health=fine)
    assert state.read() == seen


def test_read_answers_at_once_when_the_version_differs() -> None:
    state = State(configure())
    started = time.monotonic()
    state.read(since=99, wait_seconds=30)
    assert time.monotonic() - started < 5


def test_read_waits_for_a_change() -> None:
    state = State(configure())
    version = state.read()["version"]
    timer = threading.Timer(0.1, state.enter, (phases.PLACING, "waiting"))
    timer.start()
    assert state.read(since=version, wait_seconds=30)["phase"] == "Placing"
    timer.join()


def test_read_gives_up_after_its_time() -> None:
    state = State(configure())
    version = state.read()["version"]
    assert state.read(since=version, wait_seconds=0.1)["version"] == version
