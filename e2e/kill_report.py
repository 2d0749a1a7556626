"""docs/ownership.md, written from what a run of the kill campaign printed; a run of some phases keeps the others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

HEADER = """# Who survives whom

Written by `make kill-campaign`, a section by each run; do not edit. Real Ray (three nodes on one host: a bystander's,
the launcher's, one with a worker only) and real vLLM with tensor parallelism over the last two. In every row an
attempt was started, one of its processes was killed by SIGKILL at that moment, and everything of it had to be gone
within 10 seconds: actors, placement group, processes, shared memory, temporary files. Meanwhile another attempt of
another slot served, and had to keep its processes and answer. Each attempt is the next one of the row before it: that
it got as far as it did shows that it could start. Each node's process 1 collects no strangers, as in a Ray pod; the
column *for process 1* names what such a process would have to collect; `sh` and `sleep` are Ray's
own, a shell that watches the supervisor of each Ray job. The supervisor and that shell are Ray's too, and hold nothing:
when they outlive the rest by more than 10 seconds, a remark says so. Ray's supervisor waits until every process that it
told to stop was collected, at most RAY_JOB_STOP_WAIT_TIME_S (30 here).
"""


def cell_row(cell: dict[str, Any]) -> str:
    """Return the table row of one cell."""
    gone = "**not**" if cell["gone"] is None else f"{cell['gone']:.1f}"
    dead = ", ".join(cell["zombies"]) or "none"
    verdict = f"**fault**: {cell['fault']}" if cell["fault"] else "as it must be"
    verdict += f"; {cell['remark']}" if cell["remark"] else ""
    texts = [cell["victim"], f"{cell['reached']:.0f}", gone, cell["outcome"], dead, verdict]
    return "| " + " | ".join(text.replace("|", "/").replace("\n", " ") for text in texts) + " |"


def section(phase: str, facts: str, cells: Sequence[dict[str, Any]]) -> str:
    """Return the section of one phase."""
    rows = "\n".join(cell_row(cell) for cell in cells)
    return (
        f"## {phase.capitalize()}\n\n{facts}\n\n"
        "| killed | after s | gone in s | the job says | for process 1 | verdict |\n"
        f"| --- | ---: | ---: | --- | --- | --- |\n{rows}\n"
    )


def update(text: str, facts: str, cells: Sequence[dict[str, Any]]) -> str:
    """Return the report with the sections of the phases that were run put in the place of older ones."""
    sections = {match[1].lower(): match[0] for match in re.finditer(r"## (.+)\n(?:(?!## ).*\n?)*", text)}
    for phase in dict.fromkeys(cell["phase"] for cell in cells):
        sections[phase] = section(phase, facts, [cell for cell in cells if cell["phase"] == phase])
    order = ("importing", "spawning", "waiting", "loading", "serving", "stopping")
    return "\n".join([HEADER, *(sections[phase].rstrip() + "\n" for phase in order if phase in sections)])
