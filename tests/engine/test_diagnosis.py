"""Failures made for real with vLLM, PyTorch, Ray and the model hub's own client, and the cause read from their logs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from vllm_ray_engine import reasons
from vllm_ray_engine.diagnosis import root_cause

from .conftest import MODEL
from .ray_cluster import HEAD, RayCluster, free_port

ARGUMENTS = {
    "--dtype": "float32", "--max-model-len": "256", "--kv-cache-memory-bytes": "64M", "--host": "127.0.0.1",
    "--served-model-name": "t",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One failure. model: path, name, or what is changed in a copy of the tiny model; code: run instead of vLLM."""

    reason: str
    words: str
    model: str | Callable[[Path], object] = MODEL
    args: dict[str, str] = field(default_factory=dict)
    code: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def configured(**changes: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def own_code(model: Path) -> None:
    configured(model_type="zork", auto_map={"AutoConfig": "configuration_zork.Config"})(model)
    (model / "configuration_zork.py").write_text("x = 1")


def cut_off(model: Path) -> None:
    (weights,) = model.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size // 2)


def without_tokenizer(model: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()


def group(port: str, rank: int = 0, then: str = "", world: int = 2) -> str:
    return (
        "import datetime, os, time, torch, torch.distributed as d\n"
        f"d.init_process_group('gloo', init_method='tcp://127.0.0.1:{port}', rank={rank}, world_size={world},"
        f" timeout=datetime.timedelta(seconds=2))\n{then}"
    )


PAIR = (
    "import os\nchild = os.fork() == 0\n"
    "import datetime, time, torch, torch.distributed as d\n"
    "d.init_process_group('gloo', init_method='tcp://127.0.0.1:{port}', rank=int(child), world_size=2,"
    " timeout=datetime.timedelta(seconds={limit}))\n"
    "if child:\n    time.sleep({sleep}); os._exit(0)\ntime.sleep(1); d.all_reduce(torch.ones(1))"
)
CONNECT = "import ray\nray.init(address={address!r}, namespace='diagnosis', log_to_driver=False)\n"

CASES = {
    # vLLM's API server.
    "unknown flag": Case(
        reasons.INVALID_ARGUMENTS, "unrecognized arguments: --no-such-flag", args={"--no-such-flag": "1"}
    ),
    "context longer than the model's": Case(
        reasons.INVALID_ARGUMENTS, "max_model_len", args={"--max-model-len": "99999"}
    ),
    "heads not divisible": Case(reasons.INVALID_ARGUMENTS, "divisible", args={"--tensor-parallel-size": "3"}),
    "unknown quantization": Case(
        reasons.INVALID_ARGUMENTS,
        "quantization",
        model=configured(quantization_config={"quant_method": "zork", "bits": 4}),
    ),
    "quantization of other numbers": Case(reasons.INVALID_ARGUMENTS, "fp8", args={"--quantization": "fp8"}),
    "no chat template": Case(reasons.INVALID_ARGUMENTS, "/none.jinja", args={"--chat-template": "/none.jinja"}),
    "code of its own": Case(reasons.INVALID_ARGUMENTS, "--trust-remote-code", model=own_code),
    "unknown architecture": Case(
        reasons.UNSUPPORTED_VERSION, "ZorkForCausalLM", model=configured(architectures=["ZorkForCausalLM"])
    ),
    "unknown type of model": Case(reasons.UNSUPPORTED_VERSION, "zork9", model=configured(model_type="zork9")),
    "no tokenizer": Case(reasons.MODEL_INVALID, "tokenizer", model=without_tokenizer),
    "config.json is no JSON": Case(
        reasons.MODEL_INVALID, "no JSON", model=lambda model: (model / "config.json").write_text("{")
    ),
    "config.json is closed": Case(
        reasons.PERMISSION_DENIED, "config.json", model=lambda model: (model / "config.json").chmod(0)
    ),
    "no config.json": Case(
        reasons.MODEL_NOT_FOUND, "there is no model", model=lambda model: (model / "config.json").unlink()
    ),
    "port in use": Case(reasons.PORT_IN_USE, "a port is in use", args={"--port": "BUSY"}),
    "folder too long for sockets": Case(
        reasons.INVALID_ENVIRONMENT, "TMPDIR", environment={"VLLM_RPC_BASE_PATH": "/tmp/" + "x" * 90}
    ),
    # The hub's client, with a hub that refuses.
    "gated model": Case(reasons.MODEL_ACCESS_DENIED, "the model is gated", model="org/gated"),
    "invalid token": Case(reasons.MODEL_ACCESS_DENIED, "refuses the token", model="org/token"),
    "no such repository": Case(reasons.MODEL_NOT_FOUND, "there is no such model", model="org/none"),
    "no such revision": Case(
        reasons.MODEL_NOT_FOUND, "no such revision", model="org/revision", args={"--revision": "none"}
    ),
    "hub that fails": Case(reasons.MODEL_NOT_FOUND, "its hub cannot be reached", model="org/down"),
    "no name of a model": Case(reasons.MODEL_NOT_FOUND, "there is no such model", model="no model!"),
    # The engine core and its worker.
    "weights cut off": Case(reasons.MODEL_INVALID, "damaged", model=cut_off),
    "no room for the KV cache": Case(reasons.OUT_OF_MEMORY, "KV cache", args={"--kv-cache-memory-bytes": "100"}),
    # PyTorch.
    "rank that never comes": Case(reasons.COMMUNICATION_FAILED, "GLOO_SOCKET_IFNAME", code=group("PORT")),
    "first rank that is not there": Case(
        reasons.COMMUNICATION_FAILED, "GLOO_SOCKET_IFNAME", code=group("PORT", rank=1)
    ),
    "rank that does not answer": Case(
        reasons.COMMUNICATION_FAILED, "network", code=PAIR.format(port="PORT", limit=2, sleep=6)
    ),
    "rank that died": Case(reasons.COMMUNICATION_FAILED, "network", code=PAIR.format(port="PORT", limit=20, sleep=0.5)),
    "rendezvous port in use": Case(reasons.PORT_IN_USE, "a port is in use", code=group("BUSY")),
    "interface that is not there": Case(
        reasons.INVALID_ENVIRONMENT,
        "_SOCKET_IFNAME",
        code=group("PORT", world=1),
        environment={"GLOO_SOCKET_IFNAME": "none9"},
    ),
    "no CUDA": Case(
        reasons.DEVICE_UNSUPPORTED, "not built for this accelerator", code="import torch; torch.zeros(1, device='cuda')"
    ),
    "memory of the pod, in PyTorch": Case(
        reasons.OUT_OF_MEMORY, "the pod ran out of memory", code="import torch; torch.ones(1 << 50)"
    ),
    # The system.
    "disk full": Case(reasons.DISK_FULL, "a disk is full", code="open('/dev/full', 'w').write('x' * 100_000)"),
    "no libnuma": Case(reasons.LIBRARY_MISSING, "libnuma.so.9", code="import ctypes; ctypes.CDLL('libnuma.so.9')"),
    "no Triton": Case(reasons.LIBRARY_MISSING, "triton", code="import triton.none"),
    "address of another pod": Case(
        reasons.INVALID_ENVIRONMENT, "VLLM_HOST_IP", code="import socket; socket.socket().bind(('203.0.113.7', 0))"
    ),
    # Ray.
    "other version of Ray": Case(
        reasons.UNSUPPORTED_VERSION, "one image", code="import ray; ray.__version__ = '2.52.0'\n" + CONNECT
    ),
    "actor's name taken": Case(
        reasons.ACTOR_NAME_TAKEN,
        "taken",
        code=CONNECT + "class A: pass\n"
        "A = ray.remote(num_cpus=0)(A)\nfirst = A.options(name='a').remote()\nA.options(name='a').remote()",
    ),
    "group's name taken": Case(
        reasons.ACTOR_NAME_TAKEN,
        "taken",
        code=CONNECT
        + "for _ in 'ab': ray.get(ray.util.placement_group([{'CPU': 0.1}], name='dp_rank_0').ready(), timeout=30)",
    ),
    "argument that cannot be sent": Case(
        reasons.ENGINE_EXITED,
        "cannot be sent to the workers",
        code=CONNECT + "import threading; ray.remote(lambda x: x).remote(threading.Lock())",
    ),
    "placement that stays pending": Case(
        reasons.PLACEMENT_PENDING,
        "too few free accelerators",
        code=CONNECT + "import vllm.v1.executor.ray_utils as utils; utils.PG_WAIT_TIMEOUT = 1\n"
        "utils._wait_until_pg_ready(ray.util.placement_group([{'GPU': 64}]))",
    ),
    "actor that is killed": Case(
        reasons.WORKER_DIED,
        "without saying why",
        code=CONNECT + "import os, signal\n"
        "def die(self): os.kill(os.getpid(), signal.SIGKILL)\n"
        "A = ray.remote(num_cpus=0)(type('A', (), {'die': die}))\nray.get(A.remote().die.remote())",
    ),
}

ANSWERS = {
    "gated": (403, "GatedRepo", "Access to model org/gated is restricted"),
    "token": (401, "", "Invalid user token."),
    "none": (401, "RepoNotFound", "Repository not found"),
    "revision": (404, "RevisionNotFound", "Invalid rev id: none"),
    "down": (503, "", "down"),
}


class Hub(BaseHTTPRequestHandler):
    """A model hub that refuses, in the words and headers of the real one."""

    def do_GET(self) -> None:
        status, code, message = next(answer for name, answer in ANSWERS.items() if f"org/{name}" in self.path)
        self.send_response(status)
        for header, value in (("X-Error-Code", code), ("X-Error-Message", message), ("Content-Length", "0")):
            if value:
                self.send_header(header, value)
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815  the base class calls it so

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory, hub: str, cluster: RayCluster) -> Iterator[Path]:
    """Make all failures, two at once, and return the folder of their logs."""
    folder = tmp_path_factory.mktemp("failures")
    started = time.monotonic()
    with socket.socket() as busy:
        busy.bind(("0.0.0.0", 0))
        busy.listen()
        prepared = [
            prepare(name, case, folder, busy.getsockname()[1], f"{HEAD}:{cluster.gcs_port}")
            for name, case in CASES.items()
        ]
        environment = {
            "HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "cache"),
            "TORCHDYNAMO_DISABLE": "1", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": cluster.token,
        }  # fmt: skip
        subprocess.run(
            [sys.executable, str(Path(__file__).with_name("failures.py"))], input=json.dumps(prepared), text=True,
            env=os.environ | environment, check=True, timeout=900,
        )  # fmt: skip
    print(f"MEASURED {len(CASES)} failures: {time.monotonic() - started:.0f} s")
    yield folder
    shutil.rmtree(folder)


def prepare(name: str, case: Case, folder: Path, busy: int, ray_address: str) -> dict[str, Any]:
    """Return a case as `failures.py` takes it."""
    prepared: dict[str, Any] = {"log": str(folder / f"{name}.log"), "environment": case.environment}
    if case.code:
        code = case.code.replace("PORT", str(free_port())).replace("BUSY", str(busy))
        return prepared | {"code": code.replace("{address!r}", repr(ray_address))}
    model = case.model
    if not isinstance(model, str):
        copy = folder / "models" / name.replace(" ", "-")
        shutil.copytree(MODEL, copy)
        model(copy)
        model = str(copy)
    arguments = {"--port": str(free_port())} | ARGUMENTS | case.args
    flags = [f"{flag}={str(busy) if value == 'BUSY' else value}" for flag, value in arguments.items()]
    return prepared | {"argv": ["serve", model, "--enforce-eager", *flags]}


@pytest.mark.parametrize("name", CASES)
def test_cause(name: str, logs: Path) -> None:
    log = (logs / f"{name}.log").read_text(errors="replace")
    cause = root_cause.find(log.splitlines())
    assert cause is not None, log[-4000:]
    assert cause.reason == CASES[name].reason, f"{cause}\n{log[-4000:]}"
    assert CASES[name].words in cause.message, cause
