"""What is applied to every cluster: KubeRay's CRDs and RBAC, our CRDs, and the DNS Service."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import yaml

from e2e.cluster.commands import run
from e2e.cluster.files import write_file
from e2e.cluster.layout import MANIFESTS, OUR_CRDS
from e2e.cluster.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from e2e.cluster.controlplane import ControlPlane
    from e2e.cluster.layout import Layout
    from e2e.cluster.progress import Progress
    from e2e.cluster.tools import Tools

CRD_PREFIX = "customresourcedefinition.apiextensions.k8s.io/"
KUBERAY_NAMESPACE = "kuberay-system"
# Leader election is off, so its role is not needed.
KUBERAY_RBAC = ("service_account.yaml", "role.yaml", "role_binding.yaml")


def kuberay_rbac(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return KubeRay's RBAC put into its namespace, which comes first."""
    placed: list[dict[str, Any]] = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": KUBERAY_NAMESPACE}}]
    for document in documents:
        copy = {**document}
        if copy["kind"] == "ServiceAccount":
            copy["metadata"] = {**copy["metadata"], "namespace": KUBERAY_NAMESPACE}
        if "subjects" in copy:
            copy["subjects"] = [{**subject, "namespace": KUBERAY_NAMESPACE} for subject in copy["subjects"]]
        placed.append(copy)
    return placed


async def ensure_applied(
    layout: Layout, control_plane: ControlPlane, tools: Tools, progress: Progress, *, our_crds: bool
) -> None:
    """Apply all of it unless the very same was applied to this cluster before.

    With ``our_crds``, the operator's own CRDs too; where pods can run, its chart brings and owns them.
    """
    binaries = control_plane.binaries
    rbac = layout.config / "kuberay-rbac.yaml"
    documents = [yaml.safe_load((binaries.kuberay_rbac / name).read_text()) for name in KUBERAY_RBAC]
    write_file(rbac, yaml.safe_dump_all(kuberay_rbac(documents)))
    files = [*sorted(binaries.kuberay_crds.glob("*.yaml")), rbac, *sorted(MANIFESTS.glob("*.yaml"))]
    if our_crds:
        files += sorted(OUR_CRDS.glob("*.yaml"))

    applied = layout.state / "applied"
    content = _hash(files)
    if applied.exists() and applied.read_text() == content:
        return
    async with progress.step("CRDs, KubeRay's RBAC, DNS"):
        # Server-side: the CRDs are too large for the annotation of a client-side apply.
        apply = [str(tools.kubectl), f"--kubeconfig={layout.kubeconfig}", "apply", "--validate=false"]
        apply += ["--server-side", "--force-conflicts", "--output=name"]
        names = await run([*apply, *(f"--filename={file}" for file in files)])
    crds = [name.removeprefix(CRD_PREFIX) for name in names.split() if name.startswith(CRD_PREFIX)]
    await until(progress, "CRDs served", lambda: control_plane.api.unserved(crds))
    write_file(applied, content)


def _hash(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file}\0".encode() + file.read_bytes())
    return digest.hexdigest()
