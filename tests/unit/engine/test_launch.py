"""The launcher's whole course, with stand-ins for Ray and vLLM."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

import pytest

from vllm_ray_engine.launcher.traffic import open_connections

from .conftest import DATA, Launch, wait_for


def environment_of_engine(launch: Launch) -> dict[str, str]:
    read: dict[str, str] = json.loads((launch.world / "environment").read_text())
    return read


def test_serves_and_stops(launch: Launch) -> None:
    launch.start()
    state = launch.wait_phase("Serving")
    assert state["placement"] == {"state": "CREATED", "explanation": ""}
    assert state["health"]["ready"]
    # The launcher's own node, n2, comes first.
    assert state["ranks"] == [{"rank": 0, "instanceId": DATA["instanceId"], "nodeIps": ["127.0.0.2", "127.0.0.1"]}]
    environment = environment_of_engine(launch)
    assert "VLLM_RAY_ENGINE_PROBE_KEY" not in environment
    launch.send(signal.SIGTERM)
    assert launch.end() == (0, {"outcome": "Stopped", "reason": "Stopped", "message": "asked to stop", "line": ""})
    assert launch.left() == []
    assert launch.ray_log() == [
        f"init auto {DATA['instanceId']}",
        f"placement_group 2 PACK {DATA['instanceId']}",
        "remove_placement_group",
        "shutdown",
    ]


def test_health_checks_pass_an_api_key(launch: Launch) -> None:
    launch.start(environment={"VLLM_API_KEY": "the-users-key"})
    launch.wait_phase("Serving")


def test_killed_engine_leaves_nothing(launch: Launch) -> None:
    launch.start()
    launch.wait_phase("Serving")
    os.kill(launch.engine(), signal.SIGKILL)
    code, result = launch.end()
    assert code == 1
    assert result["reason"] == "EngineExited"
    assert result["message"] == "the API server process was killed by SIGKILL"
    assert launch.left() == [], "the engine's child, which ignores SIGTERM"
    assert launch.ray_log()[-2:] == ["remove_placement_group", "shutdown"]


def test_killed_launcher_takes_the_engine_with_it(launch: Launch) -> None:
    launch.start()
    launch.wait_phase("Serving")
    engine = launch.engine()
    launch.send(signal.SIGKILL)
    wait_for("the engine to be gone", lambda: engine not in launch.left())


def test_ranks_of_one_engine(launch: Launch) -> None:
    launch.tell(placement="PENDING")
    launch.start(data=2, tensor=1)
    wait_for("the explanation", lambda: "needs 2 GPU for 2 ranks, each on 1 node" in launch.state().get("message", ""))
    assert [rank["nodeIps"] for rank in launch.state()["ranks"]] == [[], []]
    launch.tell(placement="CREATED")
    state = launch.wait_phase("Serving")
    assert state["ranks"] == [  # the launcher's own node, n2, comes first
        {"rank": 0, "instanceId": f"{DATA['instanceId']}_dp0", "nodeIps": ["127.0.0.2"]},
        {"rank": 1, "instanceId": f"{DATA['instanceId']}_dp1", "nodeIps": ["127.0.0.1"]},
    ]
    launch.send(signal.SIGTERM)
    assert launch.end()[1]["outcome"] == "Stopped"
    groups = [f"placement_group 2 STRICT_PACK {DATA['instanceId']}_group{number}" for number in (0, 1)]
    assert launch.ray_log()[1:3] == groups
    assert launch.ray_log().count("remove_placement_group") == 2


def test_placement_that_is_worse_than_it_could_be(launch: Launch) -> None:
    launch.start(acceleratorsPerNode=2)
    explanation = launch.wait_phase("Serving")["placement"]["explanation"]
    assert explanation.startswith("rank 0 is on 2 nodes where 1 would do")
    launch.send(signal.SIGTERM)
    launch.end()
    assert f"[vllm_ray_engine] placement is worse than it could be: {explanation}" in launch.output


def test_idle_engine_gives_its_accelerators_back_first(launch: Launch) -> None:
    launch.tell(engine="stubborn")
    launch.start()
    launch.wait_phase("Serving")
    engine = launch.engine()
    launch.send(signal.SIGTERM)
    wait_for("the group to be removed", lambda: "remove_placement_group" in launch.ray_log())
    assert engine in launch.left()
    assert launch.end()[1]["outcome"] == "Stopped"


@pytest.mark.parametrize("running", ["1", "unknown"])
def test_engine_with_requests_in_flight_is_let_finish(launch: Launch, running: str) -> None:
    launch.tell(running=running)
    launch.start()
    launch.wait_phase("Serving")
    launch.send(signal.SIGTERM)
    assert launch.end()[1]["outcome"] == "Stopped"
    assert (launch.world / "ended").read_text() == "with accelerators"


def test_accelerators_are_given_back_after_the_last_request(launch: Launch) -> None:
    launch.tell(engine="stubborn", running="1")
    launch.start(stopGraceSeconds=60)
    launch.wait_phase("Serving")
    launch.send(signal.SIGTERM)
    wait_for("it to stop", lambda: launch.state().get("phase") == "Stopping")
    assert not launch.state()["health"]["ready"], "no more clients are to be sent to it"
    assert "remove_placement_group" not in launch.ray_log()
    launch.tell(running="0")
    wait_for("the group to be removed", lambda: "remove_placement_group" in launch.ray_log())
    assert launch.end()[1]["outcome"] == "Stopped"


def test_stubborn_engine_is_killed_after_the_grace(launch: Launch) -> None:
    launch.tell(engine="stubborn", running="1")
    launch.start(stopGraceSeconds=1)
    launch.wait_phase("Serving")
    started = time.monotonic()
    launch.send(signal.SIGTERM)
    assert launch.end()[0] == 0
    assert 1 <= time.monotonic() - started < 10
    assert launch.left() == []


@pytest.mark.parametrize(
    ("engine", "reason", "message"),
    [
        ("error", "EngineExited", "the engine failed with ValueError: the first error"),
        ("exit", "EngineExited", "vLLM exited with code 3 and said no reason"),
    ],
)
def test_engine_that_exits(launch: Launch, engine: str, reason: str, message: str) -> None:
    launch.tell(engine=engine)
    launch.start()
    code, result = launch.end()
    assert (code, result["reason"], result["message"]) == (1, reason, message)
    assert f"the engine does: {engine}" in launch.output, "the engine's output is passed on"


def test_refused_argument(launch: Launch) -> None:
    launch.start(args=["--port", "9000"])
    code, result = launch.end()
    assert (code, result["reason"]) == (1, "OwnedArgument")
    assert "spec.engine.port" in result["message"]


def test_unknown_argument(launch: Launch) -> None:
    launch.start(args=["--no-such-flag"])
    code, result = launch.end()
    assert (code, result["reason"]) == (1, "InvalidArguments")
    assert "--no-such-flag" in result["message"]


def test_engine_that_does_not_get_ready(launch: Launch) -> None:
    launch.tell(engine="hang")
    launch.start(startupTimeoutSeconds=2)
    code, result = launch.end()
    assert (code, result["reason"]) == (1, "StartupTimeout")
    assert "the engine does not listen" in result["message"]
    assert launch.left() == []


def test_stop_while_loading(launch: Launch) -> None:
    launch.tell(engine="hang")
    launch.start()
    launch.wait_phase("Loading")
    launch.send(signal.SIGTERM)
    code, result = launch.end()
    assert (code, result["outcome"]) == (0, "Stopped")
    assert launch.left() == []


def test_pending_placement_is_explained_and_can_be_stopped(launch: Launch) -> None:
    launch.tell(placement="PENDING")
    launch.start()
    state = wait_for("the explanation", lambda: "free" in (s := launch.state()).get("message", "") and s)
    assert state["phase"] == "Placing"
    assert state["placement"] == {
        "state": "PENDING",
        "explanation": "needs 2 GPU on 2 nodes in slot vd-slot-0; 1 free, 1 still in use",
    }
    launch.send(signal.SIGTERM)
    assert launch.end()[1]["outcome"] == "Stopped"
    assert "remove_placement_group" in launch.ray_log()


def test_pending_placement_has_a_limit(launch: Launch) -> None:
    launch.tell(placement="PENDING")
    launch.start(startupTimeoutSeconds=1)
    code, result = launch.end()
    assert (code, result["reason"]) == (1, "PlacementPending")
    assert "needs 2 GPU" in result["message"]


def test_placement_that_comes_later(launch: Launch) -> None:
    launch.tell(placement="PENDING")
    launch.start()
    launch.wait_phase("Placing")
    launch.tell(placement="CREATED")
    launch.wait_phase("Serving")


def test_the_engine_starts_while_placement_is_pending(launch: Launch) -> None:
    launch.tell(placement="PENDING", engine="exit")
    launch.start()
    code, result = launch.end()
    assert (code, result["message"]) == (1, "vLLM exited with code 3 and said no reason")


def test_standby_waits_without_limit_and_takes_over(launch: Launch) -> None:
    launch.tell(placement="PENDING")
    launch.start(standby=True, startupTimeoutSeconds=5)
    state = launch.wait_phase("Standby")
    assert state["placement"]["state"] == "PENDING"
    assert not state["health"]["ready"]
    since = time.monotonic()
    wait_for("more than the start-up time-out", lambda: time.monotonic() - since > 6)
    state = launch.state()
    assert state["phase"] == "Standby"
    assert state["message"] == (
        "ready to take over accelerators: needs 2 GPU on 2 nodes in slot vd-slot-0; 1 free, 1 still in use"
    )
    launch.tell(placement="CREATED")
    launch.wait_phase("Serving")


def test_standby_has_a_limit_from_the_groups_creation(launch: Launch) -> None:
    launch.tell(placement="PENDING", engine="hang")
    launch.start(standby=True, startupTimeoutSeconds=5)
    launch.wait_phase("Standby")
    launch.tell(placement="CREATED")
    started = time.monotonic()
    assert launch.end()[1]["reason"] == "StartupTimeout"
    assert time.monotonic() - started >= 5


def test_standby_that_never_gets_to_wait(launch: Launch) -> None:
    launch.tell(placement="PENDING", engine="hang-importing")
    launch.start(standby=True, startupTimeoutSeconds=2)
    code, result = launch.end()
    assert (code, result["reason"]) == (1, "StartupTimeout")
    assert result["message"] == "vLLM is not ready to wait for accelerators after 2 s"


@pytest.mark.parametrize("engine", ["serve", "hang-importing"])
def test_standby_can_be_cancelled(launch: Launch, engine: str) -> None:
    launch.tell(placement="PENDING", engine=engine)
    launch.start(standby=True)
    if engine == "serve":
        launch.wait_phase("Standby")
    else:
        wait_for("the engine", lambda: launch.state().get("phase") == "Placing" and launch.engine())
    launch.send(signal.SIGTERM)
    assert launch.end()[1]["outcome"] == "Stopped"
    assert launch.left() == []
    assert launch.ray_log()[-2:] == ["remove_placement_group", "shutdown"]


def test_ray_that_cannot_be_reached(launch: Launch) -> None:
    launch.tell(placement="UNREACHABLE")
    launch.start()
    code, result = launch.end()
    assert code == 1
    assert result["message"] == "cannot connect to Ray: no Ray is running at this address"


def test_lost_worker_makes_it_unready_and_then_ends_it(launch: Launch) -> None:
    launch.start(patience=2)
    version = launch.wait_phase("Serving")["version"]
    launch.tell(workers="1")
    state = launch.state(f"?since={version}&waitSeconds=10")
    assert (state["health"]["ready"], state["health"]["workersAlive"]) == (False, 1)
    assert state["health"]["reason"] == "1 of 2 workers are alive"
    code, result = launch.end()
    assert (code, result["reason"]) == (1, "WorkerDied")
    assert launch.left() == []


def test_worker_that_dies_while_the_engine_loads_ends_it(launch: Launch) -> None:
    launch.tell(health="503")
    launch.start()
    launch.wait_phase("Loading")
    wait_for("two workers", lambda: launch.state()["health"]["workersAlive"] == 2)
    launch.tell(workers="1")
    code, result = launch.end(timeout=20)
    assert (code, result["reason"]) == (1, "WorkerDied")
    assert launch.left() == []


@pytest.mark.parametrize("phase", ["Loading", "Serving"])
def test_node_that_dies_ends_it(launch: Launch, phase: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        launch.tell(raylet=str(raylet.getsockname()[1]), health="503" if phase == "Loading" else "200")
        launch.start()
        launch.wait_phase(phase)
        raylet.settimeout(10)
        raylet.accept()[0].close()
    if phase == "Serving":
        wait_for("it to be unready", lambda: not launch.state()["health"]["ready"])
        assert launch.state()["phase"] == "Serving", "before it is ended"
        assert launch.state()["health"]["reason"] == "Ray died on pod-1 (127.0.0.1)"
    code, result = launch.end(timeout=20)
    assert (code, result["reason"]) == (1, "WorkerDied")
    assert result["message"] == (
        "the worker of rank 1 on pod-1 (127.0.0.1) died with its Ray node: look at that pod and its node"
    )
    assert launch.left() == []


def test_a_lost_worker_is_told_while_a_health_check_hangs(launch: Launch) -> None:
    launch.start(slowness=60, silence=120)
    launch.wait_phase("Serving")
    os.kill(launch.engine(), signal.SIGSTOP)
    asked = launch.port
    wait_for("a health check that hangs", lambda: open_connections(asked) == 1 and hangs(asked), 30)
    version = launch.state()["version"]
    launch.tell(workers="1")
    state = launch.state(f"?since={version}&waitSeconds=15")
    assert (state["health"]["ready"], state["health"]["reason"]) == (False, "1 of 2 workers are alive")


def hangs(port: int) -> bool:
    """Whether the connection that is there now is there half a second later."""
    time.sleep(0.5)
    return open_connections(port) == 1


def test_health_that_recovers_does_not_end_it(launch: Launch) -> None:
    launch.start(patience=60)
    launch.wait_phase("Serving")
    launch.tell(health="503")
    wait_for("unready", lambda: not launch.state()["health"]["ready"])
    launch.tell(health="200")
    wait_for("ready again", lambda: launch.state()["health"]["ready"])
    assert launch.state()["phase"] == "Serving"


def test_dead_engine_that_does_not_exit_is_ended(launch: Launch) -> None:
    launch.start(patience=1)
    launch.wait_phase("Serving")
    launch.tell(health="503")
    assert "/health answers 503" in launch.end()[1]["message"]


def test_a_dead_engine_that_then_stops_to_listen_is_ended(launch: Launch) -> None:
    launch.start(patience=3)
    launch.wait_phase("Serving")
    launch.tell(health="503")
    wait_for("unready", lambda: not launch.state()["health"]["ready"])
    launch.tell(closed="")
    assert launch.end()[1]["message"] == "the engine cannot go on: the engine does not listen"


def test_engine_that_lives_but_does_not_listen_is_ended(launch: Launch) -> None:
    launch.start(silence=1)
    launch.wait_phase("Serving")
    launch.tell(closed="")
    assert launch.end()[1]["reason"] == "EngineHung"
    assert launch.left() == []


def test_drained_while_no_client_is_connected(launch: Launch) -> None:
    launch.start()
    assert launch.wait_phase("Serving")["drained"] is None, "nobody asked"
    assert launch.drain()["drained"] is False
    wait_for("drained", lambda: launch.state()["drained"])
    with socket.create_connection(("127.0.0.1", launch.port)):
        wait_for("the client to be seen", lambda: launch.state()["drained"] is False)
        assert launch.state()["openConnections"] == 1
        assert launch.drain()["drained"] is False, "told once more, which changes nothing"
    wait_for("drained again", lambda: launch.state()["drained"])
    assert launch.state()["phase"] == "Serving"


def test_hung_engine_is_ended(launch: Launch) -> None:
    launch.start(silence=1)
    launch.wait_phase("Serving")
    os.kill(launch.engine(), signal.SIGSTOP)
    code, result = launch.end()
    assert (code, result["reason"]) == (1, "EngineHung")
    assert result["message"] == "the engine runs but has not answered /health for 1 s"
    assert launch.left() == []


PROBE = {"probePeriodSeconds": 0.3, "probeTimeoutSeconds": 0.5, "probeFailureThreshold": 2}


def test_ready_only_when_a_first_completion_is_answered(launch: Launch) -> None:
    launch.tell(completes="500")
    launch.start(**PROBE)
    wait_for("the reason", lambda: "answered with 500" in launch.state().get("health", {}).get("reason", ""))
    assert launch.state()["phase"] == "Loading"
    launch.tell(completes="200")
    assert launch.wait_phase("Serving")["health"]["ready"]


def test_an_engine_whose_first_completion_ends_it_is_never_ready(launch: Launch) -> None:
    launch.tell(completes="never")
    launch.start(**PROBE, startupTimeoutSeconds=3)
    code, result = launch.end()
    assert (code, result["reason"]) == (1, "StartupTimeout")
    assert "has not completed a first request yet: a completion of one token was not answered" in result["message"]


def test_wedged_engine_leaves_the_traffic_and_is_ended(launch: Launch) -> None:
    launch.start(**PROBE | {"probeFailureThreshold": 4})
    launch.wait_phase("Serving")
    launch.tell(completes="never", running="1")
    wait_for("unready", lambda: not launch.state()["health"]["ready"])
    assert "not answered within 0.5 s, and nothing has moved" in launch.state()["health"]["reason"]
    code, result = launch.end()
    assert (code, result["reason"]) == (1, "EngineStalled")
    assert result["message"].startswith("the engine answers health checks, but completes nothing: a completion of one")
    assert launch.left() == []


def test_model_path_that_does_not_exist(launch: Launch) -> None:
    launch.start(model="/no/such/model")
    code, result = launch.end()
    assert (code, result["reason"]) == (1, "ModelNotFound")
    assert launch.ray_log() == [], "found out before Ray was bothered"


@pytest.mark.parametrize("which", ["port", "controlPort"])
def test_port_in_use(launch: Launch, which: str) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        launch.start(**{which: other.getsockname()[1]})
        code, result = launch.end()
    assert (code, result["reason"]) == (1, "PortInUse")
    assert launch.ray_log() == []


def test_users_environment_is_set_right(launch: Launch) -> None:
    launch.start(
        environment={
            "VLLM_PLUGINS": "theirs",
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",
            "VLLM_ENGINE_READY_TIMEOUT_S": "600",
            "VLLM_RAY_BUNDLE_INDICES": "1,0",
        }
    )
    launch.wait_phase("Serving")
    environment = environment_of_engine(launch)
    assert environment["VLLM_PLUGINS"] == "theirs,vllm_ray_engine"
    assert environment["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] == "1"
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert int(environment["VLLM_ENGINE_READY_TIMEOUT_S"]) > 7 * 86400
    assert environment["VLLM_RAY_BUNDLE_INDICES"] == ""


def test_malformed_configuration(launch: Launch) -> None:
    launch.start(tensor=0)
    code, result = launch.end()
    assert (code, result["reason"]) == (1, "InvalidArguments")
    assert "tensor must be an integer from 1" in result["message"]
