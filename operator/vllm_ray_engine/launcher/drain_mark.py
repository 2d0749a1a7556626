"""A mark for the pod's preStop hook: the launcher of an engine lives in this pod, and whether it was told to drain.

A file among the attempt's shared memory, which goes with it, locked as long as the launcher lives. The hook is
`plan/pod_end.py` of the operator.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from vllm_ray_engine.log import say
from vllm_ray_engine.processes import debris


class DrainMark:
    """The mark of one launcher."""

    def __init__(self, instance_id: str, folder: Path = debris.SHARED_MEMORY) -> None:
        """Make the mark. Without it the hook goes by the engine's other processes alone."""
        self._file: int | None = None
        self._start = folder / f"{debris.NAME}{debris.tag(instance_id)}"
        try:
            self._file = os.open(self._path("serving"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_SH)
        except OSError as error:
            say(f"when this pod is deleted, it does not wait for the launcher: {error}")

    def drain(self) -> None:
        """Say that the engine drains: its end is near, and worth waiting for."""
        with contextlib.suppress(OSError):
            self._path("serving").replace(self._path("draining"))

    def close(self) -> None:
        """Take the mark away. That of a launcher which was killed is locked by nobody, and counts for nothing."""
        for state in ("serving", "draining"):
            with contextlib.suppress(OSError):
                self._path(state).unlink()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _path(self, state: str) -> Path:
        return self._start.with_name(f"{self._start.name}-{state}")
