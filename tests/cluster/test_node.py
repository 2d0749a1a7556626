"""A second node is one more instance: all that must differ does, all that must agree does."""

import json
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster import addresses
from e2e.cluster.cluster import component_names
from e2e.cluster.layout import MANIFESTS, Layout
from e2e.cluster.node import Node
from e2e.cluster.pki import Pki, users

LAYOUT = Layout.of("lab", state=Path("/home/me/lab"), cache=Path("/home/me/cache"))
PKI = Pki(Path("/home/me/lab/pki"))


def node(number: int) -> Node:
    return Node.numbered(LAYOUT, number)


def kubelet(number: int) -> dict[str, Any]:
    rendered: dict[str, Any] = yaml.safe_load(node(number).configuration(PKI)["kubelet.yaml"])
    return rendered


def pod_network(number: int) -> IPv4Network:
    rendered = json.loads(node(number).configuration(PKI)["cni/10-pods.conflist"])
    return IPv4Network(rendered["plugins"][0]["ipam"]["ranges"][0][0]["subnet"])


@pytest.mark.parametrize(
    "differing",
    ["name", "interface", "address", "pod_subnet", "cgroup_root", "folder", "net", "mount", "images", "config"],
)
def test_two_nodes_share_no_name_address_or_folder(differing: str) -> None:
    assert getattr(node(1), differing) != getattr(node(2), differing)


def test_pod_subnets_are_disjoint_parts_of_the_pod_network() -> None:
    assert not pod_network(1).overlaps(pod_network(2))
    assert pod_network(1).subnet_of(addresses.POD_NETWORK)
    assert pod_network(2).subnet_of(addresses.POD_NETWORK)
    assert pod_network(2) == node(2).pod_subnet


def test_rendered_files_of_two_nodes_differ_only_where_they_must() -> None:
    one, two = kubelet(1), kubelet(2)
    assert {key for key in one if one[key] != two[key]} == {"address", "cgroupRoot"}
    assert two["address"] == "10.240.0.12"
    assert two["cgroupRoot"] == "/lab-node2"

    proxies = [yaml.safe_load(node(number).configuration(PKI)["kube-proxy.yaml"]) for number in (1, 2)]
    assert {key for key in proxies[0] if proxies[0][key] != proxies[1][key]} == {"hostnameOverride"}

    # The node's own mounts make the runtime's paths its own; only the folder of the network's file is named.
    runtimes = [node(number).configuration(PKI)["containerd.toml"].splitlines() for number in (1, 2)]
    differing = [lines for lines in zip(*runtimes, strict=True) if lines[0] != lines[1]]
    assert [line[1].strip() for line in differing] == [f'conf_dir = "{node(2).config}/cni"']


def test_no_node_uses_the_root_of_the_machines_control_groups() -> None:
    assert all(kubelet(number)["cgroupRoot"] not in ("", "/") for number in (1, 2))


def test_a_busy_machine_evicts_nothing() -> None:
    assert set(kubelet(1)["evictionHard"].values()) == {"0%"}
    assert kubelet(1)["imageGCHighThresholdPercent"] == 100


def test_mount_points_of_a_node_lie_in_its_own_folder() -> None:
    for number in (1, 2):
        sources = list(node(number).mounts.values())
        assert len(set(sources)) == len(sources)
        assert all(source.is_relative_to(node(number).folder) for source in sources)


def test_interfaces_fit_the_kernels_limit() -> None:
    longest = Layout.of("a" * 20, state=LAYOUT.state, cache=LAYOUT.cache)
    assert len(Node.numbered(longest, 9).interface) <= 15


def test_every_node_has_a_user_and_components_of_its_own() -> None:
    keys = [user.key for user in users("lab")]
    assert {"lab-node1", "lab-node2"} <= set(keys)
    assert len(set(keys)) == len(keys)
    names = component_names([node(1), node(2)])
    assert len(set(names)) == len(names)
    assert {"lab-node1-kubelet", "lab-node2-kubelet"} <= set(names)
    assert component_names([]) == ["forwarder", "etcd", "kube-apiserver", "kube-controller-manager", "ray-operator"]


def test_the_dns_service_names_the_addresses_that_pods_are_told() -> None:
    documents = list(yaml.safe_load_all((MANIFESTS / "dns.yaml").read_text()))
    service = next(document for document in documents if document["kind"] == "Service")
    slice_ = next(document for document in documents if document["kind"] == "EndpointSlice")
    assert service["spec"]["clusterIP"] == kubelet(1)["clusterDNS"][0] == str(addresses.DNS_SERVICE)
    assert slice_["endpoints"][0]["addresses"] == [str(addresses.CONTROL_PLANE)]
    assert slice_["metadata"]["labels"]["kubernetes.io/service-name"] == service["metadata"]["name"]
