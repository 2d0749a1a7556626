"""Measures how long one plan takes, in processor time. Writes results/plan_time.json and the table in README.md.

python -m bench.plan_time [--replicas 256]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.unit.plan import build
from vllm_ray_operator.plan import planner

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "plan_time.json"
BEGIN, END = "<!-- plan_time begin -->", "<!-- plan_time end -->"
REPEATS = 50


def main() -> None:
    """Measure, and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=256)
    replicas = parser.parse_args().replicas
    scene = build.serving(build.spec_with(replicas=replicas, rollout={"maxUnavailable": "25%"}))
    if scene.status.ready_replicas != replicas:
        raise SystemExit(f"only {scene.status.ready_replicas} replicas are ready")
    times = {"at rest": milliseconds(scene)}
    scene.change(engine={"args": ["--seed=1"]})
    scene.step()
    times["a roll begins"] = milliseconds(scene)
    scene.step()
    times["a quarter is stopped"] = milliseconds(scene)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
        "replicas": replicas,
        "milliseconds": {name: {"least": least, "median": median} for name, (least, median) in times.items()},
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    rows = [f"| {name} | {least} ms | {median} ms |" for name, (least, median) in times.items()]
    table = "\n".join([f"| one plan of {replicas} replicas | least | median |", "| --- | --- | --- |", *rows])
    note = f"Measured {result['date']} with Python {result['python']} under a load of {result['load']}."
    readme = HERE / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n{table}\n\n{note}\n{END}{after}", encoding="utf-8")
    print(table)


def milliseconds(scene: build.Scene) -> tuple[float, float]:
    """Return the least and the median time of a plan of the world as it is."""
    world, taken = scene.world, []
    for _ in range(REPEATS):
        start = time.process_time()
        planner.plan(world, scene.now, lambda: "nonce", scene.defaults)
        taken.append((time.process_time() - start) * 1000)
    return round(min(taken), 1), round(statistics.median(taken), 1)


if __name__ == "__main__":
    main()
