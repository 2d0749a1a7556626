"""What the Kubernetes client makes of answers that a real API server gives too seldom to test with one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import certifi
import pytest
import yaml
from aiohttp import web
from kubernetes.aio.config import incluster_config

from tests.unit.clients.conftest import Request, Served
from vllm_ray_operator.clients import kube as kube_module
from vllm_ray_operator.clients.kube import KubeClient
from vllm_ray_operator.clients.protocols import (
    PODS,
    RAY_CLUSTERS,
    SECRETS,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    KindMissing,
    NotFound,
)


@pytest.fixture
async def kube(served: Served, tmp_path: Path) -> AsyncIterator[KubeClient]:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "x", "cluster": {"server": served.url}}],
        "users": [{"name": "x", "user": {"token": "kube-token"}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "current-context": "x",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    async with await KubeClient.connect(kubeconfig=str(path)) as client:
        yield client


def status(code: int, reason: str, message: str, **details: Any) -> web.Response:
    body = {"kind": "Status", "code": code, "reason": reason, "message": message, "details": details}
    return web.json_response(body, status=code)


NOT_SERVED = "the server could not find the requested resource"


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        pytest.param(
            status(404, "NotFound", 'pods "x" not found', name="x", kind="pods"), NotFound, "not found", id="object"
        ),
        pytest.param(status(404, "NotFound", NOT_SERVED), KindMissing, "its CRD is missing", id="kind, as a Status"),
        pytest.param(
            web.Response(status=404, text="404 page not found\n"), KindMissing, "its CRD is missing", id="kind, as text"
        ),
        pytest.param(status(409, "AlreadyExists", "exists", name="x", kind="pods"), Conflict, "exists", id="exists"),
        pytest.param(
            status(422, "Invalid", 'Pod "x" is invalid: spec.a: Required value', kind="Pod"),
            Invalid,
            r"spec\.a: Required value",
            id="invalid",
        ),
        pytest.param(web.Response(status=413, text="too large"), Invalid, "HTTP 413", id="too large"),
        pytest.param(
            status(403, "Forbidden", 'pods is forbidden: User "u" cannot list resource "pods"'),
            Forbidden,
            'cannot list resource "pods"',
            id="no right",
        ),
        pytest.param(status(401, "Unauthorized", "Unauthorized"), Forbidden, "Unauthorized", id="no credentials"),
        pytest.param(
            status(500, "InternalError", 'failed calling webhook "x"'), ApiError, "failed calling webhook", id="webhook"
        ),
        pytest.param(web.Response(status=502, text="<html>bad</html>"), ApiError, "HTTP 502", id="a load balancer's"),
        pytest.param(web.Response(status=200, text="<html>hello</html>"), ApiError, "not JSON", id="a proxy's page"),
    ],
)
async def test_errors(kube: KubeClient, served: Served, answer: web.Response, kind: type[ApiError], words: str) -> None:
    served.answers(answer)
    with pytest.raises(ApiError, match=words) as caught:
        await kube.get(PODS, "default", "x")
    assert type(caught.value) is kind
    assert caught.value.status == answer.status
    assert "html" not in str(caught.value)


async def test_secrets_do_not_leak_by_errors(kube: KubeClient, served: Served) -> None:
    served.answers(web.Response(text='{"data": {"auth_token": "czNjcjN0"'))
    with pytest.raises(ApiError) as caught:
        await kube.get(SECRETS, "default", "x")
    assert "czNjcjN0" not in repr(caught.value)
    assert caught.value.__cause__ is None


async def test_a_list_whose_snapshot_expired_starts_again(kube: KubeClient, served: Served) -> None:
    served.answers(
        web.json_response({"metadata": {"continue": "t1"}, "items": [{"metadata": {"name": "old"}}]}),
        status(410, "Expired", "The provided continue parameter is too old"),
        web.json_response({"metadata": {"continue": "t2"}, "items": [{"metadata": {"name": "a"}}]}),
        web.json_response({"metadata": {}, "items": [{"metadata": {"name": "b"}}]}),
    )
    found = await kube.list(PODS, "default", {"app": "x", "tier": "y"})
    assert found == [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "b"}},
    ]
    queries = [dict(request.query) for request in served.requests]
    assert [query.get("continue") for query in queries] == [None, "t1", None, "t2"]
    assert {(query["limit"], query["labelSelector"]) for query in queries} == {("500", "app=x,tier=y")}


async def test_a_list_that_expires_for_ever_is_given_up(kube: KubeClient, served: Served) -> None:
    def answer(request: Request) -> web.Response:
        if "continue" in dict(request.query):
            return status(410, "Expired", "too old")
        return web.json_response({"metadata": {"continue": "t"}, "items": []})

    served.answer = answer
    with pytest.raises(ApiError, match="too old"):
        await kube.list(PODS, "default", {})
    assert len(served.requests) == 2 * kube_module.LIST_ATTEMPTS


async def test_requests(kube: KubeClient, served: Served) -> None:
    served.answer = lambda _: web.json_response({})
    cluster = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "chat"}}
    operations = [{"op": "test", "path": "/metadata/resourceVersion", "value": "7"}]
    await kube.apply(RAY_CLUSTERS, "ns", cluster)
    await kube.create(RAY_CLUSTERS, "ns", cluster)
    await kube.json_patch(RAY_CLUSTERS, "ns", "chat", operations)
    await kube.replace_status(RAY_CLUSTERS, "ns", cluster)
    await kube.delete(PODS, "ns", "p", "uid-1")
    await kube.delete(PODS, "ns", "p", None, grace_seconds=0)
    root = "/apis/ray.io/v1/namespaces/ns/rayclusters"
    strict = {"fieldManager": "vllm-ray-operator", "fieldValidation": "Strict"}
    sent = [(r.method, r.path, dict(r.query), r.headers["content-type"], json.loads(r.body)) for r in served.requests]
    assert sent == [
        (
            "PATCH",
            f"{root}/chat",
            {"fieldManager": "vllm-ray-operator", "force": "true"},
            "application/apply-patch+yaml",
            cluster,
        ),
        ("POST", root, strict, "application/json", cluster),
        ("PATCH", f"{root}/chat", strict, "application/json-patch+json", operations),
        ("PUT", f"{root}/chat/status", {"fieldManager": "vllm-ray-operator"}, "application/json", cluster),
        (
            "DELETE",
            "/api/v1/namespaces/ns/pods/p",
            {},
            "application/json",
            {
                "apiVersion": "v1",
                "kind": "DeleteOptions",
                "propagationPolicy": "Background",
                "preconditions": {"uid": "uid-1"},
            },
        ),
        (
            "DELETE",
            "/api/v1/namespaces/ns/pods/p",
            {},
            "application/json",
            {
                "apiVersion": "v1",
                "kind": "DeleteOptions",
                "propagationPolicy": "Background",
                "gracePeriodSeconds": 0,
            },
        ),
    ]
    assert {r.headers["authorization"] for r in served.requests} == {"Bearer kube-token"}
    assert {r.headers["user-agent"] for r in served.requests} == {"vllm-ray-operator"}


async def test_the_service_account_token_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime(2030, 1, 1)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return cast(Clock, now)

    token = tmp_path / "token"
    token.write_text("first")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(kube_module, "SERVICE_ACCOUNT_TOKEN", token)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", certifi.where())
    monkeypatch.setattr(incluster_config, "datetime", SimpleNamespace(datetime=Clock, timedelta=timedelta))
    sent: list[str] = []

    async def answer() -> bytes:
        return b"{}"

    async def call_api(method: str, url: str, headers: dict[str, str], *_: Any, **__: Any) -> SimpleNamespace:
        sent.append(headers["authorization"])
        return SimpleNamespace(status=200, read=answer)

    async with await KubeClient.connect() as kube:
        monkeypatch.setattr(kube._api, "call_api", call_api)
        await kube.get(PODS, "ns", "p")
        token.write_text("second")
        now += timedelta(seconds=90)
        await kube.get(PODS, "ns", "p")
    assert sent == ["bearer first", "bearer second"]


async def test_nobody_listens(kube: KubeClient, served: Served, unused_tcp_port: int) -> None:
    kube._api.configuration.host = f"http://127.0.0.1:{unused_tcp_port}"
    with pytest.raises(ApiError, match="the Kubernetes API server cannot be reached") as caught:
        await kube.get(PODS, "ns", "p")
    assert caught.value.status is None
