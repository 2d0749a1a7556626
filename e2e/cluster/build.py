"""Builds Kubernetes, KubeRay, CoreDNS and pause from our Go module, once per content."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from e2e.cluster.archives import single_binary_archive
from e2e.cluster.commands import exclusive, run
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import GO_MODULE
from e2e.cluster.preflight import go_version

if TYPE_CHECKING:
    from pathlib import Path

    from e2e.cluster.layout import Layout
    from e2e.cluster.progress import Progress

KUBERAY_MODULE = "github.com/ray-project/kuberay/ray-operator"
TARGETS = ("./kubernetes", "./coredns", "./pause", KUBERAY_MODULE)
PAUSE_IMAGE = "localhost/pause:1"


@dataclass(frozen=True)
class Binaries:
    """A folder of what was built."""

    folder: Path

    @property
    def kubernetes(self) -> Path:
        """All components of Kubernetes in one; the first argument names the component."""
        return self.folder / "kubernetes"

    @property
    def coredns(self) -> Path:
        """CoreDNS."""
        return self.folder / "coredns"

    @property
    def ray_operator(self) -> Path:
        """The operator of KubeRay."""
        return self.folder / "ray-operator"

    @property
    def pause_archive(self) -> Path:
        """The image that holds a pod's namespaces open, as a Docker archive."""
        return self.folder / "pause.tar"

    @property
    def kuberay_crds(self) -> Path:
        """KubeRay's CRDs, YAML."""
        return self.folder / "kuberay" / "crd"

    @property
    def kuberay_rbac(self) -> Path:
        """KubeRay's service account, role and binding, YAML."""
        return self.folder / "kuberay" / "rbac"


def kubernetes_version(go_mod: str) -> str:
    """Return the version of Kubernetes that a go.mod requires, as v1.34.2."""
    found = re.search(r"^\s*k8s\.io/kubernetes (v\d+\.\d+\.\d+)$", go_mod, re.MULTILINE)
    if found is None:
        raise ClusterError("the Go module of the cluster does not require k8s.io/kubernetes")
    return found[1]


def build_flags(version: str) -> list[str]:
    """Return go build's flags. Without the version stamps clients cannot parse the server's version."""
    major, minor, _ = version.removeprefix("v").split(".")
    stamps = {
        "k8s.io/component-base/version.gitVersion": version,
        "k8s.io/component-base/version.gitMajor": major,
        "k8s.io/component-base/version.gitMinor": minor,
        "k8s.io/client-go/pkg/version.gitVersion": version,
    }
    linker = " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in stamps.items())])
    return ["-trimpath", "-buildvcs=false", "-ldflags", linker]


def content_hash(module: Path, flags: list[str], go: str) -> str:
    """Return the name under which a build is cached: module files, flags, targets and Go's version."""
    sources = {
        str(path.relative_to(module)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted([module / "go.mod", module / "go.sum", *module.rglob("*.go")])
    }
    text = json.dumps([sources, flags, TARGETS, PAUSE_IMAGE, go], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


async def ensure_binaries(layout: Layout, progress: Progress) -> Binaries:
    """Return the binaries, building them if this content was never built."""
    go = go_version() or ""
    flags = build_flags(kubernetes_version((GO_MODULE / "go.mod").read_text()))
    key = content_hash(GO_MODULE, flags, go)
    binaries = Binaries(layout.binaries / key)
    if binaries.folder.is_dir():
        return binaries
    async with exclusive(layout.binaries / f"{key}.lock", progress, "the same build"):
        if not binaries.folder.is_dir():
            await _build(binaries.folder, flags, progress)
    return binaries


async def _build(folder: Path, flags: list[str], progress: Progress) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    compiled: list[str] = []

    def detail() -> str:
        return f"{len(compiled)} packages compiled, now {compiled[-1]}" if compiled else "fetching modules"

    environment = {**os.environ, "CGO_ENABLED": "0"}
    async with progress.step("building Kubernetes, KubeRay and CoreDNS (some 15 minutes the first time)", detail):
        await run(
            ["go", "build", "-v", *flags, "-o", f"{partial}/", *TARGETS],
            cwd=GO_MODULE,
            env=environment,
            on_line=compiled.append,
        )
        listed = await run(["go", "list", "-m", "-json", KUBERAY_MODULE], cwd=GO_MODULE, env=environment)
    _copy_kuberay(json.loads(listed)["Dir"], partial / "kuberay")
    single_binary_archive(partial / "pause", PAUSE_IMAGE, partial / "pause.tar")
    partial.rename(folder)


def _copy_kuberay(module: str, target: Path) -> None:
    # Plain copies: files of the module cache are read-only.
    for source, name in (("config/crd/bases", "crd"), ("config/rbac", "rbac")):
        shutil.copytree(f"{module}/{source}", target / name, copy_function=shutil.copyfile)
        (target / name).chmod(0o755)
