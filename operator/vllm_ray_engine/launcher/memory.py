"""Whether the kernel's out-of-memory killer struck in this container, which no log of the victim tells."""

from __future__ import annotations

from pathlib import Path

_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))
"""Of control groups version 2 and 1, as a container sees its own."""


def oom_kills(counters: tuple[Path, ...] = _COUNTERS) -> int:
    """Return how many processes of this container have been killed for lack of memory, 0 when it cannot be known."""
    for path in counters:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdigit():
                return int(value)
    return 0
