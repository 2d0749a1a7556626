from __future__ import annotations

import os
import queue
import socket
from typing import Any

import pytest

from vllm_ray_engine import report


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[dict[str, Any]]:
    received: queue.Queue[dict[str, Any]] = queue.Queue()
    monkeypatch.setenv(report.VARIABLE, report.Listener(received.put).name)
    return received


def test_a_report_arrives(reports: queue.Queue[dict[str, Any]]) -> None:
    report.send(report.WAITING, nodes=["n1"], odd=pytest)
    read = reports.get(timeout=10)
    assert (read["event"], read["nodes"]) == ("waiting", ["n1"])


def test_what_is_not_a_report_is_skipped(reports: queue.Queue[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        for data in (b"", b"{", b"\xff", b"[]"):
            other.sendto(data, "\0" + os.environ[report.VARIABLE])
    report.send("after")
    assert reports.get(timeout=10)["event"] == "after"


@pytest.mark.parametrize("name", [None, "", "nobody-listens", "x" * 1000])
def test_without_a_launcher_nothing_happens(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if name is None:
        monkeypatch.delenv(report.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(report.VARIABLE, name)
    report.send(report.WAITING)


def test_a_listener_that_does_not_read_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind("\0deaf-launcher-of-a-test")
        monkeypatch.setenv(report.VARIABLE, "deaf-launcher-of-a-test")
        for _ in range(1000):
            report.send("event", text="x" * 1000)
