"""The real thing: up, twice, broken, interrupted, down."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from e2e.cluster.archives import single_binary_archive
from e2e.cluster.layout import default_cache

from .conftest import Cli, machine, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CONTROL_PLANE = {"forwarder", "etcd", "kube-apiserver", "kube-controller-manager", "ray-operator"}
READY_WITHIN = 15.0  # seconds, on a machine that is not busy with something else
BUSY_FACTOR = 4


def seconds_allowed() -> float:
    """Return how long `up` may take: others that use the processors are not its fault."""
    busy = os.getloadavg()[0] > (os.cpu_count() or 1) / 2
    return READY_WITHIN * (BUSY_FACTOR if busy else 1)


def new(before: dict[str, set[str]], after: dict[str, set[str]]) -> dict[str, set[str]]:
    return {kind: after[kind] - before[kind] for kind in after if after[kind] - before[kind]}


def test_control_plane_is_ready_in_seconds_and_up_again_changes_nothing(cli: Cli) -> None:
    cli.run("tools")
    before = machine(cli.state)
    allowed = seconds_allowed()
    cli.run("up")  # may have to build
    cli.run("down")

    began = time.monotonic()
    cli.run("up")
    took = time.monotonic() - began
    print(f"control plane ready after {took:.1f} s")
    assert took < allowed

    pids = cli.pids()
    assert pids.keys() == CONTROL_PLANE
    cli.run("up")
    assert cli.pids() == pids

    assert "rayclusters.ray.io" in cli.kubectl("get", "crd", "--output=name")
    inside = cli.run("exec", "--", "kubectl", "get", "--raw", "/readyz")
    assert inside == "ok"

    # KubeRay reconciles: it makes the head pod, though no node will ever run it.
    cluster = cli.state.parent / "raycluster.json"
    cluster.write_text(json.dumps(RAY_CLUSTER))
    cli.kubectl("apply", f"--filename={cluster}")
    selector = "--selector=ray.io/cluster=probe,ray.io/node-type=head"
    until("the head pod", lambda: "pod/" in cli.kubectl("get", "pods", selector, "--output=name"))

    audit = [json.loads(line) for line in (cli.state / "log" / "audit.log").read_text().splitlines()]
    writers = {
        (entry["user"]["username"], entry["verb"], entry["objectRef"]["resource"])
        for entry in audit
        if "objectRef" in entry
    }
    assert ("system:serviceaccount:kuberay-system:kuberay-operator", "create", "pods") in writers
    assert ("admin", "create", "rayclusters") in writers

    namespaces = cli.namespaces()
    cli.run("down")
    assert new(before, machine(cli.state, namespaces)) == {}
    cli.run("status", status=3)


RAY_CLUSTER = {
    "apiVersion": "ray.io/v1",
    "kind": "RayCluster",
    "metadata": {"name": "probe"},
    "spec": {
        "rayVersion": "2.60.0",
        "headGroupSpec": {
            "rayStartParams": {},
            "template": {"spec": {"containers": [{"name": "ray-head", "image": "localhost/none:1"}]}},
        },
    },
}


def test_a_dead_component_is_started_again_and_the_others_are_left_alone(cli: Cli) -> None:
    cli.run("up")
    before = cli.pids()
    for name in ("kube-apiserver", "forwarder"):
        os.kill(before[name], signal.SIGKILL)
        until(f"{name} to be gone", lambda name=name: name not in cli.pids())  # type: ignore[misc]
    cli.run("status", status=1)
    cli.run("up")
    after = cli.pids()
    assert after.keys() == CONTROL_PLANE
    untouched = CONTROL_PLANE - {"kube-apiserver", "forwarder"}
    # The controller manager may end by itself when its API server goes; etcd has no such excuse.
    assert {name for name in untouched if after[name] != before[name]} <= {"kube-controller-manager", "ray-operator"}
    assert cli.kubectl("get", "--raw", "/readyz") == "ok"


@pytest.mark.parametrize("request_to_end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_up_can_be_run_again_and_starts_nothing_twice(cli: Cli, request_to_end: signal.Signals) -> None:
    before = machine(cli.state)
    with cli.start("up") as up:
        assert up.stdout is not None
        for line in up.stdout:
            if "etcd" in line:
                break
        up.send_signal(request_to_end)
        rest = up.stdout.read()
    print(rest)
    assert "Traceback" not in rest
    assert up.returncode == (-9 if request_to_end is signal.SIGKILL else 130)

    etcd = cli.pids()["etcd"]
    cli.run("up")
    assert cli.pids()["etcd"] == etcd
    running = [line for line in machine(cli.state)["processes"] if "kube-apiserver" in line]
    assert len(running) == 1
    namespaces = cli.namespaces()
    cli.run("down")
    assert new(before, machine(cli.state, namespaces)) == {}


def test_a_node_runs_pods_and_down_leaves_nothing_but_images(cli: Cli, tmp_path: Path) -> None:
    pause = next((default_cache() / "bin").glob("*/pause"))
    archive = tmp_path / "sleeper.tar"
    single_binary_archive(pause, "localhost/sleeper:1", archive)
    before = machine(cli.state)
    cli.run("up", "--mode", "node", "--nodes", "2")
    cli.run("load", str(archive))

    nodes = ["vro-test-node1", "vro-test-node2"]
    for number, node in enumerate(nodes):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"sleeper{number}"},
            "spec": {
                "nodeSelector": {"kubernetes.io/hostname": node},
                "containers": [{"name": "sleeper", "image": "localhost/sleeper:1", "imagePullPolicy": "Never"}],
            },
        }
        file = tmp_path / f"pod{number}.json"
        file.write_text(json.dumps(pod))
        cli.kubectl("apply", f"--filename={file}")
    cli.kubectl("wait", "--for=condition=Ready", "pod", "--all", "--timeout=60s")
    placed = cli.kubectl("get", "pods", "--output=jsonpath={.items[*].spec.nodeName}").split()
    assert sorted(placed) == nodes
    # Names and Services work where commands are run: the API server by its Service's name.
    answer = cli.run("exec", "--", "curl", "-sk", "--max-time", "10", "https://kubernetes.default.svc/readyz")
    assert answer == "ok"

    namespaces = cli.namespaces()
    running = new(before, machine(cli.state, namespaces))
    assert {"processes", "mounts", "control groups"} == running.keys()  # what `down` has to take away
    assert sum("/pause" in process or "containerd-shim" in process for process in running["processes"]) == 6
    cli.run("down")
    assert new(before, machine(cli.state, namespaces)) == {}
    kept = {path.relative_to(cli.state).parts[0] for path in cli.state.iterdir()}
    assert kept == {"lock", "nodes"}

    # The images are still there.
    cli.run("up", "--mode", "node", "--nodes", "2")
    listed = cli.run("load", str(archive), status=0)
    assert listed == ""
    cli.kubectl("apply", f"--filename={tmp_path / 'pod0.json'}")
    cli.kubectl("wait", "--for=condition=Ready", "pod/sleeper0", "--timeout=60s")
    namespaces = cli.namespaces()
    cli.run("down", "--purge")
    assert not cli.state.exists()
    assert new(before, machine(cli.state, namespaces)) == {}
