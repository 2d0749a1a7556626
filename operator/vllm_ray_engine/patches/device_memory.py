"""Device memory: a worker waits until the memory that it asks for is free.

Ray gives the accelerators of an actor away when the actor is declared dead, which can be before its process has left
the device: the memory check at the start of the next worker would fail for something that is over in a moment.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ray_engine.log import say

WAIT_SECONDS = 60.0
"""How long memory that another process holds is waited for."""

POLL_SECONDS = 0.1

HELD_BY = "held by "
"""In the last error: what follows names who did not leave."""


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of the device. bytes: None where the driver does not tell."""

    pid: int
    command: str
    bytes: int | None

    def __str__(self) -> str:
        size = "" if self.bytes is None else f", {self.bytes / 2**30:.1f} GiB"
        return f"process {self.pid} ({self.command or 'in another container'}{size})"


def wait_until_free(
    original: Callable[..., int],
    _context: Any,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Callable[..., int]:
    """Wrap request_memory(snapshot, cache_config, ...), which raises ValueError when a device has too little free.

    The snapshot's own query of the platform is repeated until the check passes; the last error names who holds memory.
    """

    @functools.wraps(original)
    def request_memory(snapshot: Any, *args: Any, **kwargs: Any) -> int:
        deadline = clock() + WAIT_SECONDS
        said = False
        while True:
            try:
                return original(snapshot, *args, **kwargs)
            except ValueError as error:
                if not said:
                    say(f"waiting for device memory: {error} {_held(snapshot)}")
                    said = True
                if clock() >= deadline:
                    raise ValueError(f"{error} Still so after {WAIT_SECONDS:g} s, {_held(snapshot)}") from None
            sleep(POLL_SECONDS)
            snapshot.measure()

    return request_memory


def _held(snapshot: Any) -> str:
    """Return who holds memory of the snapshot's device, in words. Never raises."""
    try:
        found = holders(snapshot.device_)
    except Exception as error:  # no NVIDIA driver, or one that tells nothing
        return f"{HELD_BY}a process that cannot be told ({error})"
    if not found:
        return f"{HELD_BY}a process that the driver does not show, as those of other containers"
    return HELD_BY + ", ".join(map(str, found))


def holders(device: Any) -> list[Holder]:
    """Return the other processes that hold memory of a CUDA device, by NVIDIA's management library.

    Raises what that library or PyTorch raises where there is none.
    """
    import torch
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return [
            Holder(process.pid, _command(process.pid), process.usedGpuMemory)
            for process in running
            if process.pid != os.getpid()
        ]
    finally:
        pynvml.nvmlShutdown()


def _command(pid: int) -> str:
    """Return the command line of a process, empty when this container does not see it."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:80]
    except OSError:
        return ""
    # With Ray's mark of its actors the line would count as the head of a remote traceback, not as a cause.
    return text.removeprefix("ray::")
