"""The Kubernetes client against a real API server: what its answers are mapped to.

KUBECONFIG names a server that has our CRD and KubeRay's.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine
from tests.fakes.ray import FakeRay
from vllm_ray_operator.act import events, execute
from vllm_ray_operator.clients import kube as kube_module
from vllm_ray_operator.clients.bundle import Clients, Key
from vllm_ray_operator.clients.kube import KubeClient
from vllm_ray_operator.clients.protocols import (
    CONTROLLER_REVISIONS,
    ENDPOINT_SLICES,
    EVENTS,
    RAY_CLUSTERS,
    SECRETS,
    SERVICES,
    VLLM_DEPLOYMENTS,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    KindMissing,
    NotFound,
    Object,
    Resource,
)
from vllm_ray_operator.observe import kube as observe_kube
from vllm_ray_operator.observe import observe
from vllm_ray_operator.plan import names
from vllm_ray_operator.plan.actions import Emit
from vllm_ray_operator.plan.planner import plan
from vllm_ray_operator.plan.revision import Defaults
from vllm_ray_operator.plan.world import Cluster

pytestmark = pytest.mark.integration

SPEC: Object = {"model": {"uri": "file:///models/tiny"}, "engine": {"image": "registry.example/engine:1"}}


@pytest.fixture
def kubeconfig() -> str:
    if "KUBECONFIG" not in os.environ:
        pytest.fail("KUBECONFIG must name a control plane with our CRD: run `make test-integration`")
    return os.environ["KUBECONFIG"]


@pytest.fixture
async def kube(kubeconfig: str) -> AsyncIterator[KubeClient]:
    async with await KubeClient.connect(kubeconfig=kubeconfig) as client:
        yield client


@pytest.fixture
async def namespace(kube: KubeClient) -> AsyncIterator[str]:
    name = f"kube-client-{secrets.token_hex(4)}"
    await _raw(kube, "POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    await _raw(kube, "DELETE", f"/api/v1/namespaces/{name}")


async def _raw(kube: KubeClient, method: str, path: str, body: Any = None) -> Object:
    """Send a request that the operator itself never sends."""
    headers = {"Content-Type": "application/json"}
    api = kube._api
    _, url, headers, _, _ = await api.param_serialize(
        method, path, header_params=headers, auth_settings=["BearerToken"]
    )
    response = await api.call_api(method, url, headers, body)
    content = await response.read()
    assert response.status < 300, content
    parsed = kube_module._document(content)
    assert parsed is not None
    return parsed


def revision(name: str, **labels: str) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {"name": name, "labels": labels},
        "revision": 1,
        "data": {"written": {}, "resolved": {}},
    }


def service(ports: dict[str, int], **labels: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "chat", "labels": labels},
        "spec": {"ports": [{"name": name, "port": port} for name, port in ports.items()]},
    }


def deployment(name: str = "chat", **spec: Any) -> Object:
    return {
        "apiVersion": VLLM_DEPLOYMENTS.api_version,
        "kind": "VLLMDeployment",
        "metadata": {"name": name},
        "spec": {**SPEC, **spec},
    }


async def test_create_says_when_the_name_is_taken(kube: KubeClient, namespace: str) -> None:
    created = await kube.create(CONTROLLER_REVISIONS, namespace, revision("one"))
    assert created["metadata"]["uid"]
    with pytest.raises(Conflict) as caught:
        await kube.create(CONTROLLER_REVISIONS, namespace, revision("one"))
    assert caught.value.reason == "AlreadyExists"


@pytest.mark.parametrize(
    "resource",
    [
        pytest.param(Resource("nothing.example/v1", "Thing", "things"), id="unknown group"),
        pytest.param(Resource("ray.io/v1", "RayNothing", "raynothings"), id="unknown kind of a known group"),
        pytest.param(Resource("ray.io/v7", "RayCluster", "rayclusters"), id="unknown version"),
    ],
)
async def test_a_kind_that_is_not_served_is_not_an_object_that_is_missing(
    kube: KubeClient, namespace: str, resource: Resource
) -> None:
    with pytest.raises(KindMissing):
        await kube.list(resource, namespace, {})
    with pytest.raises(KindMissing):
        await kube.get(resource, namespace, "x")
    with pytest.raises(KindMissing):
        await kube.create(
            resource, namespace, {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {"name": "x"}}
        )


@pytest.mark.parametrize("resource", [RAY_CLUSTERS, VLLM_DEPLOYMENTS, SERVICES, SECRETS], ids=lambda r: r.kind)
async def test_an_object_that_is_missing(kube: KubeClient, namespace: str, resource: Resource) -> None:
    with pytest.raises(NotFound) as caught:
        await kube.get(resource, namespace, "nothing")
    assert not isinstance(caught.value, KindMissing)
    with pytest.raises(NotFound) as caught:
        await kube.delete(resource, namespace, "nothing", None)
    assert not isinstance(caught.value, KindMissing)


async def test_creating_in_a_namespace_that_is_missing(kube: KubeClient) -> None:
    with pytest.raises(NotFound) as caught:
        await kube.create(CONTROLLER_REVISIONS, "nowhere-at-all", revision("one"))
    assert not isinstance(caught.value, KindMissing)


async def test_list_selects_by_labels_over_all_pages(
    kube: KubeClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_module, "PAGE_SIZE", 3)
    for number in range(8):
        await kube.create(CONTROLLER_REVISIONS, namespace, revision(f"r{number}", **names.selector("chat")))
    await kube.create(CONTROLLER_REVISIONS, namespace, revision("other", **names.selector("another")))
    found = await kube.list(CONTROLLER_REVISIONS, namespace, names.selector("chat"))
    assert [o["metadata"]["name"] for o in found] == [f"r{number}" for number in range(8)]
    assert {(o["apiVersion"], o["kind"]) for o in found} == {("apps/v1", "ControllerRevision")}


async def test_apply_makes_changes_and_drops_what_it_applied_before(kube: KubeClient, namespace: str) -> None:
    first = await kube.apply(SERVICES, namespace, service({"http": 8000, "old": 9000}, mine="yes"))
    again = await kube.apply(SERVICES, namespace, service({"http": 8000, "old": 9000}, mine="yes"))
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    changed = await kube.apply(SERVICES, namespace, service({"http": 8001}))
    assert [(p["name"], p["port"]) for p in changed["spec"]["ports"]] == [("http", 8001)]
    assert "mine" not in (changed["metadata"].get("labels") or {})


async def test_a_json_patch_applies_only_if_its_test_holds(kube: KubeClient, namespace: str) -> None:
    created = await kube.create(VLLM_DEPLOYMENTS, namespace, deployment(replicas=1))
    version = created["metadata"]["resourceVersion"]
    test = {"op": "test", "path": "/metadata/resourceVersion", "value": version}
    patched = await kube.json_patch(
        VLLM_DEPLOYMENTS, namespace, "chat", [test, {"op": "replace", "path": "/spec/replicas", "value": 3}]
    )
    assert patched["spec"]["replicas"] == 3
    with pytest.raises(Conflict):
        await kube.json_patch(
            VLLM_DEPLOYMENTS, namespace, "chat", [test, {"op": "replace", "path": "/spec/replicas", "value": 4}]
        )
    with pytest.raises(Conflict):  # it has gone meanwhile
        await kube.json_patch(VLLM_DEPLOYMENTS, namespace, "chat", [{"op": "remove", "path": "/spec/cluster/head"}])
    with pytest.raises(Invalid, match=r"spec\.replicas"):
        await kube.json_patch(
            VLLM_DEPLOYMENTS, namespace, "chat", [{"op": "replace", "path": "/spec/replicas", "value": -1}]
        )


async def test_slots_are_patched_into_a_cluster_under_a_test_of_its_version(kube: KubeClient, namespace: str) -> None:
    template = {"spec": {"containers": [{"name": "ray", "image": "registry.example/engine:1"}]}}
    group = {
        "groupName": "slot-0",
        "replicas": 1,
        "minReplicas": 1,
        "maxReplicas": 1,
        "rayStartParams": {},
        "template": template,
    }
    cluster = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "chat-12345678", "labels": names.selector("chat")},
        "spec": {
            "suspend": True,
            "headGroupSpec": {"rayStartParams": {}, "template": template},
            "workerGroupSpecs": [group],
        },
    }
    await kube.create(RAY_CLUSTERS, namespace, cluster)
    # KubeRay writes to it as well: as in real life, look again when the test does not hold.
    for _ in range(10):
        seen = observe_kube.parse_cluster(await kube.get(RAY_CLUSTERS, namespace, "chat-12345678"), ())
        operations: list[Object] = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": seen.resource_version},
            {"op": "add", "path": "/spec/workerGroupSpecs/-", "value": {**group, "groupName": "slot-1"}},
        ]
        try:
            patched = await kube.json_patch(RAY_CLUSTERS, namespace, "chat-12345678", operations)
            break
        except Conflict:
            continue
    assert observe_kube.parse_cluster(patched, ()).groups == (("slot-0", 1), ("slot-1", 1))


async def test_a_replace_needs_the_version_that_was_read(kube: KubeClient, namespace: str) -> None:
    stale = await kube.create(VLLM_DEPLOYMENTS, namespace, deployment(replicas=1))
    await kube.replace(VLLM_DEPLOYMENTS, namespace, {**stale, "spec": {**stale["spec"], "replicas": 2}})
    with pytest.raises(Conflict) as caught:
        await kube.replace(VLLM_DEPLOYMENTS, namespace, {**stale, "spec": {**stale["spec"], "replicas": 3}})
    assert caught.value.reason == "Conflict"


async def test_a_status_is_replaced_alone_and_only_at_the_version_that_was_read(
    kube: KubeClient, namespace: str
) -> None:
    created = await kube.create(VLLM_DEPLOYMENTS, namespace, deployment(replicas=1))
    wanted = {**created, "spec": {**created["spec"], "replicas": 9}, "status": {"lastAttempt": 3}}
    await kube.replace_status(VLLM_DEPLOYMENTS, namespace, wanted)
    read = await kube.get(VLLM_DEPLOYMENTS, namespace, "chat")
    assert (read["spec"]["replicas"], read["status"]["lastAttempt"]) == (1, 3)
    with pytest.raises(Conflict):
        await kube.replace_status(VLLM_DEPLOYMENTS, namespace, {**wanted, "status": {"lastAttempt": 4}})
    # The same status again writes nothing.
    again = await kube.replace_status(VLLM_DEPLOYMENTS, namespace, read)
    assert again["metadata"]["resourceVersion"] == read["metadata"]["resourceVersion"]


async def test_delete_spares_a_later_object_of_the_same_name(kube: KubeClient, namespace: str) -> None:
    created = await kube.create(CONTROLLER_REVISIONS, namespace, revision("one"))
    with pytest.raises(Conflict):
        await kube.delete(CONTROLLER_REVISIONS, namespace, "one", "00000000-0000-0000-0000-000000000000")
    await kube.delete(CONTROLLER_REVISIONS, namespace, "one", created["metadata"]["uid"])
    with pytest.raises(NotFound):
        await kube.get(CONTROLLER_REVISIONS, namespace, "one")


@pytest.mark.parametrize(
    ("container", "field"),
    [
        pytest.param("none", "containers", id="wrong type"),
        pytest.param([{"name": "ray", "imige": "x"}], "imige", id="unknown field"),
    ],
)
async def test_a_refused_cluster_names_the_field(kube: KubeClient, namespace: str, container: Any, field: str) -> None:
    cluster = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "chat-12345678"},
        "spec": {"headGroupSpec": {"rayStartParams": {}, "template": {"spec": {"containers": container}}}},
    }
    for write in (kube.create, kube.apply):
        with pytest.raises(Invalid, match=field):
            await write(RAY_CLUSTERS, namespace, cluster)


async def test_an_endpoint_slice_that_is_refused(kube: KubeClient, namespace: str) -> None:
    slices = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "chat-0"},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["not an address"]}],
    }
    with pytest.raises(Invalid, match=r"endpoints\[0\]\.addresses"):
        await kube.apply(ENDPOINT_SLICES, namespace, slices)


async def test_events_are_accepted_and_told_once(kube: KubeClient, namespace: str) -> None:
    created = observe_kube.parse_deployment(await kube.create(VLLM_DEPLOYMENTS, namespace, deployment()))
    event = events.event(created, Emit("Warning", "OutOfMemory", "zu wenig Speicher für das Modell… " * 100), 1.8e9)
    await kube.create(EVENTS, namespace, event)
    with pytest.raises(Conflict) as caught:
        await kube.create(EVENTS, namespace, event)
    assert caught.value.reason == "AlreadyExists"


async def test_all_of_a_deployment_is_read(kube: KubeClient, namespace: str) -> None:
    assert await observe_kube.read(kube, Key(namespace, "chat")) is None
    await kube.create(VLLM_DEPLOYMENTS, namespace, deployment(replicas=2))
    labels = {**names.selector("chat"), names.REVISION_KIND: "engine"}
    await kube.create(CONTROLLER_REVISIONS, namespace, revision("chat-engine-1", **labels))
    await kube.apply(SERVICES, namespace, service({"http": 8000}, **names.selector("chat")))
    objects = await observe_kube.read(kube, Key(namespace, "chat"))
    assert objects is not None
    assert objects.deployment.spec.replicas == 2
    assert [r.name for r in objects.revisions] == ["chat-engine-1"]
    assert list(objects.services) == ["chat"]
    assert objects.problems == ()


async def test_what_the_planner_makes_is_taken_by_the_api_server(kube: KubeClient, namespace: str) -> None:
    """Strictly: no field of it is unknown to KubeRay's CRD. What an overlay of the user brings is checked likewise."""
    overlay = {"spec": {"priorityClassName": "high", "tolerations": [{"operator": "Exists"}]}}
    workers = {"acceleratorsPerNode": 1, "template": overlay}
    spec = deployment(replicas=2, parallelism={"tensor": 2}, cluster={"workers": workers})
    await kube.create(VLLM_DEPLOYMENTS, namespace, spec)
    clients = Clients(kube, FakeRay(), FakeEngine(FakeClock()), FakeClock())
    clusters: tuple[Cluster, ...] = ()
    for _ in range(10):
        observation = await observe(Key(namespace, "chat"), clients, ())
        assert observation is not None
        clusters = observation.world.clusters
        if clusters:
            break
        decided = plan(observation.world, datetime.now(UTC), new_nonce=lambda: "abcdef", defaults=Defaults())
        assert await execute(decided.actions, observation, clients) == ()
        stored = await kube.get(VLLM_DEPLOYMENTS, namespace, "chat")
        await kube.replace_status(VLLM_DEPLOYMENTS, namespace, {**stored, "status": decided.status.to_wire()})
    (cluster,) = clusters
    assert cluster.groups == (("slot-0", 2), ("slot-1", 2))
    stored = await kube.get(RAY_CLUSTERS, namespace, cluster.name)
    assert stored["spec"]["authOptions"] == {"mode": "token"}
    assert stored["spec"]["workerGroupSpecs"][0]["template"]["spec"]["priorityClassName"] == "high"


async def test_missing_rights_are_named(kubeconfig: str, kube: KubeClient, namespace: str, tmp_path: Path) -> None:
    await _raw(kube, "POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": "nobody"}})
    reply = await _raw(kube, "POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/nobody/token", {"spec": {}})
    path = _kubeconfig_with(kubeconfig, reply["status"]["token"], tmp_path)
    async with await KubeClient.connect(kubeconfig=path) as nobody:
        with pytest.raises(Forbidden, match=r'cannot list resource "rayclusters" in API group "ray\.io"') as caught:
            await nobody.list(RAY_CLUSTERS, namespace, {})
        assert caught.value.status == 403


async def test_a_token_that_is_not_accepted(kubeconfig: str, tmp_path: Path) -> None:
    path = _kubeconfig_with(kubeconfig, "wrong-token", tmp_path)
    async with await KubeClient.connect(kubeconfig=path) as nobody:
        with pytest.raises(Forbidden) as caught:
            await nobody.get(SECRETS, "default", "x")
    assert caught.value.status == 401
    assert "wrong-token" not in str(caught.value)


async def test_a_server_that_is_not_there(kubeconfig: str, tmp_path: Path) -> None:
    path = _kubeconfig_with(kubeconfig, "token", tmp_path, server="https://127.0.0.1:1")
    async with await KubeClient.connect(kubeconfig=path) as client:
        with pytest.raises(ApiError, match="cannot be reached") as caught:
            await client.get(SECRETS, "default", "x")
    assert caught.value.status is None


def _kubeconfig_with(like: str, token: str, folder: Path, server: str | None = None) -> str:
    """Write a kubeconfig like the given one, with other credentials."""
    config = yaml.safe_load(Path(like).read_text())
    current = next(c["context"] for c in config["contexts"] if c["name"] == config["current-context"])
    for user in config["users"]:
        if user["name"] == current["user"]:
            user["user"] = {"token": token}
    if server is not None:
        next(c for c in config["clusters"] if c["name"] == current["cluster"])["cluster"]["server"] = server
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return str(path)
