"""Virtual time: an event loop in which waiting takes no time and always the same course."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec

P = ParamSpec("P")

EPOCH = 1_800_000_000.0


class _Selector(selectors.DefaultSelector):
    """Instead of waiting for the next timer, moves the loop's time to it."""

    advance: Callable[[float], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock: all tasks wait, and no timer is set")
            self.advance(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time only moves when there is nothing else to do."""

    def __init__(self) -> None:
        self._virtual = 0.0
        selector = _Selector()
        selector.advance = self._advance
        super().__init__(selector)

    def time(self) -> float:
        return self._virtual

    def _advance(self, seconds: float) -> None:
        self._virtual += seconds


class VirtualClock:
    """The operator's clock over the loop's virtual time."""

    def now(self) -> float:
        return EPOCH + asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def in_virtual_time(test: Callable[P, Awaitable[Any]]) -> Callable[P, None]:
    """Run an async test in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def body() -> None:
            await test(*args, **kwargs)

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(body())

    return run
