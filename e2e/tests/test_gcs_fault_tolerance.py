"""The Ray head is lost, what it knew is in a Redis: the engine serves on, and is rolled and fenced by the next head."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e import chaos
from e2e.demo import EXAMPLE
from e2e.kube import Kube
from e2e.serving import condition, describe, head_pod, is_ready, served_name, wait_ready
from e2e.streams import Streams
from e2e.waiting import say, wait_for

NAME = "kept"
CLIENT = Path(chaos.__file__).with_name("client.py")
REDIS = """
apiVersion: v1
kind: Secret
metadata: {name: redis}
stringData: {password: open-sesame}
---
apiVersion: v1
kind: Service
metadata: {name: redis}
spec:
  selector: {app: redis}
  ports: [{port: 6379}]
---
apiVersion: v1
kind: Pod
metadata: {name: redis, labels: {app: redis}}
spec:
  containers:
    - name: redis
      image: IMAGE
      env: [{name: REDIS_PASSWORD, valueFrom: {secretKeyRef: {name: redis, key: password}}}]
      readinessProbe: {tcpSocket: {port: 6379}, periodSeconds: 1}
"""
KEYS = ["sh", "-c", 'REDISCLI_AUTH="$REDIS_PASSWORD" redis-cli dbsize']


@pytest.fixture
def redis(kube: Kube) -> Iterator[str]:
    """A Redis with a password; its address."""
    manifest = REDIS.replace("IMAGE", os.environ["VRO_REDIS_IMAGE"])
    kube.kubectl("apply", "-f", "-", stdin=manifest)
    kube.kubectl("wait", "pod/redis", "--for=condition=Ready", "--timeout=60s", seconds=90)
    yield "redis.default:6379"
    kube.kubectl("delete", "-f", "-", "--grace-period=1", stdin=manifest)


def keys(kube: Kube) -> int:
    """Return how many keys are in Redis."""
    return int(kube.kubectl("exec", "redis", "--", *KEYS).rpartition(" ")[2])


def manifest(redis: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    document["metadata"]["name"] = NAME
    document["spec"] |= {"replicas": 1, "parallelism": {"tensor": 1}}
    password = {"name": "redis", "key": "password"}
    document["spec"]["cluster"]["gcsFaultTolerance"] = {"redisAddress": redis, "redisPasswordSecretRef": password}
    return document


def attempt(deployment: dict[str, Any]) -> int:
    """Return the number of the attempt of the one replica."""
    return int(deployment["status"]["replicas"][0]["attempt"]["number"])


def test_an_engine_outlives_the_head_whose_knowledge_is_kept(kube: Kube, redis: str) -> None:
    kube.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest(redis)))
    seen: list[dict[str, Any]] = []
    requests: list[dict[str, Any]] = []
    streams = Streams(os.environ["VRO_CLUSTER"])
    try:
        deployment = wait_ready(kube, NAME, "default", seconds=600)
        assert keys(kube) > 0
        lost = head_pod(kube, deployment)
        url = deployment["status"]["endpoint"]
        node = kube.items("nodes")[0]["metadata"]["name"]
        streams.watch(("vd", NAME), lambda event: seen.append(event["object"]))
        streams.on_node(node, ["python3", str(CLIENT), url, served_name(deployment)], requests.append)
        wait_for("the client to be served", lambda: requests and seen, seconds=60)
        began = time.time()
        kube.kubectl("delete", "pod", lost, "--grace-period=1", seconds=120)

        def has_next_head() -> bool:
            waited = any(condition(r, "ClusterReady").get("status") == "False" for r in seen)
            return waited and condition(seen[-1], "ClusterReady").get("status") == "True"

        wait_for("the next head", has_next_head, seconds=300, describe=lambda: describe(seen[-1]))
        took = time.time() - began
        meanwhile = [r for r in list(requests) if r["at"] >= began]
        say(f"the next head was ready {took:.1f} s after the loss of the first; {len(meanwhile)} requests meanwhile")
        assert [r for r in meanwhile if r["error"]] == []
        assert len(meanwhile) > 3
        assert head_pod(kube, deployment) != lost
        assert {condition(r, "Ready").get("status") for r in seen} == {"True"}, "the replica served all the time"
        assert {attempt(r) for r in seen} == {1}
        # The next head knows the engine: it is rolled and fenced as ever.
        patch = {"spec": {"restartedAt": "2026-01-01T00:00:00Z"}}
        kube.kubectl("patch", "vd", NAME, "--type=merge", "-p", json.dumps(patch))
        wait_for("the roll", lambda: rolled(seen[-1]), seconds=300, describe=lambda: describe(seen[-1]))
        (replica,) = seen[-1]["status"]["replicas"]
        assert (replica["lastFence"]["attempt"], replica["lastFence"]["how"]) == (1, "JobEnded")
    finally:
        streams.stop()
        kube.kubectl("delete", "vd", NAME, "--wait=false")
        wait_for("its pods to be gone", lambda: not pods(kube), seconds=180)
    wait_for("what was kept of it to be cleared", lambda: keys(kube) == 0, seconds=120)


def rolled(deployment: dict[str, Any]) -> bool:
    return is_ready(deployment) and attempt(deployment) == 2


def pods(kube: Kube) -> list[Any]:
    return kube.items("pods", "-l", f"vllm-ray.dev/deployment={NAME}")
