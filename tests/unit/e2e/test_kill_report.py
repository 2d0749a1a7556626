"""The kill campaign's report: sections of the phases that ran, others kept."""

from __future__ import annotations

from typing import Any

from e2e import kill_report


def cell(phase: str, victim: str = "launcher", **changes: Any) -> dict[str, Any]:
    return {
        "phase": phase, "victim": victim, "reached": 12.3, "gone": 1.26, "outcome": "EngineExited: killed",
        "zombies": [], "fault": "", "remark": "",
    } | changes  # fmt: skip


def test_rows() -> None:
    assert (
        kill_report.cell_row(cell("serving")) == "| launcher | 12 | 1.3 | EngineExited: killed | none | as it must be |"
    )
    bad = cell("serving", gone=None, fault="left: a|b", zombies=["guard"])
    assert kill_report.cell_row(bad) == (
        "| launcher | 12 | **not** | EngineExited: killed | guard | **fault**: left: a/b |"
    )
    assert kill_report.cell_row(cell("serving", remark="it rained")).endswith("| as it must be; it rained |")


def test_a_run_replaces_its_own_phases_and_keeps_the_others_in_order() -> None:
    first = kill_report.update("", "`one`", [cell("serving"), cell("importing")])
    assert first.startswith(kill_report.HEADER)
    assert first.index("## Importing") < first.index("## Serving")
    second = kill_report.update(first, "`two`", [cell("serving", "guard"), cell("loading", "worker")])
    assert [line for line in second.splitlines() if line.startswith(("##", "`"))] == [
        "## Importing", "`one`", "## Loading", "`two`", "## Serving", "`two`",
    ]  # fmt: skip
    assert "| guard |" in second
    assert second.count("| launcher |") == 1
    assert kill_report.update(second, "", []) == second
