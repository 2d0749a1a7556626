"""A work queue of keys: level-triggered, de-duplicated, one worker at a time for a key.

A key that is added while it waits stays one key. A key that is added while a worker has it is handed out once more
after that. Failed keys come back with exponential back-off, and any key can be told to come back later. All of it runs
in one event loop and takes time and chance from outside, so that it behaves the same in a simulation.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vllm_ray_operator.clients.protocols import Clock
from vllm_ray_operator.runtime.clock import cancel

K = TypeVar("K")


@dataclass(frozen=True)
class Backoff:
    """Delays of a key that fails again and again: ``first`` seconds, doubled up to ``limit``, cut by chance.

    The jitter takes away up to a quarter, so that keys which failed together do not come back together.
    """

    first: float = 1.0
    limit: float = 300.0

    def delay(self, failures: int, random: Callable[[], float]) -> float:
        """Return the delay in seconds after ``failures`` (1 and more) failures in a row."""
        exponent = min(failures - 1, 32)  # beyond it any sensible limit is reached; keeps the power small
        return float(min(self.first * 2**exponent, self.limit)) * (1 - 0.25 * random())


@dataclass(frozen=True)
class Pace:
    """How often one key may be handed out: ``burst`` times at once, then every ``interval`` seconds.

    The last line against a key whose every pass gives rise to the next one.
    """

    interval: float = 0.5
    burst: int = 10


class WorkQueue(Generic[K]):
    """The queue. ``clock`` should be one that never jumps; ``random`` gives numbers in [0, 1)."""

    def __init__(
        self,
        clock: Clock,
        random: Callable[[], float],
        backoff: Backoff = Backoff(),
        pace: Pace = Pace(),
    ) -> None:
        self._clock = clock
        self._random = random
        self._backoff = backoff
        self._pace = pace
        self._waiting: dict[K, float] = {}  # in order; since when
        self._working: dict[K, float] = {}  # since when
        self._again: set[K] = set()  # added while being worked on
        self._due: dict[K, float] = {}  # timed wake-ups
        self._timers: list[tuple[float, int, K]] = []  # heap over _due; entries that _due no longer holds are stale
        self._sequence = itertools.count()
        self._failures: dict[K, int] = {}
        self._paced: dict[K, float] = {}  # when the key's burst would be used up if it were handed out steadily
        self._changed = asyncio.Event()
        self._closed = False

    def add(self, key: K) -> None:
        """Have the key worked on as soon as may be."""
        if key in self._working:
            self._again.add(key)
        else:
            self.add_after(key, 0)

    def add_after(self, key: K, seconds: float) -> None:
        """Have the key worked on in ``seconds``. Of several wake-ups the earliest wins; taking the key ends them."""
        now = self._clock.now()
        due = max(now + seconds, self._paced.get(key, now) - self._pace.burst * self._pace.interval)
        if key in self._waiting or due >= self._due.get(key, float("inf")):
            return
        if due <= now and key not in self._working:
            self._due.pop(key, None)
            self._waiting[key] = now
        else:
            self._due[key] = due
            self._push(due, key)
        self._changed.set()

    def retry(self, key: K) -> float:
        """Have the key worked on after its back-off, and return that (seconds)."""
        self._failures[key] = self._failures.get(key, 0) + 1
        delay = self._backoff.delay(self._failures[key], self._random)
        self.add_after(key, delay)
        return delay

    def forget_failures(self, key: K) -> None:
        """Let the key's back-off start from the beginning."""
        self._failures.pop(key, None)

    async def get(self) -> K | None:
        """Return the next key, now the caller's until :meth:`done`; None once the queue is closed."""
        while not self._closed:
            self._wake_due()
            if self._waiting:
                return self._take()
            self._changed.clear()
            await self._wait_for_change()
        return None

    def done(self, key: K) -> None:
        """Give a key back. If it was added meanwhile, it is waiting again."""
        del self._working[key]
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def drop(self, key: K) -> None:
        """Forget all about a key that is the caller's and whose object is gone; what was added meanwhile stays."""
        self._due.pop(key, None)
        self._failures.pop(key, None)
        self._paced.pop(key, None)

    def close(self) -> None:
        """Hand out nothing any more."""
        self._closed = True
        self._changed.set()

    def depth(self) -> int:
        """How many keys could be worked on now but are not."""
        now = self._clock.now()
        return len(self._waiting) + sum(due <= now for due in self._due.values())

    def oldest_wait(self) -> float:
        """For how many seconds the longest-waiting key has been waiting for a worker."""
        now = self._clock.now()
        since = [*self._waiting.values(), *(d for k, d in self._due.items() if k not in self._working)]
        return max(0.0, now - min(since, default=now))

    def oldest_work(self) -> float:
        """For how many seconds the slowest worker has had its key."""
        now = self._clock.now()
        return now - min(self._working.values(), default=now)

    def _push(self, due: float, key: K) -> None:
        if len(self._timers) > 64 + 2 * len(self._due):  # mostly stale
            self._timers = [timer for timer in self._timers if self._due.get(timer[2]) == timer[0]]
            heapq.heapify(self._timers)
        heapq.heappush(self._timers, (due, next(self._sequence), key))

    def _take(self) -> K:
        now = self._clock.now()
        key = next(iter(self._waiting))
        del self._waiting[key]
        self._due.pop(key, None)
        self._working[key] = now
        self._paced[key] = max(now, self._paced.get(key, now)) + self._pace.interval
        return key

    def _wake_due(self) -> None:
        now = self._clock.now()
        while self._timers and self._timers[0][0] <= now:
            due, _, key = heapq.heappop(self._timers)
            if self._due.get(key) != due:
                continue
            del self._due[key]
            if key in self._working:
                self._again.add(key)
            else:
                self._waiting.setdefault(key, due)

    async def _wait_for_change(self) -> None:
        waiters: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._changed.wait())]
        if self._timers:
            waiters.append(asyncio.ensure_future(self._sleep_until(self._timers[0][0])))
        try:
            await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(*waiters)

    async def _sleep_until(self, due: float) -> None:
        await self._clock.sleep(max(0.0, due - self._clock.now()))
