"""The drain of an engine that has left the traffic: its API servers are told, and it ends when clients are done.

Two accounts of that, and either will do:

* No client is connected. A request has a connection from before anybody counts it until its last byte has left the
  kernel, and a client that keeps its connection can send the next request, wherever the Service sends new ones.
* No request is open, and none has come for longer than vLLM keeps a connection without one. What is connected then has
  never sent any, and would hold the drain for ever.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_ray_engine import tally
from vllm_ray_engine.config import EngineConfig

TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
"""The TCP connections of this network namespace: of the pod, where the API server runs beside the launcher."""
QUIET_LOOKS = 3
"""After so many looks in a row without a connection, a second apart or more, the engine counts as drained."""
KEEP_ALIVE_SECONDS = 5.0
"""vLLM's default of VLLM_HTTP_TIMEOUT_KEEP_ALIVE: a connection that was idle for so long is closed."""
ON_THE_WAY_SECONDS = 5.0
"""How long beyond that the next request is waited for."""
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


def idle_seconds(environment: Mapping[str, str] = os.environ) -> float:
    """Return after how long without a request none comes any more on a connection that vLLM keeps."""
    try:
        return float(environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) + ON_THE_WAY_SECONDS
    except (KeyError, ValueError):
        return KEEP_ALIVE_SECONDS + ON_THE_WAY_SECONDS


@dataclass(frozen=True)
class Traffic:
    """What clients do. connections: None when the kernel does not tell. requests: None when nobody counts them.

    moved: when a request last began or ended, on the monotonic clock.
    """

    connections: int | None
    requests: int | None = None
    moved: float = 0.0


class Quiet:
    """Judges from one look after the other whether clients are done with the engine."""

    def __init__(self, began: float, idle: float) -> None:
        """`began`: when the drain did, on the monotonic clock; `idle` as `idle_seconds` has it."""
        self._began = began
        self._idle = idle
        self._looks = 0

    def judge(self, seen: Traffic, now: float) -> bool:
        """Return whether they are."""
        self._looks = self._looks + 1 if seen.connections == 0 else 0
        idle = seen.requests == 0 and now - max(seen.moved, self._began) >= self._idle
        return self._looks >= QUIET_LOOKS or idle


class Drain:
    """A drain that has begun. Looks are made from one thread."""

    def __init__(self, config: EngineConfig, now: float) -> None:
        """Tell the API servers."""
        self._config = config
        self._quiet = Quiet(now, idle_seconds())
        tally.tell_draining(config.engine_id)

    def look(self, now: float) -> tuple[Traffic, bool]:
        """Return what clients do, and whether they are done. The launcher's own requests must not be open."""
        tally.tell_draining(self._config.engine_id)  # also the API servers that came since
        connections, work = open_connections(self._config.port), tally.work(self._config.engine_id)
        seen = Traffic(connections, work.open, work.moved) if work else Traffic(connections)
        return seen, self._quiet.judge(seen, now)
