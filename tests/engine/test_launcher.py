"""The launcher with real Ray on two nodes and real vLLM: it serves, it says why it does not, and it leaves nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vllm_ray_engine.config import parse
from vllm_ray_engine.launcher.health import requests_in_flight

from .conftest import MODEL, Attempt, Attempts
from .ray_cluster import HEAD, SLOT, WORKER, free_port, get, wait_for

GONE_SECONDS = 10
START_SECONDS = 300
"""A start takes about 50 s on two idle cores."""
PROBE = {"probePeriodSeconds": 3, "probeTimeoutSeconds": 3, "probeFailureThreshold": 100}


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


def serves_over_two_nodes(attempt: Attempt, state: dict[str, Any]) -> None:
    """Check everything that an engine of two nodes shows and answers."""
    (launcher,) = attempt.processes("vllm_ray_engine.launch")
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

    assert attempt.complete() == 200


def test_standby_takes_over_and_requests_in_flight_are_finished(attempt_of: Attempts) -> None:
    """One engine serves while two standbys warm up: one is cancelled, the other takes the accelerators over."""
    started = time.monotonic()
    old = attempt_of.start("--middleware=starlette.middleware.gzip.GZipMiddleware", **PROBE)
    serves_over_two_nodes(old, old.wait_phase("Serving", START_SECONDS))
    print(f"MEASURED submission to Serving: {time.monotonic() - started:.1f} s")
    is_unready_while_it_stands_still(old)
    workers = sorted(row["actor_id"] for row in old.cluster.actors(old.instance_id))

    started = time.monotonic()
    new = attempt_of.start(standby=True, startupTimeoutSeconds=START_SECONDS)
    ranks = attempt_of.start(standby=True, data=2, tensor=1)
    for standby, needs in ((new, "needs 2 GPU on 2 nodes"), (ranks, "needs 2 GPU for 2 ranks, each on 1 node")):
        state = standby.wait_phase("Standby", START_SECONDS)
        assert state["placement"] == {
            "state": "PENDING", "explanation": f"{needs} in slot {SLOT}; 0 free, 2 still in use",
        }  # fmt: skip
        assert standby.cluster.actors(standby.instance_id) == [], "a standby holds nothing"
        assert {row["state"] for row in standby.cluster.groups(standby.instance_id)} == {"PENDING"}
        print(f"MEASURED submission to Standby, two at once: {time.monotonic() - started:.1f} s")
    assert old.state()["health"]["ready"]
    warm = waiting_workers(new)
    assert len(warm) == 2, "its workers are there already, without accelerators"

    ranks.stop()
    assert ranks.wait_ended(30)["outcome"] == "Stopped"
    print(f"MEASURED stop of a standby to nothing left: {wait_gone(ranks):.1f} s after the job's end")
    assert sorted(row["actor_id"] for row in old.cluster.actors(old.instance_id)) == workers
    assert (old.complete(), old.state()["phase"]) == (200, "Serving")
    assert new.state()["phase"] == "Standby"
    lets_clients_go(old, encoding="gzip")

    stopped = time.monotonic()
    old.stop()
    wait_for("the standby to have the accelerators", lambda: new.state()["placement"]["state"] == "CREATED", 30, 0.02)
    print(f"MEASURED stop to the standby's placement: {time.monotonic() - stopped:.2f} s")
    state = new.wait_phase("Serving", START_SECONDS)
    print(f"MEASURED stop to the standby's Serving: {time.monotonic() - stopped:.1f} s")
    assert state["health"]["workersAlive"] == 2
    assert {row["pid"] for row in new.cluster.actors(new.instance_id)} == warm, "its workers are those that waited"
    assert new.complete() == 200
    print(f"MEASURED stop to the standby's first completion: {time.monotonic() - stopped:.1f} s")
    assert old.wait_ended(30)["outcome"] == "Stopped"
    assert old.status() == "STOPPED"
    wait_gone(old)

    lets_clients_go(new)
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(new.complete, 200)
        wait_for("the request to run", lambda: in_flight(new) == 1, 30, 0.02)
        stopped = time.monotonic()
        new.stop()
        assert request.result() == 200
        print(f"MEASURED stop to the end of the request in flight: {time.monotonic() - stopped:.1f} s")
    wait_gone(new)


def is_unready_while_it_stands_still(attempt: Attempt) -> None:
    """Stop a worker in the middle of its work, as a collective operation that hangs does, and let it go on."""
    worker = attempt.cluster.actors(attempt.instance_id)[0]["pid"]
    os.kill(worker, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            stopped = time.monotonic()
            request = pool.submit(attempt.complete, 4, 200)
            seen = wait_for("it to be unready", lambda: not (s := attempt.state()["health"])["ready"] and s, 100)
            print(f"MEASURED request to a wedged engine to unready, probe {PROBE}: {time.monotonic() - stopped:.1f} s")
            assert "was not answered within 3 s, and nothing has moved" in seen["reason"]
            assert seen["workersAlive"] == 2
            assert get(f"http://{HEAD}:{attempt.port}/health")[0] == 200
            os.kill(worker, signal.SIGCONT)
            assert request.result() == 200
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_for("it to be ready again", lambda: attempt.state()["health"]["ready"], 30)


def lets_clients_go(attempt: Attempt, encoding: str | None = None) -> None:
    """Have an engine drain: clients that keep their connections move on at their next request."""
    clients = [http.client.HTTPConnection(HEAD, attempt.port, timeout=60) for _ in range(4)]
    silent = socket.create_connection((HEAD, attempt.port))
    with contextlib.closing(silent), contextlib.ExitStack() as stack:
        for client in clients:
            stack.callback(client.close)
            assert ask(client, encoding), "outside of a drain connections are kept"
        told = time.monotonic()
        status, state = get(f"http://{HEAD}:{attempt.control_port}/v1/drain", attempt.token, method="POST")
        assert (status, state["drained"]) == (200, False)
        assert [ask(client, encoding) for client in clients] == [False] * len(clients)
        seen = wait_for("it to be drained", lambda: (state := attempt.state())["drained"] and state, 30)
        print(f"MEASURED drain with {len(clients)} clients that go on and one that is silent: "
              f"{time.monotonic() - told:.1f} s")  # fmt: skip
    assert (seen["phase"], seen["openRequests"], seen["openConnections"]) == ("Serving", 0, 1), "the silent one"


def ask(client: http.client.HTTPConnection, encoding: str | None) -> bool:
    """Have a long answer made; return whether its connection is kept."""
    body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 4, "echo": True, "n": 4})
    client.request("POST", "/v1/completions", body, {"Content-Type": "application/json", "Accept-Encoding": "gzip"})
    response = client.getresponse()
    response.read()
    assert (response.status, response.headers["content-encoding"]) == (200, encoding)
    return not response.will_close


def waiting_workers(attempt: Attempt) -> set[int]:
    """Return the Ray workers of an attempt that no actor has taken yet."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in attempt.processes()}
    return {pid for pid, command in commands.items() if command.startswith("ray::IDLE")}


def in_flight(attempt: Attempt) -> int | None:
    config = parse(json.dumps(attempt.config | {"host": HEAD}))
    return requests_in_flight(config)


def test_data_parallel_ranks_over_two_nodes(attempt_of: Attempts) -> None:
    attempt = attempt_of.start("--api-server-count=1", data=2, tensor=1)
    state = attempt.wait_phase("Serving", START_SECONDS)
    first, second = state["ranks"]
    assert [first["rank"], second["rank"]] == [0, 1]
    assert [first["instanceId"], second["instanceId"]] == [f"{attempt.instance_id}_dp0", f"{attempt.instance_id}_dp1"]
    assert sorted(first["nodeIps"] + second["nodeIps"]) == [HEAD, WORKER]
    assert (state["health"]["workersExpected"], state["health"]["workersAlive"]) == (2, 2)
    actors = attempt.cluster.actors(attempt.instance_id)
    nodes = {row["node_id"]: row["node_ip"] for row in attempt.cluster.alive_nodes()}
    assert {row["name"]: nodes[row["node_id"]] for row in actors if row["class_name"] == "RayWorkerProc"} == {
        f"vllm_Worker_{rank['instanceId']}": rank["nodeIps"][0] for rank in state["ranks"]
    }
    assert [row["class_name"] for row in actors].count("EngineCoreActor") == 2
    for _ in range(4):
        assert attempt.complete() == 200
    started = time.monotonic()
    attempt.stop()
    assert attempt.wait_ended(30)["outcome"] == "Stopped"
    wait_gone(attempt)
    print(f"MEASURED stop of two ranks to nothing left: {time.monotonic() - started:.1f} s")


def test_data_parallel_ranks_that_are_jobs_of_their_own(attempt_of: Attempts, tmp_path: Path) -> None:
    """Up to Serving: vLLM has them for mixtures of experts only, and its CPU build lacks their exchange of tokens."""
    model = tmp_path / "experts"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    mixture = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    config = json.loads((model / "config.json").read_text()) | mixture | {"num_experts_per_tok": 2}
    (model / "config.json").write_text(json.dumps(config))
    base, meet = f"test-ranks-{os.getpid()}", free_port()
    ranks = [
        attempt_of.start(
            "--load-format=dummy", instanceId=base, model=str(model), tensor=1, data=2,
            dataMode="External", dataRank=rank, dataAddress=HEAD, dataRpcPort=meet,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    for number, rank in enumerate(ranks):
        state = rank.wait_phase("Serving", START_SECONDS)
        assert [(row["rank"], row["instanceId"]) for row in state["ranks"]] == [(number, f"{base}_dp{number}")]
        assert state["health"]["workersAlive"] == 1, "the other rank's worker is not counted"
    actors = ranks[0].cluster.actors(base)
    assert sorted(row["name"] for row in actors) == [f"vllm_Worker_{base}_dp0", f"vllm_Worker_{base}_dp1"]
    assert sorted(row["name"] for row in ranks[0].cluster.groups(base)) == [f"{base}_dp0", f"{base}_dp1"]
    for rank in ranks:
        rank.stop()
    for rank in ranks:
        assert rank.wait_ended(30)["outcome"] == "Stopped"
    wait_gone(ranks[0])


def test_failure_in_a_worker_is_stated_without_noise(attempt_of: Attempts) -> None:
    attempt = attempt_of.start("--worker-extension-cls=not_in_the_image.Extension")
    result = attempt.wait_ended(START_SECONDS)
    log = attempt.logs()
    assert (result["outcome"], result["reason"]) == ("Failed", "LibraryMissing"), log[-4000:]
    assert "not_in_the_image" in result["message"]
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
    assert placement["explanation"] == "needs 4 GPU on 4 nodes in slot vd-slot-0; 2 free, 2 in all on 2 nodes"
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
