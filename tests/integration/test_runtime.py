"""The operator's process against a real API server, with exactly the rights that its chart gives it.

KUBECONFIG names a control plane with KubeRay and our CRD, VRO_CLUSTER the embedded cluster it belongs to (for its audit
log), VRO_TOOLS the folder of kubectl and helm. `make test-integration` sets them.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import pytest

from e2e.cluster.layout import Layout
from e2e.waiting import wait_for
from tests.integration.lab import Cluster, Object, Operators, reconciled, vllm_deployment

pytestmark = pytest.mark.integration

RAY_CRD = "rayclusters.ray.io"
AT_REST_SECONDS = float(os.environ.get("VRO_AT_REST_SECONDS", "30"))
WRITES = {"create", "update", "patch", "delete", "deletecollection"}


class Audit:
    """What the operator asked of the API server since this was made."""

    def __init__(self, cluster: Cluster) -> None:
        self._path = Layout.of(os.environ["VRO_CLUSTER"]).audit_log
        self._users = {cluster.everywhere.user, cluster.here.user}
        self._from = self._path.stat().st_size

    def requests(self, stage: str = "ResponseComplete") -> list[Object]:
        with self._path.open() as log:
            log.seek(self._from)
            lines = [json.loads(line) for line in log if line.endswith("\n")]
        return [e for e in lines if e["user"]["username"] in self._users and e["stage"] == stage]


def in_words(request: Object) -> str:
    return f"{request['verb']} {request['requestURI']} -> {request['responseStatus']['code']}"


def refused(audit: Audit) -> list[str]:
    """Return what the operator was not allowed to do, except to create something in a namespace that goes away."""
    return [
        in_words(request)
        for request in audit.requests()
        if request["responseStatus"]["code"] in (401, 403)
        and "is being terminated" not in request["responseStatus"].get("message", "")
    ]


def test_an_event_leads_to_a_pass_and_leaves_nothing_on_the_resource(cluster: Cluster, operators: Operators) -> None:
    audit = Audit(cluster)
    operator = operators.start("first")
    assert operator.get(operator.health, "/healthz") == (200, "ok\n")
    cluster.apply(vllm_deployment(cluster))
    found = wait_for("the new deployment to be taken up", reconciled(cluster), seconds=20, poll=0.2)
    assert "annotations" not in found["metadata"]
    assert "finalizers" not in found["metadata"]
    assert found["spec"] == {"model": {"uri": "hf://org/model"}, "replicas": 1}, "the spec is the user's alone"
    wait_for("its RayCluster", cluster.ray_clusters, seconds=20, poll=0.2)

    cluster.apply(vllm_deployment(cluster, replicas=2))
    wait_for("the change to be taken up", reconciled(cluster), seconds=20, poll=0.2)
    groups = wait_for(
        "the second slot",
        lambda: len(cluster.ray_clusters()[0]["spec"]["workerGroupSpecs"]) == 2,
        seconds=20,
        poll=0.2,
    )
    assert groups
    assert not refused(audit), "the chart's role does not suffice"
    assert "error" not in operator.tail().lower(), operator.tail()


def test_a_change_of_a_child_leads_to_a_pass(cluster: Cluster, operators: Operators) -> None:
    operators.start("first")
    cluster.apply(vllm_deployment(cluster))

    def service() -> Object:
        return cluster.kube.get("service", "chat", "-n", cluster.namespace)

    first = wait_for("its Service", service, seconds=20, poll=0.2)
    cluster.kube.kubectl("delete", "service", "chat", "-n", cluster.namespace)
    again = wait_for(
        "the Service to be made again",
        lambda: (found := service()) and found["metadata"]["uid"] != first["metadata"]["uid"] and found,
        seconds=20,
        poll=0.2,
    )
    assert again


def test_applied_again_right_after_its_deletion_it_gets_a_ray_cluster_of_its_own(
    cluster: Cluster, operators: Operators
) -> None:
    """Under the same name as the one that the garbage collector still has to delete."""
    operator = operators.start("first")
    cluster.apply(vllm_deployment(cluster, "again"))

    def ray_cluster() -> Object | None:
        uid = cluster.deployment("again")["metadata"]["uid"]
        owned = [c for c in cluster.ray_clusters() if c["metadata"]["ownerReferences"][0]["uid"] == uid]
        return owned[0] if owned else None

    first = wait_for("its RayCluster", ray_cluster, seconds=20, describe=operator.tail, poll=0.2)
    cluster.kube.kubectl("delete", "vllmdeployment", "again", "-n", cluster.namespace)
    cluster.apply(vllm_deployment(cluster, "again"))
    second = wait_for("the RayCluster of the second", ray_cluster, seconds=60, describe=operator.tail, poll=0.2)
    assert second["metadata"]["name"] == first["metadata"]["name"]
    assert second["metadata"]["uid"] != first["metadata"]["uid"]


def test_a_service_of_somebody_else_is_left_alone(cluster: Cluster, operators: Operators) -> None:
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "taken", "namespace": cluster.namespace},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80}]},
    }
    cluster.apply(theirs)

    def service() -> Object:
        return cluster.kube.get("service", "taken", "-n", cluster.namespace)

    before = service()
    operator = operators.start("first")
    cluster.apply(vllm_deployment(cluster, "taken"))

    def told() -> bool:
        conditions = cluster.deployment("taken").get("status", {}).get("conditions", [])
        return any(c["type"] == "Ready" and c["reason"] == "NameTaken" for c in conditions)

    wait_for("the condition to say that the name is taken", told, seconds=30, describe=operator.tail, poll=0.2)
    assert service() == before
    cluster.kube.kubectl("delete", "service", "taken", "-n", cluster.namespace)
    wait_for("a Service of its own", service, seconds=60, describe=operator.tail, poll=0.5)
    wait_for("the condition to be gone", lambda: not told(), seconds=30, describe=operator.tail, poll=0.5)


def test_at_rest_nothing_is_written_but_the_lease(cluster: Cluster, operators: Operators) -> None:
    operator = operators.start("first")
    cluster.apply(vllm_deployment(cluster))
    wait_for("the new deployment to be taken up", reconciled(cluster), seconds=20, poll=0.2)
    settled_version = ""

    def settled() -> bool:
        nonlocal settled_version
        before = settled_version
        settled_version = str(cluster.deployment("chat")["metadata"]["resourceVersion"])
        return before == settled_version

    wait_for("the deployment to settle", settled, seconds=60, poll=5)
    audit = Audit(cluster)
    end = time.monotonic() + AT_REST_SECONDS
    wait_for("the time at rest to pass", lambda: time.monotonic() >= end, seconds=AT_REST_SECONDS + 5)
    writes = [r for r in audit.requests() if r["verb"] in WRITES]
    leases = [r for r in writes if r["objectRef"]["resource"] == "leases"]
    assert [in_words(r) for r in writes if r not in leases] == []
    assert len(leases) >= AT_REST_SECONDS / 5 - 2, "the lease is renewed every 5 s"
    assert len(leases) <= AT_REST_SECONDS / 5 + 2
    assert operator.is_leader()


def test_sigterm_releases_the_lease_and_a_stand_by_takes_over(cluster: Cluster, operators: Operators) -> None:
    leader = operators.start("first")
    follower = operators.start("second")
    assert (leader.is_leader(), follower.is_leader()) == (True, False), "and the follower is ready all the same"
    code, seconds = leader.stop()
    assert code == 0, leader.tail()
    assert seconds < 5
    wait_for("the stand-by to lead", follower.is_leader, seconds=5, describe=follower.tail, poll=0.2)
    cluster.apply(vllm_deployment(cluster))
    wait_for("the new deployment to be taken up", reconciled(cluster), seconds=20, poll=0.2)
    assert cluster.holder() == "second_uid-of-second"


def test_a_killed_container_is_followed_by_itself_at_once_and_by_others_after_the_lease(
    cluster: Cluster, operators: Operators
) -> None:
    operators.start("first").stop(signal.SIGKILL)
    again = operators.start("first")
    assert again.is_leader(), "the same pod need not wait for its own lease"
    again.stop(signal.SIGKILL)
    other = operators.start("second")
    assert not other.is_leader()
    killed = time.monotonic()
    wait_for("the lease to run out", other.is_leader, seconds=30, describe=other.tail, poll=0.2)
    assert time.monotonic() - killed > 5, "it is not taken away from somebody who may be alive"


def test_only_the_given_namespaces_are_watched(cluster: Cluster, operators: Operators) -> None:
    audit = Audit(cluster)
    operators.start("first", namespaces=cluster.namespace)
    cluster.apply(vllm_deployment(cluster, "elsewhere", namespace="default"), vllm_deployment(cluster))
    try:
        wait_for("the new deployment to be taken up", reconciled(cluster), seconds=20, poll=0.2)
        elsewhere = cluster.kube.get("vllmdeployment", "elsewhere", "-n", "default")
        assert "status" not in elsewhere
        assert not refused(audit), "the chart's role does not suffice"
    finally:
        cluster.kube.kubectl("delete", "vllmdeployment", "elsewhere", "-n", "default")


@pytest.mark.parametrize("first", ["operator", "removal"])
def test_kuberay_may_be_installed_later(first: str, cluster: Cluster, operators: Operators) -> None:
    """Last of all: it takes KubeRay's CRD away for a while."""
    crd = cluster.kube.get("crd", RAY_CRD)
    operator = operators.start("first") if first == "operator" else None
    cluster.kube.kubectl("delete", "crd", RAY_CRD)
    try:
        operator = operator or operators.start("first")
        cluster.apply(vllm_deployment(cluster))

        def told() -> bool:
            conditions = cluster.deployment("chat").get("status", {}).get("conditions", [])
            return any(c["type"] == "Ready" and c["reason"] == "KubeRayMissing" for c in conditions)

        wait_for("the condition to say that KubeRay is missing", told, seconds=30, describe=operator.tail, poll=0.5)
        wait_for("the operator to be ready all the same", operator.is_ready, seconds=30, poll=0.5)
    finally:
        audit = Audit(cluster)
        fresh = {"metadata": {"name": RAY_CRD}, **{key: crd[key] for key in ("apiVersion", "kind", "spec")}}
        cluster.kube.kubectl("create", "-f", "-", stdin=json.dumps(fresh))
    wait_for("RayClusters to be watched", lambda: watched(audit), seconds=60, describe=operator.tail, poll=0.5)
    wait_for("its RayCluster", ray_clusters_if_served(cluster), seconds=60, describe=operator.tail, poll=1)
    wait_for("the operator to be ready still", operator.is_ready, seconds=30, poll=0.5)


def watched(audit: Audit) -> bool:
    return any(
        r["verb"] == "watch" and r["objectRef"]["resource"] == "rayclusters" and "watch=true" in r["requestURI"]
        for r in audit.requests(stage="ResponseStarted")
    )


def ray_clusters_if_served(cluster: Cluster) -> Callable[[], list[Object]]:
    def probe() -> list[Object]:
        served = cluster.kube.kubectl("api-resources", "--api-group=ray.io", "--no-headers")
        return cluster.ray_clusters() if "rayclusters" in served else []

    return probe
