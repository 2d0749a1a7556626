"""Writes down what handover.py measured: results/handover.json, and the table in README.md.

python -m bench.handover_report < MEASUREMENTS. Ends with 1 when the goal is missed.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from typing import Any

from bench import readme

GOAL = 0.1
"""Hand-over to a warm standby, in cold starts."""

Result = dict[str, Any]


def main() -> int:
    """Read the measurements, write the report."""
    return write(json.load(sys.stdin))


def write(result: Result) -> int:
    """Keep the measurements, put the table into README.md; returns 1 if the goal was missed."""
    runs = result["runs"]
    ratios = {
        name: [run[f"{name}_hand_over_seconds"] / run["cold_seconds"] for run in runs] for name in ("plain", "warm")
    }
    rows = [
        ("cold start, submission to healthy", spread(run["cold_seconds"] for run in runs), "1"),
        *(
            (
                f"hand-over to a {name} standby",
                spread(run[f"{name}_hand_over_seconds"] for run in runs),
                of(ratios[name]),
            )
            for name in ratios
        ),
        (
            "of these, until the accelerators are back",
            spread(run[f"{name}_accelerators_seconds"] for run in runs for name in ratios),
            "",
        ),
        *(
            (f"{name} standby, submission to ready", spread(run[f"{name}_standby_ready_seconds"] for run in runs), "")
            for name in ratios
        ),
        *(
            (f"first completion {after}", spread(run[f"{name}_completions"][0] for run in runs), "")
            for name, after in (
                ("cold", "after a cold start"),
                ("plain", "after a hand-over, plain"),
                ("warm", "after a hand-over, warm"),
            )
        ),
        *(
            (
                f"of that, processor time of its own, {name}",
                spread(run[f"{name}_completions_processor"][0] for run in runs),
                "",
            )
            for name in ("cold", *ratios)
        ),
        ("fourth completion, all", spread(run[f"{n}_completions"][3] for run in runs for n in ("cold", *ratios)), ""),
    ]
    memory = [run["warm_memory_mib"] for run in runs]
    worker = statistics.median(size for sizes in memory for size in sizes.get("worker", [0]))
    whole = statistics.median(sum(map(sum, sizes.values())) for sizes in memory)
    plain = statistics.median(sum(map(sum, run["plain_memory_mib"].values())) for run in runs)
    table = readme.table(("what", "seconds: least, median, most", "in cold starts"), rows)
    note = (
        f"A warm worker holds {worker:.0f} MiB of the node's memory, a warm standby {whole:.0f} MiB in all, a plain one"
        f" {plain:.0f} MiB (proportional set size).\n\n"
        f"Measured {result['date']}, {len(runs)} repetitions, with vLLM {result['vllm']} (CPU, TP 2, tiny model), Ray"
        f" {result['ray']} on {result['processors']} processors under a load of {result['load'][0]} before and"
        f" {max(result['load'])} at most."
    )
    readme.write("handover", result, f"{table}\n\n{note}")
    reached = statistics.median(ratios["warm"])
    print(f"hand-over to a warm standby: {reached:.3f} of a cold start, the goal is {GOAL}")
    return 0 if reached <= GOAL else 1


def spread(values: Iterable[float]) -> str:
    """Return least, median and most."""
    values = list(values)
    return f"{min(values):.2f}, {statistics.median(values):.2f}, {max(values):.2f}"


def of(ratios: list[float]) -> str:
    """Return least, median and most of ratios, each taken within its repetition."""
    return f"{min(ratios):.3f}, {statistics.median(ratios):.3f}, {max(ratios):.3f}"


if __name__ == "__main__":
    raise SystemExit(main())
