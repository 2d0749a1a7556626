"""When a failed replica starts again."""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta

BASE_SECONDS = 10.0
MAX_SECONDS = 300.0
JITTER = 0.2
STABLE_SECONDS = 600.0
CRASH_LOOP_FAILURES = 3


def failures_after(previous: int, ready_time: datetime | None, now: datetime) -> int:
    """Return the count of failures in a row: a replica that was ready for long enough begins anew."""
    if ready_time is not None and (now - ready_time).total_seconds() >= STABLE_SECONDS:
        return 1
    return previous + 1


def backoff(failures: int, instance_id: str) -> timedelta:
    """Return how long to wait after that many failures in a row.

    Doubles from 10 s to 5 min. The jitter (up to 20 % more) comes from the instance id: planning stays pure, and
    replicas that failed together do not start together.
    """
    if failures <= 0:
        return timedelta(0)
    seconds = min(MAX_SECONDS, BASE_SECONDS * 2.0 ** min(failures - 1, 16))
    spread = int.from_bytes(hashlib.sha256(instance_id.encode()).digest()[:4], "big") / 2**32
    return timedelta(seconds=round(seconds * (1 + JITTER * spread), 3))
