"""A change of the engine goes from replica to replica under load: with standbys, in the same pods, unnoticed."""

from __future__ import annotations

import datetime
import json
import time
from typing import Any

import yaml

from e2e.demo import EXAMPLE
from e2e.kube import Kube
from e2e.serving import describe, is_ready, wait_ready
from e2e.tests.deployed import summary
from e2e.tests.load import load, outcome
from e2e.waiting import say, wait_for

NAME = "roll"


def worker_uids(kube: Kube) -> set[str]:
    pods = kube.items("pods", "-l", f"vllm-ray.dev/deployment={NAME},ray.io/node-type=worker")
    return {pod["metadata"]["uid"] for pod in pods}


def test_a_changed_environment_rolls_under_load_without_a_failed_request(kube: Kube) -> None:
    manifest = yaml.safe_load(EXAMPLE.read_text())
    manifest["metadata"]["name"] = NAME
    manifest["spec"]["parallelism"] = {"tensor": 1}  # one pod a slot: both launchers are in it
    manifest["spec"]["engine"]["drainTimeoutSeconds"] = 10
    kube.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest))
    before = wait_ready(kube, NAME, "default", seconds=600)
    pods = worker_uids(kube)
    seen: list[tuple[float, list[dict[str, Any]]]] = []
    latest: dict[str, Any] = {}

    def rolled() -> bool:
        latest.update(kube.get("vllmdeployment", NAME))
        seen.append((time.monotonic(), latest["status"]["replicas"]))
        return is_ready(latest)

    try:
        with load(before) as requests:
            env = [{"name": "ROLLED", "value": "1"}]
            kube.kubectl("patch", "vd", NAME, "--type=merge", "-p", json.dumps({"spec": {"engine": {"env": env}}}))
            wait_for("the roll", rolled, seconds=600, poll=0.5, describe=lambda: describe(latest))
        result = outcome(requests)
        say(f"cold starts: {[round(cold_start(r), 1) for r in before['status']['replicas']]} s")
        say(f"away in the roll: {[round(away(seen, index), 1) for index in (0, 1)]} s")
        replicas = latest["status"]["replicas"]
        assert [(r["attempt"]["number"], r["attempt"].get("standby")) for r in replicas] == [(3, True), (4, True)]
        assert min(sum(r["phase"] == "Ready" for r in replicas) for _, replicas in seen) == 1
        assert worker_uids(kube) == pods, "the pods stayed"
        assert latest["status"]["rayCluster"] == before["status"]["rayCluster"]
        assert result.failed == 0, result.errors
        assert result.sent > 50
        assert result.moved > 0, "a client that kept its connection was sent away"
    finally:
        say("seen:\n  " + "\n  ".join(summary(replicas for _, replicas in seen)))
        kube.kubectl("delete", "vd", NAME)
        wait_for("its pods to be gone", lambda: not worker_uids(kube), seconds=120)


def cold_start(replica: dict[str, Any]) -> float:
    """Return how long the replica's attempt took from its number to its first ready answer, in seconds."""
    attempt = replica["attempt"]
    times = [datetime.datetime.fromisoformat(attempt[name]) for name in ("startTime", "readyTime")]
    return (times[1] - times[0]).total_seconds()


def away(seen: list[tuple[float, list[dict[str, Any]]]], index: int) -> float:
    """Return for how long a replica was not ready."""
    moments = [at for at, replicas in seen if replicas[index]["phase"] != "Ready"]
    return moments[-1] - moments[0] if moments else 0.0
