"""What a machine must have, checked before any work."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

MEMORY_NEEDED = 12e9  # bytes
DISK_NEEDED = 15e9  # bytes, free
GO_NEEDED = (1, 25)


@dataclass(frozen=True)
class Machine:
    """Facts of a machine."""

    system: str
    user_id: int
    go_version: str | None  # as `go env GOVERSION` prints it: go1.25.3
    memory_bytes: float
    free_disk_bytes: float
    disk: str  # the folder that was measured


def problem(machine: Machine) -> str | None:
    """Return the first thing that is missing, with its remedy, in one line; None when all is well."""
    go = ".".join(map(str, GO_NEEDED))
    memory, disk = _gigabytes(machine.memory_bytes), _gigabytes(machine.free_disk_bytes)
    checks = (
        (
            machine.system == "Linux",
            f"needs Linux (this is {machine.system}): use a Linux machine or virtual machine",
        ),
        (
            machine.user_id == 0,
            "needs root, for namespaces and mounts: run it by sudo",
        ),
        (
            _numbers(machine.go_version) >= GO_NEEDED,
            f"needs Go {go} or newer to build Kubernetes (found {machine.go_version or 'none'}): put it first on PATH",
        ),
        (
            machine.memory_bytes >= MEMORY_NEEDED,
            f"needs {_gigabytes(MEMORY_NEEDED)} of memory (this machine has {memory}): use a larger machine",
        ),
        (
            machine.free_disk_bytes >= DISK_NEEDED,
            f"needs {_gigabytes(DISK_NEEDED)} of free disk ({machine.disk} has {disk}): "
            "free some, or point XDG_CACHE_HOME to a larger disk",
        ),
    )
    return next((remedy for met, remedy in checks if not met), None)


def probe(cache: Path) -> Machine:
    """Look at this machine."""
    folder = next(parent for parent in (cache, *cache.parents) if parent.exists())
    return Machine(
        system=platform.system(),
        user_id=os.geteuid(),
        go_version=go_version(),
        memory_bytes=_memory(),
        free_disk_bytes=shutil.disk_usage(folder).free,
        disk=str(folder),
    )


def go_version() -> str | None:
    """Return the version of the Go on PATH, or None."""
    go = shutil.which("go")
    if go is None:
        return None
    answer = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def _memory() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0.0


def _numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version or "")[:2])


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.0f} GB"
