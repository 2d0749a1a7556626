"""Reports of the engine's processes to their launcher: datagrams that get lost rather than hold anybody up.

The socket has an abstract name, so a killed launcher leaves no file, and a process on another node, which inherits the
name, finds nobody there.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

VARIABLE = "VLLM_RAY_ENGINE_REPORT"
"""Holds the name of the launcher's socket."""

WAITING = "waiting"
"""The engine is imported and waits for its placement groups."""

_MAX_BYTES = 65536


def send(event: str, **fields: Any) -> None:
    """Tell the launcher, if there is one on this machine. Never raises and never waits."""
    name = os.environ.get(VARIABLE)
    if not name:
        return
    try:
        data = json.dumps({"event": event, "pid": os.getpid(), **fields}, default=str).encode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(data, "\0" + name)
    except Exception:  # noqa: S110  a report is never worth a failure
        pass


class Listener:
    """The launcher's end: calls back for every report, from a thread of its own."""

    def __init__(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Raises OSError when there can be no such socket."""
        self.name = f"vllm-ray-engine-{secrets.token_hex(8)}"
        self._callback = callback
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + self.name)
        threading.Thread(target=self._run, name="reports", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                report = json.loads(self._socket.recv(_MAX_BYTES))
            except ValueError:  # cut off, or not from us
                continue
            if isinstance(report, dict):
                self._callback(report)
