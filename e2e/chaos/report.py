"""docs/healing.md: a section per run; a fault's row stands in the section of its newest run only."""

from __future__ import annotations

import re
from collections.abc import Sequence

from e2e.chaos.faults import FAULTS, Fault, Hits
from e2e.chaos.outcome import Outcome, Tally

HEADER = """# How it heals

Written by `make chaos`, a section by each run (`make chaos FAULTS="job-stopped gcs-killed"` runs some); do not edit.
Two nodes of the one-machine Kubernetes, a real KubeRay, Ray and vLLM on CPU; the operator and the Ray head on the first
node, a replica of one pod on each. The fault hits the replica on the second node. Times are seconds after the fault
was begun (a command of the cluster's tool takes about one of them):

- **out**: clients are sent to the replica no more (its EndpointSlice).
- **named**: the reasons that the status gave, in the order of their first appearance.
- **Ready again**: the condition Ready is True, for good.
- **engine gone**: the engine core that was hit is no more, seen on the machine itself.
- **clients failed**: of the requests through the Service from the fault until all was well, those that failed,
  between which seconds, and by what most of them did. One client sends them one after another, each on a connection
  of its own, for ten seconds each at the most.
- **other failed**: the same for requests straight to the replica that was not hit.

| fault | what is done |
| --- | --- |
"""
_COLUMNS = "| fault | out | named | Ready again | engine gone | clients failed | other failed | load | verdict |"
_RULE = "| --- | ---: | --- | ---: | ---: | --- | --- | ---: | --- |"
_SECTION = re.compile(r"^## .*\n(?:(?!## ).*\n?)*", re.MULTILINE)
_ROW = re.compile(r"^\| ([a-z][a-z-]*) \|")


def verdict(fault: Fault, outcome: Outcome) -> str:
    """Return what is to be said of a row: whether it went as it must, and notes."""
    faults = []
    if outcome.ready is None:
        faults.append("not Ready again")
    if fault.hits is Hits.NOBODY and outcome.replaced:
        faults.append(f"replicas {', '.join(map(str, outcome.replaced))} were restarted")
    if fault.hits is Hits.ONE and len(outcome.replaced) > 1:
        faults.append("the other replica was restarted too")
    if fault.hits is not Hits.NOBODY and not outcome.replaced and outcome.ready is not None:
        faults.append("no replica was restarted")
    if outcome.other is not None and outcome.other.failed:
        faults.append("requests to the other replica failed")
    words = [f"**fault**: {'; '.join(faults)}"] if faults else ["healed"]
    if fault.heals_broken and outcome.mended is not None and outcome.ready is not None:
        healed = outcome.ready < outcome.mended
        words.append("without the node" if healed else f"only when the node was back, after {outcome.mended:.0f} s")
    elif outcome.mended is not None:
        words.append(f"undone after {outcome.mended:.0f} s")
    return "; ".join([*words, *outcome.notes])


def row(fault: Fault, outcome: Outcome) -> str:
    """Return the table's row."""
    texts = [
        fault.name,
        _seconds(outcome.out),
        ", ".join(f"{reason} {at:.1f}" for reason, at in outcome.named) or "nothing",
        "never left" if outcome.ready == 0 else _seconds(outcome.ready),
        _seconds(outcome.engine_gone),
        _tally(outcome.service),
        _tally(outcome.other),
        f"{outcome.load:.1f}",
        verdict(fault, outcome),
    ]
    return "| " + " | ".join(text.replace("|", "/").replace("\n", " ") for text in texts) + " |"


def update(text: str, title: str, rows: Sequence[str]) -> str:
    """Return the report with the rows of a run in the section of that title, and nowhere else."""
    new = {name(line) for line in rows}
    sections = {}
    for match in _SECTION.finditer(text):
        heading, *lines = match[0].splitlines()
        sections[heading] = [line for line in lines if name(line) and name(line) not in new]
    sections.setdefault(f"## {title}", []).extend(rows)
    explained = "".join(f"| {fault.name} | {fault.what} |\n" for fault in FAULTS)
    parts = [HEADER + explained]
    parts += ["\n".join([heading, "", _COLUMNS, _RULE, *lines, ""]) for heading, lines in sections.items() if lines]
    return "\n".join(parts)


def name(line: str) -> str | None:
    """Return the fault whose row a line is, or None."""
    found = _ROW.match(line)
    return found[1] if found and found[1] != "fault" else None


def _seconds(value: float | None) -> str:
    return "no" if value is None else f"{value:.1f}"


def _tally(tally: Tally | None) -> str:
    if tally is None:
        return "hit too"
    if not tally.failed:
        return f"0 of {tally.sent}"
    error = f", most of them {tally.error[:120]}" if tally.error else ""
    return f"{tally.failed} of {tally.sent} ({tally.first:.1f} to {tally.last:.1f}{error})"
