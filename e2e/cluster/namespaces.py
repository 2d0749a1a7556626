"""Network and mount namespaces, held open by files in the state folder (nothing of the machine's changes)."""

from __future__ import annotations

import asyncio
import ctypes
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from e2e.cluster.commands import run
from e2e.cluster.errors import ClusterError, CommandError

if TYPE_CHECKING:
    from collections.abc import Iterator

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Namespaces:
    """Where a process runs: a network namespace and, on a node, a mount namespace."""

    net: Path
    mount: Path | None = None

    def enter(self, *argv: str | Path) -> list[str]:
        """Return the command that runs ``argv`` in here. The process keeps its id: nsenter becomes it."""
        mount = [f"--mount={self.mount}"] if self.mount else []
        return ["nsenter", f"--net={self.net}", *mount, "--", *map(str, argv)]

    def enter_network(self, *argv: str | Path) -> list[str]:
        """Return the command that runs ``argv`` in the network namespace only."""
        return Namespaces(self.net).enter(*argv)

    def inodes(self) -> set[int]:
        """Return the identities of the namespaces that are open."""
        return {path.stat().st_ino for path in (self.net, self.mount) if path is not None and is_mounted(path)}


@contextmanager
def network_of(net: Path) -> Iterator[None]:
    """Move the calling thread into a network namespace for the block. Never use it in the event loop's thread."""
    with Path("/proc/thread-self/ns/net").open() as home, net.open() as target:
        _set_namespace(target.fileno())
        try:
            yield
        finally:
            _set_namespace(home.fileno())


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def mounts_below(folder: Path, mountinfo: str) -> list[Path]:
    """Return the mount points at and below a folder, the last mounted first (pure)."""
    points = [Path(_unescape(line.split()[4])) for line in mountinfo.splitlines()]
    return [point for point in reversed(points) if point.is_relative_to(folder)]


def is_mounted(path: Path) -> bool:
    """Tell whether something is mounted exactly here."""
    return path in mounts_below(path, read_mountinfo())


def read_mountinfo() -> str:
    """Return this process's mount table."""
    return Path("/proc/self/mountinfo").read_text()


def _unescape(field: str) -> str:
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


async def hold_folder(folder: Path) -> None:
    """Prepare the folder that holds namespaces open: a mount namespace can be held only on a private mount."""
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    if not is_mounted(folder):
        await run(["mount", "--bind", folder, folder])
    await run(["mount", "--make-private", folder])


async def ensure_network_namespace(net: Path) -> None:
    """Make the network namespace unless it is there."""
    if not is_mounted(net):
        await asyncio.to_thread(net.touch)
        await run(["unshare", f"--net={net}", "true"])


async def ensure_mount_namespace(mount: Path, binds: dict[Path, Path]) -> None:
    """Make the mount namespace unless it is there whole; ``binds`` maps mount points to what is seen there.

    Mounts made inside are never seen outside, and go when the namespace goes.
    """
    if is_mounted(mount):
        try:
            await run(["nsenter", f"--mount={mount}", "--", "mountpoint", "-q", list(binds)[-1]])
        except CommandError:
            await run(["umount", mount])  # it was left half made
        else:
            return
    await asyncio.to_thread(mount.touch)
    await run(["unshare", f"--mount={mount}", "--propagation=private", "true"])
    for point, source in binds.items():
        await run(["nsenter", f"--mount={mount}", "--", "mount", "--bind", source, point])


async def unmount_all(folder: Path) -> None:
    """Unmount everything at and below a folder; namespaces held there go when their last process has ended."""
    for point in mounts_below(folder, read_mountinfo()):
        await run(["umount", "--lazy", point])
    left = mounts_below(folder, read_mountinfo())
    if left:
        raise ClusterError(f"still mounted: {', '.join(map(str, left))}")
