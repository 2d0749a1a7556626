"""Which nodes of an attempt have lost their raylet, long before Ray says so.

Ray's control store declares a node dead after five missed health checks of three seconds each (health_check_period_ms
and health_check_failure_threshold, Ray 2.52 to 2.60). Until then vLLM waits, while it starts, for workers that died
with their raylet. A port that refuses connections has nobody behind it any more: that is certain at once. A port that
does not answer says nothing: that is left to Ray.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

CONNECT_SECONDS = 0.5
REFUSALS = 2
"""So many looks in a row have to be refused."""


class Raylets:
    """Looks at the raylets of some nodes, again and again."""

    def __init__(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        """Take the address and port of each node's raylet, by the node's name."""
        self._addresses = addresses
        self._refused: dict[str, int] = {}  # of the nodes that have ever accepted: a network may refuse for all of them

    def dead(self) -> tuple[str, ...]:
        """Look once; return the names of the nodes whose raylet is gone."""
        for name, address in self._addresses.items():
            try:
                socket.create_connection(address, CONNECT_SECONDS).close()
                self._refused[name] = 0
            except ConnectionRefusedError:
                if name in self._refused:
                    self._refused[name] += 1
            except OSError:
                continue
        return tuple(name for name, count in self._refused.items() if count >= REFUSALS)
