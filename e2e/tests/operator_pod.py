"""The operator as seen from outside: its container, and what the API server's audit log says it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from e2e.install import NAMESPACE, RELEASE
from e2e.kube import Kube
from e2e.waiting import wait_for

USER = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"
WRITES = ("create", "update", "patch", "delete", "deletecollection")


def container_id(kube: Kube) -> str | None:
    """Return the id of the running container of the operator, or None while it does not run."""
    for pod in kube.items("pods", "-n", NAMESPACE, "-l", f"app.kubernetes.io/name={RELEASE}"):
        for status in pod.get("status", {}).get("containerStatuses", []):
            if "running" in status.get("state", {}):
                return str(status["containerID"]).removeprefix("containerd://")
    return None


def wait_running(kube: Kube, other_than: str | None = None) -> str:
    """Return the id of a running container of the operator, other than the one given."""

    def probe() -> str | None:
        now = container_id(kube)
        return now if now != other_than else None

    return wait_for("the operator's container to run", probe, seconds=180)


def kill(container: str) -> None:
    """SIGKILL the operator's process, by containerd and the container's id."""
    name = os.environ["VRO_CLUSTER"]
    command = [sys.executable, "-m", "e2e.cluster", "--name", name, "ctr", "--"]
    subprocess.run([*command, "task", "kill", "--signal", "SIGKILL", container], check=True)


def audit(since: str = "") -> Iterator[dict[str, Any]]:
    """Yield the answered calls of the operator since an RFC 3339 time."""
    name = os.environ["VRO_CLUSTER"]
    command = [sys.executable, "-m", "e2e.cluster", "--name", name, "status", "--json"]
    path = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["auditLog"]
    for line in Path(path).read_text().splitlines():
        event = json.loads(line)
        if (
            event.get("user", {}).get("username") == USER
            and event.get("stage") == "ResponseComplete"
            and event["requestReceivedTimestamp"] >= since
        ):
            yield event
