"""Tells what restart measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench import readme

OUT_GOAL = 5.0  # seconds from the death of a worker to its replica being out of the traffic
DRAIN_GOAL = 2.0  # seconds from the change to the first drain, where no standby has to warm up

RESTARTS = {"plain": "without standbys: stop, then start", "standby": "with standbys"}

Result = Mapping[str, Any]


def report(result: Result) -> tuple[str, list[str]]:
    """Return the text for README.md, and which goals were missed."""
    return "\n\n".join([_kills(result), _restarts(result), readme.conditions(result)]), missed(result)


def missed(result: Result) -> list[str]:
    """Return the goals that were missed."""
    found = list[str]()
    late = [k for k in result["kills"] if k["out_of_traffic_seconds"] is None or k["out_of_traffic_seconds"] > OUT_GOAL]
    if late:
        found.append(
            f"{len(late)} of {len(result['kills'])} replicas took more than {OUT_GOAL:g} s to leave the traffic"
        )
    drain = result["plain"]["to_drain_seconds"] if "plain" in result else 0.0
    if drain is None or drain > DRAIN_GOAL:
        found.append(f"the first drain began after {drain} s, the goal is {DRAIN_GOAL:g} s")
    failed = sum(result[name]["failed"] for name in RESTARTS if name in result)
    if failed:
        found.append(f"{failed} requests failed in restarts on demand")
    return found


def _kills(result: Result) -> str:
    heading = (
        "worker killed, replica",
        "**out of traffic, s**",
        "named",
        "Ready again, s",
        "requests",
        "failed",
        "load average",
    )
    rows = [
        (
            str(k["index"]),
            f"**{k['out_of_traffic_seconds']}**",
            k["named"],
            str(k["ready_seconds"]),
            str(k["sent"]),
            str(k["failed"]),
            str(k["load"]),
        )
        for k in result["kills"]
    ]
    return readme.table(heading, rows)


def _restarts(result: Result) -> str:
    heading = ("restart on demand", "to the first drain, s", "away, s", "of a cold start", "requests", "failed", "load")
    rows = [
        (
            words,
            str(result[name]["to_drain_seconds"]),
            ", ".join(map(str, result[name]["away_seconds"])),
            ", ".join(f"{ratio:.2f}" for ratio in result[name]["away_in_cold_starts"]),
            str(result[name]["sent"]),
            str(result[name]["failed"]),
            str(result[name]["load"]),
        )
        for name, words in RESTARTS.items()
        if name in result
    ]
    cold = ", ".join(map(str, result["cold_seconds"]))
    return readme.table(heading, rows) + f"\n\nThe cold starts of the two replicas took {cold} s."
