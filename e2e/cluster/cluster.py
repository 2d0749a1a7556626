"""Brings a cluster up, and asks what is there."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from e2e.cluster import cgroups, network
from e2e.cluster.build import ensure_binaries
from e2e.cluster.commands import exclusive
from e2e.cluster.containerd import Containerd
from e2e.cluster.controlplane import ControlPlane, control_plane_namespaces
from e2e.cluster.errors import ClusterError
from e2e.cluster.files import write_file
from e2e.cluster.manifests import ensure_applied
from e2e.cluster.namespaces import ensure_mount_namespace, hold_folder, read_mountinfo
from e2e.cluster.node import Node
from e2e.cluster.packages import ensure_packages
from e2e.cluster.pki import MAX_NODES, ensure_pki
from e2e.cluster.processes import Supervisor
from e2e.cluster.tools import ensure_tools
from e2e.cluster.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from e2e.cluster.layout import Layout
    from e2e.cluster.processes import ProcessId
    from e2e.cluster.progress import Progress
    from e2e.cluster.tools import Tools


class Mode(StrEnum):
    """How much of Kubernetes there is."""

    CONTROL_PLANE = "control-plane"  # objects and controllers, no pod ever runs
    NODE = "node"


@dataclass(frozen=True)
class Intent:
    """What a cluster is meant to be; kept in its state folder."""

    nodes: int  # 0 in control-plane mode
    port: int  # of the API server on the machine's loopback

    @property
    def mode(self) -> Mode:
        """How much of Kubernetes there is."""
        return Mode.NODE if self.nodes else Mode.CONTROL_PLANE


class Cluster:
    """One cluster of this machine."""

    def __init__(self, layout: Layout, progress: Progress) -> None:
        """Nothing happens until a method is called."""
        self.layout = layout
        self.progress = progress
        self.supervisor = Supervisor(layout, progress)

    def intent(self) -> Intent | None:
        """Return what the cluster is meant to be; None when it is down."""
        try:
            return Intent(**json.loads(self.layout.state_file.read_text()))
        except FileNotFoundError:
            return None

    def nodes(self) -> list[Node]:
        """Return its nodes."""
        intent = self.intent()
        return [Node.numbered(self.layout, number + 1) for number in range(intent.nodes if intent else 0)]

    def processes(self) -> dict[str, ProcessId]:
        """Return its running components by name."""
        return self.supervisor.all_running()

    def missing(self) -> list[str]:
        """Return the names of the components that are meant to run and do not."""
        intent = self.intent()
        expected = component_names(self.nodes()) if intent else []
        return [name for name in expected if self.supervisor.running(name) is None]

    async def up(self, nodes: int) -> None:
        """Have the cluster running with at least so many nodes. Never takes a node away."""
        if nodes > MAX_NODES:
            raise ClusterError(f"at most {MAX_NODES} nodes")
        async with exclusive(self.layout.lock, self.progress, f"cluster {self.layout.name}"):
            tools = await self._prepare()
            await hold_folder(self.layout.namespaces)
            await network.ensure_switch(control_plane_namespaces(self.layout))
            self._decide(nodes)
            control_plane = await self.control_plane()
            control_plane.pki.write_outside_kubeconfig(self.layout.kubeconfig, control_plane.port)
            control_plane.write_configuration()
            node_list = self.nodes()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._start(control_plane, tools))
                for node in node_list:
                    group.create_task(self.boot(node, control_plane))
            async with asyncio.TaskGroup() as group:
                if node_list:
                    group.create_task(self.supervisor.ensure_ready(control_plane.scheduler()))
                    group.create_task(self.supervisor.ensure_ready(control_plane.coredns()))
                for node in node_list:
                    group.create_task(self.join(node, control_plane))
            account = "/api/v1/namespaces/default/serviceaccounts/default"
            await until(self.progress, "the default service account", lambda: control_plane.api.missing(account))

    async def load(self, archives: list[Path]) -> None:
        """Have the images of these archives in every node."""
        async with exclusive(self.layout.lock, self.progress, f"cluster {self.layout.name}"):
            nodes = self.nodes()
            if not nodes:
                raise ClusterError("there is no node to load images into: bring one up by `up --mode node`")
            for archive in archives:
                async with asyncio.TaskGroup() as group:
                    for node in nodes:
                        group.create_task(self._load(node, archive))

    async def _load(self, node: Node, archive: Path) -> None:
        async with self.progress.step(f"{archive.name} into {node.name}"):
            if not await Containerd(node).load(archive):
                self.progress.say(f"{archive.name}: {node.name} has it already")

    async def _prepare(self) -> Tools:
        async with asyncio.TaskGroup() as group:
            group.create_task(ensure_packages(self.progress))
            group.create_task(ensure_binaries(self.layout, self.progress))
            tools = group.create_task(ensure_tools(self.layout, self.progress))
        return tools.result()

    def _decide(self, nodes: int) -> None:
        before = self.intent()
        port = before.port if before else free_port()
        # A forwarder that died may have lost its port to another program.
        if before and self.supervisor.running("forwarder") is None and not is_free(port):
            port = free_port()
        intent = Intent(max(nodes, before.nodes if before else 0), port)
        if before and before.nodes > nodes:
            self.progress.say(f"the cluster has {before.nodes} node(s) and keeps them; `down` takes them away")
        write_file(self.layout.state_file, json.dumps(asdict(intent)))

    async def control_plane(self) -> ControlPlane:
        """Return the control plane as it is meant to be; ClusterError when the cluster is down."""
        intent = self.intent()
        if intent is None:
            raise ClusterError(f"cluster {self.layout.name} is down: bring it up by `up`")
        binaries = await ensure_binaries(self.layout, self.progress)
        return ControlPlane(self.layout, binaries, await ensure_pki(self.layout), intent.port)

    async def _start(self, control_plane: ControlPlane, tools: Tools) -> None:
        supervisor = self.supervisor
        await supervisor.ensure_ready(control_plane.forwarder())
        await supervisor.ensure_ready(control_plane.etcd())
        await supervisor.ensure_ready(control_plane.api_server())
        async with asyncio.TaskGroup() as group:
            group.create_task(supervisor.ensure_ready(control_plane.controller_manager()))
            await ensure_applied(self.layout, control_plane, tools, self.progress, our_crds=not self.nodes())
            group.create_task(supervisor.ensure_ready(control_plane.ray_operator()))

    async def boot(self, node: Node, control_plane: ControlPlane) -> None:
        """Start the node as far as it needs no API server."""
        await network.ensure_link(control_plane.namespaces, node)
        node.write_files(control_plane.pki)
        await asyncio.to_thread(cgroups.ensure_group, node.cgroup_root, cgroups.hierarchies(read_mountinfo()))
        await ensure_mount_namespace(node.mount, node.mounts)
        await self.supervisor.ensure_ready(node.containerd(control_plane.pki))
        await Containerd(node).load(control_plane.binaries.pause_archive)

    async def join(self, node: Node, control_plane: ControlPlane) -> None:
        """Start the rest of the node and wait until it can take pods."""
        async with asyncio.TaskGroup() as group:
            for component in (
                node.kubelet(control_plane.binaries, control_plane.pki),
                node.kube_proxy(control_plane.binaries, control_plane.pki),
            ):
                group.create_task(self.supervisor.ensure_ready(component))
        path = f"/api/v1/nodes/{node.name}"
        await until(self.progress, f"{node.name} Ready", lambda: control_plane.api.missing_condition(path, "Ready"))


def component_names(nodes: list[Node]) -> list[str]:
    """Return the names of all components of a cluster with these nodes."""
    names = ["forwarder", "etcd", "kube-apiserver", "kube-controller-manager", "ray-operator"]
    if nodes:
        names += ["kube-scheduler", "coredns"]
    return [*names, *(name for node in nodes for name in node.component_names)]


def free_port() -> int:
    """Return a port of the loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def is_free(port: int) -> bool:
    """Tell whether nobody listens on this port of the loopback."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
