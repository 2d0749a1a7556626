"""The operator as seen from outside: its container, and what the API server's audit log says it did."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from e2e import environment
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
    """SIGKILL the processes of a container, found by the id in their cgroup."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mine = container in (process / "cgroup").read_text()
        except OSError:  # it has ended meanwhile
            continue
        if mine:
            os.kill(int(process.name), signal.SIGKILL)


def audit_log() -> Path:
    """Return the API server's audit log."""
    rows = environment.module("e2e.cluster", "--name", os.environ["VRO_CLUSTER"], "status").splitlines()
    return Path(next(row.split()[-1] for row in rows if row.startswith("audit log")))


def audit(since: str = "") -> Iterator[dict[str, Any]]:
    """Yield the answered calls of the operator since an RFC 3339 time."""
    for line in audit_log().read_text().splitlines():
        event = json.loads(line)
        if (
            event.get("user", {}).get("username") == USER
            and event.get("stage") == "ResponseComplete"
            and event["requestReceivedTimestamp"] >= since
        ):
            yield event
