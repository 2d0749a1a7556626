"""The cluster's own network: a switch in the control plane's namespace, and a link to every node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from e2e.cluster.addresses import CONTROL_PLANE, NODE_NETWORK
from e2e.cluster.commands import run
from e2e.cluster.errors import CommandError
from e2e.cluster.namespaces import ensure_network_namespace

if TYPE_CHECKING:
    from e2e.cluster.namespaces import Namespaces
    from e2e.cluster.node import Node

SWITCH = "nodes"
PREFIX = NODE_NETWORK.prefixlen


async def ensure_switch(control_plane: Namespaces) -> None:
    """Make the control plane's network namespace with the switch in it. Nothing leads out of it."""
    await ensure_network_namespace(control_plane.net)
    await _ip(control_plane, "link", "set", "lo", "up")
    if not await _has_link(control_plane, SWITCH):
        await _ip(control_plane, "link", "add", SWITCH, "type", "bridge")
    await _ip(control_plane, "address", "replace", f"{CONTROL_PLANE}/{PREFIX}", "dev", SWITCH)
    await _ip(control_plane, "link", "set", SWITCH, "up")
    # Components look for a default route to learn their own address.
    await _ip(control_plane, "route", "replace", "default", "dev", SWITCH)
    # It routes between the nodes' pod subnets, in and out by the same link.
    await _sysctl(control_plane, "net.ipv4.ip_forward=1", "net.ipv4.conf.all.send_redirects=0")


async def ensure_link(control_plane: Namespaces, node: Node) -> None:
    """Make the node's network namespace, its link to the switch, and the routes to and from its pods."""
    await ensure_network_namespace(node.net)
    await _ip(node.namespaces, "link", "set", "lo", "up")
    if not await _has_link(control_plane, node.interface):
        peer = ["peer", "name", "eth0", "netns", str(node.net)]
        await _ip(control_plane, "link", "add", node.interface, "type", "veth", *peer)
    await _ip(control_plane, "link", "set", node.interface, "master", SWITCH, "up")
    await _ip(node.namespaces, "address", "replace", f"{node.address}/{PREFIX}", "dev", "eth0")
    await _ip(node.namespaces, "link", "set", "eth0", "up")
    await _ip(node.namespaces, "route", "replace", "default", "via", str(CONTROL_PLANE))
    await _ip(control_plane, "route", "replace", str(node.pod_subnet), "via", str(node.address))
    # Without the bridge setting, pods of the same node cannot reach each other through a Service.
    await _sysctl(node.namespaces, "net.ipv4.ip_forward=1", "net.bridge.bridge-nf-call-iptables=1")


async def cut_link(control_plane: Namespaces, node: Node) -> None:
    """Take the node's link down at the switch: what runs on it goes on and hears of nothing."""
    await _ip(control_plane, "link", "set", node.interface, "down")


async def remove_link(control_plane: Namespaces, node: Node) -> None:
    """Remove the node's link, if it has one."""
    if await _has_link(control_plane, node.interface):
        await _ip(control_plane, "link", "delete", node.interface)


async def _has_link(namespaces: Namespaces, name: str) -> bool:
    try:
        await _ip(namespaces, "link", "show", name)
    except CommandError:
        return False
    return True


async def _ip(namespaces: Namespaces, *arguments: str) -> None:
    await run(namespaces.enter_network("ip", *arguments))


async def _sysctl(namespaces: Namespaces, *settings: str) -> None:
    await run(namespaces.enter_network("sysctl", "-q", "-w", *settings))
