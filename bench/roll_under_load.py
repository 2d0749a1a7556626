"""Measures a roll of four replicas under a steady load, and the same load against a bare delete-and-recreate.

On the one-machine Kubernetes with the real KubeRay, Ray and vLLM (CPU); requests go through the Service, so through
kube-proxy. In one run:

* cold starts: the replicas come up one after another, nothing else to do;
* a quiet time under the load;
* a roll: the environment of the engines is changed, and the operator takes replica after replica by a standby;
* a bare delete-and-recreate: replica after replica, the pod is deleted by force (`kubectl delete pod --grace-period=0
  --force`), so that nobody drains it; the next one when all is Ready again.

python -m bench.roll_under_load [--replicas 4] [--quiet 60] [--bare 4]. Writes results/roll_under_load.json and its part
of README.md, after the roll and again after the rest; ends with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

from bench import readme
from bench.roll_report import report
from bench.stage import (
    Stage,
    Window,
    absences,
    between,
    environment_of_engines,
    first_seen,
    pause,
    slice_of,
    stage,
    unix,
)
from e2e.chaos.outcome import out_of_traffic
from e2e.load import Request
from e2e.waiting import say

SETTLE_SECONDS = 5.0  # after the last replica is Ready, within its window

Result = dict[str, Any]


def main() -> int:
    """Measure, and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--quiet", type=float, default=60, help="seconds under load before the roll (default 60)")
    parser.add_argument("--bare", type=int, default=4, help="how many replicas are deleted and recreated (default 4)")
    options = parser.parse_args()
    with stage() as scene:
        for result in measure(scene, options.replicas, options.quiet, options.bare):
            text, missed = report(result)
            readme.write("roll_under_load", result, text)
            print(text, flush=True)
    say(f"goals missed: {'; '.join(missed) or 'none'}")
    return 1 if missed else 0


def measure(scene: Stage, replicas: int, quiet: float, bare_ones: int) -> Iterator[Result]:
    """Run all parts; yields what is there after the roll, and at the end."""
    cold = scene.start_one_by_one(replicas)
    say(f"cold starts: {cold} s")
    result: Result = {**scene.conditions(), "cold_seconds": cold}
    say(f"memory of the replicas' pods: {result['memory_mib']} MiB")
    with scene.watch(), scene.load() as requests:
        window = Window()
        pause(quiet, "a quiet time under the load")
        result["quiet"] = window.end(requests)
        say(f"quiet: {result['quiet']}")
        result["roll"] = roll(scene, requests, cold)
        say(f"the roll: {result['roll']}")
        yield result
        result["bare"] = bare(scene, requests, bare_ones)
        say(f"bare: {result['bare']}")
        yield result


def roll(scene: Stage, requests: list[Request], cold: list[float]) -> Result:
    """Change the environment of the engines, and wait until all replicas run with it."""
    before = {r["index"]: r["attempt"]["number"] for r in scene.replicas}
    window = Window()
    changed = scene.change({"engine": {"env": environment_of_engines(ROLLED="1")}})
    scene.wait_ready("the roll", before)
    time.sleep(SETTLE_SECONDS)
    ended = time.time()
    result: Result = window.end(requests)
    result["replicas"] = []
    for replica in scene.replicas:
        index, attempt = replica["index"], replica["attempt"]
        times = absences(scene.traffic, slice_of(index), changed, ended)
        away = round(sum(back - gone for gone, back in times), 2)
        result["replicas"].append(
            {
                "index": index,
                "by_standby": attempt["standby"],
                "absences": len(times),
                "away_seconds": away,
                "away_in_cold_starts": round(away / cold[index], 3),
                "leaves_after_seconds": round(times[0][0] - changed, 1),
                # From out of traffic to the end of the older attempt, and from there to Ready.
                "drain_and_fence_seconds": round(unix(attempt["takeoverTime"]) - times[0][0], 2),
                "takeover_to_ready_seconds": between(attempt, "takeoverTime", "readyTime"),
                "standby_warm_seconds": between(attempt, "startTime", "warmTime"),
            }
        )
    result["operator"] = operators_share(scene, changed)
    return result


def operators_share(scene: Stage, changed: float) -> Result:
    """Return what the first drain waited for, in seconds: the operator, and between its two parts the engine.

    The operator has to begin the first standby, which then warms up; when that is done, it has to begin the drain.
    """
    begun = min(s.at for s in scene.seen if s.at >= changed and any(r.get("standby") for r in s.status["replicas"]))
    drained = first_seen(scene.seen, changed, "Draining")
    if drained is None:
        raise RuntimeError("no replica was drained")
    status = max((s for s in scene.seen if s.at <= drained), key=lambda s: s.at).status
    standbys = [r["standby"] for r in status["replicas"] if r["phase"] == "Draining"]
    to_standby, to_drain = begun - changed, drained - unix(standbys[0]["warmTime"])
    return {
        "to_standby_seconds": round(to_standby, 2),
        "standby_to_drain_seconds": round(to_drain, 2),
        "share_seconds": round(to_standby + to_drain, 2),
        "standby_warms_seconds": between(standbys[0], "startTime", "warmTime"),
    }


def bare(scene: Stage, requests: list[Request], count: int) -> Result:
    """Delete the pods of so many replicas by force, one after another, and wait each time until all is Ready."""
    window, replicas = Window(), list[Result]()
    for replica in scene.replicas[:count]:
        index, endpoint = replica["index"], replica["attempt"]["endpoint"]
        deleted = time.time()
        scene.kube.kubectl("delete", "pod", endpoint["pod"], "--grace-period=0", "--force", "--wait=false")
        scene.wait_ready(f"replica {index} to be there again", {index: replica["attempt"]["number"]})
        time.sleep(SETTLE_SECONDS)
        times = absences(scene.traffic, slice_of(index), deleted, time.time())
        attempt = next(r["attempt"] for r in scene.replicas if r["index"] == index)
        away, cold = times[-1][1] - deleted, between(attempt, "startTime", "readyTime")
        out = out_of_traffic(scene.traffic, f"{endpoint['address']}:{endpoint['port']}", deleted)
        replicas.append(
            {
                "index": index,
                "out_of_traffic_seconds": None if out is None else round(out, 2),
                "away_seconds": round(away, 2),
                "cold_under_load_seconds": cold,
            }
        )
    return {**window.end(requests), "replicas": replicas}


if __name__ == "__main__":
    raise SystemExit(main())
