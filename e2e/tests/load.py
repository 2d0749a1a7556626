"""Clients that ask all the time while a test changes something."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from e2e.load import Load, Request, Tally, tally
from e2e.waiting import say, wait_for


@contextmanager
def load(resource: Mapping[str, Any], url: str = "") -> Iterator[list[Request]]:
    """Send four requests a second, one of each kind, through the Service or to a URL."""
    cluster = os.environ["VRO_CLUSTER"]
    clients = Load(cluster, f"{cluster}-node1", resource, count=1, period=1.0, url=url)
    try:
        wait_for("all kinds of clients to be served", lambda: len({r.kind for r in clients.requests}) == 4, seconds=60)
        yield clients.requests
    finally:
        clients.stop()


def outcome(requests: list[Request]) -> Tally:
    """Count what came of all of them, and say it."""
    result = tally(requests, 0, time.time())
    say(f"the load: {result}")
    return result
