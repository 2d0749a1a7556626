"""The work queue."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.runtime.virtual import EPOCH, VirtualClock, in_virtual_time
from vllm_ray_operator.runtime.queue import Backoff, Pace, WorkQueue

UNPACED = Pace(interval=0, burst=1)


def make(pace: Pace = UNPACED) -> WorkQueue[str]:
    return WorkQueue(VirtualClock(), random=lambda: 0.0, pace=pace)


def elapsed() -> float:
    return round(VirtualClock().now() - EPOCH, 3)


async def take(queue: WorkQueue[str]) -> tuple[float, str | None]:
    key = await queue.get()
    return elapsed(), key


@in_virtual_time
async def test_keys_come_in_order_and_once() -> None:
    queue = make()
    for key in ("a", "b", "a", "c", "b"):
        queue.add(key)
    assert [await queue.get() for _ in range(3)] == ["a", "b", "c"]
    assert queue.depth() == 0


@in_virtual_time
async def test_a_key_is_with_one_worker_at_a_time_and_comes_once_more_after() -> None:
    queue = make()
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    queue.add("a")
    second = asyncio.create_task(take(queue))
    await asyncio.sleep(5)
    assert not second.done()
    queue.done("a")
    assert await second == (5, "a")
    queue.done("a")
    assert queue.depth() == 0


@in_virtual_time
async def test_the_earliest_wake_up_wins() -> None:
    queue = make()
    queue.add_after("a", 30)
    queue.add_after("a", 10)
    queue.add_after("a", 20)
    assert await take(queue) == (10, "a")
    queue.done("a")
    queue.add_after("a", 100)
    assert await take(queue) == (110, "a"), "the wake-ups at 20 and 30 had ended with the pass at 10"


@in_virtual_time
async def test_an_earlier_wake_up_reaches_a_worker_that_waits_already() -> None:
    queue = make()
    queue.add_after("a", 300)
    taken = asyncio.create_task(take(queue))
    await asyncio.sleep(1)
    queue.add_after("a", 2)
    assert await taken == (3, "a")


@in_virtual_time
async def test_an_event_cuts_a_wake_up_short() -> None:
    queue = make()
    queue.add_after("a", 300)
    queue.add("a")
    assert await take(queue) == (0, "a")


@in_virtual_time
async def test_a_wake_up_during_work_brings_the_key_back_after_it() -> None:
    queue = make()
    queue.add("a")
    await queue.get()
    queue.add_after("a", 1)
    idle = asyncio.create_task(take(queue))
    await asyncio.sleep(4)
    queue.done("a")
    assert await idle == (4, "a")


@in_virtual_time
async def test_failures_back_off_and_success_forgets_them() -> None:
    queue = make()
    queue.add("a")
    delays = []
    for _ in range(12):
        await queue.get()
        delays.append(queue.retry("a"))
        queue.done("a")
    assert delays == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    await queue.get()
    queue.forget_failures("a")
    assert queue.retry("a") == 1


@pytest.mark.parametrize(("failures", "low", "high"), [(1, 0.75, 1), (4, 6, 8), (50, 225, 300), (10_000, 225, 300)])
def test_backoff_is_cut_by_at_most_a_quarter(failures: int, low: float, high: float) -> None:
    assert Backoff().delay(failures, lambda: 0.0) == high
    assert Backoff().delay(failures, lambda: 0.999999) == pytest.approx(low, rel=1e-4)


@in_virtual_time
async def test_a_key_that_calls_for_itself_is_paced_and_others_are_not() -> None:
    queue = make(Pace(interval=0.5, burst=4))
    queue.add("busy")
    passes = []
    while elapsed() < 10:
        when, _ = await take(queue)
        passes.append(when)
        queue.add("busy")
        queue.done("busy")
    assert passes[:5] == [0, 0, 0, 0, 0]
    assert passes[5:8] == [0.5, 1, 1.5]
    queue.add("calm")
    assert await take(queue) == (elapsed(), "calm")


@in_virtual_time
async def test_pacing_holds_for_wake_ups_too_and_recovers() -> None:
    queue = make(Pace(interval=1, burst=2))
    for _ in range(3):
        queue.add_after("a", 0)
        await queue.get()
        queue.done("a")
    queue.add_after("a", 0)
    assert (await take(queue))[0] == 1
    queue.done("a")
    await asyncio.sleep(60)
    queue.add("a")
    assert (await take(queue))[0] == 61


@in_virtual_time
async def test_ages_tell_waiting_from_working() -> None:
    queue = make()
    queue.add("a")
    queue.add_after("later", 100)
    await asyncio.sleep(7)
    assert (queue.oldest_wait(), queue.oldest_work(), queue.depth()) == (7, 0, 1)
    await queue.get()
    await asyncio.sleep(3)
    assert (queue.oldest_wait(), queue.oldest_work(), queue.depth()) == (0, 3, 0)
    await asyncio.sleep(100)
    assert (queue.oldest_wait(), queue.depth()) == (10, 1), "a wake-up that no worker takes is waiting"


@in_virtual_time
async def test_a_dropped_key_does_not_come_back_by_itself() -> None:
    queue = make()
    queue.add("a")
    await queue.get()
    queue.retry("a")
    queue.drop("a")
    queue.done("a")
    taken = asyncio.create_task(queue.get())
    await asyncio.sleep(1000)
    assert not taken.done()
    queue.add("a")
    assert await taken == "a"


@in_virtual_time
async def test_closing_ends_all_waiting_workers() -> None:
    queue = make()
    waiting = [asyncio.create_task(queue.get()) for _ in range(3)]
    await asyncio.sleep(1)
    queue.close()
    queue.add("a")
    assert await asyncio.gather(*waiting) == [None, None, None]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "after", "retry"]), st.sampled_from("abc"), st.integers(0, 20), st.integers(0, 5)
        ),
        max_size=40,
    )
)
def test_no_key_is_lost_or_with_two_workers(steps: list[tuple[str, str, int, int]]) -> None:
    """Whatever happens, each added key is worked on again after its last add, by one worker at a time."""

    @in_virtual_time
    async def run() -> None:
        queue = make()
        working: set[str] = set()
        last_start: dict[str, float] = {}
        last_due: dict[str, float] = {}

        async def worker() -> None:
            while (key := await queue.get()) is not None:
                assert key not in working
                working.add(key)
                last_start[key] = elapsed()
                await asyncio.sleep(3)
                working.discard(key)
                queue.done(key)

        workers = [asyncio.create_task(worker()) for _ in range(2)]
        for kind, key, seconds, pause in steps:
            if kind == "add":
                queue.add(key)
                last_due[key] = elapsed()
            elif kind == "after":
                queue.add_after(key, seconds)
            else:
                queue.retry(key)
            await asyncio.sleep(pause)
        await asyncio.sleep(2000)
        assert queue.depth() == 0
        for key, due in last_due.items():
            assert last_start[key] >= due
        queue.close()
        await asyncio.gather(*workers)

    run()
