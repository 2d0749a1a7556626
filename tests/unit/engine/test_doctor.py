"""The doctor: every check as a table of named cases, then its command line."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from vllm_ray_engine import config, doctor, plugin, reasons, versions
from vllm_ray_engine.diagnosis import checks, facts, nodes
from vllm_ray_engine.diagnosis.checks import ERROR, OK, WARNING, Check
from vllm_ray_engine.diagnosis.facts import Facts, Folder, Wanted
from vllm_ray_engine.diagnosis.model_files import ModelFiles
from vllm_ray_engine.diagnosis.nodes import Node
from vllm_ray_engine.reasons import EngineFailure

from .conftest import DATA, configure

MIB = 1 << 20
GIB = 1 << 30
WHOLE = ModelFiles(exists=True, readable=True, config=True, tokenizer=True, weights=True)
FOLDERS = {
    name: Folder(path=f"/tmp/{name}", writable=True, free=100 * GIB, executable=True)
    for name in ("TMPDIR", "HF_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
}
HEALTHY = Facts(
    wanted=Wanted(model="/models/tiny", ports={8000: "engine"}, local_workers=1),
    environment={},
    node_environment=None,
    job_environment=frozenset(),
    python="3.11.2",
    versions={"vllm": "0.32.0", "ray": "2.60.0"},
    plugin_found=True,
    patch_points={"ray:init": ""},
    own_address=None,
    shared_memory=8 * GIB,
    ports_taken=(),
    model=WHOLE,
    cached=False,
    folders=FOLDERS,
    compiler="/usr/bin/g++",
    has_gpu=True,
)
NAMED = {"wanted": Wanted(model="org/model"), "model": None}
OFFLINE = {"environment": {"HF_HUB_OFFLINE": "1"}}


def env(**variables: str) -> dict[str, Any]:
    return {"environment": variables}


def folder(name: str, **changes: Any) -> dict[str, Any]:
    return {"folders": FOLDERS | {name: replace(FOLDERS[name], **changes)}}


def args(*arguments: str, **model: Any) -> dict[str, Any]:
    return {"wanted": Wanted(model="/models/tiny", args=arguments), "model": replace(WHOLE, **model)}


CASES: dict[str, tuple[Check, dict[str, Any], str, str]] = {
    # name: (check, what differs from HEALTHY, status, "reason: part of the message")
    "vLLM": (checks.vllm_version, {}, OK, "vllm 0.32.0 on Python 3.11.2"),
    "vLLM too old": (checks.vllm_version, {"versions": {"vllm": "0.20.2"}}, ERROR, "UnsupportedVersion: vllm 0.20.2"),
    "no vLLM": (checks.vllm_version, {"versions": {"vllm": None}}, ERROR, "UnsupportedVersion: is not installed"),
    "Ray too old": (checks.ray_version, {"versions": {"ray": "2.51.1"}}, ERROR, "UnsupportedVersion: ray 2.51.1"),
    "no plugin": (checks.plugin, {"plugin_found": False}, ERROR, "UnsupportedVersion: would not find the plugin"),
    "patch points": (checks.patch_points, {}, OK, "all 1 functions"),
    "unknown vLLM": (
        checks.patch_points, {"patch_points": {"ray:init": "", "vllm.x:y": "there is no module vllm.x"}}, ERROR,
        "UnsupportedVersion: does not know this vLLM: there is no module vllm.x (vllm.x:y)",
    ),
    "no VLLM_PORT": (checks.vllm_port, {}, OK, "not set"),
    "VLLM_PORT": (checks.vllm_port, env(VLLM_PORT="20000"), OK, "20000"),
    "VLLM_PORT of a Service": (
        checks.vllm_port, env(VLLM_PORT="tcp://10.0.0.1:80"), ERROR, "InvalidEnvironment: tcp://10.0.0.1:80",
    ),
    "VLLM_PORT is no port": (checks.vllm_port, env(VLLM_PORT="70000"), ERROR, "InvalidEnvironment: 70000"),
    "no VLLM_HOST_IP": (checks.vllm_host_ip, {}, OK, "not set"),
    "VLLM_HOST_IP": (checks.vllm_host_ip, env(VLLM_HOST_IP="10.0.0.1") | {"own_address": True}, OK, "an address of"),
    "VLLM_PORT that any port is": (checks.vllm_port, env(VLLM_PORT="0"), WARNING, "is 0"),
    "VLLM_PORT with spaces": (checks.vllm_port, env(VLLM_PORT=" 20000 "), OK, "20000"),
    "VLLM_HOST_IP of another": (
        checks.vllm_host_ip, env(VLLM_HOST_IP="10.0.0.9") | {"own_address": False}, WARNING, "no address of this pod",
    ),
    "VLLM_HOST_IP is a name": (checks.vllm_host_ip, env(VLLM_HOST_IP="pod"), WARNING, "no address"),
    "VLLM_HOST_IP is the loopback": (
        checks.vllm_host_ip, env(VLLM_HOST_IP="127.0.0.1") | {"own_address": True}, WARNING, "cannot reach it",
    ),
    "shared memory": (checks.shared_memory, {}, OK, "8.0 GiB"),
    "shared memory of a plain container": (
        checks.shared_memory, {"shared_memory": 64 * MIB}, ERROR, "SharedMemory: 64 MiB are free in /dev/shm",
    ),
    "shared memory for one queue, of a node without workers": (
        checks.shared_memory, {"shared_memory": 64 * MIB, "wanted": Wanted(local_workers=0)}, WARNING, "64 MiB",
    ),
    "shared memory for some queues": (
        checks.shared_memory, {"shared_memory": GIB, "wanted": Wanted(local_workers=8)}, WARNING, "queues of 8 workers",
    ),
    "size of queues that is no number": (checks.shared_memory, env(VLLM_MQ_MAX_CHUNK_BYTES_MB="x"), OK, "8.0 GiB"),
    "larger queues": (
        checks.shared_memory, env(VLLM_MQ_MAX_CHUNK_BYTES_MB="1024"), ERROR, "SharedMemory: need 10.0 GiB",
    ),
    "little shared memory of a vLLM that does not refuse it": (
        checks.shared_memory, {"shared_memory": 64 * MIB, "versions": {"vllm": "0.21.0"}}, WARNING, "64 MiB",
    ),
    "little shared memory of the classic executor": (
        checks.shared_memory, env(VLLM_USE_RAY_V2_EXECUTOR_BACKEND="0") | {"shared_memory": 64 * MIB}, WARNING, "64",
    ),
    "no shared memory": (checks.shared_memory, {"shared_memory": None}, ERROR, "SharedMemory: no /dev/shm"),
    "free port": (checks.ports, {}, OK, "8000"),
    "port in use": (checks.ports, {"ports_taken": (8000,)}, ERROR, "PortInUse: port 8000 of the engine"),
    "model": (checks.model_path, {}, OK, "/models/tiny can be read"),
    "no model": (checks.model_path, {"model": ModelFiles(exists=False)}, ERROR, "ModelNotFound: no /models/tiny"),
    "closed model": (checks.model_path, {"model": ModelFiles(exists=True)}, ERROR, "PermissionDenied: not be entered"),
    "closed file": (
        checks.model_path, {"model": replace(WHOLE, readable=False, damaged=("a.json may not be read",))}, ERROR,
        "PermissionDenied: a.json may not be read",
    ),
    "damaged model": (
        checks.model_path, {"model": replace(WHOLE, damaged=("a.safetensors is cut off",))}, ERROR,
        "ModelInvalid: a.safetensors is cut off",
    ),
    "damaged model whose weights are not read": (
        checks.model_path, args("--load-format", "auto", "--load-format=dummy", damaged=("a is cut off",)), WARNING,
        "a is cut off",
    ),
    "damaged config.json that is not read": (
        checks.model_path, args("--hf-config-path=/x", damaged=("config.json is no JSON",)), WARNING, "is no JSON",
    ),
    "damaged model in two formats": (
        checks.model_path, args(damaged=("a.safetensors is cut off",), two_formats=True), WARNING, "is cut off",
    ),
    "damaged file that is not read": (
        checks.model_path, args(doubtful=("b.safetensors is cut off",)), WARNING, "b.safetensors is cut off",
    ),
    "config.json in a format of its own": (
        checks.model_path, args("--config-format", "mine", config=False), OK, "can be read",
    ),
    "no weights": (checks.model_path, args(weights=False), ERROR, "ModelNotFound: no model weights"),
    "no weights, none wanted": (checks.model_path, args("--load-format", "dummy", weights=False), OK, "can be read"),
    "no config.json": (checks.model_path, args(config=False), ERROR, "ModelInvalid: no config.json"),
    "config.json elsewhere": (checks.model_path, args("--hf-config-path=/x", config=False), OK, "can be read"),
    "no tokenizer": (checks.model_path, args(tokenizer=False), WARNING, "no tokenizer"),
    "tokenizer elsewhere": (checks.model_path, args("--tokenizer", "/x", tokenizer=False), OK, "can be read"),
    "no tokenizer wanted": (checks.model_path, args("--skip_tokenizer_init", tokenizer=False), OK, "can be read"),
    "model by name": (checks.model_cache, NAMED, OK, "comes from its hub"),
    "model by name, offline": (checks.model_cache, NAMED | OFFLINE, ERROR, "ModelNotFound: is not in the cache"),
    "model by name, cached": (checks.model_cache, NAMED | OFFLINE | {"cached": True}, OK, "in the cache"),
    "model from another hub": (
        checks.model_cache, NAMED | env(HF_HUB_OFFLINE="1", VLLM_USE_MODELSCOPE="1"), OK, "comes from its hub",
    ),
    "folders": (checks.writable_folders, {}, OK, "can be written"),
    "closed cache": (checks.writable_folders, folder("VLLM_CACHE_ROOT", writable=False), WARNING, "VLLM_CACHE_ROOT"),
    "closed hub cache of a model by name": (
        checks.writable_folders, NAMED | folder("HF_HOME", writable=False), WARNING, "HF_HOME",
    ),
    "closed hub cache of a path": (checks.writable_folders, folder("HF_HOME", writable=False), OK, "can be written"),
    "closed temporary folder": (checks.writable_folders, folder("TMPDIR", writable=False), WARNING, "TMPDIR"),
    "room": (checks.free_space, {}, OK, "have room"),
    "little room": (checks.free_space, folder("HF_HOME", free=MIB), WARNING, "/tmp/HF_HOME (1 MiB)"),
    "noexec": (checks.executable_folders, folder("TRITON_CACHE_DIR", executable=False), WARNING, "noexec"),
    "long temporary folder": (checks.socket_path, folder("TMPDIR", path="/" + "x" * 70), WARNING, "too long for"),
    "long folder for sockets": (
        checks.socket_path, env(VLLM_RPC_BASE_PATH="/" + "x" * 70), ERROR, "InvalidEnvironment: too long for",
    ),
    "short folder for sockets": (
        checks.socket_path, folder("TMPDIR", path="/" + "x" * 70) | env(VLLM_RPC_BASE_PATH="/run"), "none", "",
    ),
    "longest folder for sockets": (checks.socket_path, folder("TMPDIR", path="/" + "x" * 69), "none", ""),
    "compiler": (checks.compiler, {}, OK, "/usr/bin/g++"),
    "no compiler": (checks.compiler, {"compiler": None}, WARNING, "no C++ compiler"),
    "no compiler for Triton": (
        checks.compiler, {"compiler": None} | env(TORCHDYNAMO_DISABLE="1"), WARNING, "no C++ compiler",
    ),
    "no compiler needed": (
        checks.compiler, {"compiler": None, "has_gpu": False} | env(TORCHDYNAMO_DISABLE="1"), OK, "not needed",
    ),
    "no node": (checks.environment_of_workers, {}, "none", ""),
    "node that agrees": (
        checks.environment_of_workers, env(VLLM_X="1") | {"node_environment": {"VLLM_X": "1", "UCX_TLS": "tcp"}}, OK,
        "nothing else",
    ),
    "node that differs, and the job": (
        checks.environment_of_workers,
        env(VLLM_X="1") | {"node_environment": {"VLLM_X": "2"}, "job_environment": frozenset({"VLLM_X"})}, OK,
        "nothing else",
    ),
    "node that differs": (
        checks.environment_of_workers, env(VLLM_X="1", HOME="/a") | {"node_environment": {"VLLM_X": "2", "HOME": "/b"}},
        WARNING, "started: VLLM_X",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_check(name: str) -> None:
    check, changes, status, expected = CASES[name]
    verdict = check(replace(HEALTHY, **changes))
    if status == "none":
        assert verdict is None
        return
    assert verdict is not None
    reason, _, message = expected.rpartition(": ") if status == ERROR else ("", "", expected)
    assert verdict.status == status, verdict
    if reason:
        assert expected.split(": ")[0] == verdict.reason
    assert message in f"{verdict.reason} {verdict.message}"
    assert (verdict.reason in reasons.ALL) == (status == ERROR)


def test_nothing_is_wrong_with_a_healthy_node() -> None:
    assert {finding.status for finding in checks.judge(HEALTHY)} == {OK}


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_every_check_has_a_bad_case(check: Check) -> None:
    assert {status for one, _, status, _ in CASES.values() if one is check} & {WARNING, ERROR}


def test_start_is_refused_for_an_error_and_warned_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = replace(HEALTHY, compiler=None)
    monkeypatch.setattr(facts, "gather", lambda _: seen)
    assert [finding.check for finding in doctor.check_start(configure())] == ["compiler"]
    seen = replace(HEALTHY, compiler=None, shared_memory=MIB)
    with pytest.raises(EngineFailure, match=r"1 MiB are free in /dev/shm.*: raise spec\.engine\.shmSize") as caught:
        doctor.check_start(configure())
    assert caught.value.cause.reason == reasons.SHARED_MEMORY


def test_a_pod_that_cannot_be_looked_at_is_no_reason_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(_: Wanted) -> Facts:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(facts, "gather", gather)
    (finding,) = doctor.check_start(configure())
    assert "Stale file handle" in finding.message


def test_what_the_launcher_wants() -> None:
    wanted = doctor.wanted(configure(tensor=4, acceleratorsPerNode=8, model="/m", args=["--tokenizer", "/t"]))
    assert (wanted.model, wanted.local_workers, list(wanted.ports)) == ("/m", 4, [8000])
    assert wanted.flag("--tokenizer") == "/t"
    assert wanted.flag("--load-format") is None


def two(**changes: Any) -> list[Node]:
    resources = {"GPU": 1.0}
    return [Node("10.0.0.1", resources, HEALTHY), Node("10.0.0.2", resources, replace(HEALTHY, **changes))]


COMPARED: dict[str, tuple[list[Node], dict[str, str]]] = {
    "the same": (two(), {}),
    "another Ray": (two(versions={"vllm": "0.32.0", "ray": "2.58.0"}), {"same-ray": ERROR}),
    "another vLLM": (two(versions={"vllm": "0.30.0", "ray": "2.60.0"}), {"same-vllm": ERROR}),
    "another Python": (two(python="3.11.9"), {"same-python": ERROR}),
    "another variable": (two(environment={"NCCL_DEBUG": "INFO"}), {"same-environment": WARNING}),
    "another address": (two(environment={"VLLM_HOST_IP": "10.0.0.2"}), {}),
    "another home": (two(environment={"HOME": "/x"}), {}),
    "silent": ([*two(), Node("10.0.0.3", {}, None)], {"node": ERROR}),
}


@pytest.mark.parametrize("name", COMPARED)
def test_nodes_are_compared(name: str) -> None:
    found, expected = COMPARED[name]
    findings = nodes.compare(found)
    assert {finding.check: finding.status for finding in findings if finding.status != OK} == expected
    assert all((finding.reason in reasons.ALL) == (finding.status == ERROR) for finding in findings)


def test_resources_are_counted() -> None:
    assert nodes.enough(two(), {"GPU": 2}).status == OK
    lacking = nodes.enough(two(), {"GPU": 4, "vd-slot-0": 2})
    assert (lacking.status, lacking.reason) == (ERROR, reasons.PLACEMENT_PENDING)
    assert lacking.message == "2 of GPU, 4 needed, 0 of vd-slot-0, 2 needed"


def test_a_ray_that_cannot_be_reached_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(_: Wanted) -> list[Node]:
        raise RuntimeError("Version mismatch: The cluster was started with: Ray 2.52.0")

    monkeypatch.setattr(nodes, "gather", gather)
    (finding,) = doctor.cluster(Wanted(), {})
    assert (finding.status, finding.reason) == (ERROR, reasons.UNSUPPORTED_VERSION)


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "gather", lambda wanted: replace(HEALTHY, wanted=wanted))
    monkeypatch.delenv(config.ENVIRONMENT_VARIABLE, raising=False)


@pytest.mark.usefixtures("healthy")
def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--port", "8000"]) == 0
    out = capsys.readouterr().out
    assert "ok      vllm-version: vllm 0.32.0 on Python 3.11.2\n" in out
    assert out.endswith("0 errors, 0 warnings, 12 ok\n")


@pytest.mark.usefixtures("healthy")
def test_error_is_shown_with_its_remedy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(facts, "gather", lambda _: replace(HEALTHY, shared_memory=MIB))
    assert doctor.main([]) == 1
    assert "error   shared-memory: 1 MiB are free" in (out := capsys.readouterr().out)
    assert "        -> raise spec.engine.shmSize\n" in out


@pytest.mark.usefixtures("healthy")
def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(facts, "gather", lambda _: replace(HEALTHY, plugin_found=False))
    assert doctor.main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    (bad,) = [finding for finding in found["findings"] if finding["status"] == ERROR]
    assert (bad["check"], bad["reason"]) == ("plugin", reasons.UNSUPPORTED_VERSION)


@pytest.mark.usefixtures("healthy")
def test_configuration_of_a_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(config.ENVIRONMENT_VARIABLE, json.dumps(DATA | {"port": 8123}))
    assert doctor.main([]) == 0
    assert "free: 8123" in capsys.readouterr().out
    monkeypatch.setenv(config.ENVIRONMENT_VARIABLE, json.dumps(DATA | {"port": 0}))
    assert doctor.main([]) == 1
    assert "error   configuration" in capsys.readouterr().out


def test_patches_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda _: "0.32.0")
    monkeypatch.setattr(plugin, "PATCHES", (plugin.Patch("x", ("no.such:thing",), lambda f, _: f, "why"),))
    finding = doctor.patches()
    assert (finding.status, finding.reason) == (ERROR, reasons.UNSUPPORTED_VERSION)
    assert "no.such:thing" in finding.message
    monkeypatch.setattr(plugin, "PATCHES", (plugin.Patch("x", ("json:loads",), lambda f, _: f, "why"),))
    assert doctor.patches().status == OK


def test_wrong_usage() -> None:
    with pytest.raises(SystemExit) as caught:
        doctor.main(["--need", "GPU"])
    assert caught.value.code == 2
