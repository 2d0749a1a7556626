"""The networks of a cluster. Every cluster has the same ones: each lives in namespaces of its own."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

NODE_NETWORK = IPv4Network("10.240.0.0/24")
SERVICE_NETWORK = IPv4Network("10.241.0.0/16")
POD_NETWORK = IPv4Network("10.242.0.0/16")  # a /24 of it per node

CONTROL_PLANE = NODE_NETWORK[1]
API_PORT = 6443
API_SERVICE = SERVICE_NETWORK[1]  # Kubernetes gives the first address to kubernetes.default
DNS_SERVICE = SERVICE_NETWORK[10]
CLUSTER_DOMAIN = "cluster.local"


def node_address(number: int) -> IPv4Address:
    """Return the address of the node of that number, from 1."""
    return NODE_NETWORK[10 + number]


def pod_subnet(number: int) -> IPv4Network:
    """Return the pods' subnet of the node of that number, from 1."""
    return list(POD_NETWORK.subnets(new_prefix=24))[number]
