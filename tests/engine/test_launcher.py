"""The launcher with real Ray on two nodes and real vLLM: it serves, it says why it does not, and it leaves nothing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import MODEL, Attempt, Attempts
from .ray_cluster import HEAD, WORKER, get, wait_for

GONE_SECONDS = 10
START_SECONDS = 300
"""A start takes about 50 s on two idle cores."""


@pytest.fixture
def attempt_of(attempts: Attempts) -> Iterator[Attempts]:
    """Start attempts, and have none of them left for the next test, however this one ended."""
    before = len(attempts.started)
    yield attempts
    for attempt in attempts.started[before:]:
        if attempt.status() in {"PENDING", "RUNNING"}:
            attempt.stop()
        wait_gone(attempt, 60)


def wait_gone(attempt: Attempt, timeout: float = GONE_SECONDS) -> float:
    started = time.monotonic()
    wait_for(f"nothing of {attempt.instance_id} to be left", lambda: not attempt.left(), timeout)
    return time.monotonic() - started


def memory_mb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) // 1024


def test_serves_over_two_nodes_and_a_stop_leaves_nothing(attempt_of: Attempts) -> None:
    started = time.monotonic()
    attempt = attempt_of.start()
    state = attempt.wait_phase("Serving", START_SECONDS)
    (launcher,) = attempt.processes("vllm_ray_engine.launch")
    print(f"MEASURED submission to Serving: {time.monotonic() - started:.1f} s")
    print(f"MEASURED launcher RSS: {memory_mb(launcher)} MB")

    assert state["instanceId"] == attempt.instance_id
    assert state["placement"] == {"state": "CREATED", "explanation": ""}
    assert state["health"] == {
        "ready": True, "reason": "", "models": ["tiny"], "workersExpected": 2, "workersAlive": 2,
    }  # fmt: skip
    assert state["cause"] is None
    (rank,) = state["ranks"]
    assert rank["instanceId"] == attempt.instance_id
    assert sorted(rank["nodeIps"]) == [HEAD, WORKER]

    control = f"http://{HEAD}:{attempt.control_port}"
    assert get(f"{control}/healthz") == (200, {"status": "ok"})
    assert get(f"{control}/v1/state")[0] == 401
    assert get(f"{control}/v1/state", "wrong")[0] == 401
    assert get(f"{control}/v1/state", attempt.cluster.token)[0] == 401, "the Ray token itself opens nothing"
    assert attempt.state(f"?since={state['version']}&waitSeconds=1")["version"] == state["version"]

    actors = attempt.cluster.actors(attempt.instance_id)
    assert [row["class_name"] for row in actors] == ["RayWorkerProc"] * 2
    assert all(attempt.instance_id in row["name"] for row in actors)
    assert len(attempt.cluster.groups(attempt.instance_id)) == 1

    status, answer = get(
        f"http://{HEAD}:{attempt.port}/v1/completions", timeout=60,
        body={"model": "tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True},
    )  # fmt: skip
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)

    attempt.stop()
    assert attempt.wait_ended(30)["outcome"] == "Stopped"
    assert attempt.status() == "STOPPED"
    wait_gone(attempt)


def test_failure_in_a_worker_is_stated_without_noise(attempt_of: Attempts, tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    attempt = attempt_of.start(model=str(tmp_path / "model"))
    result = attempt.wait_ended(START_SECONDS)
    log = attempt.logs()
    assert (result["outcome"], result["reason"]) == ("Failed", "ModelNotFound"), log[-4000:]
    assert "weights" in result["message"]
    assert "RayWorkerProc" in log, "the workers were made before it failed"
    assert "ActorHandleNotFoundError" not in log, "teardown touched handles of another Ray job"
    wait_gone(attempt)


def test_owned_value_in_a_config_file_is_refused(attempt_of: Attempts, tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("tensor-parallel-size: 4\n")
    attempt = attempt_of.start("--config", str(path))
    result = attempt.wait_ended(START_SECONDS)
    assert (result["outcome"], result["reason"]) == ("Failed", "OwnedArgument"), attempt.logs()[-4000:]
    assert "spec.parallelism.tensor" in result["message"]
    wait_gone(attempt)


def test_model_path_that_does_not_exist(attempt_of: Attempts) -> None:
    attempt = attempt_of.start(model=f"{MODEL}-absent")
    result = attempt.wait_ended(60)
    assert (result["outcome"], result["reason"]) == ("Failed", "ModelNotFound")
    assert f"{MODEL}-absent" in result["message"]
    wait_gone(attempt)


def test_model_that_the_hub_does_not_give(attempt_of: Attempts) -> None:
    attempt = attempt_of.start(model="nobody/no-such-model")
    result = attempt.wait_ended(START_SECONDS)
    assert (result["outcome"], result["reason"]) == ("Failed", "ModelNotFound"), attempt.logs()[-4000:]
    wait_gone(attempt)


def test_placement_that_cannot_be_met_is_explained_and_can_be_stopped(attempt_of: Attempts) -> None:
    attempt = attempt_of.start(tensor=4)

    def explained() -> dict[str, str] | None:
        placement: dict[str, str] = attempt.state().get("placement", {})
        return placement if "free" in placement.get("explanation", "") else None

    placement = wait_for("the explanation", explained, 60)
    assert placement["state"] == "PENDING"
    assert placement["explanation"] == "needs 4 GPU in slot vd-slot-0; 2 free, 2 in all on 2 nodes"
    started = time.monotonic()
    attempt.stop()
    assert attempt.wait_ended(10)["outcome"] == "Stopped"
    print(f"MEASURED stop while pending: {time.monotonic() - started:.1f} s")
    wait_gone(attempt)


def test_placement_that_is_not_met_in_time(attempt_of: Attempts) -> None:
    attempt = attempt_of.start(tensor=4, startupTimeoutSeconds=5)
    result = attempt.wait_ended(60)
    assert (result["outcome"], result["reason"]) == ("Failed", "PlacementPending")
    assert "needs 4 GPU" in result["message"]
    wait_gone(attempt)
