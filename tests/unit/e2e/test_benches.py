"""What the benches of a served deployment conclude from what was seen, and how they write it down."""

from __future__ import annotations

from typing import Any

import pytest

from bench import readme, restart_report, roll_report
from bench.stage import absences, first_seen
from e2e.chaos.outcome import Seen, Traffic


def traffic(at: float, *addresses: str, name: str = "bench-0") -> Traffic:
    return Traffic(at, name, frozenset(addresses))


def test_a_replica_is_away_while_its_slice_sends_clients_nowhere() -> None:
    seen = [
        traffic(0, "a:8000"),
        traffic(5),  # before the change
        traffic(6, "a:8000"),
        traffic(12),
        traffic(13),
        traffic(14, "b:8000", name="bench-1"),
        traffic(20, "a:8001"),
        traffic(30),  # did not come back
    ]
    assert absences(seen, "bench-0", 10, 100) == [(12, 20)]
    assert absences(seen, "bench-1", 10, 100) == []


def test_the_first_drain_after_a_change_is_found() -> None:
    def seen(at: float, *phases: str) -> Seen:
        return Seen(at, 1, {"replicas": [{"phase": phase} for phase in phases]})

    looks = [seen(1, "Draining"), seen(11, "Ready", "Ready"), seen(12, "Ready", "Draining"), seen(13, "Draining")]
    assert first_seen(looks, 10, "Draining") == 12
    assert first_seen(looks, 10, "Backoff") is None


CONDITIONS: dict[str, Any] = {
    "date": "today",
    "commit": "abc",
    "memory_mib": [1, 2],
    "clients": 8,
    "requests_per_second": 2.0,
    "vllm": "1",
    "ray": "2",
    "kubernetes": "3",
    "python": "4",
    "processors": 2,
    "cold_seconds": [50.0, 40.0],
}
ASKED: dict[str, Any] = {
    "seconds": 60.0,
    "sent": 100,
    "failed": 0,
    "moved": 4,
    "errors": {},
    "latency": {"p50": 100.0},
    "first": {},
    "stream": {"p50": 500.0},
    "busy": 0.5,
    "load": 3.0,
}


def rolled(away: float = 0.3, failed: int = 0, share: float = 1.0) -> dict[str, Any]:
    replica = {"index": 0, "away_seconds": 10, "away_in_cold_starts": away, "drain_and_fence_seconds": 6}
    operator = {
        "to_standby_seconds": share / 2,
        "standby_to_drain_seconds": share / 2,
        "share_seconds": share,
        "standby_warms_seconds": 40,
    }
    bare = {"index": 0, "away_seconds": 70, "out_of_traffic_seconds": 1.5}
    return {
        **CONDITIONS,
        "quiet": ASKED,
        "roll": {**ASKED, "failed": failed, "replicas": [replica] * 2, "operator": operator},
        "bare": {**ASKED, "failed": 9, "errors": {"reset": 9}, "replicas": [bare] * 2},
    }


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (rolled(), None),
        (rolled(failed=1), "1 requests failed"),
        (rolled(away=0.46), "0.46 of its cold start"),
        (rolled(share=2.1), "2.1 s until the first drain"),
    ],
)
def test_a_roll_that_misses_a_goal_is_told(result: dict[str, Any], words: str | None) -> None:
    text, missed = roll_report.report(result)
    assert "| **failed** | **0** |" in text
    assert "- 9 times `reset`" in text
    assert missed == [] if words is None else words in missed[0]


def restarted(out: float | None = 1.5, drain: float = 1.0, failed: int = 0) -> dict[str, Any]:
    kill = {"index": 0, "out_of_traffic_seconds": out, "named": "WorkerDied", "ready_seconds": 60.0, **ASKED}
    restart = {"to_drain_seconds": drain, "away_seconds": [40.0], "away_in_cold_starts": [0.9], **ASKED}
    return {**CONDITIONS, "kills": [kill], "plain": restart, "standby": {**restart, "failed": failed}}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (restarted(), None),
        (restarted(out=5.1), "1 of 1 replicas"),
        (restarted(out=None), "1 of 1 replicas"),
        (restarted(drain=2.1), "after 2.1 s"),
        (restarted(failed=2), "2 requests failed"),
    ],
)
def test_a_restart_that_misses_a_goal_is_told(result: dict[str, Any], words: str | None) -> None:
    text, missed = restart_report.report(result)
    assert "WorkerDied" in text
    assert missed == [] if words is None else words in missed[0]


def test_a_part_of_the_document_is_replaced() -> None:
    document = "a\n<!-- x begin -->\nold\n<!-- x end -->\nb\n"
    assert readme.replaced(document, "x", "new") == "a\n<!-- x begin -->\nnew\n<!-- x end -->\nb\n"
    with pytest.raises(ValueError, match="the marks of y"):
        readme.replaced(document, "y", "new")
