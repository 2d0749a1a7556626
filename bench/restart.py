"""Measures how soon a replica whose worker died is out of the traffic, and a restart of its job against a cold start.

On the one-machine Kubernetes with the real KubeRay, Ray and vLLM (CPU), two replicas, under a steady load through the
Service. In one run:

* cold starts: the replicas come up one after another;
* a worker process is killed (SIGKILL), of one replica and the other in turn, each time when all is Ready again;
* restarts on demand (`spec.restartedAt`), one without standbys and one with them.

python -m bench.restart [--kills 5]. Writes results/restart.json and its part of README.md, after each part; ends with 1
when a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from bench import readme
from bench.restart_report import report
from bench.stage import Stage, Window, absences, first_seen, slice_of, stage
from e2e.chaos.outcome import out_of_traffic
from e2e.chaos.scene import processes
from e2e.load import Request
from e2e.waiting import say, wait_for

REPLICAS = 2
SETTLE_SECONDS = 5.0
WORKER = "RayWorkerProc"

Result = dict[str, Any]


def main() -> int:
    """Measure, and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    kills = parser.parse_args().kills
    with stage() as scene:
        for result in measure(scene, kills):
            text, missed = report(result)
            readme.write("restart", result, text)
            print(text, flush=True)
    say(f"goals missed: {'; '.join(missed) or 'none'}")
    return 1 if missed else 0


def measure(scene: Stage, kills: int) -> Iterator[Result]:
    """Run all parts; yields what is there after the kills and after each restart."""
    cold = scene.start_one_by_one(REPLICAS)
    say(f"cold starts: {cold} s")
    result: Result = {**scene.conditions(), "cold_seconds": cold, "kills": []}
    with scene.watch(), scene.load() as requests:
        for number in range(kills):
            result["kills"].append(kill(scene, requests, number % REPLICAS))
            say(f"kill {number + 1}: {result['kills'][-1]}")
        yield result
        for name, standby in (("plain", False), ("standby", True)):
            result[name] = restart(scene, requests, cold, standby=standby)
            say(f"restart, {name}: {result[name]}")
            yield result


def kill(scene: Stage, requests: list[Request], index: int) -> Result:
    """Kill the worker process of a replica, and wait until all is Ready again."""
    attempt = next(r["attempt"] for r in scene.replicas if r["index"] == index)
    endpoint = attempt["endpoint"]
    uid = scene.kube.get("pod", endpoint["pod"])["metadata"]["uid"]
    workers = [pid for pid, command in processes(uid).items() if WORKER in command]
    window = Window()
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    address = f"{endpoint['address']}:{endpoint['port']}"
    wait_for(
        f"replica {index} to be out of the traffic",
        lambda: out_of_traffic(scene.traffic, address, window.began),
        seconds=120,
        poll=0.2,
    )
    ready = scene.wait_ready(f"replica {index} to be there again", {index: attempt["number"]})
    time.sleep(SETTLE_SECONDS)
    out = out_of_traffic(scene.traffic, address, window.began)
    failure = next(r for r in scene.replicas if r["index"] == index)["lastFailure"]
    return {
        "index": index,
        "workers": len(workers),
        "out_of_traffic_seconds": None if out is None else round(out, 2),
        "named": failure["reason"],
        "ready_seconds": round(ready - window.began, 1),
        **window.end(requests),
    }


def restart(scene: Stage, requests: list[Request], cold: list[float], *, standby: bool) -> Result:
    """Restart all engines on demand, replica by replica."""
    before = {r["index"]: r["attempt"]["number"] for r in scene.replicas}
    window = Window()
    spec = {"rollout": {"standby": standby}, "restartedAt": datetime.now(UTC).isoformat()}
    changed = scene.change(spec)
    scene.wait_ready("the restart", before)
    time.sleep(SETTLE_SECONDS)
    drained = first_seen(scene.seen, changed, "Draining")
    away = [
        sum(back - gone for gone, back in absences(scene.traffic, slice_of(index), changed, time.time()))
        for index in range(REPLICAS)
    ]
    return {
        "to_drain_seconds": None if drained is None else round(drained - changed, 2),
        "away_seconds": [round(seconds, 2) for seconds in away],
        "away_in_cold_starts": [round(seconds / start, 3) for seconds, start in zip(away, cold, strict=True)],
        **window.end(requests),
    }


if __name__ == "__main__":
    raise SystemExit(main())
