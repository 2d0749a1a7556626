"""The watch of the launchers."""

from __future__ import annotations

import asyncio

from tests.unit.runtime.doubles import ScriptedEngine
from tests.unit.runtime.virtual import VirtualClock, in_virtual_time
from vllm_ray_operator.clients.bundle import Key
from vllm_ray_operator.clients.protocols import ApiError, EngineEndpoint
from vllm_ray_operator.runtime.engine_watch import EngineWatch

KEY = Key("default", "chat")


class Watched:
    """An EngineWatch over scripted launchers, and when it called for a look."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.looks: list[tuple[float, Key]] = []
        self.watch = EngineWatch(self.engine, VirtualClock(), lambda: 0.0, self._look)

    def _look(self, key: Key) -> None:
        self.looks.append((round(asyncio.get_running_loop().time(), 2), key))

    def times(self) -> list[float]:
        return [time for time, _ in self.looks]


def endpoint(instance_id: str, address: str = "10.0.0.1") -> EngineEndpoint:
    return EngineEndpoint(address, 8070, instance_id)


@in_virtual_time
async def test_a_new_version_calls_for_a_look_at_once_and_a_quiet_launcher_does_not() -> None:
    watched = Watched()
    await watched.engine.version("a", 1)
    watched.watch.follow(KEY, {"a": endpoint("a")})
    await asyncio.sleep(100)
    assert watched.times() == [0], "the first answer may be newer than the last observation"
    assert watched.engine.calls <= 5
    await watched.engine.version("a", 2)
    await asyncio.sleep(1)
    assert watched.looks == [(0, KEY), (100, KEY)]
    await watched.watch.close()


@in_virtual_time
async def test_a_broken_connection_and_its_return_call_for_one_look_each() -> None:
    watched = Watched()
    await watched.engine.version("a", 1)
    watched.watch.follow(KEY, {"a": endpoint("a")})
    await asyncio.sleep(10)
    await watched.engine.set("a", ApiError("connection closed"))
    await asyncio.sleep(300)
    assert watched.times() == [0, 10]
    assert watched.engine.calls < 25, "reconnects back off"
    await watched.engine.version("a", 1)
    await asyncio.sleep(31)
    assert len(watched.times()) == 3
    await watched.watch.close()


@in_virtual_time
async def test_only_the_launchers_of_the_latest_observation_are_watched() -> None:
    watched = Watched()
    other = Key("default", "other")
    for name in ("a", "b", "c"):
        await watched.engine.version(name, 1)
    watched.watch.follow(KEY, {"a": endpoint("a"), "b": endpoint("b")})
    watched.watch.follow(other, {"c": endpoint("c")})
    await asyncio.sleep(1)
    watched.watch.follow(KEY, {"b": endpoint("b")})
    await asyncio.sleep(1)
    assert watched.watch.count() == 2
    watched.looks.clear()
    for name in ("a", "b", "c"):
        await watched.engine.version(name, 2)
    await asyncio.sleep(1)
    assert [key for _, key in watched.looks] == [KEY, other]
    watched.watch.follow(KEY, {})
    watched.watch.follow(other, {})
    assert watched.watch.count() == 0
    await watched.watch.close()


@in_virtual_time
async def test_a_launcher_at_a_new_address_is_asked_there() -> None:
    watched = Watched()
    await watched.engine.version("a", 1)
    watched.watch.follow(KEY, {"a": endpoint("a")})
    await asyncio.sleep(1)
    watched.watch.follow(KEY, {"a": endpoint("a")})
    await asyncio.sleep(1)
    assert len(watched.looks) == 1, "the same launcher goes on being watched"
    watched.watch.follow(KEY, {"a": endpoint("a", "10.0.0.2")})
    await asyncio.sleep(1)
    assert len(watched.looks) == 2
    await watched.watch.close()


@in_virtual_time
async def test_a_launcher_whose_answers_make_no_sense_keeps_nobody_busy() -> None:
    watched = Watched()
    await watched.engine.set("a", {"instanceId": "a"})
    watched.watch.follow(KEY, {"a": endpoint("a")})
    await asyncio.sleep(60)
    assert watched.times() == [0]
    assert watched.engine.calls < 12
    await watched.watch.close()


@in_virtual_time
async def test_a_launcher_that_answers_at_once_for_ever_is_paced() -> None:
    watched = Watched()
    watched.watch.follow(KEY, {"a": endpoint("a")})
    for version in range(1000):
        await watched.engine.version("a", version)
        await asyncio.sleep(0.01)
    assert watched.engine.calls <= 60
    await watched.watch.close()
