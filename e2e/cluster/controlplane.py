"""The processes of the control plane: what they are called with, and how each shows that it is ready."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from e2e.cluster import pki as identities
from e2e.cluster.addresses import (
    API_PORT,
    CLUSTER_DOMAIN,
    CONTROL_PLANE,
    DNS_SERVICE,
    POD_NETWORK,
    SERVICE_NETWORK,
)
from e2e.cluster.files import write_file
from e2e.cluster.namespaces import Namespaces
from e2e.cluster.probes import ApiServer, HttpProbe
from e2e.cluster.processes import Component

if TYPE_CHECKING:
    from e2e.cluster.build import Binaries
    from e2e.cluster.layout import Layout
    from e2e.cluster.pki import Pki

ETCD_URL = "http://127.0.0.1:2379"

AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
"""

# CoreDNS knows the cluster only; other names are refused at once, since nothing outside can be reached anyway.
COREFILE = f"""\
{CLUSTER_DOMAIN} in-addr.arpa {{
    errors
    health 127.0.0.1:8180
    ready 127.0.0.1:8181
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa {{
        kubeconfig %s
        ttl 5
    }}
}}
"""


# For commands of `exec`: names resolve as they do in a pod of the default namespace.
RESOLVER = f"""\
nameserver {DNS_SERVICE}
search default.svc.{CLUSTER_DOMAIN} svc.{CLUSTER_DOMAIN} {CLUSTER_DOMAIN}
options ndots:5
"""


@dataclass(frozen=True)
class ControlPlane:
    """Describes the components that run once per cluster, in the cluster's first network namespace."""

    layout: Layout
    binaries: Binaries
    pki: Pki
    port: int  # on the machine's loopback

    @property
    def namespaces(self) -> Namespaces:
        """Where they run."""
        return control_plane_namespaces(self.layout)

    @property
    def api(self) -> ApiServer:
        """The API server, as seen from the machine."""
        return ApiServer(self.port, self.pki.authority, self.pki.token(identities.ADMIN))

    def write_configuration(self) -> None:
        """Write the files that the components read."""
        write_file(self.layout.config / "audit-policy.yaml", AUDIT_POLICY)
        write_file(self.layout.config / "Corefile", self._corefile())
        write_file(resolver_file(self.layout), RESOLVER, mode=0o644)

    def forwarder(self) -> Component:
        """Return the only process that listens outside the namespaces, on the machine's loopback."""
        script = Path(__file__).with_name("forward.py")
        argv = [sys.executable, "-I", script, "--port", self.port, "--net", self.namespaces.net]
        return Component(
            name="forwarder",
            argv=[*map(str, argv), "--target-port", str(API_PORT)],
            configuration=script.read_text(),
            # That it forwards shows when the API server behind it answers.
            missing=lambda: None,
        )

    def etcd(self) -> Component:
        """Return the database."""
        return self._component(
            "etcd",
            [
                "etcd",
                f"--data-dir={self.layout.etcd}",
                f"--listen-client-urls={ETCD_URL}",
                f"--advertise-client-urls={ETCD_URL}",
                "--listen-peer-urls=http://127.0.0.1:2380",
                # The data does not outlive the cluster: no need to wait for the disk.
                "--unsafe-no-fsync",
            ],
            f"{ETCD_URL}/health",
        )

    def api_server(self) -> Component:
        """Return the API server."""
        pki = self.pki
        return Component(
            name="kube-apiserver",
            argv=[
                str(self.binaries.kubernetes),
                "kube-apiserver",
                f"--etcd-servers={ETCD_URL}",
                f"--secure-port={API_PORT}",
                f"--advertise-address={CONTROL_PLANE}",
                f"--service-cluster-ip-range={SERVICE_NETWORK}",
                f"--tls-cert-file={pki.file('apiserver.crt')}",
                f"--tls-private-key-file={pki.file('apiserver.key')}",
                f"--client-ca-file={pki.file('ca.crt')}",
                f"--token-auth-file={pki.file('tokens.csv')}",
                f"--service-account-key-file={pki.file('service-account.pub')}",
                f"--service-account-signing-key-file={pki.file('service-account.key')}",
                f"--service-account-issuer=https://kubernetes.default.svc.{CLUSTER_DOMAIN}",
                f"--kubelet-client-certificate={pki.file('kubelet-client.crt')}",
                f"--kubelet-client-key={pki.file('kubelet-client.key')}",
                # Node names do not resolve here.
                "--kubelet-preferred-address-types=InternalIP",
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                "--allow-privileged=true",
                f"--audit-policy-file={self.layout.config / 'audit-policy.yaml'}",
                f"--audit-log-path={self.layout.audit_log}",
                "--audit-log-maxsize=200",
                "--audit-log-maxbackup=2",
            ],
            namespaces=self.namespaces,
            configuration=AUDIT_POLICY,
            missing=lambda: self.api.missing("/readyz"),
        )

    def controller_manager(self) -> Component:
        """Return the controllers of Kubernetes itself."""
        pki = self.pki
        return self._component(
            "kube-controller-manager",
            [
                str(self.binaries.kubernetes),
                "kube-controller-manager",
                f"--kubeconfig={pki.config(identities.CONTROLLER_MANAGER)}",
                f"--service-account-private-key-file={pki.file('service-account.key')}",
                f"--root-ca-file={pki.file('ca.crt')}",
                f"--cluster-signing-cert-file={pki.file('ca.crt')}",
                f"--cluster-signing-key-file={pki.file('ca.key')}",
                "--use-service-account-credentials=true",
                "--leader-elect=false",
                f"--cluster-cidr={POD_NETWORK}",
                f"--service-cluster-ip-range={SERVICE_NETWORK}",
            ],
            "https://127.0.0.1:10257/healthz",
        )

    def scheduler(self) -> Component:
        """Return the scheduler."""
        kubeconfig = self.pki.config(identities.SCHEDULER)
        return self._component(
            "kube-scheduler",
            [str(self.binaries.kubernetes), "kube-scheduler", f"--kubeconfig={kubeconfig}", "--leader-elect=false"],
            "https://127.0.0.1:10259/healthz",
        )

    def ray_operator(self) -> Component:
        """Return KubeRay's operator. It runs under its own service account's name, so under its own RBAC."""
        return self._component(
            "ray-operator",
            [
                str(self.binaries.ray_operator),
                f"--kubeconfig={self.pki.config(identities.KUBERAY)}",
                "--enable-leader-election=false",
                # It stands outside the pods' network and DNS.
                "--use-kubernetes-proxy=true",
                "--metrics-addr=127.0.0.1:8080",
                "--health-probe-bind-address=127.0.0.1:8082",
            ],
            "http://127.0.0.1:8082/readyz",
        )

    def coredns(self) -> Component:
        """Return the cluster's DNS server; its Service has this process as its endpoint."""
        return self._component(
            "coredns",
            [str(self.binaries.coredns), "-conf", str(self.layout.config / "Corefile")],
            "http://127.0.0.1:8181/ready",
            configuration=self._corefile(),
        )

    def _corefile(self) -> str:
        return COREFILE % self.pki.config(identities.COREDNS)

    def _component(self, name: str, argv: list[str], health: str, configuration: str = "") -> Component:
        probe = HttpProbe(self.namespaces.net, health)
        return Component(name, argv, probe, self.namespaces, configuration)


def control_plane_namespaces(layout: Layout) -> Namespaces:
    """Return where the control plane runs, and everything in control-plane mode."""
    return Namespaces(layout.namespaces / "control-plane.net")


def resolver_file(layout: Layout) -> Path:
    """Return the resolv.conf for commands that run in a node's network."""
    return layout.config / "resolv.conf"
