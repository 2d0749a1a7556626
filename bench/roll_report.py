"""Tells what roll_under_load measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench import readme

AWAY_GOAL = 0.45  # of a replica's own cold start, each replica
SHARE_GOAL = 2.0  # seconds of the operator's own from the change to the first drain

Result = Mapping[str, Any]


def report(result: Result) -> tuple[str, list[str]]:
    """Return the text for README.md, and which goals were missed."""
    text = "\n\n".join([_requests(result), _replicas(result), _operator(result), readme.conditions(result)])
    return text, missed(result)


def missed(result: Result) -> list[str]:
    """Return the goals that were missed."""
    roll, found = result["roll"], list[str]()
    if roll["failed"]:
        found.append(f"{roll['failed']} requests failed in the roll")
    away = max(r["away_in_cold_starts"] for r in roll["replicas"])
    if away > AWAY_GOAL:
        found.append(f"a replica was away for {away} of its cold start, the goal is {AWAY_GOAL}")
    share = roll["operator"]["share_seconds"]
    if share > SHARE_GOAL:
        found.append(f"the operator took {share} s until the first drain, the goal is {SHARE_GOAL:g} s")
    return found


def _requests(result: Result) -> str:
    names = {"quiet": "quiet", "roll": "roll", "bare": "bare delete-and-recreate"}
    heading = ("", *(words for name, words in names.items() if name in result))
    parts = [result[name] for name in names if name in result]

    def row(name: str, *values: object) -> tuple[str, ...]:
        return (name, *map(str, values))

    rows = [
        row("seconds", *(p["seconds"] for p in parts)),
        row("requests", *(p["sent"] for p in parts)),
        row("**failed**", *(f"**{p['failed']}**" for p in parts)),
        row("kept connections that the server ended", *(p["moved"] for p in parts)),
        row("answer in one piece (ms): p50, p90, p99, most", *(_spread(p["latency"]) for p in parts)),
        row("begin of a stream (ms)", *(_spread(p["first"]) for p in parts)),
        row("end of a stream (ms)", *(_spread(p["stream"]) for p in parts)),
        row("processors busy", *(f"{p['busy']:.0%}" for p in parts)),
        row("load average at the end", *(p["load"] for p in parts)),
    ]
    met = [f"\n- {count} times `{error}`" for part in parts for error, count in part["errors"].items()]
    return readme.table(heading, rows) + ("\n\nWhat clients met, most often:\n" + "".join(met) if met else "")


def _replicas(result: Result) -> str:
    heading = (
        "replica",
        "cold start, s",
        "away in the roll, s",
        "**of a cold start**",
        "of that drain, stop, fence, s",
        "away in the bare one, s",
        "out of traffic there after, s",
    )
    bare = {replica["index"]: replica for replica in result.get("bare", {}).get("replicas", ())}
    rows = []
    for cold, roll in zip(result["cold_seconds"], result["roll"]["replicas"], strict=True):
        compared = bare.get(roll["index"], {})
        rows.append(
            (
                str(roll["index"]),
                str(cold),
                str(roll["away_seconds"]),
                f"**{roll['away_in_cold_starts']:.2f}**",
                str(roll["drain_and_fence_seconds"]),
                str(compared.get("away_seconds", "not done")),
                str(compared.get("out_of_traffic_seconds", "not done")),
            )
        )
    return readme.table(heading, rows)


def _operator(result: Result) -> str:
    share = result["roll"]["operator"]
    return (
        f"From the change of the spec to the first drain the operator took **{share['share_seconds']} s**: "
        f"{share['to_standby_seconds']} s until the first standby was begun, and {share['standby_to_drain_seconds']} s "
        f"after it knew that one to be warm. In between the standby warmed up for {share['standby_warms_seconds']} s."
    )


def _spread(percentiles: Mapping[str, float]) -> str:
    return ", ".join(f"{value:.0f}" for value in percentiles.values()) or "none"
