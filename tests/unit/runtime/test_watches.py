"""kopf's handlers and settings. That they work against an API server is shown by the integration tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kopf
import pytest

from vllm_ray_operator.clients.bundle import Key
from vllm_ray_operator.plan import names
from vllm_ray_operator.runtime import watches


@pytest.mark.parametrize("nodes", [True, False])
def test_only_event_handlers_are_registered(nodes: bool) -> None:
    """All others leave annotations or finalizers on what they watch."""
    registry = watches.registry(lambda _: None, nodes=nodes)
    handlers = registry._watching.get_all_handlers()
    assert len(handlers) == 1 + len(watches.CHILDREN) + 2 * nodes, "with nodes, and then pods have two"
    for others in (registry._changing, registry._spawning, registry._indexing, registry._webhooks):
        assert not others.get_all_handlers()


def handlers(changed: Callable[[Key], None]) -> Iterator[tuple[str, Any]]:
    """Each handler's function, and of what kind it is told."""
    for handler in watches.registry(changed, nodes=True)._watching.get_all_handlers():
        assert handler.selector is not None
        yield str(handler.selector.any_name), handler.fn


def pod(name: str, node: str | None, deployment: str | None = "chat") -> dict[str, Any]:
    labels = {names.DEPLOYMENT: deployment} if deployment else {}
    spec = {"nodeName": node} if node else {}
    return {"metadata": {"name": name, "uid": name, "namespace": "default", "labels": labels}, "spec": spec}


async def test_events_put_the_deployment_s_key_in_the_queue() -> None:
    keys: list[Key] = []
    for kind, handle in handlers(keys.append):
        name, labels = ("chat", {}) if kind == "vllmdeployments" else ("chat-1a2b-head", {names.DEPLOYMENT: "chat"})
        await handle(namespace="default", name=name, labels=labels, type="MODIFIED", body=pod("p", "node-1"))
    assert keys == [Key("default", "chat")] * 5


async def test_objects_without_our_label_put_nothing_in_the_queue() -> None:
    keys: list[Key] = []
    for kind, handle in handlers(keys.append):
        if kind != "vllmdeployments":
            await handle(namespace="default", name="chat", labels={}, type="ADDED", body=pod("p", "chat", None))
    assert keys == []


async def test_a_node_that_is_cordoned_or_not_concerns_those_with_pods_on_it() -> None:
    keys: list[Key] = []
    told = [(kind, handle) for kind, handle in handlers(keys.append)]

    async def tell(kind: str, type: str | None, body: dict[str, Any]) -> list[Key]:
        keys.clear()
        for of, handle in told:
            if of == kind:
                await handle(namespace=None, name=body["metadata"]["name"], labels={}, type=type, body=body)
        return sorted(keys, key=lambda key: key.name)

    node = {"metadata": {"name": "node-1"}}
    assert await tell("nodes", None, node) == []
    await tell("pods", "ADDED", pod("a", "node-1"))
    await tell("pods", "ADDED", pod("b", "node-1"))
    await tell("pods", "MODIFIED", pod("b", "node-1"))
    await tell("pods", None, pod("c", "node-1", "other"))
    await tell("pods", "ADDED", pod("d", "node-2", "away"))
    await tell("pods", "ADDED", pod("e", None, "waiting"))
    assert await tell("nodes", "ADDED", node) == [Key("default", "chat"), Key("default", "other")]
    await tell("pods", "DELETED", pod("c", "node-1", "other"))
    assert await tell("nodes", "DELETED", node) == [Key("default", "chat")]


def test_children_are_filtered_by_the_server_and_kopf_writes_nothing() -> None:
    settings = watches.settings()
    assert len(settings.watching.label_selectors) == len(watches.CHILDREN)
    assert set(settings.watching.label_selectors.values()) == {"app.kubernetes.io/managed-by=vllm-ray-operator"}
    assert list(settings.watching.field_selectors.values()) == ["spec.unschedulable=true"]
    assert settings.posting.enabled is False
    assert settings.scanning.disabled is True
    assert settings.peering.standalone is True
    assert settings.process.ultimate_exiting_timeout is None


@pytest.mark.parametrize(
    ("host", "server"), [("10.0.0.1", "https://10.0.0.1:6443"), ("fd00::1", "https://[fd00::1]:6443")]
)
def test_in_a_pod_the_service_account_is_used_without_dns(
    host: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("abc\n")
    monkeypatch.setattr(watches, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    connection = watches.connection(settings=kopf.OperatorSettings())
    assert connection is not None
    assert (connection.server, connection.token, connection.ca_path) == (server, "abc", str(tmp_path / "ca.crt"))


def test_outside_of_a_pod_the_kubeconfig_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    config = tmp_path / "config"
    config.write_text(
        "current-context: c\n"
        "contexts: [{name: c, context: {cluster: c, user: u}}]\n"
        "clusters: [{name: c, cluster: {server: 'https://example:6443'}}]\n"
        "users: [{name: u, user: {token: abc}}]\n"
    )
    monkeypatch.setenv("KUBECONFIG", str(config))
    connection = watches.connection(settings=kopf.OperatorSettings())
    assert connection is not None
    assert connection.server == "https://example:6443"
