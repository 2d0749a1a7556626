"""Control groups of a node: made, emptied and removed in every hierarchy of the machine."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from e2e.cluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

REMOVAL_DEADLINE = 15.0  # seconds
REMOVAL_POLL = 0.05  # seconds


def hierarchies(mountinfo: str) -> list[Path]:
    """Return where control group hierarchies are mounted, version 1 and 2 (pure)."""
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] in ("cgroup", "cgroup2"):
            found.append(Path(before.split()[4]))
    return found


def ensure_group(root: str, mounted: list[Path]) -> None:
    """Make a top-level group in every hierarchy: a kubelet starts only when its root exists."""
    for hierarchy in mounted:
        group = hierarchy / root.lstrip("/")
        group.mkdir(exist_ok=True)
        # Version 1 gives a new cpuset no processors and no memory, and nothing can run in it.
        for setting in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / setting).is_file() and not (group / setting).read_text().strip():
                (group / setting).write_text((hierarchy / setting).read_text())
        # Version 2 hands down only what the parent enables.
        available = hierarchy / "cgroup.controllers"
        if available.is_file() and available.read_text().strip():
            enabled = " ".join(f"+{name}" for name in available.read_text().split())
            (hierarchy / "cgroup.subtree_control").write_text(enabled)


def remove_group(root: str, mounted: list[Path]) -> None:
    """Kill whatever still runs in the group's tree and remove the tree, in every hierarchy."""
    end = time.monotonic() + REMOVAL_DEADLINE
    trees = [tree for hierarchy in mounted if (tree := hierarchy / root.lstrip("/")).is_dir()]
    while trees:
        for tree in trees:
            for group in _deepest_first(tree):
                _kill_members(group)
                with suppress(OSError):  # busy until its members are gone
                    group.rmdir()
        trees = [tree for tree in trees if tree.is_dir()]
        if trees and time.monotonic() > end:
            raise ClusterError(f"control groups cannot be removed: {', '.join(map(str, trees))}")
        if trees:
            time.sleep(REMOVAL_POLL)


def _deepest_first(tree: Path) -> Iterator[Path]:
    for folder, _, _ in os.walk(tree, topdown=False):
        yield Path(folder)


def _kill_members(group: Path) -> None:
    with suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
