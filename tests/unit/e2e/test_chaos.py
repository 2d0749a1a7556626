"""The fault campaign: what its figures mean, and how they are told."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from e2e.chaos import __main__ as command
from e2e.chaos import campaign, faults, outcome, report
from e2e.chaos.faults import Fault, Hits
from e2e.chaos.outcome import Outcome, Request, Seen, Tally, Traffic
from e2e.chaos.scene import Scene, manifest
from e2e.kube import CommandError, Kube
from e2e.streams import told_by

BEGAN = 1000.0
VICTIM, OTHER = "10.242.2.5:8000", "10.242.1.7:8000"
BY_NAME = {fault.name: fault for fault in faults.FAULTS}


def seen(after: float, *, ready: bool = True, reason: str = "", **failures: str) -> Seen:
    """The resource so long after the fault; failures as a3="WorkerDied" for attempt 3."""
    reasons = {"Ready": reason or "AllReplicasReady", "ClusterReady": "ClusterReady", "Degraded": "AsExpected"}
    conditions = [
        {"type": kind, "status": str(ready), "reason": words, "observedGeneration": 2}
        for kind, words in reasons.items()
    ]
    replicas = [
        {"index": index, "lastFailure": {"attempt": int(attempt[1:]), "reason": words}}
        for index, (attempt, words) in enumerate(failures.items())
    ]
    return Seen(BEGAN + after, 2, {"conditions": conditions, "replicas": replicas})


def sent_to(after: float, name: str, *addresses: str) -> Traffic:
    return Traffic(BEGAN + after, name, frozenset(addresses))


def test_ready_is_of_the_spec_as_it_is() -> None:
    assert seen(0).ready
    assert not seen(0, ready=False).ready
    assert not Seen(0, 3, seen(0).status).ready
    assert not Seen(0, 1, {}).ready


@pytest.mark.parametrize(
    ("traffic", "expected"),
    [
        pytest.param([sent_to(-5, "chaos-1", VICTIM)], None, id="stays"),
        pytest.param([sent_to(-5, "chaos-1", VICTIM), sent_to(2.5, "chaos-1")], 2.5, id="leaves"),
        pytest.param(
            [sent_to(-5, "chaos-1", VICTIM), sent_to(2.5, "chaos-1"), sent_to(60, "chaos-1", VICTIM)],
            2.5,
            id="comes back at the same address",
        ),
        pytest.param(
            [sent_to(-5, "chaos-0", OTHER), sent_to(-5, "chaos-1", VICTIM), sent_to(3, "chaos-0")],
            None,
            id="another one leaves",
        ),
        pytest.param(
            [sent_to(-9, "chaos-1"), sent_to(-5, "chaos-1", VICTIM), sent_to(4, "chaos-1", "10.242.2.6:8001")],
            4.0,
            id="another address comes in its place",
        ),
    ],
)
def test_out_of_traffic(traffic: list[Traffic], expected: float | None) -> None:
    assert outcome.out_of_traffic(traffic, VICTIM, BEGAN) == expected


def slice_event(kind: str, *, ready: bool) -> Mapping[str, Any]:
    endpoints = [{"addresses": ["10.242.2.5"], "conditions": {"ready": ready, "serving": True}}]
    return {
        "type": kind,
        "object": {"metadata": {"name": "chaos-1"}, "ports": [{"port": 8000}], "endpoints": endpoints},
    }


@pytest.mark.parametrize(
    ("event", "addresses"),
    [
        (slice_event("ADDED", ready=True), {VICTIM}),
        (slice_event("MODIFIED", ready=False), set()),
        (slice_event("DELETED", ready=True), set()),
    ],
)
def test_a_slice_sends_clients_to_ready_addresses_while_it_exists(
    event: Mapping[str, Any], addresses: set[str]
) -> None:
    assert Traffic.of(1.0, event) == Traffic(1.0, "chaos-1", frozenset(addresses))


def test_reasons_are_told_once_in_their_order_and_old_failures_are_no_news() -> None:
    looks = [
        seen(-1, ready=False, reason="JobLost"),
        seen(0.5, a3="OldFailure"),
        seen(1.0, ready=False, reason="NotReady", a3="OldFailure"),
        seen(2.0, ready=False, reason="Stopping", a3="OldFailure", a5="WorkerDied"),
        seen(9.0, ready=False, reason="WorkerDied", a3="OldFailure", a5="WorkerDied"),
    ]
    assert outcome.named(looks, {3}, BEGAN) == (("NotReady", 1.0), ("WorkerDied", 2.0))


def test_the_reason_of_a_stop_is_told() -> None:
    stopped = {"index": 0, "attempt": {"number": 5, "stop": {"reason": "PodsDeleted"}}}
    looks = [seen(0.5), Seen(BEGAN + 1, 2, {**seen(0).status, "replicas": [stopped, {"index": 1}]})]
    assert outcome.named(looks, (), BEGAN) == (("PodsDeleted", 1.0),)


def test_ready_again_is_the_last_time() -> None:
    assert outcome.ready_again([seen(-5)], BEGAN) == 0.0
    assert outcome.ready_again([seen(-5), seen(3, ready=False)], BEGAN) is None
    flaps = [seen(-5), seen(3, ready=False), seen(8), seen(9, ready=False), seen(40), seen(41)]
    assert outcome.ready_again(flaps, BEGAN) == 40.0


def test_requests_count_while_the_fault_lasts() -> None:
    requests = [
        Request(BEGAN - 9, 1.0, "before"),
        Request(BEGAN - 1, 3.0, "under way when it came"),
        Request(BEGAN + 4, 0.5, ""),
        Request(BEGAN + 5, 1.5, "refused"),
        Request(BEGAN + 7, 0.5, "refused"),
        Request(BEGAN + 100, 1.0, "after"),
    ]
    assert outcome.tally(requests, BEGAN, BEGAN + 50) == Tally(4, 3, 2.0, 7.5, "refused")
    assert outcome.tally([], BEGAN, BEGAN + 50) == Tally(0, 0, None, None)


def test_replaced_are_those_with_another_attempt_or_none() -> None:
    assert outcome.replaced({0: 1, 1: 2}, {0: 1, 1: 3}) == (1,)
    assert outcome.replaced({0: 1, 1: 2}, {0: 1}) == (1,)
    assert outcome.replaced({0: 1, 1: 2}, {0: 1, 1: 2}) == ()


def test_an_instance_id_is_one_attempts_alone() -> None:
    def attempts(*numbers: int, standby: int | None = None) -> Seen:
        replicas: list[dict[str, Any]] = [
            {"index": index, "attempt": {"instanceId": f"chat-a{number}", "number": number}}
            for index, number in enumerate(numbers)
        ]
        if standby is not None:
            replicas[0]["standby"] = {"instanceId": "chat-a1", "number": standby}
        return Seen(0, 1, {"replicas": [*replicas, {"index": 9}]})

    assert outcome.reused([attempts(1, 2), attempts(1, 3), attempts(4, 3)]) == ()
    assert outcome.reused([attempts(1, 2), attempts(2, 3)]) == ("chat-a2",), "by two replicas"
    assert outcome.reused([attempts(1, 2), attempts(3, 2, standby=4)]) == ("chat-a1",), "by two attempts"


def came_of(fault: str, **changes: Any) -> Outcome:
    usual: dict[str, Any] = {
        "out": 0.84, "named": (("NotReady", 0.8), ("WorkerDied", 1.3)), "mended": None, "ready": 61.44,
        "replaced": (1,), "engine_gone": 0.6, "service": Tally(120, 2, 0.1, 1.2), "other": Tally(130, 0, None, None),
        "load": 2.04,
    }  # fmt: skip
    return Outcome(fault=fault, **(usual | changes))


def test_a_row() -> None:
    assert report.row(BY_NAME["worker-killed"], came_of("worker-killed"), "today, 123abc") == (
        "| worker-killed | 0.8 | NotReady 0.8, WorkerDied 1.3 | 61.4 | 0.6 | 2 of 120 (0.1 to 1.2) | 0 of 130 | 2.0 "
        "| healed | today, 123abc |"
    )


@pytest.mark.parametrize(
    ("fault", "changes", "expected"),
    [
        ("worker-killed", {}, "healed"),
        ("worker-killed", {"ready": None, "notes": ("last seen: x",)}, "**fault**: not Ready again; last seen: x"),
        ("worker-killed", {"replaced": (0, 1)}, "**fault**: the other replica was restarted too"),
        ("worker-killed", {"replaced": ()}, "**fault**: no replica was restarted"),
        ("worker-killed", {"other": Tally(9, 1, 2, 2)}, "**fault**: requests to the other replica failed"),
        ("node-partitioned", {"reused": ("chat-a2",)}, "**fault**: used twice: chat-a2"),
        ("dashboard-down", {"replaced": (), "ready": 0.0, "mended": 60.2}, "healed; undone after 60 s"),
        ("dashboard-down", {"mended": 60.2}, "**fault**: replicas 1 were restarted; undone after 60 s"),
        ("node-gone", {"ready": 90.0, "mended": 92.0}, "healed; without the node"),
        ("node-gone", {"ready": 650.0, "mended": 600.0}, "healed; only when the node was back, after 600 s"),
        ("head-pod-deleted", {"replaced": (0, 1), "other": None}, "healed"),
    ],
)
def test_verdicts(fault: str, changes: dict[str, Any], expected: str) -> None:
    assert report.verdict(BY_NAME[fault], came_of(fault, **changes)) == expected


def test_failed_requests_are_told_with_the_error_that_most_of_them_met() -> None:
    line = report.row(BY_NAME["node-gone"], came_of("node-gone", service=Tally(9, 3, 1, 4, "refused")), "x")
    assert "| 3 of 9 (1.0 to 4.0, most of them refused) |" in line


def test_the_newest_run_of_each_fault_in_the_order_of_the_faults() -> None:
    def row(fault: str, run: str) -> str:
        return report.row(BY_NAME[fault], came_of(fault), run)

    def results(text: str) -> list[str]:
        assert text.startswith(report.HEADER)
        return [line for line in text.splitlines() if line.startswith("| ") and "| healed |" in line]

    text = report.update("", row("gcs-killed", "one"))
    text = report.update(text, row("job-stopped", "one"))
    assert results(text) == [row("job-stopped", "one"), row("gcs-killed", "one")]
    text = report.update(text, row("gcs-killed", "two"))
    assert results(text) == [row("job-stopped", "one"), row("gcs-killed", "two")]
    assert report.update(text, row("gcs-killed", "two")) == text
    assert text.count("| not run yet | |") == len(faults.FAULTS) - 2
    assert len({line.count("|") for line in text[text.index("| fault | out") :].splitlines()}) == 1


def test_the_table() -> None:
    names = [fault.name for fault in faults.FAULTS]
    assert len(set(names)) == len(names)
    assert all(report.name(report.row(fault, came_of(fault.name), "x")) == fault.name for fault in faults.FAULTS)
    for fault in faults.FAULTS:
        assert (fault.mend is not None) == (fault.hold > 0), fault.name
        assert fault.mend is not None or not fault.heals_broken, fault.name
        assert fault.hits is not Hits.NOBODY or fault.mend is not None, f"{fault.name}: what would end it?"


def test_faults_are_chosen_by_name_in_the_order_of_the_table() -> None:
    assert faults.chosen([]) == list(faults.FAULTS)
    assert [fault.name for fault in faults.chosen(["node-gone", "job-stopped"])] == ["job-stopped", "node-gone"]
    with pytest.raises(ValueError, match="unknown: typo; there are: job-stopped"):
        faults.chosen(["typo", "node-gone"])


def test_sigterm_takes_the_cluster_down(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, ...]] = []

    def ended_from_outside() -> Kube:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        raise AssertionError("it was not heard")

    monkeypatch.setattr(sys, "argv", ["chaos", "job-stopped"])
    monkeypatch.setattr(command, "bring_up", ended_from_outside)
    monkeypatch.setattr(command.environment, "module", lambda *args: done.append(args))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            command.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143
    assert [args[-1] for args in done] == ["down"]


def test_a_line_that_was_cut_off_tells_nothing() -> None:
    assert told_by('{"type":"ADDED","object":{}}\n') == {"type": "ADDED", "object": {}}
    assert told_by('{"type":"ADDED","obj') is None


def test_replicas_are_apart_but_may_share_a_node_when_there_is_one_only() -> None:
    cluster = manifest()["spec"]["cluster"]
    for part in ("head", "workers"):
        (affinity,) = cluster[part]["template"]["spec"]["affinity"].values()
        assert list(affinity) == ["preferredDuringSchedulingIgnoredDuringExecution"]


class FakeWatching:
    """What a watch tells, from a script: two clients that are served, and the resource as the test leaves it."""

    def __init__(self, scene: Scene) -> None:
        served = [Request(time.time() - 1, 0.1, "")]
        self.service, self.other = list(served), list(served)
        self.traffic = [sent_to(-5, "chaos-1", VICTIM)]
        self.seen = [Seen.of(time.time(), scene.deployment)]
        self.ended = False

    def start(self) -> None:
        FAKES.append(self)

    def stop(self) -> None:
        self.ended = True


FAKES: list[FakeWatching] = []


def resource(*attempts: int, ready: bool = True) -> dict[str, Any]:
    status = dict(seen(0, ready=ready).status)
    endpoints = [{"address": "10.242.1.7", "port": 8000}, {"address": "10.242.2.5", "port": 8000, "pod": "w1"}]
    status["replicas"] = [
        {
            "index": index,
            "phase": "Ready",
            "attempt": {"number": n, "instanceId": f"a{n}", "endpoint": endpoints[index]},
        }
        for index, n in enumerate(attempts)
    ]
    return {"metadata": {"generation": 2, "uid": "u"}, "status": status}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The resource that the API server has, changed by the test's faults; the engine core of the victim's pod."""
    state: dict[str, Any] = {"resource": resource(1, 2), "cores": {7}}
    monkeypatch.setattr(campaign, "Watching", FakeWatching)
    monkeypatch.setattr(campaign, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(campaign, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(campaign, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(campaign, "HEAL_SECONDS", 1.0)
    monkeypatch.setattr(campaign, "engine_cores", lambda _: state["cores"])
    yield state
    FAKES.clear()


def scene(state: dict[str, Any]) -> Scene:
    class FakeKube(Kube):
        def get(self, *_: str) -> dict[str, Any]:
            return dict(state["resource"])

        def kubectl(self, *_: str, **__: Any) -> str:
            return "what the operator logged"

    other, victim = state["resource"]["status"]["replicas"]
    return Scene(FakeKube(tools=None), state["resource"], victim, other)


def change(state: dict[str, Any], new: dict[str, Any]) -> None:
    """The world becomes another one, and the watch tells of it."""
    state["resource"] = new
    FAKES[-1].seen.append(Seen.of(time.time(), new))


def test_a_fault_is_watched_until_it_is_healed(world: dict[str, Any]) -> None:
    def crash(_: Scene) -> None:
        change(world, resource(1, 2, ready=False))
        FAKES[-1].traffic.append(Traffic(time.time(), "chaos-1", frozenset()))
        FAKES[-1].service.append(Request(time.time(), 0.1, "refused"))
        world["cores"] = {8}
        change(world, resource(1, 3))

    came = campaign.run(Fault("engine-core-killed", "a crash", Hits.ONE, crash), scene(world))
    assert came.replaced == (1,)
    assert came.out is not None
    assert came.ready is not None
    assert came.engine_gone is not None
    assert (came.service.failed, came.notes) == (1, ())
    assert came.other is not None
    assert came.other.failed == 0
    assert FAKES[0].ended
    rows = [json.loads(line) for line in (campaign.RECORDS / "engine-core-killed.jsonl").read_text().splitlines()]
    assert {row["what"] for row in rows} == {"status", "slice", "service", "other"}
    assert [row["at"] for row in rows] == sorted(row["at"] for row in rows)
    assert (campaign.RECORDS / "engine-core-killed.log").read_text() == "what the operator logged"


def test_what_does_not_heal_is_told_as_it_was_last_seen(world: dict[str, Any]) -> None:
    fault = Fault("head-pod-deleted", "a loss", Hits.ALL, lambda _: change(world, resource(1, 2, ready=False)))
    came = campaign.run(fault, scene(world))
    assert (came.ready, came.replaced, came.other, came.engine_gone) == (None, (), None, None)
    assert came.notes[0].startswith("last seen: AllReplicasReady")


def test_a_fault_that_is_undone_and_one_that_cannot_be(world: dict[str, Any]) -> None:
    done: list[str] = []

    def impossible(_: Scene) -> None:
        raise CommandError("no process was there")

    fault = Fault("dashboard-down", "hangs", Hits.NOBODY, impossible, lambda _: done.append("undone"), hold=0.1)
    came = campaign.run(fault, scene(world))
    assert done == ["undone"]
    assert came.mended is not None
    assert came.mended >= 0.1
    assert (came.ready, came.replaced) == (0.0, ())
    assert came.notes == ("impossible: no process was there",)


def test_one_that_heals_broken_is_undone_after_the_healing(world: dict[str, Any]) -> None:
    fault = Fault(
        "node-gone",
        "a loss",
        Hits.ONE,
        lambda _: change(world, resource(1, 3)),
        lambda _: None,
        hold=5,
        heals_broken=True,
    )
    came = campaign.run(fault, scene(world))
    assert came.mended is not None
    assert came.mended < 5
