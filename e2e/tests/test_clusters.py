"""A RayCluster for each replica: a lost head takes one; suspended, there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.kube import Kube
from e2e.serving import chat, condition, head_pod
from e2e.tests.deployed import Deployed, Object, attempts, deployed, summary
from e2e.tests.load import load, outcome
from e2e.waiting import say, wait_for


@pytest.fixture(scope="module")
def apart(kube: Kube) -> Iterator[Deployed]:
    """Two replicas, each with a Ray head and a pod of its own."""
    with deployed(kube, "apart", cluster={"policy": "PerReplica"}) as made:
        yield made


def test_a_lost_head_takes_its_replica_and_the_other_serves_on(kube: Kube, apart: Deployed) -> None:
    before = apart.ready(600)
    victim, other = attempts(before)
    assert victim["rayCluster"] != other["rayCluster"]
    seen: list[Object] = []

    def replaced(resource: Object) -> bool:
        now = resource["status"]["replicas"][0].get("attempt")
        return now is not None and now["number"] > victim["number"]

    url = f"http://{other['endpoint']['address']}:{other['endpoint']['port']}/v1"
    try:
        with load(before, url) as requests:
            head = head_pod(kube, before, 0)
            say(f"deleting {head}")
            kube.kubectl("delete", "pod", head, "-n", apart.name, "--wait=false")
            apart.watch("its replica to start again", seen, replaced, seconds=300)
            after = apart.roll("both to serve", seen)
        result = outcome(requests)
        assert result.failed == 0, result.errors
        assert result.sent > 50
    finally:
        say("seen:\n  " + "\n  ".join(summary(resource["status"]["replicas"] for resource in seen)))
    healed, untouched = after["status"]["replicas"]
    assert healed["lastFailure"]["attempt"] == healed["lastFence"]["attempt"] == victim["number"]
    say(f"lost as {healed['lastFailure']['reason']}, gone by {healed['lastFence']['how']}")
    assert healed["attempt"]["rayCluster"] == victim["rayCluster"]
    assert untouched["attempt"]["instanceId"] == other["instanceId"]
    assert all(resource["status"]["replicas"][1]["phase"] == "Ready" for resource in seen)
    assert chat(kube, after, "Both there?")["choices"]


def test_suspended_nothing_is_left_and_resumed_it_starts_anew(kube: Kube, apart: Deployed) -> None:
    before = apart.ready(600)
    apart.patch({"suspend": True})
    wait_for("every pod to be gone", lambda: not apart.pods() and not apart.ray_clusters(), seconds=180)
    seen: list[Object] = []

    def told(resource: Object) -> bool:
        return all(condition(resource, kind).get("reason") == "Suspended" for kind in ("Ready", "Progressing"))

    suspended = apart.watch("the conditions to say so", seen, told, seconds=30)
    assert [(r["phase"], r.get("attempt")) for r in suspended["status"]["replicas"]] == [("Stopped", None)] * 2
    assert kube.get("service", apart.name, "-n", apart.name), "clients keep its address"

    apart.patch({"suspend": False, "replicas": 1})
    after = apart.ready(400)
    assert [a["number"] for a in attempts(after)] == [before["status"]["lastAttempt"] + 1]
    assert chat(kube, after, "Back again?")["choices"]
