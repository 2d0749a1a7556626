"""Takes a cluster away, and leaves nothing of it behind but its images."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING

from e2e.cluster import cgroups
from e2e.cluster.cluster import Cluster, component_names
from e2e.cluster.commands import exclusive
from e2e.cluster.containerd import Containerd
from e2e.cluster.controlplane import control_plane_namespaces
from e2e.cluster.errors import ClusterError
from e2e.cluster.namespaces import read_mountinfo, unmount_all
from e2e.cluster.node import Node
from e2e.cluster.pki import MAX_NODES
from e2e.cluster.processes import processes_in

if TYPE_CHECKING:
    from pathlib import Path

    from e2e.cluster.layout import Layout

CONTAINERS_DEADLINE = 30.0  # seconds for the orderly way; afterwards they are killed
IMPATIENT = 0.2  # seconds from SIGTERM to SIGKILL for what keeps nothing that outlives it


async def take_down(cluster: Cluster, *, purge: bool) -> None:
    """End all processes, namespaces, mounts and control groups of a cluster; ``purge`` forgets its images too.

    Safe to call at any time: on a cluster that is half up, half down, or not there.
    """
    layout = cluster.layout
    async with exclusive(layout.lock, cluster.progress, f"cluster {layout.name}"):
        # Whatever the intent says: an interrupted run may have left any of them.
        nodes = [node for number in range(1, MAX_NODES + 1) if (node := Node.numbered(layout, number)).folder.exists()]
        async with cluster.progress.step(f"taking cluster {layout.name} down"):
            # First everything that would start something again.
            restarters = ["ray-operator", "kube-controller-manager", "kube-scheduler"]
            kubelets = [f"{node.name}-kubelet" for node in nodes]
            await cluster.supervisor.stop(*restarters, *kubelets, patience=IMPATIENT)
            await asyncio.gather(*(_end_containers(cluster, node) for node in nodes))
            # The image store is kept, so its owner may take its time.
            await cluster.supervisor.stop(*(f"{node.name}-containerd" for node in nodes))
            await cluster.supervisor.stop(*component_names(nodes), patience=IMPATIENT)
            await _end_leftovers(layout, nodes)
            mounted = cgroups.hierarchies(read_mountinfo())
            for node in nodes:
                await asyncio.to_thread(cgroups.remove_group, node.cgroup_root, mounted)
            await unmount_all(layout.state)
            await asyncio.to_thread(_remove_files, layout, nodes, purge)
    if purge:
        layout.lock.unlink(missing_ok=True)
        if layout.state.exists() and not any(layout.state.iterdir()):
            layout.state.rmdir()


async def _end_containers(cluster: Cluster, node: Node) -> None:
    if cluster.supervisor.running(f"{node.name}-containerd") is None:
        return
    try:
        async with asyncio.timeout(CONTAINERS_DEADLINE):
            await Containerd(node).end_containers()
    except (ClusterError, TimeoutError) as error:
        cluster.progress.say(f"{node.name}: containers did not end in order, they are killed ({error})")


async def _end_leftovers(layout: Layout, nodes: list[Node]) -> None:
    """End what runs in our namespaces without a record: shims, commands of `exec`, strays of a killed run."""
    namespaces = control_plane_namespaces(layout).inodes().union(*(node.namespaces.inodes() for node in nodes))
    leftovers = processes_in(namespaces)
    await asyncio.gather(*(asyncio.to_thread(process.end, IMPATIENT) for process in leftovers))


def _remove_files(layout: Layout, nodes: list[Node], purge: bool) -> None:
    for node in nodes:
        Containerd(node).forget_pods()
    images = {node.images for node in nodes if node.images.exists() and not purge}
    if layout.state.exists():
        _remove_except(layout.state, images | {layout.lock})


def _remove_except(folder: Path, kept: set[Path]) -> None:
    """Remove what is in a folder, but the kept paths and the folders that lead to them."""
    for entry in folder.iterdir():
        if entry in kept:
            continue
        if any(path.is_relative_to(entry) for path in kept):
            _remove_except(entry, kept)
        elif entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
