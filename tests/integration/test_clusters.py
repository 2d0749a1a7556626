"""RayClusters as real KubeRay takes them: one for each replica, others in their place, beside them, or none.

There is no node, so no engine is ever in the way: what takes its turn in a roll goes at once here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import pytest

from e2e.waiting import wait_for
from tests.integration.lab import Cluster, Object, Operator, Operators, vllm_deployment

pytestmark = pytest.mark.integration

Slots = dict[str, list[str]]


@dataclass(frozen=True)
class Scene:
    """A deployment with a RayCluster for each replica, and another that nobody may touch."""

    cluster: Cluster
    operator: Operator
    name: str
    other: str

    def scale(self, replicas: int) -> None:
        self.cluster.kube.kubectl("scale", "vd", self.name, "-n", self.cluster.namespace, f"--replicas={replicas}")

    def ask(self, replicas: int, *, suspend: bool = False, upgrade: str = "Recreate", **shape: str) -> None:
        manifest = vllm_deployment(self.cluster, self.name, replicas=replicas, suspend=suspend)
        manifest["spec"]["cluster"] = {"policy": "PerReplica", **shape}
        manifest["spec"]["rollout"] = {"clusterUpgrade": upgrade}
        self.cluster.apply(manifest)

    def wait(self, what: str, probe: Callable[[], Slots | None]) -> Slots:
        return wait_for(what, probe, seconds=60, describe=lambda: f"{self.slots()} {self.pods()}", poll=0.2)

    def slots(self) -> Slots:
        """Return the RayClusters that are to stay, with their worker groups."""
        return {
            c["metadata"]["name"]: [group["groupName"] for group in c["spec"]["workerGroupSpecs"]]
            for c in self.cluster.ray_clusters()
            if "deletionTimestamp" not in c["metadata"] and _owner(c) == ("VLLMDeployment", self.name)
        }

    def pods(self) -> list[tuple[str, str]]:
        """Return RayCluster and group of each pod, sorted."""
        labels = [pod["metadata"]["labels"] for pod in self._pods(self.name)]
        return sorted((each["ray.io/cluster"], each["ray.io/group"]) for each in labels)

    def one_each(self, *indices: int, other_than: Slots | None = None) -> Callable[[], Slots | None]:
        """Probe for one RayCluster for each of these replicas, with its pods and nothing else."""

        def probe() -> Slots | None:
            found = self.slots()
            expected = [(name, group) for name, slots in found.items() for group in (*slots, "headgroup")]
            there = sorted(found.values()) == [[f"slot-{index}"] for index in indices]
            return (
                found if there and sorted(expected) == self.pods() and not found.keys() & (other_than or {}) else None
            )

        return probe

    def bystander(self) -> set[str]:
        """Return what the other deployment has, with its identity."""
        owned = [c for c in self.cluster.ray_clusters() if _owner(c) == ("VLLMDeployment", self.other)]
        shapes = {f"{c['metadata']['uid']} generation {c['metadata']['generation']}" for c in owned}
        return shapes | {pod["metadata"]["uid"] for pod in self._pods(self.other)}

    def _pods(self, deployment: str) -> list[Object]:
        selector = f"vllm-ray.dev/deployment={deployment}"
        return self.cluster.kube.items("pods", "-n", self.cluster.namespace, "-l", selector)


def _owner(thing: Object) -> tuple[str, str]:
    owner = next(o for o in thing["metadata"]["ownerReferences"] if o.get("controller"))
    return owner["kind"], owner["name"]


NUMBERS = count(1)  # what an earlier test left goes in its own time


@pytest.fixture
def scene(cluster: Cluster, operators: Operators) -> Scene:
    number = next(NUMBERS)
    scene = Scene(cluster, operators.start("first"), f"chat-{number}", f"other-{number}")
    cluster.apply(vllm_deployment(cluster, scene.other))
    wait_for("a head and a worker of the other", lambda: len(scene.bystander()) == 3, seconds=60, poll=0.2)
    return scene


def test_each_replica_has_a_raycluster_that_comes_and_goes_with_it(scene: Scene) -> None:
    other = scene.bystander()
    scene.ask(2)
    first = scene.wait("a RayCluster for each", scene.one_each(0, 1))
    assert [name[-2:] for name in sorted(first)] == ["-0", "-1"]
    assert "rayCluster" not in scene.cluster.deployment(scene.name)["status"]

    scene.scale(3)
    more = scene.wait("one more", scene.one_each(0, 1, 2))
    assert more.keys() > first.keys()

    scene.ask(3, rayVersion="2.59.0")
    second = scene.wait("others in their place", scene.one_each(0, 1, 2, other_than=more))

    scene.scale(1)
    left = scene.wait("two that go with their replicas", scene.one_each(0))
    assert left.keys() < second.keys()
    assert scene.bystander() == other


def test_blue_green_moves_what_does_not_serve_and_makes_nothing_beside_it(scene: Scene) -> None:
    other = scene.bystander()
    scene.ask(2, upgrade="BlueGreen")
    old = scene.wait("a RayCluster for each", scene.one_each(0, 1))
    scene.ask(2, upgrade="BlueGreen", rayVersion="2.59.0")
    new = scene.wait("others in their place", scene.one_each(0, 1, other_than=old))
    scene.ask(2, upgrade="BlueGreen")
    again = scene.wait("the old revision", scene.one_each(0, 1, other_than=new))
    assert again == old, "named after the revision"
    assert scene.bystander() == other


def test_suspended_it_has_no_raycluster_and_no_pod_until_it_is_resumed(scene: Scene) -> None:
    other = scene.bystander()
    scene.ask(2)
    before = scene.wait("a RayCluster for each", scene.one_each(0, 1))
    scene.ask(2, suspend=True)
    scene.wait("nothing", lambda: {"nothing": []} if not scene.slots() and not scene.pods() else None)

    def told() -> bool:
        conditions = {c["type"]: c["reason"] for c in scene.cluster.deployment(scene.name)["status"]["conditions"]}
        return (conditions["Ready"], conditions["Progressing"]) == ("Suspended", "Suspended")

    wait_for("the conditions to say so", told, seconds=30, describe=scene.operator.tail, poll=0.2)
    assert scene.cluster.kube.get("service", scene.name, "-n", scene.cluster.namespace), "clients keep its address"
    scene.ask(2)
    assert scene.wait("the same again", scene.one_each(0, 1)) == before
    assert scene.bystander() == other
