"""The operator's process, with the rights that its chart gives it, on the control plane that KUBECONFIG names."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from e2e.kube import Kube
from e2e.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "vllm-ray-operator"
LEASE = "vllm-ray-operator"

Object = dict[str, Any]


@dataclass(frozen=True)
class Account:
    """A service account: who it is in the audit log, and its kubeconfig."""

    user: str
    kubeconfig: Path


@dataclass(frozen=True)
class Cluster:
    """The API server, a namespace of ours, and the rights that the chart gives the operator.

    ``everywhere`` is its account when all namespaces are watched, ``here`` when only ours is.
    """

    kube: Kube
    namespace: str
    everywhere: Account
    here: Account

    def apply(self, *manifests: Object) -> None:
        self.kube.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(manifests))

    def deployment(self, name: str) -> Object:
        return self.kube.get("vllmdeployment", name, "-n", self.namespace)

    def ray_clusters(self) -> list[Object]:
        return self.kube.items("rayclusters.ray.io", "-n", self.namespace)

    def holder(self) -> str | None:
        holder: str | None = self.kube.get("lease", LEASE, "-n", self.namespace).get("spec", {}).get("holderIdentity")
        return holder


@dataclass
class Operator:
    """One operator process."""

    process: subprocess.Popen[bytes]
    health: int
    metrics: int
    log: Path

    def get(self, port: int, path: str) -> tuple[int, str]:
        """Return status and body; (0, what went wrong) if nobody listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, f"the operator ended with {self.process.returncode}\n{self.tail()}"
        return self.get(self.health, "/readyz")[0] == 200

    def is_leader(self) -> bool:
        return "vllm_ray_operator_leader 1.0" in self.get(self.metrics, "/metrics")[1]

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Send a signal; return the exit code and how long it took."""
        start = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(timeout=30), time.monotonic() - start

    def tail(self) -> str:
        return self.log.read_text()[-4000:]


@dataclass
class Operators:
    """Starts operator processes, and ends those that a test leaves."""

    cluster: Cluster
    folder: Path
    started: list[Operator] = field(default_factory=list)

    def start(self, pod: str, namespaces: str = "", *, wait: bool = True) -> Operator:
        health, metrics = free_port(), free_port()
        log = self.folder / f"{pod}-{len(self.started)}.log"
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT / "operator"),
            "KUBECONFIG": str((self.cluster.here if namespaces else self.cluster.everywhere).kubeconfig),
            "POD_NAMESPACE": self.cluster.namespace,
            "POD_NAME": pod,
            "POD_UID": "uid-of-" + pod,
            "VLLM_RAY_OPERATOR_HEALTH_PORT": str(health),
            "VLLM_RAY_OPERATOR_METRICS_PORT": str(metrics),
            "VLLM_RAY_OPERATOR_ENGINE_IMAGE": "registry.example/engine:1",
            "VLLM_RAY_OPERATOR_NAMESPACES": namespaces,
        }
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "vllm_ray_operator.runtime.main"],
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        operator = Operator(process, health, metrics, log)
        self.started.append(operator)
        if wait:
            wait_for(f"operator {pod} to be ready", operator.is_ready, seconds=60, describe=operator.tail, poll=0.2)
        return operator

    def end(self) -> None:
        for operator in self.started:
            if operator.process.poll() is None:
                operator.process.kill()
                operator.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def account(kube: Kube, admin: Path, namespace: str, name: str, folder: Path, *values: str) -> Account:
    """Make the service account that the chart would, with its rights, and a kubeconfig for it."""
    chart = ["template", name, str(CHART), "--namespace", namespace, "--show-only", "templates/rbac.yaml"]
    kube.kubectl("apply", "-f", "-", stdin=kube.helm(*chart, "--set", f"fullnameOverride={name}", *values))
    token = kube.kubectl("create", "token", name, "-n", namespace, "--duration=2h").strip()
    config = yaml.safe_load(admin.read_text())
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    kubeconfig = folder / f"{name}.kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    return Account(f"system:serviceaccount:{namespace}:{name}", kubeconfig)


def vllm_deployment(cluster: Cluster, name: str = "chat", namespace: str = "", **spec: Any) -> Object:
    return {
        "apiVersion": "vllm-ray.dev/v1alpha1",
        "kind": "VLLMDeployment",
        "metadata": {"name": name, "namespace": namespace or cluster.namespace},
        "spec": {"model": {"uri": "hf://org/model"}, **spec},
    }


def reconciled(cluster: Cluster, name: str = "chat") -> Callable[[], Object | None]:
    """Probe for a deployment whose present generation was taken up, with a condition that tells so."""

    def probe() -> Object | None:
        found = cluster.deployment(name)
        generation = found["metadata"]["generation"]
        status = found.get("status", {})
        conditions = [c for c in status.get("conditions", []) if c["type"] == "Ready"]
        done = status.get("observedGeneration") == generation and conditions
        return found if done and conditions[0]["observedGeneration"] == generation else None

    return probe
