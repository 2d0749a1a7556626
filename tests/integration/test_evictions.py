"""The real eviction API against the budgets that the planner makes, with pods that nothing runs."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.kube import CommandError, Kube
from e2e.waiting import wait_for
from tests.unit.plan import build
from tests.unit.plan.test_disruption import TWO_PODS, labels
from vllm_ray_operator.plan.world import Pod

pytestmark = pytest.mark.integration

READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


class Namespace:
    """Pods as a scene of the planner has them, and its budgets."""

    def __init__(self, kube: Kube, name: str) -> None:
        self.kube, self.name = kube, name

    def make(self, pod: Pod) -> None:
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": pod.name, "labels": dict(labels(pod))},
            "spec": {"containers": [{"name": "ray", "image": "registry.example/engine:1"}]},
        }
        self.kubectl("create", "-f", "-", stdin=yaml.safe_dump(manifest))
        patch = ("patch", "pod", pod.name, "--subresource=status", "--type=merge", "-p", json.dumps({"status": READY}))
        self.kubectl(*patch)

    def apply(self, budgets: dict[str, Any]) -> None:
        """Apply the budgets, less their owner, who is not there, and wait until they count."""
        for name, budget in budgets.items():
            manifest = {**budget, "metadata": {"name": name, "labels": budget["metadata"]["labels"]}}
            self.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(manifest))

        def taken_in() -> bool:
            found = [self.kube.get("pdb", name, "-n", self.name) for name in budgets]
            return all(b.get("status", {}).get("observedGeneration") == b["metadata"]["generation"] for b in found)

        wait_for("the budgets to be taken in", taken_in, seconds=60, poll=0.2)

    def evict(self, pod: str) -> str:
        """Evict a pod; return why not, empty if it went."""
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": self.name}}
        path = f"/api/v1/namespaces/{self.name}/pods/{pod}/eviction"
        try:
            self.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
        except CommandError as error:
            return str(error)
        return ""

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        return self.kube.kubectl(*args, "-n", self.name, stdin=stdin)


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    tools = Path(os.environ["VRO_TOOLS"]) if "VRO_TOOLS" in os.environ else None
    kube, name = Kube(tools, Path(os.environ["KUBECONFIG"])), f"evictions-{secrets.token_hex(3)}"
    kube.kubectl("create", "namespace", name)
    yield Namespace(kube, name)
    kube.kubectl("delete", "namespace", name, "--wait=false")


def test_of_cordoned_nodes_one_replica_is_evicted_at_a_time_and_whole(namespace: Namespace) -> None:
    scene = build.serving(build.spec_with(replicas=2, cluster=TWO_PODS))
    for pod in scene.world.pods.values():
        namespace.make(pod)
    namespace.apply(scene.budgets)
    assert set(scene.budgets) == {"chat-replicas", "chat-heads"}

    def allowed() -> bool:
        return bool(namespace.kube.get("pdb", "chat-replicas", "-n", namespace.name)["status"]["disruptionsAllowed"])

    wait_for("the pods to be counted", allowed, seconds=60, poll=0.2)
    assert "disruption budget" in namespace.evict("head")
    assert namespace.evict("w0-0") == ""
    for pod in ("w1-0", "w1-1", "w0-1"):
        assert "disruption budget" in namespace.evict(pod), f"{pod}: the operator has not seen it yet"

    scene.change_pod("w0-0", deleting=True)
    scene.step()
    assert scene.phase == "Stopping"
    namespace.apply(scene.budgets)
    for pod in ("w1-0", "w1-1", "head"):
        assert "disruption budget" in namespace.evict(pod), "the last replica that serves, and its head"
    assert namespace.evict("w0-1") == ""
