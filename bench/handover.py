"""Measures a hand-over: an attempt is stopped, and its standby serves. In one run, in turns, over two Ray nodes:

* a cold start: submission to the first healthy answer, with nothing prepared but the running Ray cluster;
* a hand-over to a plain standby, which has imported vLLM and waits for the accelerators;
* a hand-over to a warm standby, whose workers are prestarted and which has imported what it will need.

A hand-over is the time from the call that stops the older attempt to the first healthy answer of the newer one. Runs
inside the engine image (`make bench-handover`) and prints its measurements as JSON, for handover_report.py.

python bench/handover.py [--repetitions 3]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "operator"), str(ROOT)]

from tests.engine.conftest import Attempt, Attempts  # noqa: E402
from tests.engine.ray_cluster import HEAD, RayCluster, get, wait_for  # noqa: E402
from vllm_ray_engine import versions  # noqa: E402
from vllm_ray_engine.standby import imports  # noqa: E402

START_SECONDS = 300
Result = dict[str, Any]


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    print(json.dumps(measure(options.repetitions), indent=2))
    return 0


def measure(repetitions: int) -> Result:
    """Run everything in turns, so that load hits all alike."""
    runs: list[Result] = []
    cluster = RayCluster()
    loads = [os.getloadavg()[0]]
    attempts = Attempts(cluster)
    with Progress():
        try:
            cluster.start()
            for number in range(repetitions):
                say(f"repetition {number + 1} of {repetitions}")
                runs.append(one_round(attempts))
                say(json.dumps(runs[-1]))
                loads.append(os.getloadavg()[0])
        except BaseException:
            for attempt in attempts.started[-2:]:
                say(f"log of {attempt.instance_id}:\n{attempt.logs()[-8000:]}")
            raise
        finally:
            cluster.stop()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "vllm": versions.installed("vllm"),
        "ray": versions.installed("ray"),
        "processors": os.cpu_count() or 0,
        "load": [round(load, 1) for load in loads],
        "runs": runs,
    }


def one_round(attempts: Attempts) -> Result:
    """Start cold, hand over to a plain standby, then to a warm one, and end."""
    started = time.monotonic()
    cold = attempts.start()
    wait_healthy(cold)
    result: Result = {"cold_seconds": since(started), **completions(cold, "cold")}
    settle(cold)

    plain = attempts.start(standby=True, environment={"VLLM_RAY_WARM_STANDBY": "0"})
    result |= hand_over(cold, plain, "plain")
    settle(plain)

    warm = attempts.start(standby=True)
    result |= hand_over(plain, warm, "warm")
    settle(warm)
    warm.stop()
    warm.wait_ended(60)
    return result


def hand_over(old: Attempt, new: Attempt, name: str) -> Result:
    """Wait for the standby, stop the older attempt, and measure until the standby serves."""

    submitted = time.monotonic()
    new.wait_phase("Standby", START_SECONDS)
    ready = since(submitted)
    memory = memory_mib(new)
    stopped = time.monotonic()
    old.stop()
    placed = lambda: new.state().get("placement", {}).get("state") == "CREATED"  # noqa: E731
    wait_for(f"{new.instance_id} to have the accelerators", placed, 60, interval=0.02)
    accelerators = since(stopped)
    wait_healthy(new)
    result = {
        f"{name}_standby_ready_seconds": ready,
        f"{name}_accelerators_seconds": accelerators,
        f"{name}_hand_over_seconds": since(stopped),
        **completions(new, name),
        f"{name}_memory_mib": memory,
    }
    say("\n".join(line for line in new.logs().splitlines() if "[vllm_ray_engine]" in line))
    wait_for(f"nothing of {old.instance_id} to be left", lambda: not old.left(), 60)
    return result


def settle(attempt: Attempt) -> None:
    """Wait until the attempt serves in its launcher's eyes too, and has noted what it imported."""

    attempt.wait_phase("Serving", 60)
    time.sleep(imports.RECORD_SECONDS + 2)


def wait_healthy(attempt: Attempt) -> None:
    """Wait for /health; asked often, for what is measured is short."""

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(f"http://{HEAD}:{attempt.port}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    wait_for(f"{attempt.instance_id} to be healthy", healthy, START_SECONDS, interval=0.02)


def completions(attempt: Attempt, name: str) -> Result:
    """Measure the first four completions, one after the other: seconds, and processor seconds of the attempt's own.

    What a completion takes beyond its own processor time, it waited: for processors that others used, most of all.
    """
    taken, own = [], []
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    for _ in range(4):
        used, started = processor_seconds(attempt), time.monotonic()
        status, answer = get(f"http://{HEAD}:{attempt.port}/v1/completions", timeout=60, body=body)
        if status != 200:
            raise RuntimeError(f"{attempt.instance_id} does not complete: {status} {answer}")
        taken.append(since(started))
        own.append(round(processor_seconds(attempt) - used, 2))
    return {f"{name}_completions": taken, f"{name}_completions_processor": own}


def processor_seconds(attempt: Attempt) -> float:
    """Return the processor time that the attempt's processes have used."""
    ticks = 0
    for pid in attempt.processes():
        with contextlib.suppress(OSError):  # gone
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # utime and stime, see proc(5)
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mib(attempt: Attempt) -> dict[str, list[float]]:
    """Return the proportional set sizes of an attempt's processes by what they are; warm workers are Ray's idle ones.

    Proportional: what processes share is counted once in all.
    """
    found: dict[str, list[float]] = {}
    for pid in attempt.processes():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # gone
        kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        names = {"ray::IDLE": "worker", "VLLM::EngineCore": "engine core", "vllm_ray_engine.serve": "API server"}
        name = next((name for mark, name in names.items() if mark in command), "other")
        found.setdefault(name, []).append(round(kilobytes / 1024, 1))
    return found


def since(started: float) -> float:
    """Return the seconds since then."""
    return round(time.monotonic() - started, 2)


def say(text: str) -> None:
    """Tell the one who waits."""
    print(text, file=sys.stderr, flush=True)


class Progress:
    """Sends to the standard error what is printed meanwhile: the standard output is for the measurements."""

    def __enter__(self) -> None:
        self._saved = os.dup(1)
        os.dup2(2, 1)

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        os.dup2(self._saved, 1)
        os.close(self._saved)


if __name__ == "__main__":
    raise SystemExit(main())
