"""The attempt's state as the control endpoint shows it: versioned, so that a reader can wait for a change."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from vllm_ray_engine.config import EngineConfig
from vllm_ray_engine.reasons import Cause

CHECKING = "Checking"
PLACING = "Placing"
STANDBY = "Standby"
LOADING = "Loading"
SERVING = "Serving"
STOPPING = "Stopping"
FAILED = "Failed"
ENDING = (STOPPING, FAILED)


def timestamp() -> str:
    """Return the present as RFC 3339, in UTC, with seconds."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")  # noqa: UP017  images may have Python 3.10


class State:
    """The state and its version, which grows with every real change. Safe to use from any thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._changed = threading.Condition(threading.RLock())
        self._version = 1
        self._fields: dict[str, Any] = {
            "instanceId": config.instance_id,
            "attempt": config.attempt,
            "phase": CHECKING,
            "message": "checking versions, ports and the model path",
            "since": timestamp(),
            "placement": {"state": "PENDING", "explanation": ""},
            "health": {
                "ready": False,
                "reason": "the engine is not started",
                "models": [],
                "workersExpected": config.workers,
                "workersAlive": 0,
            },
            "ranks": self._ranks([()] * len(config.ranks)),
            "cause": None,
            "openConnections": None,
            "openRequests": None,
            "drained": None,
        }

    def _ranks(self, node_ips: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        return [
            {"rank": rank, "instanceId": self._config.rank_id(rank), "nodeIps": list(ips)}
            for rank, ips in zip(self._config.ranks, node_ips, strict=True)
        ]

    def place(self, node_ips: Sequence[Sequence[str]]) -> None:
        """Set for each rank of the job the address of each worker's node."""
        self.update(ranks=self._ranks(node_ips))

    def update(self, **fields: Any) -> None:
        """Set fields; waiting readers are woken only if one of them really changed.

        What the engine of an attempt that ends still answers changes nothing: it is not ready again.
        """
        with self._changed:
            if self._fields["phase"] in ENDING:
                fields.pop("health", None)
            if all(self._fields[name] == value for name, value in fields.items()):
                return
            self._fields |= fields
            self._version += 1
            self._changed.notify_all()

    def observe_drain(self, connections: int | None, requests: int | None, *, drained: bool) -> None:
        """Set what clients do in a drain. The counts change all the time; only the verdict is a new version."""
        with self._changed:
            self._fields |= {"openConnections": connections, "openRequests": requests}
            self.update(drained=drained)

    def enter(self, phase: str, message: str) -> None:
        """Enter a phase, or change the message of the present one."""
        with self._changed:
            since = self._fields["since"] if self._fields["phase"] == phase else timestamp()
            self.update(phase=phase, message=message, since=since)

    def stop(self) -> None:
        """Enter Stopping, no longer ready, in one change."""
        self._end(STOPPING, "asked to stop")

    def fail(self, cause: Cause) -> None:
        """Enter Failed with its cause, no longer ready, in one change."""
        self._end(FAILED, cause.message, cause=cause.as_dict())

    def _end(self, phase: str, message: str, **fields: Any) -> None:
        """Clients must not be sent to an engine that is about to end, however well it still answers them."""
        with self._changed:
            health = {**self._fields["health"], "ready": False, "reason": message}
            self.update(phase=phase, message=message, since=timestamp(), health=health, **fields)

    @property
    def phase(self) -> str:
        """Return the present phase."""
        with self._changed:
            return str(self._fields["phase"])

    def read(self, since: int | None = None, wait_seconds: float = 0.0) -> dict[str, Any]:
        """Return the state; if its version is still `since`, wait at most `wait_seconds` for it to change."""
        deadline = time.monotonic() + wait_seconds
        with self._changed:
            while self._version == since and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return {"version": self._version, **self._fields}
