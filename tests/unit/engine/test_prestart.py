"""Asking raylets for workers ahead of need: what is asked, and that nothing of it can end an engine."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_ray_engine.standby import prestart
from vllm_ray_engine.standby.prestart import Node, choose, merged_environment

ACTOR = {"GPU": 1.0, "vd-slot-0": 1.0}


def node(address: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    names = {name.replace("_", "-"): value for name, value in resources.items()}
    return {"Alive": alive, "NodeManagerAddress": address, "NodeManagerPort": 7, "Resources": names}


NODES = {
    "one worker on each of two nodes": (
        [node("a", GPU=1, vd_slot_0=1, CPU=4), node("b", GPU=1, vd_slot_0=1)], 2, [Node("a:7", 1), Node("b:7", 1)],
    ),
    "all on one node": ([node("a", GPU=8, vd_slot_0=8)], 8, [Node("a:7", 8)]),
    "never more than the engine has": ([node("a", GPU=8, vd_slot_0=8), node("b", GPU=8, vd_slot_0=8)], 4,
        [Node("a:7", 4), Node("b:7", 4)],
    ),
    "the scarcer resource counts": ([node("a", GPU=8, vd_slot_0=2)], 8, [Node("a:7", 2)]),
    "another replica's nodes are left alone": ([node("a", GPU=8, vd_slot_1=8), node("b", CPU=8)], 8, []),
    "dead nodes are left out": ([node("a", alive=False, GPU=8, vd_slot_0=8)], 8, []),
}  # fmt: skip


@pytest.mark.parametrize("name", NODES)
def test_nodes(name: str) -> None:
    nodes, workers, expected = NODES[name]
    assert choose(nodes, ACTOR, workers) == expected


JOB = '{"env_vars":{"A":"1","B":"2"},"py_modules":["gcs://x.zip"],"worker_process_setup_hook":"m.f"}'
ENVIRONMENTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "an actor without one has its job's, letter by letter": ('{"b": 1,  "a": "\\u00e4"}', {"env_vars": {}},
        '{"b": 1,  "a": "\\u00e4"}'),
    "a variable of its own": (JOB, {"env_vars": {"NOSET": "1"}},
        '{"env_vars":{"A":"1","B":"2","NOSET":"1"},"py_modules":["gcs://x.zip"],"worker_process_setup_hook":"m.f"}'),
    "a variable of the job replaced": (JOB, {"env_vars": {"A": "9"}},
        '{"env_vars":{"A":"9","B":"2"},"py_modules":["gcs://x.zip"],"worker_process_setup_hook":"m.f"}'),
    "a field replaced": (JOB, {"py_modules": ["gcs://y.zip"]},
        '{"env_vars":{"A":"1","B":"2"},"py_modules":["gcs://y.zip"],"worker_process_setup_hook":"m.f"}'),
    "no environment of the job": ("", {"env_vars": {"A": "ä"}}, '{"env_vars":{"A":"ä"}}'),
}  # fmt: skip


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environment_is_written_as_ray_writes_it(name: str) -> None:
    job, actor, expected = ENVIRONMENTS[name]
    assert merged_environment(job, actor) == expected
    json.loads(expected)


@pytest.mark.parametrize("version", ["2.51.2", "2.61.0", "3.0.0", "dev", None])
def test_unknown_ray_is_left_alone(
    version: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vllm_ray_engine.versions.installed", lambda _: version)
    monkeypatch.setattr(prestart, "_ask", lambda *_: pytest.fail("it asked"))
    assert prestart.prestart(ACTOR, 2, {}) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert f"workers are not prestarted and start cold: known to work with Ray 2.52 to 2.60, this is {version}" in said


@pytest.mark.parametrize("version", ["2.52.0", "2.60.1"])
def test_known_ray(version: str) -> None:
    prestart._check_version(version)


class FakeRay:
    """What Ray's own modules give to the one who asks a raylet for workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.closed: list[str] = []
        self.fields = {"language", "job_id", "runtime_env_info", "keep_alive_duration_secs", "num_workers"}
        self.error: Exception | None = None
        context = SimpleNamespace(get_runtime_env_string=lambda: JOB, get_job_id=lambda: "0a000000")
        nodes = [node("a", GPU=1, vd_slot_0=1), node("b", GPU=1, vd_slot_0=1)]
        for name, content in {
            "ray": {"nodes": lambda: nodes, "get_runtime_context": lambda: context},
            "ray._private": {},
            "ray._private.grpc_utils": {"init_grpc_channel": self._channel},
            "ray._private.utils": {"get_runtime_env_info": lambda environment: SimpleNamespace(of=environment)},
            "ray.core": {},
            "ray.core.generated": {},
            "ray.core.generated.common_pb2": {"Language": SimpleNamespace(PYTHON="Python")},
            "ray.core.generated.node_manager_pb2": {"PrestartWorkersRequest": self._request_type()},
            "ray.core.generated.node_manager_pb2_grpc": {"NodeManagerServiceStub": self._stub},
            "ray.runtime_env": {"RuntimeEnv": SimpleNamespace(deserialize=json.loads)},
        }.items():
            module = ModuleType(name)
            module.__dict__.update(content)
            monkeypatch.setitem(sys.modules, name, module)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
        monkeypatch.setattr("vllm_ray_engine.versions.installed", lambda _: "2.60.0")

    def _request_type(self) -> type:
        class PrestartWorkersRequest(SimpleNamespace):
            DESCRIPTOR = SimpleNamespace(fields_by_name=self.fields)

        return PrestartWorkersRequest

    def _channel(self, address: str) -> Any:
        return SimpleNamespace(address=address, close=lambda: self.closed.append(address))

    def _stub(self, channel: Any) -> Any:
        def future(request: Any, timeout: float) -> Any:
            assert timeout == prestart.CALL_SECONDS
            self.requests.append((channel.address, request))
            return SimpleNamespace(result=self._result)

        return SimpleNamespace(PrestartWorkers=SimpleNamespace(future=future))

    def _result(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


def test_every_raylet_of_the_slot_is_asked(ray: FakeRay) -> None:
    assert prestart.prestart(ACTOR, 2, {"env_vars": {"NOSET": "1"}}) == 2
    assert [address for address, _ in ray.requests] == ray.closed == ["a:7", "b:7"]
    request = ray.requests[0][1]
    assert (request.language, request.num_workers) == ("Python", 1)
    assert request.job_id == b"\x0a\0\0\0"
    assert request.keep_alive_duration_secs == prestart.KEEP_SECONDS
    assert request.runtime_env_info.serialized_runtime_env == ENVIRONMENTS["a variable of its own"][2]
    assert request.runtime_env_info.of == json.loads(ENVIRONMENTS["a variable of its own"][2])


def test_request_without_a_field_that_is_needed(ray: FakeRay, capsys: pytest.CaptureFixture[str]) -> None:
    ray.fields.remove("keep_alive_duration_secs")
    assert prestart.prestart(ACTOR, 2, {}) == 0
    assert "PrestartWorkersRequest has no keep_alive_duration_secs" in capsys.readouterr().out
    assert ray.requests == []


def test_raylet_that_refuses(ray: FakeRay, capsys: pytest.CaptureFixture[str]) -> None:
    ray.error = RuntimeError("UNAUTHENTICATED")
    assert prestart.prestart(ACTOR, 2, {}) == 0
    assert capsys.readouterr().out.count("start cold: UNAUTHENTICATED") == 1
    assert ray.closed == ["a:7", "b:7"]


def test_ray_without_these_modules(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray._private.grpc_utils", None)
    assert prestart.prestart(ACTOR, 2, {}) == 0
    assert ray.requests == []
