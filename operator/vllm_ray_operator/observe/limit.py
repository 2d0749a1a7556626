"""A bound on how much is read at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")


class Limit:
    """Runs awaitables side by side, at most so many at once."""

    def __init__(self, most: int) -> None:
        self._slots = asyncio.Semaphore(most)

    async def gather(self, work: Iterable[Awaitable[T]]) -> list[T]:
        """Return the results in order. The first exception is raised when all have ended."""
        results = await asyncio.gather(*(self._run(one) for one in work), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    async def _run(self, one: Awaitable[T]) -> T:
        async with self._slots:
            return await one
