from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plan.build import NOW, later
from vllm_ray_operator.api.spec import Restart
from vllm_ray_operator.plan import restart

POLICY = Restart()

FAILURES: dict[str, tuple[int, datetime | None, int]] = {
    "first": (0, None, 1),
    "never ready": (4, None, 5),
    "ready for too short": (4, later(-599), 5),
    "ready for long": (4, later(-600), 1),
    "ready only just now": (4, NOW, 5),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_in_a_row(name: str) -> None:
    previous, ready_time, expected = FAILURES[name]
    assert restart.failures_after(previous, ready_time, NOW) == expected


@pytest.mark.parametrize(("failures", "least"), [(1, 10), (2, 20), (3, 40), (4, 80), (5, 160), (6, 300), (7, 300)])
def test_backoff_doubles_up_to_a_limit(failures: int, least: float) -> None:
    assert least <= restart.backoff(failures, "chat-1", POLICY).total_seconds() <= least * 1.2


def test_no_failure_no_wait() -> None:
    assert restart.backoff(0, "chat-1", POLICY).total_seconds() == 0


@settings(deadline=None)  # a loaded machine
@given(st.integers(min_value=1, max_value=10**9), st.text())
def test_backoff_is_bounded_and_a_function_of_its_arguments(failures: int, instance_id: str) -> None:
    waited = restart.backoff(failures, instance_id, POLICY)
    assert 10 <= waited.total_seconds() <= 360
    assert restart.backoff(failures, instance_id, POLICY) == waited


def test_replicas_that_fail_together_do_not_start_together() -> None:
    waits = {restart.backoff(1, f"chat-1a2b3c4d-a{n}-x", POLICY).total_seconds() for n in range(50)}
    assert len(waits) > 45
    assert max(waits) - min(waits) > 1


def test_the_policy_decides() -> None:
    policy = Restart(backoff_seconds=1, max_backoff_seconds=3)
    waits = [int(restart.backoff(failures, "chat-1", policy).total_seconds()) for failures in (1, 2, 3, 9)]
    assert waits == [1, 2, 3, 3]
