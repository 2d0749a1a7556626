from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plan import build
from tests.unit.plan.model import patch
from vllm_ray_operator.api.spec import VLLMDeploymentSpec
from vllm_ray_operator.plan import raycluster
from vllm_ray_operator.plan.raycluster import ResolvedCluster, Unresolvable
from vllm_ray_operator.plan.world import Cluster


def resolve(image: str | None = "img:1", **parts: Any) -> ResolvedCluster:
    spec = VLLMDeploymentSpec.model_validate(build.spec_with(**parts))
    return raycluster.render_cluster(build.NAME, spec, image)


def manifest(replicas: int = 2, **parts: Any) -> Any:
    return raycluster.manifest(build.deployment(), "chat-12345678", "chat-cluster-1", resolve(**parts), range(replicas))


def ray_container(template: Any) -> Any:
    return template["spec"]["containers"][0]


# -- the manifest ------------------------------------------------------------------------------------------------------


def test_a_slot_for_every_replica() -> None:
    groups = manifest(replicas=2)["spec"]["workerGroupSpecs"]
    assert [g["groupName"] for g in groups] == ["slot-0", "slot-1"]
    for index, group in enumerate(groups):
        assert group["resources"] == {"GPU": "2", f"vd-slot-{index}": "2", f"vd-driver-{index}": "2"}
        assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (1, 1, 1)
        assert group["template"]["metadata"]["labels"]["vllm-ray.dev/replica"] == str(index)
        assert ray_container(group["template"])["resources"] == {"limits": {"nvidia.com/gpu": 2}}


def test_no_slot_without_replicas() -> None:
    assert manifest(replicas=0)["spec"]["workerGroupSpecs"] == []


SIZES: dict[str, tuple[dict[str, Any], int, int]] = {
    # parallelism and workers; accelerators of a pod, pods of a slot
    "one": ({"parallelism": {}}, 1, 1),
    "one pod": ({"parallelism": {"tensor": 4, "pipeline": 2}}, 8, 1),
    "at most eight in a pod": ({"parallelism": {"tensor": 8, "pipeline": 2}}, 8, 2),
    "spread": ({"parallelism": {"tensor": 2}, "cluster": {"workers": {"acceleratorsPerNode": 1}}}, 1, 2),
    "the last pod not full": ({"parallelism": {"tensor": 6}, "cluster": {"workers": {"acceleratorsPerNode": 4}}}, 4, 2),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    parts, per_pod, pods = SIZES[name]
    resolved = resolve(**parts)
    assert (resolved.accelerators_per_pod, resolved.pods_per_slot) == (per_pod, pods)
    assert raycluster.slot_group(resolved, 0)["replicas"] == pods


@pytest.mark.parametrize("parallelism", [{"tensor": 4}, {"tensor": 2, "pipeline": 2}, {}])
def test_a_slot_has_no_room_for_a_second_engine(parallelism: Any) -> None:
    """A standby would start in it beside the engine that serves (I2)."""
    with pytest.raises(Unresolvable, match="set it to at most") as raised:
        resolve(parallelism=parallelism, cluster={"workers": {"acceleratorsPerNode": 8}})
    assert raised.value.reason == "AcceleratorsLeftOver"


def test_the_head_does_no_work() -> None:
    head = manifest()["spec"]["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    assert ray_container(head["template"])["resources"] == {}


@pytest.mark.parametrize(
    ("auth", "options"), [(None, {"mode": "token"}), ("Token", {"mode": "token"}), ("Disabled", None)]
)
def test_authentication(auth: str | None, options: Any) -> None:
    cluster = {} if auth is None else {"auth": auth}
    assert manifest(cluster=cluster)["spec"].get("authOptions") == options


def test_owner_and_labels() -> None:
    made = manifest(cluster={"labels": {"queue": "a", "vllm-ray.dev/deployment": "forged"}, "annotations": {"b": "c"}})
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("VLLMDeployment", build.UID, True)
    assert made["metadata"]["labels"] == {
        "queue": "a",
        "app.kubernetes.io/managed-by": "vllm-ray-operator",
        "vllm-ray.dev/deployment": "chat",
        "vllm-ray.dev/cluster-revision": "chat-cluster-1",
    }
    assert made["metadata"]["annotations"] == {"b": "c"}


def templates(made: Any) -> list[Any]:
    return [made["spec"]["headGroupSpec"]["template"], *(g["template"] for g in made["spec"]["workerGroupSpecs"])]


def test_every_pod_can_be_found_and_is_fit_for_vllm() -> None:
    for template in templates(manifest(engine={"image": "mine:2", "shmSize": "1Gi"})):
        assert template["metadata"]["labels"]["vllm-ray.dev/deployment"] == "chat"
        assert template["spec"]["enableServiceLinks"] is False
        assert template["spec"]["automountServiceAccountToken"] is False
        container = ray_container(template)
        assert (container["name"], container["image"]) == ("ray", "mine:2")
        environment = {variable["name"]: variable for variable in container["env"]}
        assert environment["VLLM_HOST_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
        assert template["spec"]["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}]


def test_an_overlay_keeps_ray_first_and_our_labels() -> None:
    overlay = {
        "metadata": {"labels": {"vllm-ray.dev/deployment": "forged", "mine": "yes"}},
        "spec": {
            "containers": [{"name": "sidecar", "image": "s"}, {"name": "ray", "env": [{"name": "A", "value": "1"}]}],
            "nodeSelector": {"gpu": "h100"},
        },
    }
    made = manifest(cluster={"head": {"template": overlay}, "workers": {"template": overlay}})
    for template in templates(made):
        assert [c["name"] for c in template["spec"]["containers"]] == ["ray", "sidecar"]
        assert [v["name"] for v in ray_container(template)["env"]] == ["VLLM_HOST_IP", "RAY_JOB_STOP_WAIT_TIME_S", "A"]
        assert template["spec"]["nodeSelector"] == {"gpu": "h100"}
        assert template["metadata"]["labels"]["vllm-ray.dev/deployment"] == "chat"
        assert template["metadata"]["labels"]["mine"] == "yes"


def test_resources_of_head_and_workers() -> None:
    made = manifest(
        cluster={
            "head": {"resources": {"requests": {"cpu": 1}}},
            "workers": {
                "resources": {"requests": {"cpu": "8"}, "limits": {"memory": "9Gi"}},
                "acceleratorResource": "x/y",
            },
        }
    )
    head, slot, _ = templates(made)
    assert ray_container(head)["resources"] == {"requests": {"cpu": 1}}
    assert ray_container(slot)["resources"] == {"requests": {"cpu": "8"}, "limits": {"memory": "9Gi", "x/y": 2}}


def test_no_accelerator_resource_for_cpu_builds() -> None:
    made = manifest(cluster={"workers": {"acceleratorResource": ""}})
    assert ray_container(templates(made)[1])["resources"] == {}
    assert made["spec"]["workerGroupSpecs"][0]["resources"]["GPU"] == "2"


def test_a_claim_is_mounted_read_only() -> None:
    for template in templates(manifest(model={"uri": "pvc://weights/llama"})):
        mount = ray_container(template)["volumeMounts"][1]
        volume = template["spec"]["volumes"][1]
        assert mount == {"name": "model", "mountPath": "/models/weights", "readOnly": True}
        assert volume["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}


def test_an_image_has_to_come_from_somewhere() -> None:
    with pytest.raises(Unresolvable, match=r"spec\.engine\.image") as caught:
        resolve(image=None)
    assert caught.value.reason == "EngineImageMissing"
    assert ray_container(resolve(image=None, engine={"image": "mine:1"}).head)["image"] == "mine:1"


def test_what_is_resolved_survives_being_stored() -> None:
    resolved = resolve(cluster={"workers": {"template": {"spec": {"a": None, "b": {"c": None}}}}})
    assert ResolvedCluster.model_validate(resolved.to_wire()) == resolved


# -- slots -------------------------------------------------------------------------------------------------------------


def live(groups: Iterable[tuple[str, int]], pods: Iterable[str] = ()) -> Cluster:
    return build.cluster("c", [build.head(), *(build.pod(f"pod-of-{g}", g) for g in pods)], tuple(groups))


def sync(
    cluster: Cluster, wanted: Iterable[int], resolved: ResolvedCluster | None = None
) -> list[tuple[str, int]] | None:
    """The groups after the patch was applied as an API server does; None if there is no patch."""
    action = raycluster.sync_slots(cluster, resolved or resolve(), set(wanted))
    if action is None:
        return None
    test, *operations = action.operations
    assert test == {"op": "test", "path": "/metadata/resourceVersion", "value": cluster.resource_version}
    spec: dict[str, Any] = {}
    if cluster.groups:
        sizes = ("replicas", "minReplicas", "maxReplicas")
        spec["workerGroupSpecs"] = [{"groupName": g, **dict.fromkeys(sizes, n)} for g, n in cluster.groups]
    patched = {"spec": spec}
    for operation in deepcopy(operations):
        patch(patched, operation)
    after = patched["spec"]["workerGroupSpecs"]
    assert all(g["replicas"] == g["minReplicas"] == g["maxReplicas"] for g in after)
    return [(g["groupName"], g["replicas"]) for g in after]


SLOTS: dict[str, tuple[Cluster, set[int], list[tuple[str, int]] | None]] = {
    "in step": (live([("slot-0", 1), ("slot-1", 1)]), {0, 1}, None),
    "in step, other order": (live([("slot-1", 1), ("slot-0", 1)]), {0, 1}, None),
    "added at the end": (live([("slot-0", 1)]), {0, 1, 2}, [("slot-0", 1), ("slot-1", 1), ("slot-2", 1)]),
    "from no groups": (live([]), {0, 1}, [("slot-0", 1), ("slot-1", 1)]),
    "shrunk first": (live([("slot-0", 1), ("slot-1", 1)], ["slot-1"]), {0}, [("slot-0", 1), ("slot-1", 0)]),
    "kept while a pod is left": (live([("slot-0", 1), ("slot-1", 0)], ["slot-1"]), {0}, None),
    "removed with its last pod": (live([("slot-0", 1), ("slot-1", 0)]), {0}, [("slot-0", 1)]),
    "never shrunk and removed at once": (live([("slot-0", 1)]), set(), [("slot-0", 0)]),
    "all removed": (live([("slot-0", 0), ("slot-1", 0)]), set(), []),
    "several at once": (
        live([("slot-0", 0), ("slot-1", 1), ("slot-2", 0), ("slot-3", 1)], ["slot-3"]),
        {1, 5},
        [("slot-1", 1), ("slot-3", 0), ("slot-5", 1)],
    ),
    "all removed and another added": (live([("slot-0", 0)]), {1}, [("slot-1", 1)]),
    "wanted again while it shrinks": (live([("slot-0", 0)], ["slot-0"]), {0}, [("slot-0", 1)]),
    "size repaired": (live([("slot-0", 3)]), {0}, [("slot-0", 1)]),
    "a foreign group goes too": (live([("slot-0", 1), ("mine", 2)], ["mine"]), {0}, [("slot-0", 1), ("mine", 0)]),
}


@pytest.mark.parametrize("name", SLOTS)
def test_sync_slots(name: str) -> None:
    cluster, wanted, expected = SLOTS[name]
    assert sync(cluster, wanted) == expected


def test_slots_of_several_pods() -> None:
    resolved = resolve(cluster={"workers": {"acceleratorsPerNode": 1}})
    assert sync(live([]), {0}, resolved) == [("slot-0", 2)]
    assert sync(live([("slot-0", 1)]), {0}, resolved) == [("slot-0", 2)]


@settings(deadline=None)  # a loaded machine
@given(
    groups=st.dictionaries(st.integers(0, 6), st.integers(0, 2), max_size=6),
    with_pods=st.sets(st.integers(0, 6)),
    wanted=st.sets(st.integers(0, 6)),
)
def test_slots_end_as_wanted_and_none_is_removed_with_pods(
    groups: dict[int, int], with_pods: set[int], wanted: set[int]
) -> None:
    before = [(f"slot-{i}", n) for i, n in groups.items()]
    after = sync(live(before, [f"slot-{i}" for i in with_pods]), wanted)
    if after is None:
        after = before
    assert {g for g, n in after if n} == {f"slot-{i}" for i in wanted}
    assert len({g for g, _ in after}) == len(after)
    kept = {g for g, _ in after}
    assert all(g in kept for g, n in before if n or int(g[5:]) in with_pods)
