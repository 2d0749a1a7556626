"""The life of the process: stand by, lead, stop."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.unit.runtime.doubles import StoredKube
from tests.unit.runtime.virtual import EPOCH, VirtualClock, in_virtual_time
from vllm_ray_operator.clients.bundle import Key
from vllm_ray_operator.clients.protocols import LEASES, ApiError
from vllm_ray_operator.runtime.lease import LeaderLease
from vllm_ray_operator.runtime.process import STEP_SECONDS, Process
from vllm_ray_operator.runtime.queue import WorkQueue

KEY = Key("default", "chat")


class Watcher:
    running = False
    ended = False

    def unready(self) -> str:
        return "" if self.running else "the watches have not started"

    async def run(self) -> None:
        self.running = True
        try:
            await asyncio.Event().wait()
        finally:
            self.running, self.ended = False, True


class Reconciler:
    """Passes that take ``seconds``."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self.begun: list[Key] = []
        self.done: list[Key] = []
        self.error: Exception | None = None

    async def work(self, queue: WorkQueue[Key]) -> None:
        while (key := await queue.get()) is not None:
            self.begun.append(key)
            await asyncio.sleep(self.seconds)
            if self.error is not None:
                raise self.error
            self.done.append(key)
            queue.done(key)


class EngineWatch:
    closed = False

    async def close(self) -> None:
        self.closed = True


class Stage:
    """A process of doubles around a real queue and a real lease."""

    def __init__(self, kube: StoredKube, identity: str = "a", seconds: float = 1.0) -> None:
        self.kube = kube
        self.lease = LeaderLease(kube, "ops", "lease", identity, VirtualClock())
        self.watcher, self.reconciler, self.engine_watch = Watcher(), Reconciler(seconds), EngineWatch()
        self.queue: WorkQueue[Key] = WorkQueue(VirtualClock(), lambda: 0.0)
        self.stop = asyncio.Event()
        self.fault = ""
        self.process = Process(
            lease=self.lease,
            watcher=self.watcher,
            queue=self.queue,
            reconciler=self.reconciler,
            engine_watch=self.engine_watch,
            workers=2,
            ill=lambda: self.fault,
            stop=self.stop,
        )
        self.run = asyncio.create_task(self.process.run())

    def holder(self) -> str | None:
        holder: str | None = self.kube.objects[LEASES.plural, "ops", "lease"]["spec"].get("holderIdentity")
        return holder


def elapsed() -> float:
    return round(VirtualClock().now() - EPOCH, 3)


@in_virtual_time
async def test_it_leads_works_and_stops_in_order() -> None:
    stage = Stage(StoredKube())
    await asyncio.sleep(1)
    assert stage.process.unready() == ""
    stage.queue.add(KEY)
    await asyncio.sleep(0.5)
    stage.stop.set()
    stage.queue.add(Key("default", "next"))
    assert await stage.run == 0
    assert stage.reconciler.done == [KEY], "the pass in hand is ended, no other is begun"
    assert elapsed() == 2
    assert stage.holder() is None
    assert stage.watcher.ended
    assert stage.engine_watch.closed


@in_virtual_time
async def test_a_pass_that_does_not_end_does_not_hold_up_the_stop() -> None:
    stage = Stage(StoredKube(), seconds=3600)
    await asyncio.sleep(1)
    stage.queue.add(KEY)
    await asyncio.sleep(1)
    stage.stop.set()
    assert await stage.run == 0
    assert elapsed() == 2 + STEP_SECONDS
    assert stage.holder() is None


@in_virtual_time
async def test_a_stand_by_is_ready_stops_at_once_and_leaves_the_lease_alone() -> None:
    kube = StoredKube()
    leader, other = Stage(kube, "a"), Stage(kube, "b")
    await asyncio.sleep(60)
    assert (leader.process.unready(), other.process.unready()) == ("", "")
    assert not other.watcher.running
    other.stop.set()
    assert await other.run == 0
    assert elapsed() == 60
    assert leader.holder() == "a"
    leader.stop.set()
    assert await leader.run == 0


@in_virtual_time
async def test_a_successor_starts_when_the_leader_stops() -> None:
    kube = StoredKube()
    leader, other = Stage(kube, "a"), Stage(kube, "b")
    await asyncio.sleep(20)
    leader.stop.set()
    assert await leader.run == 0
    await asyncio.sleep(2.1)
    assert other.watcher.running
    assert other.holder() == "b"
    other.stop.set()
    await other.run


@in_virtual_time
async def test_losing_the_lease_ends_the_process_without_waiting(caplog: pytest.LogCaptureFixture) -> None:
    kube = StoredKube()
    stage = Stage(kube, seconds=3600)
    await asyncio.sleep(1)
    stage.queue.add(KEY)
    kube.fault, kube.fault_count = ApiError("unreachable"), 10_000
    assert await stage.run == 1
    assert elapsed() <= 12, "the lease lasts until 15"
    assert stage.reconciler.done == []
    assert "could not be renewed in time" in caplog.text
    assert "Traceback" not in caplog.text


@in_virtual_time
async def test_a_stuck_process_ends_and_lets_go_of_the_lease(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(StoredKube())
    await asyncio.sleep(7)
    stage.fault = "a worker has been busy with one deployment for 999 s"
    assert await stage.run == 1
    assert elapsed() <= 10
    assert stage.holder() is None
    assert "busy with one deployment" in caplog.text


@in_virtual_time
@pytest.mark.parametrize("what", ["worker", "watcher"])
async def test_a_part_that_dies_takes_the_process_with_it(what: str, caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(StoredKube())
    if what == "watcher":

        async def broken() -> None:
            raise ZeroDivisionError("ours")

        stage.watcher.run = broken  # type: ignore[method-assign]
    else:
        stage.reconciler.error = ZeroDivisionError("ours")
        stage.queue.add(KEY)
    with caplog.at_level(logging.ERROR):
        assert await stage.run == 1
    assert "ZeroDivisionError" in caplog.text
    assert stage.holder() is None


@in_virtual_time
async def test_without_an_api_server_it_is_not_ready_and_can_be_stopped() -> None:
    kube = StoredKube()
    kube.fault, kube.fault_count = ApiError("unreachable"), 10_000
    stage = Stage(kube)
    await asyncio.sleep(30)
    assert stage.process.unready() == "the leader lease cannot be read"
    stage.stop.set()
    assert await stage.run == 0
