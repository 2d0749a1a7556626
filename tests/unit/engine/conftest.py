"""Fixtures for the engine package: a configuration, and launchers that run in a stand-in for an engine image."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_ray_engine.config import EngineConfig, parse
from vllm_ray_engine.launcher.control import bearer
from vllm_ray_engine.processes import debris

from .fake_ray import FakeRay

IMAGE = Path(__file__).parent / "image"
OPERATOR = Path(__file__).parents[3] / "operator"
TOKEN = "the-ray-token"

DATA: dict[str, Any] = {
    "version": 1,
    "instanceId": f"chat-1a2b3c4d-a7-{os.getpid()}",  # also names what is outside processes: not shared by test runs
    "deployment": "default/chat",
    "replica": 0,
    "attempt": 7,
    "model": "org/model",
    "revision": None,
    "servedName": "tiny",
    "host": "127.0.0.1",
    "port": 8000,
    "controlPort": 8070,
    "tensor": 2,
    "pipeline": 1,
    "acceleratorKey": "GPU",
    "acceleratorsPerNode": 1,
    "slotResource": "vd-slot-0",
    "args": [],
    "startupTimeoutSeconds": 60,
    "stopGraceSeconds": 20,
}


def configure(**changes: Any) -> EngineConfig:
    return parse(json.dumps(DATA | changes))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str, token: str | None = None, method: str = "GET") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=20) as response:  # noqa: S310
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())
    except OSError:
        return 0, None


def wait_for(what: str, condition: Callable[[], Any], timeout: float = 20) -> Any:
    print(f"waiting for {what}", flush=True)
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not after {timeout:g} s"
        time.sleep(0.02)
    return value


class Launch:
    """A launcher as a process of its own, and the world that it runs in."""

    def __init__(self, world: Path, temporary: Path) -> None:
        self.world = world
        self.temporary = temporary
        self.control = f"http://127.0.0.1:{free_port()}"
        self.port = free_port()
        self._process: subprocess.Popen[str] | None = None
        self._output = ""

    def tell(self, **files: str) -> None:
        """Set what the stand-ins do; each file appears at once with its whole content."""
        for name, text in files.items():
            (self.world / f"{name}.new").write_text(text)
            (self.world / f"{name}.new").rename(self.world / name)

    def start(
        self, *, environment: dict[str, str] | None = None, patience: float = 30, silence: float = 60,
        slowness: float = 0.5, guarded: bool = False, supervised: bool = False, **changes: Any,
    ) -> None:  # fmt: skip
        """Start it, `guarded` by the guard, and that `supervised` by one more process.

        `patience` stands in for LOST_SECONDS, `silence` for HUNG_SECONDS, `slowness` for PROBE_TIMEOUT_SECONDS.
        """
        config = DATA | {"port": self.port, "controlPort": int(self.control.rpartition(":")[2])} | changes
        script = f"""if True:
            from vllm_ray_engine import launch, plugin
            from vllm_ray_engine.launcher import cluster, health
            plugin.PATCHES = ()  # the stand-in for vLLM has none of its internals
            health.HUNG_SECONDS, health.PROBE_TIMEOUT_SECONDS = {silence}, {slowness}
            cluster.POLL_ACTORS_SECONDS = launch.HEALTH_SECONDS = 0.1
            launch.LOST_SECONDS = {patience}
            launch.main()"""
        command = [sys.executable, "-c", script]
        if guarded:
            script = f"from vllm_ray_engine import guard; guard.LAUNCHER = {command!r}; guard.main()"
            command = [sys.executable, "-c", script]
        if supervised:
            command = [sys.executable, "-c", f"import subprocess; subprocess.run({command!r})"]
        self._process = subprocess.Popen(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{OPERATOR}:{IMAGE}", "FAKE_WORLD": str(self.world),
                 "TMPDIR": str(self.temporary),
                 "RAY_AUTH_TOKEN": TOKEN, "VLLM_RAY_ENGINE_CONFIG": json.dumps(config)} | (environment or {}),
        )  # fmt: skip

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    def state(self, query: str = "") -> dict[str, Any]:
        return get(f"{self.control}/v1/state{query}", bearer(TOKEN, DATA["instanceId"]))[1] or {}

    def drain(self) -> dict[str, Any]:
        state: dict[str, Any] = get(f"{self.control}/v1/drain", bearer(TOKEN, DATA["instanceId"]), "POST")[1]
        return state

    def wait_phase(self, phase: str) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            assert self.process.poll() is None, self.end()
            state = self.state()
            return state if state.get("phase") == phase else None

        state: dict[str, Any] = wait_for(f"phase {phase}", reached)
        return state

    def engine(self) -> int:
        """Return the process id of the engine process."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        (child,) = wait_for("the engine process", lambda: path.read_text().split())
        return int(child)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, timeout: float = 30) -> tuple[int, dict[str, str]]:
        """Wait for its end; return exit code and result."""
        output, _ = self.process.communicate(timeout=timeout)
        self._output += output
        mark, _, text = self._output.rstrip("\n").splitlines()[-1].partition(" ")
        assert mark == "VLLM_RAY_ENGINE_RESULT", self._output
        return self.process.returncode, json.loads(text)

    @property
    def output(self) -> str:
        return self._output

    def ray_log(self) -> list[str]:
        path = self.world / "ray.log"
        return path.read_text().splitlines() if path.exists() else []

    def places(self) -> list[str]:
        """Return what the attempt keeps outside its processes."""
        place = debris.NAME + debris.tag(DATA["instanceId"])
        folders = [self.temporary, debris.SHARED_MEMORY]
        return sorted({place for folder in folders for path in folder.iterdir() if place in path.name})

    def left(self) -> list[int]:
        """Return the processes of this world that still live."""
        mark = f"FAKE_WORLD={self.world}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    # pytest's own folder has too long a path for sockets.
    with tempfile.TemporaryDirectory(prefix="launch-") as temporary:
        launch = Launch(tmp_path, Path(temporary))
        yield launch
        for pid in launch.left():
            os.kill(pid, signal.SIGKILL)
        if launch._process is not None:
            launch._process.communicate()
        debris.sweep_all(launch.temporary)
