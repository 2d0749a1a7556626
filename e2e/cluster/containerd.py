"""A node's container runtime, through its own client."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from e2e.cluster.archives import images_in
from e2e.cluster.commands import run
from e2e.cluster.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from e2e.cluster.node import Node

# What the runtime remembers of pods; without it only images are left.
POD_RECORDS = "io.containerd.grpc.v1.cri"


def outdated_by(names: Collection[str], stored: Mapping[str, str]) -> list[str]:
    """Return the stored names (of digests) that are other versions of the images named: same repository, other tag.

    The kubelet's runtime stores an image under its digest too; such names of the same content go as well.
    """
    repositories = {name.rpartition(":")[0] for name in names}
    digests = {d for name, d in stored.items() if name not in names and name.rpartition(":")[0] in repositories}
    kept = {stored[name] for name in names if name in stored}
    return sorted(name for name, digest in stored.items() if digest in digests - kept and name not in names)


@dataclass(frozen=True)
class Containerd:
    """The running containerd of a node."""

    node: Node

    async def load(self, archive: Path) -> bool:
        """Import an image archive; False when exactly these images are there already."""
        wanted = images_in(archive)
        stored = await self._images()
        if wanted and {image.name for image in wanted} <= stored.keys():
            digests = [await self._config_digest(stored[image.name]) for image in wanted]
            if digests == [image.config_digest for image in wanted]:
                return False
        await self._ctr("images", "import", archive)
        outdated = outdated_by({image.name for image in wanted}, stored)
        if outdated:
            await self._ctr("images", "remove", "--sync", *outdated)
        return True

    async def end_containers(self) -> None:
        """Kill and forget every container, and with it its file system."""
        while tasks := (await self._ctr("tasks", "list", "--quiet")).split():
            # The runtime also deletes what it sees ending, and who comes second gets an error: look again.
            with suppress(CommandError):
                await self._ctr("tasks", "delete", "--force", *tasks)
        containers = (await self._ctr("containers", "list", "--quiet")).split()
        if containers:
            await self._ctr("containers", "delete", *containers)

    def forget_pods(self) -> None:
        """Remove records of pods from the store (while containerd does not run)."""
        for kind in ("sandboxes", "containers"):
            shutil.rmtree(self.node.images / POD_RECORDS / kind, ignore_errors=True)

    async def _images(self) -> dict[str, str]:
        """Return the digest of every stored image by name."""
        rows = [line.split() for line in (await self._ctr("images", "list")).splitlines()[1:]]
        return {row[0]: row[2] for row in rows if len(row) > 2}

    async def _config_digest(self, manifest: str) -> str | None:
        """Return the digest of an image's configuration; None when its content is not whole."""
        try:
            content = json.loads(await self._ctr("content", "get", manifest))
            digest: str = content["config"]["digest"]
            await self._ctr("content", "get", digest)
        except (CommandError, KeyError, ValueError):
            return None
        return digest

    async def _ctr(self, *arguments: str | Path) -> str:
        return await run(self.node.namespaces.enter("ctr", "--namespace=k8s.io", *arguments))
