"""Pod problems in plain words."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from vllm_ray_operator.observe import words

Object = dict[str, Any]


def pod(status: Object, **spec: Any) -> Object:
    container = {"name": "ray", "image": "reg/engine:9", "resources": {"limits": {"memory": "8Gi"}}}
    init = {"name": "wait-gcs-ready", "image": "reg/engine:9"}
    return {
        "metadata": {"name": "chat-slot-0"},
        "spec": {"containers": [container], "initContainers": [init], "nodeName": "node-a", **spec},
        "status": status,
    }


def container(name: str = "ray", **fields: Any) -> Object:
    return {"name": name, "image": "reg/engine:9", "restartCount": 0, "ready": False, "state": {}, **fields}


def waiting(reason: str, message: str = "", **fields: Any) -> Object:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [container(state=state, **fields)]}


def condition(kind: str, status: str, **fields: str) -> Object:
    return {"type": kind, "status": status, **fields}


def pull(cause: str) -> Object:
    return waiting("ImagePullBackOff", f'Back-off pulling image "reg/engine:9": ErrImagePull: {cause}')


MISSING = 'rpc error: code = NotFound desc = failed to pull and unpack image "reg/engine:9": not found'
DENIED = "failed to authorize: failed to fetch anonymous token: unexpected status: 401 Unauthorized"
SCHEDULER = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
NO_SECRET = 'secret "hf-token" not found'
OOM = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
EXITED = {"terminated": {"reason": "Error", "exitCode": 1}}

PROBLEMS = {
    "nothing known yet": (pod({"phase": "Pending"}), "", ()),
    "running": (pod({"containerStatuses": [container(ready=True, state={"running": {}})]}), "", ()),
    "starting, not ready yet": (pod({"containerStatuses": [container(state={"running": {}})]}), "", ()),
    "being created": (pod(waiting("ContainerCreating")), "", ()),
    "waits for the head in its init container": (
        pod(
            {
                "initContainerStatuses": [container("wait-gcs-ready", state={"running": {}})],
                "containerStatuses": [container(state={"waiting": {"reason": "PodInitializing"}})],
            }
        ),
        "",
        (),
    ),
    "image not there": (
        pod(pull(MISSING)),
        "ImagePullBackOff",
        ("image reg/engine:9", "not found", "spec.engine.image"),
    ),
    "image not there, first try": (pod(waiting("ErrImagePull", MISSING)), "ImagePullBackOff", ("cannot be pulled",)),
    "image refused": (pod(pull(DENIED)), "ImagePullBackOff", ("imagePullSecrets",)),
    "image, no cause given": (
        pod(waiting("ImagePullBackOff", 'Back-off pulling image "reg/engine:9"')),
        "ImagePullBackOff",
        ("image reg/engine:9 cannot be pulled; check",),
    ),
    "image of the init container": (
        pod(
            {
                "initContainerStatuses": [
                    container("wait-gcs-ready", state={"waiting": {"reason": "ErrImagePull", "message": MISSING}})
                ]
            }
        ),
        "ImagePullBackOff",
        ("image reg/engine:9",),
    ),
    "malformed image name": (
        pod(waiting("InvalidImageName", "couldn't parse image name")),
        "ImagePullBackOff",
        ("parse",),
    ),
    "no node fits": (
        pod({"conditions": [condition("PodScheduled", "False", reason="Unschedulable", message=SCHEDULER)]}),
        "Unschedulable",
        ("3 Insufficient nvidia.com/gpu", "free nodes", "spec.cluster"),
    ),
    "held back by a queue": (
        pod({"conditions": [condition("PodScheduled", "False", reason="SchedulingGated")]}),
        "SchedulingGated",
        ("queue",),
    ),
    "a secret is missing": (
        pod(waiting("CreateContainerConfigError", NO_SECRET)),
        "CreateContainerConfigError",
        ("hf-token", "spec.cluster.workers.template"),
    ),
    "crashing": (
        pod(waiting("CrashLoopBackOff", "back-off 40s restarting failed container", lastState=EXITED)),
        "CrashLoopBackOff",
        ("exits again and again with code 1", "kubectl logs --previous chat-slot-0"),
    ),
    "killed for memory": (pod(waiting("CrashLoopBackOff", lastState=OOM)), "OOMKilled", ("limit is 8Gi", "raise")),
    "killed for memory just now": (
        pod({"containerStatuses": [container(state=OOM)]}),
        "OOMKilled",
        ("container ray of pod chat-slot-0",),
    ),
    "killed for memory once, runs again": (
        pod({"containerStatuses": [container(ready=True, state={"running": {}}, lastState=OOM)]}),
        "",
        (),
    ),
    "evicted": (
        pod({"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}),
        "Evicted",
        ("low on resource",),
    ),
    "node lost": (
        pod(
            {
                "conditions": [condition("Ready", "False"), condition("ContainersReady", "True")],
                "containerStatuses": [container(ready=True, state={"running": {}})],
            }
        ),
        "NodeNotReady",
        ("its node node-a does not answer",),
    ),
}


@pytest.mark.parametrize(("resource", "reason", "parts"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_pod_problem(resource: Object, reason: str, parts: tuple[str, ...]) -> None:
    found, message = words.pod_problem(resource)
    assert found == reason
    assert bool(message) == bool(reason)
    for part in parts:
        assert part in message


def test_a_pod_being_deleted_has_no_problem() -> None:
    resource = pod(pull(MISSING))
    resource["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    assert words.pod_problem(resource) == ("", "")


def test_a_pod_on_a_lost_node_says_so_also_when_it_is_deleted() -> None:
    since = {**condition("Ready", "False"), "lastTransitionTime": "2030-01-01T00:00:07Z"}
    resource = pod({"conditions": [since, condition("ContainersReady", "True")]})
    resource["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    assert words.pod_problem(resource)[0] == "NodeNotReady"
    assert words.lost_since(resource) == datetime(2030, 1, 1, 0, 0, 7, tzinfo=UTC)
    resource["status"]["conditions"][0]["status"] = "True"
    assert words.lost_since(resource) is None


def test_the_words_do_not_change_with_every_retry() -> None:
    """Else each one would be written into the status."""
    assert words.pod_problem(pod(pull(MISSING))) == words.pod_problem(pod(waiting("ErrImagePull", MISSING)))
    delays = ("back-off 10s restarting failed container", "back-off 20s restarting failed container")
    crashes = [pod(waiting("CrashLoopBackOff", d, lastState=EXITED, restartCount=n)) for n, d in enumerate(delays)]
    assert words.pod_problem(crashes[0]) == words.pod_problem(crashes[1])


def test_a_long_cause_is_cut() -> None:
    _, message = words.pod_problem(pod(pull("x" * 5000)))
    assert len(message) < 2 * words.MAX_CHARACTERS


def test_readiness_gates_do_not_make_a_node_lost() -> None:
    status = {"conditions": [condition("Ready", "False"), condition("ContainersReady", "True")]}
    assert not words.node_is_lost(pod(status, readinessGates=[{"conditionType": "x"}]))


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, ""),
        ({"state": "ready"}, ""),
        ({"conditions": [condition("ReplicaFailure", "False", reason="x")]}, ""),
        (
            {"conditions": [condition("ReplicaFailure", "True", reason="FailedCreatePod", message="quota exceeded")]},
            "KubeRay cannot make all pods: quota exceeded",
        ),
        ({"state": "failed", "reason": "bad spec"}, "KubeRay gave up on the RayCluster: bad spec"),
    ],
)
def test_cluster_problem(status: Object, expected: str) -> None:
    assert words.cluster_problem(status) == expected


@pytest.mark.parametrize(
    ("toleration", "tolerates"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": "node.kubernetes.io/unschedulable"}, True),
        ({"key": "node.kubernetes.io/unschedulable", "value": "x"}, False),
        ({"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "nvidia.com/gpu", "operator": "Exists"}, False),
        ({"value": ""}, False),
    ],
)
def test_a_pod_that_could_be_scheduled_on_a_cordoned_node(toleration: dict[str, Any], tolerates: bool) -> None:
    assert words.tolerates_cordon({"spec": {"tolerations": [toleration]}}) is tolerates
    assert not words.tolerates_cordon({"spec": {}})
