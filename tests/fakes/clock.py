"""A clock that stands still until it is told to go on."""

from __future__ import annotations

import asyncio
import heapq
import itertools

START = 1_800_000_000.0


class FakeClock:
    def __init__(self, now: float = START) -> None:
        self._now = now
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Let time pass. Sleepers wake in order, each with the time it asked for."""
        end = self._now + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
            await settle()
        self._now = end


async def settle() -> None:
    """Let all that can run without time passing run."""
    for _ in range(20):
        await asyncio.sleep(0)
