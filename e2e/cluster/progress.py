"""Says what is being done, with the time since the start."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

FIRST_SIGN_OF_LIFE = 3.0  # seconds
NEXT_SIGNS_OF_LIFE = 15.0  # seconds


class Progress:
    """Prints a line per step; a step that takes long shows signs of life."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock that all lines show."""
        self._stream = stream or sys.stderr
        self._clock = clock
        self._start = clock()

    def say(self, text: str) -> None:
        """Print one line."""
        print(f"{self._clock() - self._start:7.1f}s  {text}", file=self._stream, flush=True)

    @asynccontextmanager
    async def step(self, name: str, detail: Callable[[], str] = lambda: "") -> AsyncIterator[None]:
        """Announce the end of the block, and meanwhile, if it takes long, that it still runs (and the detail)."""
        began = self._clock()
        alive = asyncio.create_task(self._signs_of_life(name, detail))
        try:
            yield
        except asyncio.CancelledError:
            raise
        except BaseException:
            self.say(f"{name}: FAILED after {self._clock() - began:.1f} s")
            raise
        finally:
            alive.cancel()
            with suppress(asyncio.CancelledError):
                await alive
        self.say(f"{name} ({self._clock() - began:.1f} s)")

    async def _signs_of_life(self, name: str, detail: Callable[[], str]) -> None:
        await asyncio.sleep(FIRST_SIGN_OF_LIFE)
        while True:
            text = detail()
            self.say(f"{name} ..." + (f" {text}" if text else ""))
            await asyncio.sleep(NEXT_SIGNS_OF_LIFE)
