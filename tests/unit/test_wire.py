"""Operator and engine package share no code. What one writes the other reads: each pair meets here."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from vllm_ray_engine import config, launch
from vllm_ray_engine.launcher import control, packing
from vllm_ray_engine.launcher.state import State
from vllm_ray_engine.reasons import OUT_OF_MEMORY, Cause
from vllm_ray_operator.api.spec import VLLMDeploymentSpec
from vllm_ray_operator.api.status import Attempt, ContainerRef, Session, VLLMDeploymentStatus
from vllm_ray_operator.clients.engine import control_token
from vllm_ray_operator.observe.engine import parse_state
from vllm_ray_operator.observe.ray import last_words
from vllm_ray_operator.plan import engine_job, names
from vllm_ray_operator.plan.actions import SubmitJob
from vllm_ray_operator.plan.revision import render_engine
from vllm_ray_operator.plan.world import Deployment, EngineState

ID = "chat-1a2b3c4d-a7-x9k2q1"
SPEC = {
    "model": {"uri": "hf://org/tiny", "revision": "main", "servedName": "chat"},
    "engine": {
        "args": ["--max-model-len=256", "--trust-remote-code"],
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "port": 9000,
        "startupTimeoutSeconds": 120,
    },
    "parallelism": {"tensor": 4, "pipeline": 2},
    "cluster": {"workers": {"acceleratorsPerNode": 4}},
}


def submission(probe: dict[str, Any] | None = None, **changes: Any) -> SubmitJob:
    spec = VLLMDeploymentSpec.model_validate({**SPEC, "engine": SPEC["engine"] | ({"probe": probe} if probe else {})})
    attempt = Attempt(
        number=7,
        nonce="x9k2q1",
        instance_id=ID,
        engine_revision="chat-engine-1",
        ray_cluster="chat-12345678",
        session=Session(head=ContainerRef(pod="h", uid="u", restarts=0), slot=[]),
        start_time=datetime(2030, 1, 1, tzinfo=UTC),
        **changes,
    )
    deployment = Deployment("default", "chat", "1a2b3c4d-0", 1, "7", spec, SPEC, VLLMDeploymentStatus())
    return engine_job.submission(deployment, 3, attempt, render_engine(spec))


def test_the_launcher_reads_the_configuration_of_a_submission() -> None:
    job = submission()
    read = config.from_environment(job.environment)
    assert (read.instance_id, read.deployment, read.replica, read.attempt) == (ID, "default/chat", 3, 7)
    assert (read.model, read.revision, read.served_name) == ("org/tiny", "main", "chat")
    assert (read.port, read.control_port) == (9000, names.control_port(0))
    assert (read.tensor, read.pipeline, read.accelerators_per_node) == (4, 2, 4)
    assert read.args == ("--max-model-len=256", "--trust-remote-code")
    assert read.startup_timeout_seconds == 105  # gives up before the operator does
    assert not read.standby
    standby = config.from_environment(submission(standby=True, turn=1).environment)
    assert standby.standby
    assert (standby.port, standby.control_port) == (9001, names.control_port(1)), "both are on the same node"
    (group,) = packing.groups(read)
    assert (group.name, group.bundles) == (ID, ({"GPU": 1.0, names.slot_resource(3): 1.0},) * 8)


def test_the_launcher_reads_how_it_is_to_ask_its_engine() -> None:
    read = config.from_environment(submission().environment)
    assert (read.probe_period_seconds, read.probe_timeout_seconds, read.probe_failure_threshold) == (30, 60, 2)
    read = config.from_environment(submission({"periodSeconds": 7, "timeoutSeconds": 8}).environment)
    assert (read.probe_period_seconds, read.probe_timeout_seconds, read.probe_failure_threshold) == (7, 8, 2)
    assert config.from_environment(submission({"enabled": False}).environment).probe_period_seconds is None


def test_nothing_of_the_user_is_in_what_a_shell_reads() -> None:
    job = submission()
    assert job.entrypoint == "exec python3 -m vllm_ray_engine.guard"
    assert job.environment["NCCL_DEBUG"] == "INFO"
    assert job.resources == {names.driver_resource(3): 1}


def test_the_operator_reads_a_launchers_state() -> None:
    state = State(config.from_environment(submission().environment))
    state.enter("Placing", "waiting for accelerators")
    assert parse_state(state.read()) == EngineState(
        "Placing", "waiting for accelerators", ready=False, reason="the engine is not started", ranks=((0, ID, ()),)
    )
    for drained in (True, False):
        state.observe_drain(0 if drained else 1, None, drained=drained)
        seen = parse_state(state.read())
        assert seen is not None
        assert seen.drained is drained
    state.enter("Standby", "ready to take over")
    standby = parse_state(state.read())
    assert standby is not None
    assert (standby.phase, standby.ready) == ("Standby", False)
    cause = Cause(OUT_OF_MEMORY, "raise it", "a line")
    state.fail(cause)
    failed = parse_state(state.read())
    assert failed is not None
    assert (failed.phase, failed.cause) == ("Failed", cause.as_dict())


def test_the_operator_reads_a_launchers_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    cause = Cause(OUT_OF_MEMORY, "raise it", "a line")
    launch.print_result(cause)
    printed = capsys.readouterr().out
    assert last_words(f"noise{printed}noise of Ray's own\n") == {"outcome": "Failed", **cause.as_dict()}


def test_both_derive_the_same_key_for_the_control_endpoint() -> None:
    assert control_token("the Ray token", ID) == control.bearer("the Ray token", ID)
