"""Faults made on purpose, each undone by its opposite. `up` undoes all of them."""

from __future__ import annotations

import asyncio
import shutil
from enum import StrEnum
from typing import TYPE_CHECKING

from e2e.cluster import cgroups, network
from e2e.cluster.commands import exclusive
from e2e.cluster.controlplane import control_plane_namespaces
from e2e.cluster.errors import ClusterError
from e2e.cluster.namespaces import read_mountinfo, unmount_all
from e2e.cluster.processes import processes_in

if TYPE_CHECKING:
    from e2e.cluster.cluster import Cluster
    from e2e.cluster.controlplane import ControlPlane
    from e2e.cluster.node import Node

API_SERVER = "kube-apiserver"


class Fault(StrEnum):
    """What can be broken."""

    NETWORK = "network"  # of a node: it is cut off, and all on it goes on alone
    NODE = "node"  # as if its power were cut; it starts again with its disk
    API_SERVER = "api-server"  # killed; pods and their traffic go on


async def inject(cluster: Cluster, fault: Fault, node: str | None) -> None:
    """Break it; nothing happens if it is broken already."""
    async with exclusive(cluster.layout.lock, cluster.progress, f"cluster {cluster.layout.name}"):
        match fault:
            case Fault.NETWORK:
                await network.cut_link(control_plane_namespaces(cluster.layout), _node(cluster, fault, node))
            case Fault.NODE:
                await _cut_power(cluster, _node(cluster, fault, node))
            case Fault.API_SERVER:
                _no_node(fault, node)
                await cluster.supervisor.stop(API_SERVER, patience=0)


async def mend(cluster: Cluster, fault: Fault, node: str | None) -> None:
    """Undo it, and wait until what was broken is there again: the node Ready, the API server and its clients ready."""
    async with exclusive(cluster.layout.lock, cluster.progress, f"cluster {cluster.layout.name}"):
        control_plane = await cluster.control_plane()
        if fault is Fault.API_SERVER:
            _no_node(fault, node)
            await _start_api_server(cluster, control_plane)
            return
        target = _node(cluster, fault, node)
        await cluster.boot(target, control_plane)
        await cluster.join(target, control_plane)


def _node(cluster: Cluster, fault: Fault, name: str | None) -> Node:
    nodes = {node.name: node for node in cluster.nodes()}
    if name not in nodes:
        raise ClusterError(f"{fault}: name one of the nodes: {', '.join(nodes) or 'there are none'}")
    return nodes[name]


def _no_node(fault: Fault, name: str | None) -> None:
    if name is not None:
        raise ClusterError(f"{fault} belongs to no node")


async def _start_api_server(cluster: Cluster, control_plane: ControlPlane) -> None:
    supervisor = cluster.supervisor
    await supervisor.ensure_ready(control_plane.api_server())
    # Some of its clients end when it is away for long.
    await supervisor.ensure_ready(control_plane.controller_manager())
    await supervisor.ensure_ready(control_plane.ray_operator())
    if cluster.nodes():
        await supervisor.ensure_ready(control_plane.scheduler())
        await supervisor.ensure_ready(control_plane.coredns())


async def _cut_power(cluster: Cluster, node: Node) -> None:
    """End all of a node at once. Its link goes first, so that no process on it can say goodbye to a peer elsewhere."""
    await network.remove_link(control_plane_namespaces(cluster.layout), node)
    await cluster.supervisor.stop(*node.component_names, patience=0)
    mounted = cgroups.hierarchies(read_mountinfo())
    await asyncio.to_thread(cgroups.remove_group, node.cgroup_root, mounted)
    leftovers = processes_in(node.namespaces.inodes())
    await asyncio.gather(*(asyncio.to_thread(process.end, 0) for process in leftovers))
    for held in (node.net, node.mount):
        await unmount_all(held)
    # What a machine finds when it starts: its disk, and nothing of what was in memory.
    await asyncio.to_thread(shutil.rmtree, node.folder / "run", ignore_errors=True)
