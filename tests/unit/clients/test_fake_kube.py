"""The API server in memory keeps the promises that the operator's tests lean on (the real one's: tests/integration)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.kube import FakeKube, fail_once
from vllm_ray_operator.clients.protocols import (
    CONTROLLER_REVISIONS,
    PODS,
    RAY_CLUSTERS,
    SERVICES,
    VLLM_DEPLOYMENTS,
    ApiError,
    Conflict,
    Invalid,
    Kube,
    NotFound,
)


def obj(name: str = "x", **fields: Any) -> dict[str, Any]:
    metadata = {"name": name, **fields.pop("metadata", {})}
    return {"metadata": metadata, **fields}


@pytest.fixture
def kube() -> FakeKube:
    fake = FakeKube()
    _: Kube = fake
    return fake


async def test_create_ignores_the_status_and_asks_for_no_version(kube: FakeKube) -> None:
    created = await kube.create(RAY_CLUSTERS, "ns", obj(spec={}, status={"a": 1}))
    assert "status" not in created
    assert created["metadata"]["generation"] == 1
    with pytest.raises(Invalid):
        await kube.create(RAY_CLUSTERS, "ns", obj("y", metadata={"resourceVersion": "3"}))


async def test_versions_are_preconditions_and_move_only_with_a_change(kube: FakeKube) -> None:
    first = await kube.create(RAY_CLUSTERS, "ns", obj(spec={"a": 1}))
    same = await kube.replace(RAY_CLUSTERS, "ns", first)
    assert same["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    changed = await kube.replace(RAY_CLUSTERS, "ns", {**first, "spec": {"a": 2}})
    assert changed["metadata"]["generation"] == 2
    with pytest.raises(Conflict):
        await kube.replace(RAY_CLUSTERS, "ns", {**first, "spec": {"a": 3}})


async def test_the_status_is_written_apart(kube: FakeKube) -> None:
    first = await kube.create(VLLM_DEPLOYMENTS, "ns", obj(spec={"a": 1}))
    written = await kube.replace_status(VLLM_DEPLOYMENTS, "ns", {**first, "spec": {"a": 9}, "status": {"b": 1}})
    assert (written["spec"], written["status"], written["metadata"]["generation"]) == ({"a": 1}, {"b": 1}, 1)
    kept = await kube.replace(VLLM_DEPLOYMENTS, "ns", {**written, "spec": {"a": 2}, "status": {}})
    assert kept["status"] == {"b": 1}
    with pytest.raises(Conflict):
        await kube.replace_status(VLLM_DEPLOYMENTS, "ns", {**first, "status": {"b": 2}})


async def test_apply_drops_what_it_applied_and_leaves_what_others_set(kube: FakeKube) -> None:
    await kube.apply(SERVICES, "ns", obj(metadata={"labels": {"ours": "1", "gone": "1"}}, spec={"ports": [1, 2]}))
    stored = kube.objects(SERVICES)[0]
    stored["metadata"]["labels"]["theirs"] = "1"
    stored["spec"]["clusterIP"] = "10.0.0.1"
    await kube.replace(SERVICES, "ns", stored)
    applied = await kube.apply(SERVICES, "ns", obj(metadata={"labels": {"ours": "2"}}, spec={"ports": [3]}))
    assert applied["metadata"]["labels"] == {"ours": "2", "theirs": "1"}
    assert applied["spec"] == {"ports": [3], "clusterIP": "10.0.0.1"}
    assert applied["metadata"]["uid"] == stored["metadata"]["uid"]
    again = await kube.apply(SERVICES, "ns", obj(metadata={"labels": {"ours": "2"}}, spec={"ports": [3]}))
    assert again["metadata"]["resourceVersion"] == applied["metadata"]["resourceVersion"]


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        ([{"op": "add", "path": "/spec/groups/-", "value": "c"}], {"groups": ["a", "b", "c"]}),
        ([{"op": "add", "path": "/spec/groups/0", "value": "c"}], {"groups": ["c", "a", "b"]}),
        ([{"op": "remove", "path": "/spec/groups/0"}], {"groups": ["b"]}),
        ([{"op": "replace", "path": "/spec/groups/1", "value": "c"}], {"groups": ["a", "c"]}),
        ([{"op": "add", "path": "/spec/a~1b", "value": 1}], {"groups": ["a", "b"], "a/b": 1}),
        ([{"op": "test", "path": "/spec/groups/0", "value": "a"}], {"groups": ["a", "b"]}),
        ([{"op": "test", "path": "/spec/groups/0", "value": "z"}], None),
        ([{"op": "add", "path": "/spec/groups/-", "value": 1}, {"op": "test", "path": "/kind", "value": 1}], None),
        ([{"op": "remove", "path": "/spec/groups/7"}], None),
        ([{"op": "replace", "path": "/spec/other", "value": 1}], None),
    ],
)
async def test_json_patches(kube: FakeKube, operations: list[Any], expected: dict[str, Any] | None) -> None:
    kube.put(RAY_CLUSTERS, obj(metadata={"namespace": "ns"}, spec={"groups": ["a", "b"]}))
    if expected is None:
        with pytest.raises(Conflict):
            await kube.json_patch(RAY_CLUSTERS, "ns", "x", operations)
        expected = {"groups": ["a", "b"]}
    else:
        await kube.json_patch(RAY_CLUSTERS, "ns", "x", operations)
    assert kube.objects(RAY_CLUSTERS)[0]["spec"] == expected


async def test_deletion(kube: FakeKube) -> None:
    owner = await kube.create(VLLM_DEPLOYMENTS, "ns", obj("owner"))
    owned = {"ownerReferences": [{"uid": owner["metadata"]["uid"]}]}
    await kube.create(CONTROLLER_REVISIONS, "ns", obj("owned", metadata=owned))
    await kube.create(PODS, "ns", obj("pod", metadata=owned))
    with pytest.raises(Conflict):
        await kube.delete(VLLM_DEPLOYMENTS, "ns", "owner", "another-uid")
    await kube.delete(VLLM_DEPLOYMENTS, "ns", "owner", owner["metadata"]["uid"])
    assert kube.objects(CONTROLLER_REVISIONS) == []
    (pod,) = kube.objects(PODS)
    assert pod["metadata"]["deletionTimestamp"]  # until its kubelet is done
    kube.remove(PODS, "ns", "pod")
    assert kube.objects(PODS) == []


async def test_a_finalizer_keeps_the_object_until_it_is_taken_off(kube: FakeKube) -> None:
    await kube.create(RAY_CLUSTERS, "ns", obj(metadata={"finalizers": ["a/b"]}, spec={}))
    await kube.delete(RAY_CLUSTERS, "ns", "x", None)
    (going,) = kube.objects(RAY_CLUSTERS)
    going["metadata"]["finalizers"] = []
    await kube.replace(RAY_CLUSTERS, "ns", going)
    with pytest.raises(NotFound):
        await kube.get(RAY_CLUSTERS, "ns", "x")


async def test_lists_select_by_namespace_and_labels(kube: FakeKube) -> None:
    for namespace, name, labels in (("ns", "a", {"x": "1", "y": "1"}), ("ns", "b", {"x": "1"}), ("other", "c", {})):
        await kube.create(SERVICES, namespace, obj(name, metadata={"labels": labels}))
    assert [o["metadata"]["name"] for o in await kube.list(SERVICES, "ns", {"x": "1"})] == ["a", "b"]
    assert [o["metadata"]["name"] for o in await kube.list(SERVICES, "ns", {"x": "1", "y": "1"})] == ["a"]


async def test_what_is_handed_out_is_a_copy(kube: FakeKube) -> None:
    created = await kube.create(SERVICES, "ns", obj(spec={"a": {}}))
    created["spec"]["a"]["changed"] = True
    assert kube.objects(SERVICES)[0]["spec"] == {"a": {}}


async def test_a_lost_request_did_nothing_and_a_lost_reply_did(kube: FakeKube) -> None:
    lost = ApiError("no answer")
    kube.before.append(fail_once(lost, verb="create", resource=SERVICES))
    with pytest.raises(ApiError):
        await kube.create(SERVICES, "ns", obj())
    assert kube.objects(SERVICES) == []
    kube.after.append(fail_once(lost, verb="create", resource=SERVICES))
    with pytest.raises(ApiError):
        await kube.create(SERVICES, "ns", obj())
    assert len(kube.objects(SERVICES)) == 1
