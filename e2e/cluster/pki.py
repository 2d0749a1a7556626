"""Certificates, tokens and kubeconfigs of one cluster."""

from __future__ import annotations

import base64
import json
import secrets
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from e2e.cluster.addresses import API_PORT, API_SERVICE, CLUSTER_DOMAIN, CONTROL_PLANE
from e2e.cluster.commands import run
from e2e.cluster.files import write_file

if TYPE_CHECKING:
    from pathlib import Path

    from e2e.cluster.layout import Layout

VALID_DAYS = "365"
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
MAX_NODES = 9  # the API server reads the tokens once, at its start


@dataclass(frozen=True)
class User:
    """Who a component is to the API server."""

    key: str  # the name of its kubeconfig
    name: str
    group: str = ""


ADMIN = User("admin", "admin", "system:masters")
CONTROLLER_MANAGER = User("controller-manager", "system:kube-controller-manager")
SCHEDULER = User("scheduler", "system:kube-scheduler")
KUBE_PROXY = User("kube-proxy", "system:kube-proxy")
# Bound to their roles as service accounts, though they run as processes of the control plane.
KUBERAY = User("kuberay", "system:serviceaccount:kuberay-system:kuberay-operator", "system:serviceaccounts")
COREDNS = User("coredns", "system:serviceaccount:kube-system:coredns", "system:serviceaccounts")


def node_user(name: str) -> User:
    """Return the user of a node's kubelet."""
    return User(name, f"system:node:{name}", "system:nodes")


def users(cluster: str) -> list[User]:
    """Return everybody who may need a token in this cluster."""
    nodes = [node_user(f"{cluster}-node{number}") for number in range(1, MAX_NODES + 1)]
    return [ADMIN, CONTROLLER_MANAGER, SCHEDULER, KUBE_PROXY, KUBERAY, COREDNS, *nodes]


def kubeconfig(server: str, authority: bytes, user: User, token: str) -> str:
    """Return a kubeconfig (JSON, which is YAML too)."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "cluster",
                    "cluster": {
                        "server": server,
                        "certificate-authority-data": base64.b64encode(authority).decode(),
                    },
                }
            ],
            "users": [{"name": user.key, "user": {"token": token}}],
            "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": user.key}}],
            "current-context": "cluster",
        },
        indent=2,
    )


@dataclass(frozen=True)
class Pki:
    """A folder with all of it."""

    folder: Path

    @property
    def authority(self) -> Path:
        """The cluster's certificate authority."""
        return self.folder / "ca.crt"

    def file(self, name: str) -> str:
        """Return the path of a file, as a component's flag wants it."""
        return str(self.folder / name)

    def config(self, user: User) -> str:
        """Return the path of a user's kubeconfig (for use inside the cluster's networks)."""
        return str(self.folder / f"{user.key}.conf")

    def token(self, user: User) -> str:
        """Return a user's token."""
        tokens: dict[str, str] = json.loads((self.folder / "tokens.json").read_text())
        return tokens[user.key]

    def write_outside_kubeconfig(self, path: Path, port: int) -> None:
        """Write the administrator's kubeconfig for use on the machine, through the forwarder's port."""
        text = kubeconfig(f"https://127.0.0.1:{port}", self.authority.read_bytes(), ADMIN, self.token(ADMIN))
        write_file(path, text)


async def ensure_pki(layout: Layout) -> Pki:
    """Return the cluster's certificates and tokens, made at the first call."""
    if not layout.pki.is_dir():
        draft = layout.pki.with_name(".pki.draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True, mode=0o700)
        await _certificates(draft)
        _tokens(draft, users(layout.name))
        draft.rename(layout.pki)
    return Pki(layout.pki)


async def _certificates(folder: Path) -> None:
    authority = ["-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=cluster-ca", "-days", VALID_DAYS]
    await run(["openssl", "req", "-x509", *KEY, *authority], cwd=folder)
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    names += [f"kubernetes.default.svc.{CLUSTER_DOMAIN}", "localhost"]
    alternatives = [*(f"DNS:{name}" for name in names), "IP:127.0.0.1", f"IP:{API_SERVICE}", f"IP:{CONTROL_PLANE}"]
    await _signed(folder, "apiserver", "/CN=kube-apiserver", f"subjectAltName={','.join(alternatives)}")
    # What the API server shows to kubelets, for logs and exec.
    await _signed(
        folder, "kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client", "extendedKeyUsage=clientAuth"
    )
    await run(["openssl", "genrsa", "-out", "service-account.key", "2048"], cwd=folder)
    public = ["-in", "service-account.key", "-pubout", "-out", "service-account.pub"]
    await run(["openssl", "rsa", *public], cwd=folder)


async def _signed(folder: Path, name: str, subject: str, extension: str) -> None:
    # With -CA, `openssl req -x509` signs by the authority in one go.
    by = ["-CA", "ca.crt", "-CAkey", "ca.key", "-days", VALID_DAYS]
    out = ["-keyout", f"{name}.key", "-out", f"{name}.crt"]
    extensions = ["-addext", extension, "-addext", "basicConstraints=critical,CA:FALSE"]
    await run(["openssl", "req", "-x509", *KEY, *by, *out, "-subj", subject, *extensions], cwd=folder)


def _tokens(folder: Path, everybody: list[User]) -> None:
    tokens = {user.key: secrets.token_hex(16) for user in everybody}
    rows = [f'{tokens[user.key]},{user.name},{user.key},"{user.group}"' for user in everybody]
    write_file(folder / "tokens.csv", "\n".join(rows) + "\n")
    write_file(folder / "tokens.json", json.dumps(tokens))
    authority = (folder / "ca.crt").read_bytes()
    for user in everybody:
        text = kubeconfig(f"https://{CONTROL_PLANE}:{API_PORT}", authority, user, tokens[user.key])
        write_file(folder / f"{user.key}.conf", text)
