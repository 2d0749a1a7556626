"""The life of the operator's process: stand by, lead, stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from vllm_ray_operator.clients.bundle import Key
from vllm_ray_operator.clients.protocols import ApiError
from vllm_ray_operator.runtime.clock import cancel
from vllm_ray_operator.runtime.lease import LeaderLease, LeaseLost
from vllm_ray_operator.runtime.queue import WorkQueue

log = logging.getLogger(__name__)

STEP_SECONDS = 3.0  # what the passes in hand get when the process is told to stop
WATCHDOG_SECONDS = 5.0


class Watcher(Protocol):
    """What puts keys in the queue."""

    def unready(self) -> str:
        """Return why nothing is watched; "" if all is."""
        ...

    async def run(self) -> None:
        """Watch until cancelled."""
        ...


class Worker(Protocol):
    """What works the queue off."""

    async def work(self, queue: WorkQueue[Key]) -> None:
        """Work until the queue is closed."""
        ...


class Closable(Protocol):
    """What has tasks of its own."""

    async def close(self) -> None:
        """End them."""
        ...


class Stuck(Exception):
    """The process does not get on with its work."""


class Process:
    """One operator process."""

    def __init__(
        self,
        lease: LeaderLease,
        watcher: Watcher,
        queue: WorkQueue[Key],
        reconciler: Worker,
        engine_watch: Closable,
        workers: int,
        ill: Callable[[], str],
        stop: asyncio.Event,
    ) -> None:
        self._lease = lease
        self._watcher = watcher
        self._queue = queue
        self._reconciler = reconciler
        self._engine_watch = engine_watch
        self._workers = workers
        self._ill = ill
        self._stop = stop

    def unready(self) -> str:
        """Return why the process cannot do its part; "" if it can. One that stands by does its part."""
        if not self._lease.reachable:
            return "the leader lease cannot be read"
        return self._watcher.unready() if self._lease.held else ""

    async def run(self) -> int:
        """Run until told to stop, or until it is better to start anew. Return the exit code."""
        if not await self._before_stop(self._lease.acquire()):
            return 0
        workers = [asyncio.create_task(self._reconciler.work(self._queue)) for _ in range(self._workers)]
        stop = asyncio.create_task(self._stop.wait())
        keeper = asyncio.create_task(self._lease.keep())
        watcher = asyncio.create_task(self._watcher.run())
        watchdog = asyncio.create_task(self._watch_over())
        try:
            done, _ = await asyncio.wait(
                [stop, keeper, watcher, watchdog, *workers], return_when=asyncio.FIRST_COMPLETED
            )
            for fault in map(_fault, done - {stop}):
                log.error("stopping: %s", fault, exc_info=_trace(fault))
            if keeper not in done:
                # Keys are taken no more, and what is under way gets the time to end, while the lease is still kept.
                self._queue.close()
                await asyncio.wait(workers, timeout=STEP_SECONDS)
            await cancel(keeper, *workers)
            await self._engine_watch.close()
            try:
                await self._lease.release()
            except (ApiError, TimeoutError) as error:
                log.warning("the leader lease could not be released: %s", error)
            return 0 if done == {stop} else 1
        finally:
            await cancel(stop, keeper, watchdog, watcher, *workers)

    async def _before_stop(self, work: Awaitable[None]) -> bool:
        """Wait for ``work``. Return whether it was done before the process was told to stop."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return task.done()
        finally:
            await cancel(task, stop)

    async def _watch_over(self) -> None:
        """Stuck when the process should be restarted."""
        while True:
            await asyncio.sleep(WATCHDOG_SECONDS)
            if fault := self._ill():
                raise Stuck(fault)


def _fault(task: asyncio.Task[Any]) -> BaseException:
    return task.exception() or RuntimeError(f"{task.get_name()} ended")


def _trace(error: BaseException) -> BaseException | None:
    """What is part of life needs no trace in the log."""
    return None if isinstance(error, LeaseLost | Stuck) else error
