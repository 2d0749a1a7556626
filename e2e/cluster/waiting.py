"""Waits for conditions, says for which, and never for ever."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from e2e.cluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from e2e.cluster.progress import Progress

DEADLINE = 180.0  # seconds; generous: a busy machine is slow
POLL = 0.1  # seconds


async def until(progress: Progress, what: str, missing: Callable[[], str | None], deadline: float = DEADLINE) -> None:
    """Wait until nothing is missing; ClusterError says what still was at the deadline.

    ``missing`` may block (it runs in a thread) and returns None or the reason in words.
    """
    reason = await asyncio.to_thread(missing)
    if reason is None:
        return
    try:
        async with progress.step(what, lambda: str(reason)), asyncio.timeout(deadline):
            while (reason := await asyncio.to_thread(missing)) is not None:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(POLL)
    except TimeoutError:
        raise ClusterError(f"{what}: not after {deadline:.0f} s: {reason}") from None
