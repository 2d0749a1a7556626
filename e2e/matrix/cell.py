"""One cell of the matrix: the launcher's life on two real Ray nodes, in an environment that holds the versions.

`python -m e2e.matrix.cell OUT` inside that environment. An attempt serves over both nodes; a second waits as its
standby; the first's API server is killed, everything of it goes, the standby takes over; a stop leaves nothing. Then
the patched functions are checked one by one. What was seen is written to OUT as JSON, also when a step fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from e2e.matrix.source_check import check_functions
from tests.engine.conftest import Attempt, Attempts
from tests.engine.ray_cluster import HEAD, WORKER, RayCluster, get, kill, wait_for

GONE_SECONDS = 10.0
START_SECONDS = 300.0
ENDED = {"STOPPED", "FAILED", "SUCCEEDED"}
FORBIDDEN = {
    "ActorHandleNotFoundError": "ActorHandleNotFoundError",
    "ActorAlreadyExistsError": "ActorAlreadyExistsError",
    "abort of Ray's actor manager": r"actor_manager\.cc.*Check failed",
}
"""Signs of the faults that the engine package is there to rule out. Older Ray aborts at a stale handle."""


class Record:
    """What was seen, step by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.checks: list[str] = []
        self.failure: dict[str, str] | None = None

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step under its name."""
        started = time.monotonic()
        print(f"== {name}", flush=True)
        try:
            yield
        except Exception as error:
            self.failure = {"step": name, "error": str(error) or type(error).__name__}
            raise
        self.seconds[name] = round(time.monotonic() - started, 1)


def check(condition: bool, message: Callable[[], str] | str) -> None:
    """Raise AssertionError with the message unless the condition holds; never optimised away."""
    if not condition:
        raise AssertionError(message if isinstance(message, str) else message())


def complete(attempt: Attempt) -> None:
    """Have the engine answer."""
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
    status, answer = get(f"http://{HEAD}:{attempt.port}/v1/completions", timeout=120, body=body)
    check(status == 200, lambda: f"completion: {status} {answer}")
    check(answer["usage"]["completion_tokens"] == 4, lambda: f"completion: {answer}")


def check_names(attempt: Attempt) -> None:
    """Check that the engine's actors are ours, by their name and namespace, in our group and over both nodes."""
    rows = attempt.cluster.actors(attempt.instance_id)
    check([row["class_name"] for row in rows] == ["RayWorkerProc"] * 2, lambda: f"actors: {rows}")
    check(all(attempt.instance_id in row["name"] for row in rows), lambda: f"actor names: {rows}")
    groups = attempt.cluster.groups(attempt.instance_id)
    check(len(groups) == 1, lambda: f"placement groups: {groups}")
    check(
        {row["placement_group_id"] for row in rows} == {groups[0]["placement_group_id"]},
        lambda: f"actors outside of the launcher's placement group: {rows}",
    )
    (rank,) = attempt.state()["ranks"]
    check(rank["instanceId"] == attempt.instance_id, lambda: f"rank: {rank}")
    check(sorted(rank["nodeIps"]) == [HEAD, WORKER], lambda: f"rank: {rank}")


def wait_gone(attempt: Attempt) -> None:
    """Wait until nothing of the attempt is left: actors, placement groups, processes."""
    wait_for(f"nothing of {attempt.instance_id} to be left", lambda: not attempt.left(), GONE_SECONDS)


def kill_api_server(attempt: Attempt) -> None:
    """Send SIGKILL to vLLM's API server and to nothing else, as the kernel does when memory runs out."""
    (launcher,) = attempt.processes("vllm_ray_engine.launch")
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    servers = [int(pid) for pid in children if int(pid) in attempt.processes("vllm_ray_engine.serve")]
    check(len(servers) == 1, lambda: f"children of the launcher: {children}")
    kill(servers[0])


def wait_ended(attempt: Attempt) -> dict[str, str]:
    """Wait for the job's end and return the launcher's result."""
    wait_for(f"{attempt.instance_id} to end", lambda: attempt.status() in ENDED, 60)
    return attempt.result()


def life(record: Record, cluster: RayCluster) -> None:
    """Go through all steps; raises at the first that fails."""
    with record.step("cluster"):
        cluster.start()
    attempts = Attempts(cluster)
    with record.step("serving"):
        first = attempts.start()
        first.wait_phase("Serving", START_SECONDS)
    with record.step("completion"):
        complete(first)
    with record.step("names"):
        check_names(first)
    with record.step("standby"):
        second = attempts.start(standby=True)
        second.wait_phase("Standby", START_SECONDS)
    with record.step("gone after kill"):
        kill_api_server(first)
        wait_gone(first)
    with record.step("takeover"):
        second.wait_phase("Serving", START_SECONDS)
        complete(second)
        check_names(second)
    with record.step("gone after stop"):
        second.stop()
        wait_gone(second)
    with record.step("results"):
        result = wait_ended(first)
        check(result["outcome"] == "Failed" and "SIGKILL" in result["message"], lambda: f"killed: {result}")
        result = wait_ended(second)
        check(result["outcome"] == "Stopped", lambda: f"stopped: {result}")
    with record.step("functions"):
        record.checks = check_functions(cluster)
    with record.step("logs"):
        found = sorted({f"{path.name}: {sign}" for path in logs(cluster) for sign in signs(path)})
        check(not found, lambda: f"in Ray's logs: {', '.join(found)}")


def logs(cluster: RayCluster) -> list[Path]:
    """List the log files of the Ray session: those of jobs, workers and Ray itself."""
    found = sorted(path for path in Path(cluster.folder).glob("session_2*/logs/**/*") if path.is_file())
    check(any(path.name.startswith("job-driver-") for path in found), "the logs of the jobs were not found")
    return found


def signs(path: Path) -> list[str]:
    """Return the signs of a known fault in a log."""
    text = path.read_text(errors="replace")
    return [name for name, sign in FORBIDDEN.items() if re.search(sign, text)]


def tail(attempts_logs: list[Path], lines: int = 60) -> dict[str, list[str]]:
    """Return the end of the logs that explain a failure."""
    return {path.name: path.read_text(errors="replace").splitlines()[-lines:] for path in attempts_logs}


def main() -> int:
    """Run the cell, write its record, and return 0 when every step passed."""
    parser = argparse.ArgumentParser(prog="python -m e2e.matrix.cell", description=__doc__)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    record, cluster, ends = Record(), RayCluster(), {}
    try:
        life(record, cluster)
    except Exception:
        traceback.print_exc()
        ends = tail(sorted(Path(cluster.folder).glob("session_2*/logs/job-driver-*")))
    finally:
        cluster.stop()
    versions = {name: metadata.version(name) for name in ("vllm", "ray", "torch", "transformers")}
    seen: dict[str, Any] = {
        "passed": record.failure is None,
        "seconds": record.seconds,
        "checks": record.checks,
        "failure": record.failure,
        "versions": versions | {"python": platform.python_version()},
        "logs": ends,
    }
    out.write_text(json.dumps(seen, indent=1) + "\n")
    return 0 if record.failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
