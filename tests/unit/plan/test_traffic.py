from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from tests.unit.plan import build
from vllm_ray_operator.api.status import Endpoint, Phase, ReplicaStatus
from vllm_ray_operator.plan import traffic
from vllm_ray_operator.plan.actions import Apply, Delete
from vllm_ray_operator.plan.world import World

CONTAINS: dict[str, tuple[Any, Any, bool]] = {
    "equal": ({"a": 1}, {"a": 1}, True),
    "more is fine": ({"a": 1, "b": 2}, {"a": 1}, True),
    "missing": ({"b": 2}, {"a": 1}, False),
    "different": ({"a": 2}, {"a": 1}, False),
    "more inside": ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, True),
    "items may have more": ({"a": [{"b": 1, "c": 2}]}, {"a": [{"b": 1}]}, True),
    "a longer list is different": ({"a": [1, 2]}, {"a": [1]}, False),
    "a shorter list is different": ({"a": []}, {"a": [1]}, False),
    "order counts": ({"a": [2, 1]}, {"a": [1, 2]}, False),
    "nothing there": (None, {"a": 1}, False),
    "empty wanted": ({"a": 1}, {}, True),
    "other types": ({"a": "1"}, {"a": {"b": 1}}, False),
}


@pytest.mark.parametrize("name", CONTAINS)
def test_contains(name: str) -> None:
    live, wanted, expected = CONTAINS[name]
    assert traffic.contains(live, wanted) is expected


def replica(phase: Phase = "Ready", index: int = 0, address: str = "10.0.1.1", port: int = 8000) -> ReplicaStatus:
    where = Endpoint(address=address, port=port, pod=f"w{index}", node="node-1")
    cluster = build.cluster("c", [build.head(), build.pod("w0")])
    return ReplicaStatus(index=index, phase=phase, attempt=build.attempt_on(cluster, endpoint=where))


def world(*replicas: ReplicaStatus) -> World:
    """A world in which the traffic of these replicas is in step, with what an API server adds."""
    made = [a.manifest for a in traffic.sync(World(build.deployment()), replicas, 8000) if isinstance(a, Apply)]
    added = [
        {**deepcopy(dict(m)), "metadata": {**m["metadata"], "uid": "u", "resourceVersion": "9", "managedFields": []}}
        for m in made
    ]
    for manifest in added:
        if manifest["kind"] == "Service":
            manifest["spec"] = {**manifest["spec"], "type": "ClusterIP", "clusterIP": "10.96.0.9"}
    return World(
        build.deployment(),
        services={m["metadata"]["name"]: m for m in added if m["kind"] == "Service"},
        endpoint_slices={m["metadata"]["name"]: m for m in added if m["kind"] == "EndpointSlice"},
    )


def conditions(action: Any) -> Any:
    return action.manifest["endpoints"][0]["conditions"]


def test_made_once_and_left_alone() -> None:
    assert traffic.sync(world(replica()), [replica()], 8000) == []


def test_the_service_selects_nothing() -> None:
    (service,) = traffic.sync(World(build.deployment()), [], 8000)
    assert isinstance(service, Apply)
    assert "selector" not in service.manifest["spec"]
    assert service.manifest["metadata"]["ownerReferences"][0]["uid"] == build.UID


def test_a_replica_without_an_address_has_no_slice() -> None:
    cluster = build.cluster("c", [build.head(), build.pod("w0")])
    starting = ReplicaStatus(index=0, phase="Starting", attempt=build.attempt_on(cluster))
    assert [
        a.manifest["kind"] for a in traffic.sync(World(build.deployment()), [starting], 8000) if isinstance(a, Apply)
    ] == ["Service"]


@pytest.mark.parametrize("phase", ["Starting", "NotReady", "Stopping", "Fencing"])
def test_only_ready_replicas_are_in_traffic(phase: Phase) -> None:
    (action,) = traffic.sync(world(replica("Ready")), [replica(phase)], 8000)
    assert conditions(action) == {"ready": False, "serving": False, "terminating": False}
    (back,) = traffic.sync(world(replica(phase)), [replica("Ready")], 8000)
    assert conditions(back) == {"ready": True, "serving": True, "terminating": False}


def test_the_slice_of_an_attempt_that_is_gone_goes() -> None:
    before = world(replica(), replica(index=1))
    gone = ReplicaStatus(index=1, phase="Backoff")
    assert traffic.sync(before, [replica(), gone], 8000) == [
        Delete("EndpointSlice", "chat-1", "u", "its replica has no engine")
    ]


def test_a_new_address_is_written() -> None:
    (action,) = traffic.sync(world(replica()), [replica(address="10.0.1.7")], 8000)
    assert isinstance(action, Apply)
    assert action.manifest["endpoints"][0]["addresses"] == ["10.0.1.7"]


def test_a_slice_names_its_service_pod_and_node() -> None:
    made = world(replica(address="fd00::1", port=8001)).endpoint_slices["chat-0"]
    assert made["addressType"] == "IPv6"
    assert made["metadata"]["labels"]["kubernetes.io/service-name"] == "chat"
    assert made["endpoints"][0]["targetRef"]["name"] == "w0"
    assert made["endpoints"][0]["nodeName"] == "node-1"
    assert made["ports"] == [{"name": "http", "port": 8001, "protocol": "TCP"}]
    assert made["ports"][0]["name"] == traffic.service_manifest(build.deployment(), 8000)["spec"]["ports"][0]["name"]


def test_somebody_elses_change_is_undone() -> None:
    before = world(replica())
    tampered = deepcopy(dict(before.endpoint_slices["chat-0"]))
    tampered["endpoints"][0]["conditions"]["ready"] = False
    changed = World(before.deployment, services=before.services, endpoint_slices={"chat-0": tampered})
    (action,) = traffic.sync(changed, [replica()], 8000)
    assert conditions(action)["ready"] is True
