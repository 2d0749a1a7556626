"""docs/healing.md: a table with the newest run of each fault."""

from __future__ import annotations

import re

from e2e.chaos.faults import FAULTS, Fault, Hits
from e2e.chaos.outcome import Outcome, Tally

HEADER = """# How it heals

Written by `make chaos` (`make chaos FAULTS="job-stopped gcs-killed"` runs some); do not edit. The table has the newest
run of each fault, with its time and commit.
Two nodes of the one-machine Kubernetes, a real KubeRay, Ray and vLLM on CPU; the operator and the Ray head on the first
node, a replica of one pod on each. The fault hits the replica on the second node. Times are seconds after the fault
was begun (a command of the cluster's tool takes about one of them):

- **out**: clients are sent to the replica no more (its EndpointSlice).
- **named**: the reasons that the status gave, in the order of their first appearance.
- **Ready again**: the condition Ready is True, for good.
- **engine gone**: the engine core that was hit is no more, seen on the machine itself. On a node that is cut off it
  lives on until the network is back, since nobody reaches it: that is no fault as long as it gets no clients and no
  other attempt has its instance id, which is looked at after every fault.
- **clients failed**: of the requests through the Service from the fault until all was well, those that failed,
  between which seconds, and by what most of them did. One client sends them one after another, each on a connection
  of its own, for ten seconds each at the most.
- **other failed**: the same for requests straight to the replica that was not hit.
- **load**: the average load of the machine, which has two cores, over the last minute of it.

| fault | what is done |
| --- | --- |
"""
_COLUMNS = "| fault | out | named | Ready again | engine gone | clients failed | other failed | load | verdict | run |"
_RULE = "| --- | ---: | --- | ---: | ---: | --- | --- | ---: | --- | --- |"
_RESULTS = "## What came of it"
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
    if outcome.reused:
        faults.append(f"used twice: {', '.join(outcome.reused)}")
    words = [f"**fault**: {'; '.join(faults)}"] if faults else ["healed"]
    if fault.heals_broken and outcome.mended is not None and outcome.ready is not None:
        healed = outcome.ready < outcome.mended
        words.append("without the node" if healed else f"only when the node was back, after {outcome.mended:.0f} s")
    elif outcome.mended is not None:
        words.append(f"undone after {outcome.mended:.0f} s")
    return "; ".join([*words, *outcome.notes])


def row(fault: Fault, outcome: Outcome, run: str) -> str:
    """Return the table's row. ``run``: the time and the commit."""
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
        run,
    ]
    return "| " + " | ".join(text.replace("|", "/").replace("\n", " ") for text in texts) + " |"


def update(text: str, line: str) -> str:
    """Return the report with a fault's row in place of the one that it had, in the order of the faults."""
    _, _, results = text.partition(_RESULTS)
    rows = {name(found): found for found in [*results.splitlines(), line]}
    explained = [f"| {fault.name} | {fault.what} |" for fault in FAULTS]
    told = [rows.get(fault.name) or f"| {fault.name} |{' |' * 7} not run yet | |" for fault in FAULTS]
    return HEADER + "\n".join([*explained, "", _RESULTS, "", _COLUMNS, _RULE, *told, ""])


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
