"""Time as the runtime needs it: durations that no change of the wall clock can stretch or cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from vllm_ray_operator.clients.protocols import Clock

T = TypeVar("T")


class WallClock:
    """The machine's clock. For what is written for others to read, and compared with what others wrote."""

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await asyncio.sleep(seconds)


class SteadyClock:
    """A clock that starts at the wall time of its making and then never jumps.

    For durations: back-off, leases, ages.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Seconds since the epoch, as they were when the clock was made."""
        return self._offset + time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await asyncio.sleep(seconds)


async def within(clock: Clock, seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns. TimeoutError, and ``work`` cancelled, if ``seconds`` pass before it is done."""
    task = asyncio.ensure_future(work)
    timer = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({task, timer}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise TimeoutError(f"no answer within {seconds:.1f} s")
    finally:
        await cancel(task, timer)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended, whatever they end with."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
