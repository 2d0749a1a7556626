"""A real Ray cluster of two nodes on this machine, with token authentication, and jobs submitted over its REST API."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEAD, WORKER = "127.0.1.1", "127.0.1.2"
SLOT = "vd-slot-0"
DRIVER = "vd-driver-0"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: str, condition: Callable[[], Any], timeout: float, interval: float = 0.1) -> Any:
    """Wait until the condition gives something true, say what is waited for, and return it."""
    started = time.monotonic()
    print(f"waiting for {what} ...", flush=True)
    while True:
        if value := condition():
            print(f"... {what}: {time.monotonic() - started:.1f} s", flush=True)
            return value
        if time.monotonic() - started > timeout:
            raise AssertionError(f"{what}: not after {timeout:g} s")
        time.sleep(interval)


def get(
    url: str, token: str | None = None, timeout: float = 10, body: Any = None, method: str | None = None
) -> tuple[int, Any]:
    """Return status and JSON body (the text of an error); status 0 when nothing answers."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310
        with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310
            text = response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError:
        return 0, None
    return 200, json.loads(text) if text else None


class RayCluster:
    """Two nodes with one (pretended) GPU each, both of slot 0: a head on 127.0.1.1, a worker on 127.0.1.2."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self.folder = tempfile.mkdtemp(prefix="ray-engine-tests-")
        self.dashboard = f"http://{HEAD}:{free_port()}"
        self.gcs_port = free_port()
        self.mark = f"VLLM_RAY_TEST_CLUSTER={secrets.token_hex(8)}"
        """Stands in the environment of every process of the cluster, by which they are found at its end."""

    def start(self) -> None:
        resources = json.dumps({SLOT: 1, DRIVER: 2})  # room for the launcher of a standby beside another
        common = ["--num-cpus=4", "--num-gpus=1", "--object-store-memory=200000000", f"--resources={resources}"]
        self._ray(
            HEAD, "--head", f"--port={self.gcs_port}", f"--ray-client-server-port={free_port()}",
            f"--dashboard-host={HEAD}", f"--temp-dir={self.folder}",
            f"--dashboard-port={self.dashboard.rpartition(':')[2]}", "--min-worker-port=20000",
            "--max-worker-port=20999", *common,
        )  # fmt: skip
        self._ray(
            WORKER, f"--address={HEAD}:{self.gcs_port}", "--min-worker-port=21000", "--max-worker-port=21999", *common
        )
        wait_for("two Ray nodes", lambda: len(self.alive_nodes()) == 2, 60)
        wait_for("the Jobs API", lambda: self._api("/api/jobs/")[0] == 200, 60)

    def _environment(self, address: str) -> dict[str, str]:
        """Return the environment in which a node is started."""
        name, _, value = self.mark.partition("=")
        return {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {
            name: value,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": "",
            "VLLM_HOST_IP": address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_JOB_STOP_WAIT_TIME_S": "30",
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def _ray(self, address: str, *arguments: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={address}",
             f"--dashboard-agent-listen-port={free_port()}", *arguments],
            env=self._environment(address), check=True, timeout=300, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def stop(self) -> None:
        """End every process of this cluster, and no other."""
        for _ in range(100):
            left = [pid for pid in processes(self.mark) if pid != os.getpid()]
            if not left:
                shutil.rmtree(self.folder, ignore_errors=True)
                return
            for pid in left:
                kill(pid)
            time.sleep(0.05)
        raise AssertionError(f"processes of the Ray cluster that do not end: {left}")

    def _api(self, path: str, body: Any = None) -> tuple[int, Any]:
        return get(f"{self.dashboard}{path}", self.token, timeout=60, body=body)

    def _rows(self, kind: str) -> list[dict[str, Any]]:
        status, answer = self._api(f"/api/v0/{kind}?detail=1&limit=1000")
        assert status == 200, (kind, status)
        rows: list[dict[str, Any]] = answer["data"]["result"]["result"]
        return rows

    def alive_nodes(self) -> list[dict[str, Any]]:
        status, answer = self._api("/api/v0/nodes?detail=1")
        rows = answer["data"]["result"]["result"] if status == 200 else []
        return [row for row in rows if row["state"] == "ALIVE"]

    def actors(self, namespace: str) -> list[dict[str, Any]]:
        """Return the actors of a namespace that are not dead."""
        return [row for row in self._rows("actors") if row["ray_namespace"] == namespace and row["state"] != "DEAD"]

    def groups(self, name: str) -> list[dict[str, Any]]:
        """Return the placement groups whose names begin like this and that are not removed."""
        rows = self._rows("placement_groups")
        return [row for row in rows if row["name"].startswith(name) and row["state"] != "REMOVED"]

    def upload(self, name: str, content: bytes) -> None:
        request = urllib.request.Request(  # noqa: S310
            f"{self.dashboard}/api/packages/gcs/{name}",
            content,
            {"authorization": f"Bearer {self.token}"},
            method="PUT",
        )
        with urllib.request.urlopen(request, timeout=30):  # noqa: S310
            pass

    def submit(
        self, submission: str, uri: str, environment: dict[str, str], driver: str = DRIVER,
        entrypoint: str = "exec python3 -m vllm_ray_engine.guard",
    ) -> None:  # fmt: skip
        body = {
            "submission_id": submission,
            "entrypoint": entrypoint,
            "entrypoint_resources": {driver: 1},
            "runtime_env": {"py_modules": [uri], "env_vars": environment},
        }

        def accepted() -> bool:
            status, answer = self._api("/api/jobs/", body)
            # A node that just joined has no agent for its jobs yet.
            assert status == 200 or "No available agent" in answer, answer
            return status == 200

        wait_for(f"Ray to take the job {submission}", accepted, 60, interval=0.5)

    def job(self, submission: str) -> dict[str, Any]:
        answer: dict[str, Any] = self._api(f"/api/jobs/{submission}")[1]
        return answer

    def logs(self, submission: str) -> str:
        return str(self._api(f"/api/jobs/{submission}/logs")[1]["logs"])

    def stop_job(self, submission: str) -> None:
        assert self._api(f"/api/jobs/{submission}/stop", {})[0] == 200


def processes(*marks: str) -> list[int]:
    """Return the living processes whose environment or command line holds all the marks."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "environ").read_bytes() + b"\0" + (entry / "cmdline").read_bytes()
        except OSError:
            continue  # gone, or not ours; a zombie has neither
        if all(mark.encode() in text for mark in marks):
            found.append(int(entry.name))
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
