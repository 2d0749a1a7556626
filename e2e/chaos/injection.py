"""How each fault is done, and undone."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

from e2e.chaos.scene import AWAY, NAME, Scene, module, processes
from e2e.install import NAMESPACE, RELEASE
from e2e.kube import CommandError
from e2e.waiting import wait_for

ROLL_SECONDS = 300.0
EVICTION_SECONDS = 120


def stop_job(scene: Scene) -> None:
    """Stop the victim's Ray job behind the operator's back."""
    job = scene.victim["attempt"]["instanceId"]
    _in_ray(scene, "ray", "job", "stop", "--no-wait", "--address", "http://127.0.0.1:8265", job)


def kill_worker(scene: Scene) -> None:
    """Kill the process of a worker actor."""
    _kill(scene, scene.pod, "RayWorkerProc")


def kill_engine_core(scene: Scene) -> None:
    """Kill the engine core."""
    _kill(scene, scene.pod, "EngineCore")


def kill_api_server(scene: Scene) -> None:
    """Kill vLLM's API server."""
    _kill(scene, scene.pod, "vllm_ray_engine.serve")


def delete_worker_pod(scene: Scene) -> None:
    """Delete the victim's pod."""
    scene.kube.kubectl("delete", "pod", scene.pod, "--wait=false")


def delete_head_pod(scene: Scene) -> None:
    """Delete the head pod."""
    scene.kube.kubectl("delete", "pod", scene.head, "--wait=false")


def kill_gcs(scene: Scene) -> None:
    """Kill Ray's control service in the head pod."""
    _kill(scene, scene.head, "/gcs_server ")


def stop_dashboard(scene: Scene) -> None:
    """Have the dashboard's processes stand still: connections are taken, and nothing answers."""
    _signal(_dashboard(scene), signal.SIGSTOP)


def continue_dashboard(scene: Scene) -> None:
    """Let them go on."""
    _signal(_dashboard(scene), signal.SIGCONT)


def stop_kubernetes_api(_: Scene) -> None:
    """Kill the API server of Kubernetes."""
    module("break", "api-server")


def start_kubernetes_api(_: Scene) -> None:
    """Start it again."""
    module("mend", "api-server")


def kill_operator_in_roll(scene: Scene) -> None:
    """Change the environment of the engines, and kill the operator when it drains a replica for it."""
    selector = ("-n", NAMESPACE, "-l", f"app.kubernetes.io/name={RELEASE}")
    (operator,) = scene.kube.items("pods", *selector)
    env = [{"name": "ROLLED", "value": str(int(time.time()))}]
    scene.kube.kubectl("patch", "vd", NAME, "--type=merge", "-p", json.dumps({"spec": {"engine": {"env": env}}}))

    def drains() -> bool:
        return any(r["phase"] == "Draining" for r in scene.kube.get("vd", NAME)["status"]["replicas"])

    wait_for("the roll to drain a replica", drains, seconds=ROLL_SECONDS, poll=0.2)
    _signal(_all_but_pause(processes(operator["metadata"]["uid"])), signal.SIGKILL)


def drain_node(scene: Scene) -> None:
    """Drain the second node as an administrator does."""
    flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", f"--timeout={EVICTION_SECONDS}s")
    scene.kube.kubectl("drain", AWAY, *flags, seconds=EVICTION_SECONDS + 30)


def uncordon_node(scene: Scene) -> None:
    """Let the node take pods again."""
    scene.kube.kubectl("uncordon", AWAY)


def cut_network(_: Scene) -> None:
    """Cut the second node off."""
    module("break", "network", AWAY)


def join_network(_: Scene) -> None:
    """Join it again."""
    module("mend", "network", AWAY)


def cut_power(_: Scene) -> None:
    """Cut the second node's power."""
    module("break", "node", AWAY)


def restore_power(_: Scene) -> None:
    """Start it again."""
    module("mend", "node", AWAY)


def _in_ray(scene: Scene, *command: str) -> None:
    scene.kube.kubectl("exec", scene.head, "-c", "ray", "--", *command)


def _kill(scene: Scene, pod: str, word: str) -> None:
    found = [pid for pid, command in processes(scene.uid(pod)).items() if word in command]
    _signal(found, signal.SIGKILL)


def _dashboard(scene: Scene) -> list[int]:
    return [
        pid
        for pid, command in processes(scene.uid(scene.head)).items()
        if "/dashboard/dashboard.py" in command or command.startswith("ray-dashboard-")
    ]


def _all_but_pause(found: dict[int, str]) -> Iterator[int]:
    """The pod's own container holds its network; the kubelet would make a new pod of it."""
    return (pid for pid, command in found.items() if not command.startswith("/pause"))


def _signal(pids: Iterator[int] | list[int], what: signal.Signals) -> None:
    sent = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, what)
            sent += 1
    if not sent:
        raise CommandError(f"no process was there for {what.name}")
