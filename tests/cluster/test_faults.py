"""Two nodes, broken and mended: a cut link, a power cut, an API server that is away. One cluster for all of them."""

from __future__ import annotations

import functools
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.archives import single_binary_archive
from e2e.cluster.layout import default_cache

from .conftest import Cli, machine, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NODES = ("vro-test-node1", "vro-test-node2")
IMAGE = "localhost/web:1"
PORT = 8080  # CoreDNS answers /health there: a web server that we have
COREFILE = f".:5353 {{\n    health :{PORT}\n}}\n"


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A cluster of two nodes with a web server on each."""
    folder = tmp_path_factory.mktemp("faults")
    made = Cli(folder / "state")
    began = time.monotonic()
    try:
        made.run("up", "--mode", "node", "--nodes", "2")
        print(f"two nodes after {time.monotonic() - began:.1f} s")
        coredns = next((default_cache() / "bin").glob("*/coredns"))
        single_binary_archive(coredns, IMAGE, folder / "web.tar", "-conf", "/config/Corefile")
        made.run("load", str(folder / "web.tar"))
        (folder / "objects.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects()}))
        made.kubectl("apply", f"--filename={folder / 'objects.json'}")
        made.kubectl("wait", "--for=condition=Ready", "pod", "--all", "--timeout=60s")
        yield made
    finally:
        made.run("down", "--purge")


def objects() -> list[dict[str, Any]]:
    volume = {"name": "config", "configMap": {"name": "web"}}
    container = {
        "name": "web",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "volumeMounts": [{"name": "config", "mountPath": "/config"}],
    }
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"web{number}", "labels": {"app": f"web{number}"}},
            "spec": {
                "nodeSelector": {"kubernetes.io/hostname": node},
                "containers": [container],
                "volumes": [volume],
            },
        }
        for number, node in enumerate(NODES, 1)
    ]
    services = [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": f"web{number}"},
            "spec": {"selector": {"app": f"web{number}"}, "ports": [{"port": PORT}]},
        }
        for number in (1, 2)
    ]
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "web"}, "data": {"Corefile": COREFILE}}
    return [config, *pods, *services]


def pod(cli: Cli, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cli.kubectl("get", "pod", f"web{number}", "--output=json"))
    return found


def answers(cli: Cli, node: str, host: str) -> bool:
    """Whether the web server answers when asked from a node."""
    return cli.run("exec", "--node", node, "--", *curl(host), status=None) == "OK"


def reach(cli: Cli, node: str, host: str) -> None:
    """Wait until the web server answers when asked from a node."""
    until(f"an answer of {host}, asked from {node}", lambda: answers(cli, node, host))


def answered(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout == "OK"


def curl(host: str) -> list[str]:
    return ["curl", "-s", "--max-time", "2", f"http://{host}:{PORT}/health"]


def processes_of(node: str) -> dict[int, str]:
    """Return what runs in the node's pods: number to command."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"/{node}/" in (entry / "cgroup").read_text():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return found


def components(cli: Cli, of: Callable[[str], bool]) -> dict[str, int]:
    return {name: pid for name, pid in cli.pids().items() if of(name)}


def test_pods_reach_each_other_over_nodes_directly_and_through_services(cli: Cli) -> None:
    for here, there in ((0, 2), (1, 1)):
        address = pod(cli, there)["status"]["podIP"]
        inside = next(pid for pid, command in processes_of(NODES[here]).items() if "Corefile" in command)
        from_pod = ["nsenter", f"--net=/proc/{inside}/ns/net", *curl(address)]
        # A pod without a probe is ready before its server listens.
        until("an answer from pod to pod", functools.partial(answered, from_pod))
        reach(cli, NODES[here], f"web{there}.default.svc.cluster.local")


def test_a_node_that_is_cut_off_goes_on_alone_until_it_is_joined_again(cli: Cli) -> None:
    address, before = pod(cli, 2)["status"]["podIP"], processes_of(NODES[1])
    running = cli.pids()
    cli.run("break", "network", NODES[1])
    assert not answers(cli, NODES[0], address)
    reach(cli, NODES[1], address)
    assert cli.kubectl("get", "--raw", "/readyz") == "ok"
    cli.run("mend", "network", NODES[1])
    reach(cli, NODES[0], address)
    assert processes_of(NODES[1]) == before
    assert cli.pids() == running


def test_a_node_without_power_has_nothing_left_running_and_starts_again_with_its_disk(cli: Cli) -> None:
    before, running = pod(cli, 2), cli.pids()
    assert processes_of(NODES[1])
    cli.run("break", "node", NODES[1])
    assert processes_of(NODES[1]) == {}
    left = cli.pids()
    assert {name: running[name] for name in running if NODES[1] not in name} == left
    assert [line for line in machine(cli.state)["processes"] if NODES[1] in line] == []
    cli.run("status", status=1)
    assert not answers(cli, NODES[0], before["status"]["podIP"])

    cli.run("mend", "node", NODES[1])

    def started_again() -> bool:
        now = pod(cli, 2)
        status = now["status"]["containerStatuses"][0]
        return bool(now["metadata"]["uid"] == before["metadata"]["uid"] and status["ready"] and status["restartCount"])

    until("its pod to run again", started_again)
    reach(cli, NODES[0], pod(cli, 2)["status"]["podIP"])
    cli.run("status")


def test_up_mends_what_was_broken(cli: Cli) -> None:
    cli.run("break", "network", NODES[0])
    cli.run("break", "node", NODES[1])
    cli.run("up", "--mode", "node", "--nodes", "2")
    cli.run("status")
    until("both to be reached", lambda: all(answers(cli, NODES[0], f"web{n}.default.svc") for n in (1, 2)))


def test_without_the_api_server_pods_go_on_serving(cli: Cli) -> None:
    address, before = pod(cli, 2)["status"]["podIP"], components(cli, lambda name: "node" in name)
    cli.run("break", "api-server")
    cli.run("kubectl", "--", "get", "--raw", "/readyz", status=1)
    reach(cli, NODES[0], address)
    reach(cli, NODES[0], "web2.default.svc.cluster.local")
    cli.run("mend", "api-server")
    assert cli.kubectl("get", "--raw", "/readyz") == "ok"
    cli.run("status")
    assert components(cli, lambda name: "node" in name) == before


def test_a_fault_needs_a_node_that_is_there(cli: Cli) -> None:
    cli.run("break", "node", status=1)
    cli.run("break", "network", "vro-test-node7", status=1)
    cli.run("break", "api-server", NODES[0], status=1)


def test_down_takes_a_broken_cluster_away_whole(cli: Cli) -> None:
    namespaces = cli.namespaces()
    cli.run("break", "node", NODES[0])
    cli.run("break", "network", NODES[1])
    cli.run("break", "api-server")
    cli.run("down")
    left = machine(cli.state, namespaces)
    assert left["processes"] == left["mounts"] == left["control groups"] == set()
