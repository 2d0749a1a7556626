"""What a fault is done to: a cluster of two nodes, and a deployment with a replica on each."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e import environment
from e2e.demo import EXAMPLE
from e2e.install import install_operator
from e2e.kube import Kube
from e2e.serving import head_pod, wait_ready
from e2e.waiting import say, wait_for

CLUSTER = "vro-chaos"
HOME, AWAY = (f"{CLUSTER}-node{number}" for number in (1, 2))  # of head and operator; of the replica that is hit
HOSTNAME = "kubernetes.io/hostname"
NAME = "chaos"
WORKERS = {"vllm-ray.dev/deployment": NAME, "ray.io/node-type": "worker"}
START_SECONDS = 900.0


@dataclass(frozen=True)
class Scene:
    """The deployment as it was right before the fault. ``victim`` is the replica on the second node."""

    kube: Kube
    deployment: dict[str, Any]
    victim: dict[str, Any]
    other: dict[str, Any]

    @property
    def pod(self) -> str:
        """The victim's pod."""
        return str(self.victim["attempt"]["endpoint"]["pod"])

    @property
    def head(self) -> str:
        """The Ray head's pod."""
        return head_pod(self.kube, self.deployment)

    def uid(self, pod: str) -> str:
        """Return the uid of a pod."""
        return str(self.kube.get("pod", pod)["metadata"]["uid"])


def module(*args: str) -> str:
    """Run a command of the cluster's tool."""
    return environment.module("e2e.cluster", "--name", CLUSTER, *args)


def processes(uid: str) -> dict[int, str]:
    """Return the processes of a pod as the machine sees them: number to command line. No API server is asked."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"pod{uid}/" in (entry / "cgroup").read_text():
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = command.decode(errors="replace").strip()
    return found


def engine_cores(uid: str) -> set[int]:
    """Return the engine cores that run in a pod."""
    return {pid for pid, command in processes(uid).items() if "EngineCore" in command}


def manifest() -> dict[str, Any]:
    """Return the deployment: two replicas of a pod each, on two nodes as long as there are two; the head at home."""
    document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    document["metadata"]["name"] = NAME
    spec = document["spec"]
    spec["parallelism"] = {"tensor": 1}
    spec["engine"]["drainTimeoutSeconds"] = 10
    # Each fault is to be met like a first one.
    spec["restart"] = {"maxBackoffSeconds": 10, "crashLoopAfter": 1000}
    at_home = {"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": [HOME]}]}
    prefer_home = {"nodeAffinity": {_PREFERRED: [{"weight": 100, "preference": at_home}]}}
    apart = {"labelSelector": {"matchLabels": WORKERS}, "topologyKey": HOSTNAME}
    prefer_apart = {"podAntiAffinity": {_PREFERRED: [{"weight": 100, "podAffinityTerm": apart}]}}
    spec["cluster"]["head"]["template"] = {"spec": {"affinity": prefer_home}}
    spec["cluster"]["workers"]["template"] = {"spec": {"affinity": prefer_apart}}
    return document


_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def bring_up() -> Kube:
    """Bring up two nodes, the operator on the first, and the deployment; return access when it is Ready."""
    env = environment.bring_up(CLUSTER, nodes=2)
    install_operator(env.kube, env.operator_image, env.engine_image, {f"nodeSelector.{_escaped(HOSTNAME)}": HOME})
    env.kube.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest()))
    wait_ready(env.kube, NAME, "default", START_SECONDS)
    return env.kube


def _escaped(key: str) -> str:
    return key.replace(".", r"\.")


def settle(kube: Kube) -> Scene:
    """Wait until all is well, with a replica on each node, and return the scene."""
    deployment = wait_ready(kube, NAME, "default", START_SECONDS)
    by_node = {replica["attempt"]["endpoint"]["node"]: replica for replica in deployment["status"]["replicas"]}
    if set(by_node) != {HOME, AWAY}:
        crowded = deployment["status"]["replicas"][0]
        say(f"both replicas are on {next(iter(by_node))}: moving replica {crowded['index']}")
        kube.kubectl("delete", "pod", crowded["attempt"]["endpoint"]["pod"])
        number = crowded["attempt"]["number"]
        wait_for(
            "the replica to start again",
            lambda: any(
                r["index"] == crowded["index"] and r.get("attempt", {}).get("number", 0) > number
                for r in kube.get("vd", NAME)["status"]["replicas"]
            ),
            seconds=START_SECONDS,
        )
        return settle(kube)
    return Scene(kube, deployment, by_node[AWAY], by_node[HOME])
