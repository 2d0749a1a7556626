"""Whether clients are still at the engine: the drain of an engine that has left the traffic ends when none is.

Connections are counted, not requests. A request has a connection from before vLLM's metrics count it (while an image is
fetched, say) until its last byte, and a client that keeps its connection can send the next request, wherever the
Service sends new ones. vLLM closes a connection that has been idle for VLLM_HTTP_TIMEOUT_KEEP_ALIVE, 5 s by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
"""The TCP connections of this network namespace: of the pod, where the API server runs beside the launcher."""
QUIET_LOOKS = 3
"""After so many looks in a row without a connection, a second apart or more, the engine counts as drained."""
_OPEN = ("01", "08")
"""ESTABLISHED and CLOSE_WAIT (a client that will send no more, but may wait for its answer), see tcp_states.h."""


def open_connections(port: int, tables: Sequence[Path] = TABLES) -> int | None:
    """Return how many connections clients have to a local port, None when the kernel does not tell."""
    count = None
    for table in tables:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:  # a kernel without IPv6 has no tcp6
            continue
        # number, local address:port, remote address:port, state, ...: addresses, ports and states in hexadecimal
        rows = [line.split(maxsplit=4) for line in lines]
        count = (count or 0) + sum(row[3] in _OPEN and int(row[1].rpartition(":")[2], 16) == port for row in rows)
    return count


class Quiet:
    """Judges from one look after the other whether clients are done with the engine."""

    def __init__(self) -> None:
        self._looks = 0

    def judge(self, connections: int | None) -> bool | None:
        """Return whether there have been none for some looks now, None when they are not known."""
        self._looks = self._looks + 1 if connections == 0 else 0
        return None if connections is None else self._looks >= QUIET_LOOKS
