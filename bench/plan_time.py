"""Measures how long one plan takes, in processor time. Writes results/plan_time.json and the table in README.md.

python -m bench.plan_time [--replicas 256]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from bench import readme
from tests.unit.plan import build
from vllm_ray_operator.plan import planner
from vllm_ray_operator.plan.world import Manifest

REPEATS = 100


def main() -> None:
    """Measure, and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=256)
    replicas = parser.parse_args().replicas
    scene = build.serving(build.spec_with(replicas=replicas, rollout={"maxUnavailable": "25%"}))
    if scene.status.ready_replicas != replicas:
        raise SystemExit(f"only {scene.status.ready_replicas} replicas are ready")
    scene.slices = {name: as_served(manifest) for name, manifest in scene.slices.items()}
    times = {"at rest": milliseconds(scene)}
    scene.change(engine={"args": ["--seed=1"]})
    scene.step()
    times["a roll begins"] = milliseconds(scene)
    scene.step()
    times["a quarter has standbys"] = milliseconds(scene)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
        "replicas": replicas,
        "milliseconds": {name: {"least": least, "median": median} for name, (least, median) in times.items()},
    }
    rows = [(name, f"{least} ms", f"{median} ms") for name, (least, median) in times.items()]
    table = readme.table((f"one plan of {replicas} replicas", "least", "median"), rows)
    note = f"Measured {result['date']} with Python {result['python']} under a load of {result['load']}."
    readme.write("plan_time", result, f"{table}\n\n{note}")
    print(table)


def as_served(manifest: Manifest) -> dict[str, Any]:
    """Return an object with what an API server adds to it: it has to be looked through for what we want of it."""
    added = {"uid": "u", "resourceVersion": "7", "generation": 1, "creationTimestamp": "2026-01-02T03:04:05Z"}
    return {**manifest, "metadata": {**manifest["metadata"], **added, "managedFields": [{"manager": "operator"}]}}


def milliseconds(scene: build.Scene) -> tuple[float, float]:
    """Return the least and the median time of a plan of the world as it is, which was just observed."""
    taken = []
    for _ in range(REPEATS):
        world = replace(scene.world, clusters=tuple(replace(cluster) for cluster in scene.clusters.values()))
        start = time.process_time()
        planner.plan(world, scene.now, lambda: "nonce", scene.defaults)
        taken.append((time.process_time() - start) * 1000)
    return round(min(taken), 1), round(statistics.median(taken), 1)


if __name__ == "__main__":
    main()
