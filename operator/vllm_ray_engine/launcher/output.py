"""The engine's output: passed on as it comes, and its end kept for the search for a root cause."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from typing import IO, BinaryIO

MAX_LINES = 4000
MAX_LINE_BYTES = 4000
_CHUNK = 65536


class EngineOutput:
    """Reads a pipe to its end in a thread, copies it to `sink`, and keeps the last lines with their times."""

    def __init__(self, pipe: IO[bytes], sink: BinaryIO) -> None:
        self._pipe = pipe
        self._sink = sink
        self._lines: deque[tuple[float, str]] = deque(maxlen=MAX_LINES)
        self._lock = threading.Lock()
        self._sink_open = True
        self._thread = threading.Thread(target=self._run, name="engine-output", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rest = b""
        while chunk := os.read(self._pipe.fileno(), _CHUNK):
            with self._lock:
                if self._sink_open:
                    # A full disk: the pipe must still be read, or it fills and vLLM stands still.
                    with contextlib.suppress(OSError):
                        self._sink.write(chunk)
                        self._sink.flush()
            *lines, rest = (rest + chunk).split(b"\n")
            self._keep(lines)
            # A progress bar never ends its line.
            rest = rest[-MAX_LINE_BYTES:]
        self._keep([rest] if rest else [])

    def _keep(self, lines: list[bytes]) -> None:
        now = time.monotonic()
        with self._lock:
            self._lines.extend((now, line[:MAX_LINE_BYTES].decode(errors="replace")) for line in lines)

    def wait_end(self, timeout: float) -> None:
        """Wait for the end of the pipe, at most `timeout` seconds: other processes than the engine may hold it."""
        self._thread.join(timeout)

    def finish(self, timeout: float) -> None:
        """Wait for the end of the pipe as `wait_end` does, then pass nothing more on."""
        self.wait_end(timeout)
        with self._lock:
            self._sink_open = False

    def lines(self, since: float = 0.0) -> list[str]:
        """Return the kept lines that came at or after `since` (monotonic clock)."""
        with self._lock:
            return [line for at, line in self._lines if at >= since]
