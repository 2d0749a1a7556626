"""Where everything is: the cache that clusters share, and one cluster's own state folder."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError

REPOSITORY = Path(__file__).resolve().parents[2]
GO_MODULE = Path(__file__).resolve().parent / "binaries"
MANIFESTS = Path(__file__).resolve().parent / "manifests"
OUR_CRDS = REPOSITORY / "crds"

# Every node mounts folders of its own over these; what lies below them would be hidden from it.
HIDDEN_FROM_NODES = (Path("/run"), Path("/var/run"), Path("/var/lib"), Path("/var/log"))

NAME_PATTERN = re.compile(r"[a-z]([a-z0-9-]{0,18}[a-z0-9])?")


def default_cache() -> Path:
    """Return the user's cache folder for this project."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-ray-operator"


@dataclass(frozen=True)
class Layout:
    """The paths of one cluster."""

    name: str
    state: Path
    cache: Path

    @classmethod
    def of(cls, name: str, state: Path | None = None, cache: Path | None = None) -> Layout:
        """Return the layout of the cluster of that name; ClusterError when name or folder cannot be used."""
        if not NAME_PATTERN.fullmatch(name):
            raise ClusterError(f"cluster name {name!r}: use up to 20 lower-case letters, digits and hyphens")
        cache = (cache or default_cache()).absolute()
        state = (state or cache / "cluster" / name).absolute()
        for folder in (state, cache):
            if any(folder.is_relative_to(hidden) for hidden in HIDDEN_FROM_NODES):
                raise ClusterError(
                    f"{folder} lies below /run, /var/lib or /var/log, which nodes replace by their own: "
                    "give --state-dir (and XDG_CACHE_HOME) elsewhere"
                )
        return cls(name, state, cache)

    @property
    def binaries(self) -> Path:
        """Built binaries, a folder per content hash."""
        return self.cache / "bin"

    @property
    def tools(self) -> Path:
        """Client tools (kubectl, helm), a folder per version."""
        return self.cache / "tools"

    @property
    def lock(self) -> Path:
        """Held by whoever changes this cluster."""
        return self.state / "lock"

    @property
    def state_file(self) -> Path:
        """What the cluster is meant to be."""
        return self.state / "cluster.json"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig for use from the machine itself, through the forwarder."""
        return self.state / "kubeconfig"

    @property
    def inside_kubeconfig(self) -> Path:
        """The administrator's kubeconfig for use inside the cluster's network namespaces."""
        return self.pki / "admin.conf"

    @property
    def processes(self) -> Path:
        """One record per process that we started."""
        return self.state / "processes"

    @property
    def logs(self) -> Path:
        """One log per component."""
        return self.state / "log"

    @property
    def audit_log(self) -> Path:
        """The API server's audit log: a JSON object per request, level Metadata."""
        return self.logs / "audit.log"

    @property
    def pki(self) -> Path:
        """Certificates, tokens and the components' kubeconfigs."""
        return self.state / "pki"

    @property
    def config(self) -> Path:
        """Rendered configuration of the control plane."""
        return self.state / "config"

    @property
    def etcd(self) -> Path:
        """The database of etcd."""
        return self.state / "etcd"

    @property
    def namespaces(self) -> Path:
        """Files that hold our network and mount namespaces open."""
        return self.state / "namespaces"

    @property
    def nodes(self) -> Path:
        """A folder per node."""
        return self.state / "nodes"
