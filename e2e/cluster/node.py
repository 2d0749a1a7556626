"""A node: its names, its addresses, its folders, and the configuration that follows from them.

All of it is values, so a second node is one more instance. A node sees ``/run``, ``/var/lib`` and
``/var/log`` of its own, like a machine of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from e2e.cluster import pki as identities
from e2e.cluster.addresses import CLUSTER_DOMAIN, DNS_SERVICE, POD_NETWORK, node_address, pod_subnet
from e2e.cluster.build import PAUSE_IMAGE
from e2e.cluster.files import write_file
from e2e.cluster.namespaces import Namespaces
from e2e.cluster.probes import HttpProbe, SocketProbe
from e2e.cluster.processes import Component

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv4Network

    from e2e.cluster.build import Binaries
    from e2e.cluster.layout import Layout
    from e2e.cluster.pki import Pki

CONTAINERD_SOCKET = Path("/run/containerd/containerd.sock")  # as the node sees it
CNI_PLUGINS = "/usr/lib/cni"

# The kubelet sets these for the whole machine unless it finds them set: let it find them so, and change nothing.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


@dataclass(frozen=True)
class Node:
    """One node."""

    name: str  # of the Kubernetes node
    interface: str  # its link's name on the cluster's switch, at most 15 characters
    address: IPv4Address
    pod_subnet: IPv4Network
    cgroup_root: str  # pods' control groups lie below; each kubelet takes unknown ones below its root for orphans
    folder: Path
    net: Path  # file that holds its network namespace
    mount: Path  # file that holds its mount namespace

    @classmethod
    def numbered(cls, layout: Layout, number: int) -> Node:
        """Return the node of that number, from 1."""
        name = f"{layout.name}-node{number}"
        return cls(
            name=name,
            interface=f"node{number}",
            address=node_address(number),
            pod_subnet=pod_subnet(number),
            cgroup_root=f"/{name}",
            folder=layout.nodes / name,
            net=layout.namespaces / f"{name}.net",
            mount=layout.namespaces / f"{name}.mount",
        )

    @property
    def component_names(self) -> list[str]:
        """The names of its components."""
        return [f"{self.name}-{part}" for part in ("containerd", "kubelet", "kube-proxy")]

    @property
    def namespaces(self) -> Namespaces:
        """Where its processes run."""
        return Namespaces(self.net, self.mount)

    @property
    def mounts(self) -> dict[Path, Path]:
        """What the node sees in place of the machine's own: mount point to source."""
        folders = {Path("/run"): self.folder / "run", Path("/var/log"): self.folder / "log"}
        settings = {Path("/proc/sys") / name: self.folder / "sysctl" / name for name in KERNEL_SETTINGS}
        return {**settings, **folders, Path("/var/lib"): self.folder / "lib"}

    @property
    def images(self) -> Path:
        """The image store: the only thing that outlives a stop of the cluster."""
        return self.folder / "lib" / "containerd"

    @property
    def config(self) -> Path:
        """The folder of its configuration files."""
        return self.folder / "config"

    def configuration(self, pki: Pki) -> dict[str, str]:
        """Return its configuration files by name."""
        return {
            "containerd.toml": self._containerd(),
            "cni/10-pods.conflist": self._pod_network(),
            "kubelet.yaml": yaml.safe_dump(self._kubelet(pki)),
            "kube-proxy.yaml": yaml.safe_dump(self._kube_proxy(pki)),
        }

    def write_files(self, pki: Pki) -> None:
        """Make its folders and write its files."""
        for source in (self.folder / "run", self.folder / "log", self.folder / "lib"):
            source.mkdir(parents=True, exist_ok=True)
        for name, value in KERNEL_SETTINGS.items():
            write_file(self.folder / "sysctl" / name, f"{value}\n")
        for name, text in self.configuration(pki).items():
            write_file(self.config / name, text)

    def containerd(self, pki: Pki) -> Component:
        """Return its container runtime."""
        files = self.configuration(pki)
        return Component(
            name=f"{self.name}-containerd",
            argv=["containerd", "--config", str(self.config / "containerd.toml")],
            missing=SocketProbe(self.folder / CONTAINERD_SOCKET.relative_to("/")),
            namespaces=self.namespaces,
            configuration=files["containerd.toml"] + files["cni/10-pods.conflist"],
        )

    def kubelet(self, binaries: Binaries, pki: Pki) -> Component:
        """Return its kubelet."""
        return Component(
            name=f"{self.name}-kubelet",
            argv=[
                str(binaries.kubernetes),
                "kubelet",
                f"--config={self.config / 'kubelet.yaml'}",
                f"--kubeconfig={pki.config(identities.node_user(self.name))}",
                f"--hostname-override={self.name}",
                f"--node-ip={self.address}",
            ],
            missing=HttpProbe(self.net, "http://127.0.0.1:10248/healthz"),
            namespaces=self.namespaces,
            configuration=self.configuration(pki)["kubelet.yaml"],
        )

    def kube_proxy(self, binaries: Binaries, pki: Pki) -> Component:
        """Return what makes Services work on it."""
        return Component(
            name=f"{self.name}-kube-proxy",
            argv=[str(binaries.kubernetes), "kube-proxy", f"--config={self.config / 'kube-proxy.yaml'}"],
            missing=HttpProbe(self.net, "http://127.0.0.1:10256/healthz"),
            namespaces=self.namespaces,
            configuration=self.configuration(pki)["kube-proxy.yaml"],
        )

    def _containerd(self) -> str:
        return f"""\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
]

[grpc]
  address = "{CONTAINERD_SOCKET}"

[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # Needed where root lacks CAP_SYS_RESOURCE (inside a container, say): else no pod starts.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{self.config / "cni"}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""

    def _pod_network(self) -> str:
        ranges = [[{"subnet": str(self.pod_subnet)}]]
        bridge = {
            "type": "bridge",
            "bridge": "pods",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {"type": "host-local", "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}]},
        }
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        return json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]}, indent=2)

    def _kubelet(self, pki: Pki) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": str(self.address),
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": pki.file("ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self.cgroup_root,
            "clusterDNS": [str(DNS_SERVICE)],
            "clusterDomain": CLUSTER_DOMAIN,
            "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
            # A busy machine is no reason to lose pods or images; "0%" switches a signal off.
            "evictionHard": dict.fromkeys(
                ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available"), "0%"
            ),
            "imageGCHighThresholdPercent": 100,
            "failCgroupV1": False,
            "failSwapOn": False,
            "maxPods": 110,
            "oomScoreAdj": 0,
            # Nothing of the machine's own DNS reaches pods.
            "resolvConf": "",
            "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        }

    def _kube_proxy(self, pki: Pki) -> dict[str, object]:
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": pki.config(identities.KUBE_PROXY)},
            "clusterCIDR": str(POD_NETWORK),
            # Connection tracking limits belong to the whole machine: leave them.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            "hostnameOverride": self.name,
            "mode": "iptables",
            "oomScoreAdj": 0,
        }
