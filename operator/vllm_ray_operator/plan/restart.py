"""When a failed replica starts again."""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta

from vllm_ray_operator.api.spec import Restart

JITTER = 0.2
STABLE_SECONDS = 600.0


def failures_after(previous: int, ready_time: datetime | None, now: datetime) -> int:
    """Return the count of failures in a row: a replica that was ready for long enough begins anew."""
    if ready_time is not None and (now - ready_time).total_seconds() >= STABLE_SECONDS:
        return 1
    return previous + 1


def backoff(failures: int, instance_id: str, policy: Restart) -> timedelta:
    """Return how long to wait after that many failures in a row.

    Doubles from the policy's first to its longest time. The jitter (up to 20 % more) comes from the instance id:
    planning stays pure, and replicas that failed together do not start together.
    """
    if failures <= 0:
        return timedelta(0)
    seconds = min(float(policy.max_backoff_seconds), policy.backoff_seconds * 2.0 ** min(failures - 1, 16))
    spread = int.from_bytes(hashlib.sha256(instance_id.encode()).digest()[:4], "big") / 2**32
    return timedelta(seconds=round(seconds * (1 + JITTER * spread), 3))
