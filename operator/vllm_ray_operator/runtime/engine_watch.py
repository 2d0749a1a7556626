"""Watches the launchers of all attempts: one long poll each, so that a dead engine is noticed at once.

What a launcher answers is not kept: a change only has the deployment looked at, like any other event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm_ray_operator.clients.bundle import Key
from vllm_ray_operator.clients.protocols import ApiError, Clock, Engine, EngineEndpoint
from vllm_ray_operator.runtime.clock import cancel, within
from vllm_ray_operator.runtime.logging import bound
from vllm_ray_operator.runtime.queue import Backoff

log = logging.getLogger(__name__)

POLL_SECONDS = 30.0
ANSWER_SECONDS = 10.0  # what a launcher may take beyond the poll before it counts as silent
PAUSE_SECONDS = 0.2  # between polls, so that a launcher that answers at once for ever cannot keep us busy
RECONNECT = Backoff(first=0.5, limit=30.0)


@dataclass(frozen=True)
class _Poll:
    endpoint: EngineEndpoint
    task: asyncio.Task[None]


class EngineWatch:
    """One poll for every launcher of the latest observation of each deployment."""

    def __init__(
        self, engine: Engine, clock: Clock, random: Callable[[], float], changed: Callable[[Key], None]
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._random = random
        self._changed = changed
        self._polls: dict[Key, dict[str, _Poll]] = {}

    def follow(self, key: Key, engines: Mapping[str, EngineEndpoint]) -> None:
        """Watch exactly these launchers (by instance id) of one deployment from now on."""
        polls = self._polls.setdefault(key, {})
        for instance_id, poll in list(polls.items()):
            if engines.get(instance_id) != poll.endpoint or poll.task.done():
                poll.task.cancel()
                del polls[instance_id]
        for instance_id, endpoint in engines.items():
            if instance_id not in polls:
                task = asyncio.create_task(self._hold(key, endpoint), name=f"engine watch {instance_id}")
                polls[instance_id] = _Poll(endpoint, task)
        if not polls:
            del self._polls[key]

    def count(self) -> int:
        """How many launchers are watched."""
        return sum(len(polls) for polls in self._polls.values())

    async def close(self) -> None:
        """End all polls."""
        tasks = [poll.task for polls in self._polls.values() for poll in polls.values()]
        self._polls.clear()
        await cancel(*tasks)

    async def _hold(self, key: Key, endpoint: EngineEndpoint) -> None:
        version: int | None = None
        failures = 0
        with bound(namespace=key.namespace, name=key.name, attempt=endpoint.instance_id):
            while True:
                try:
                    # After a break the answer must come at once, whether or not the version is the same.
                    answer = await self._poll(endpoint, None if failures else version)
                except (ApiError, TimeoutError) as error:
                    failures += 1
                    if failures == 1:
                        log.info("the launcher does not answer: %s", error)
                        self._changed(key)
                    await self._clock.sleep(RECONNECT.delay(failures, self._random))
                    continue
                # The first answer counts as a change: it may be newer than what was observed before this watch began.
                if answer != version or failures:
                    self._changed(key)
                version, failures = answer, 0
                await self._clock.sleep(PAUSE_SECONDS)

    async def _poll(self, endpoint: EngineEndpoint, since: int | None) -> int:
        """Return the launcher's version. ApiError or TimeoutError if it does not answer, or not as it should."""
        state = await within(
            self._clock, POLL_SECONDS + ANSWER_SECONDS, self._engine.state(endpoint, since, POLL_SECONDS)
        )
        version = state.get("version")
        if not isinstance(version, int):
            raise ApiError("its state has no version")
        if state.get("instanceId") != endpoint.instance_id:
            raise ApiError(f"another launcher answers at its address: {state.get('instanceId')!r}")
        return version
