"""The operator's process against a real API server, with exactly the rights that its chart gives it.

KUBECONFIG names a control plane with KubeRay and our CRD, VRO_CLUSTER the embedded cluster it belongs to (for its audit
log), VRO_TOOLS the folder of kubectl and helm. `make test-integration` sets them.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.layout import Layout
from e2e.kube import Kube
from e2e.waiting import wait_for
from vllm_ray_operator.plan import names

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "vllm-ray-operator"
LEASE = "vllm-ray-operator"
RAY_CRD = "rayclusters.ray.io"
AT_REST_SECONDS = float(os.environ.get("VRO_AT_REST_SECONDS", "30"))
WRITES = {"create", "update", "patch", "delete", "deletecollection"}

Object = dict[str, Any]


@dataclass(frozen=True)
class Account:
    """A service account: who it is in the audit log, and its kubeconfig."""

    user: str
    kubeconfig: Path


@dataclass(frozen=True)
class Cluster:
    """The API server, a namespace of ours, and the rights that the chart gives the operator.

    ``everywhere`` is its account when all namespaces are watched, ``here`` when only ours is.
    """

    kube: Kube
    namespace: str
    everywhere: Account
    here: Account

    def apply(self, *manifests: Object) -> None:
        self.kube.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(manifests))

    def deployment(self, name: str) -> Object:
        return self.kube.get("vllmdeployment", name, "-n", self.namespace)

    def ray_clusters(self) -> list[Object]:
        return self.kube.items("rayclusters.ray.io", "-n", self.namespace)

    def holder(self) -> str | None:
        holder: str | None = self.kube.get("lease", LEASE, "-n", self.namespace).get("spec", {}).get("holderIdentity")
        return holder


@dataclass
class Operator:
    """One operator process."""

    process: subprocess.Popen[bytes]
    health: int
    metrics: int
    log: Path

    def get(self, port: int, path: str) -> tuple[int, str]:
        """Return status and body; (0, what went wrong) if nobody listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, f"the operator ended with {self.process.returncode}\n{self.tail()}"
        return self.get(self.health, "/readyz")[0] == 200

    def is_leader(self) -> bool:
        return "vllm_ray_operator_leader 1.0" in self.get(self.metrics, "/metrics")[1]

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Send a signal; return the exit code and how long it took."""
        start = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(timeout=30), time.monotonic() - start

    def tail(self) -> str:
        return self.log.read_text()[-4000:]


@dataclass
class Operators:
    """Starts operator processes, and ends those that a test leaves."""

    cluster: Cluster
    folder: Path
    started: list[Operator] = field(default_factory=list)

    def start(self, pod: str, namespaces: str = "", *, wait: bool = True) -> Operator:
        health, metrics = free_port(), free_port()
        log = self.folder / f"{pod}-{len(self.started)}.log"
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT / "operator"),
            "KUBECONFIG": str((self.cluster.here if namespaces else self.cluster.everywhere).kubeconfig),
            "POD_NAMESPACE": self.cluster.namespace,
            "POD_NAME": pod,
            "POD_UID": "uid-of-" + pod,
            "VLLM_RAY_OPERATOR_HEALTH_PORT": str(health),
            "VLLM_RAY_OPERATOR_METRICS_PORT": str(metrics),
            "VLLM_RAY_OPERATOR_ENGINE_IMAGE": "registry.example/engine:1",
            "VLLM_RAY_OPERATOR_NAMESPACES": namespaces,
        }
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "vllm_ray_operator.runtime.main"],
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        operator = Operator(process, health, metrics, log)
        self.started.append(operator)
        if wait:
            wait_for(f"operator {pod} to be ready", operator.is_ready, seconds=60, describe=operator.tail, poll=0.2)
        return operator

    def end(self) -> None:
        for operator in self.started:
            if operator.process.poll() is None:
                operator.process.kill()
                operator.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if "KUBECONFIG" not in os.environ or "VRO_CLUSTER" not in os.environ:
        pytest.fail("KUBECONFIG and VRO_CLUSTER must name a control plane: run `make test-integration`")
    tools = Path(os.environ["VRO_TOOLS"]) if "VRO_TOOLS" in os.environ else None
    admin = Path(os.environ["KUBECONFIG"])
    kube = Kube(tools, admin)
    name = f"runtime-{secrets.token_hex(3)}"
    folder = tmp_path_factory.mktemp("operator")
    kube.kubectl("create", "namespace", name)
    everywhere = account(kube, admin, name, f"{name}-all", folder)
    here = account(kube, admin, name, f"{name}-here", folder, "--set", f"watchNamespaces={{{name}}}")
    yield Cluster(kube, name, everywhere, here)
    kube.kubectl("delete", "namespace", name, "--wait=false")
    kube.kubectl("delete", "clusterrole", *(f"{name}-{one}" for one in ("all", "here", "all-nodes", "here-nodes")))
    kube.kubectl("delete", "clusterrolebinding", *(f"{name}-{one}" for one in ("all", "all-nodes", "here-nodes")))


def account(kube: Kube, admin: Path, namespace: str, name: str, folder: Path, *values: str) -> Account:
    """Make the service account that the chart would, with its rights, and a kubeconfig for it."""
    chart = ["template", name, str(CHART), "--namespace", namespace, "--show-only", "templates/rbac.yaml"]
    kube.kubectl("apply", "-f", "-", stdin=kube.helm(*chart, "--set", f"fullnameOverride={name}", *values))
    token = kube.kubectl("create", "token", name, "-n", namespace, "--duration=2h").strip()
    config = yaml.safe_load(admin.read_text())
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    kubeconfig = folder / f"{name}.kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    return Account(f"system:serviceaccount:{namespace}:{name}", kubeconfig)


@pytest.fixture
def operators(cluster: Cluster, tmp_path: Path) -> Iterator[Operators]:
    operators = Operators(cluster, tmp_path)
    yield operators
    operators.end()
    cluster.kube.kubectl("delete", "vllmdeployments", "--all", "-n", cluster.namespace)
    cluster.kube.kubectl("delete", "lease", LEASE, "-n", cluster.namespace, "--ignore-not-found")


def vllm_deployment(cluster: Cluster, name: str = "chat", namespace: str = "", **spec: Any) -> Object:
    return {
        "apiVersion": "vllm-ray.dev/v1alpha1",
        "kind": "VLLMDeployment",
        "metadata": {"name": name, "namespace": namespace or cluster.namespace},
        "spec": {"model": {"uri": "hf://org/model"}, **spec},
    }


def reconciled(cluster: Cluster, name: str = "chat") -> Callable[[], Object | None]:
    """Probe for a deployment whose present generation was taken up, with a condition that tells so."""

    def probe() -> Object | None:
        found = cluster.deployment(name)
        generation = found["metadata"]["generation"]
        status = found.get("status", {})
        conditions = [c for c in status.get("conditions", []) if c["type"] == "Ready"]
        done = status.get("observedGeneration") == generation and conditions
        return found if done and conditions[0]["observedGeneration"] == generation else None

    return probe


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


@pytest.mark.parametrize("limited", [False, True], ids=["all namespaces", "one namespace"])
def test_a_node_that_is_cordoned_leads_to_a_pass(limited: bool, cluster: Cluster, operators: Operators) -> None:
    """Nodes are in no namespace: the right to see them is one for the whole cluster, whatever else is watched."""
    node = f"{cluster.namespace}-{'limited' if limited else 'all'}"
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": node, "namespace": cluster.namespace, "labels": names.selector("chat")},
        "spec": {"nodeName": node, "containers": [{"name": "ray", "image": "registry.example/engine:1"}]},
    }
    cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}, pod)
    audit = Audit(cluster)
    operator = operators.start("first", namespaces=cluster.namespace if limited else "")
    cluster.apply(vllm_deployment(cluster))
    wait_for("the new deployment to be taken up", reconciled(cluster), seconds=20, poll=0.2)

    def passes() -> int:
        return sum("/nodes?" in r["requestURI"] and r["verb"] == "list" for r in audit.requests())

    seen, since = passes(), time.monotonic()

    def quiet() -> bool:
        nonlocal seen, since
        if (now := passes()) != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > 3

    wait_for("the operator to come to rest", quiet, seconds=30, describe=operator.tail, poll=0.2)
    try:
        cluster.kube.kubectl("cordon", node)
        wait_for("a pass", lambda: passes() > seen, seconds=3, describe=operator.tail, poll=0.2)
        wait_for("the operator to come to rest", quiet, seconds=30, describe=operator.tail, poll=0.2)
        cluster.kube.kubectl("uncordon", node)
        wait_for("another pass", lambda: passes() > seen, seconds=3, describe=operator.tail, poll=0.2)
        assert not refused(audit), "the chart's role does not suffice"
    finally:
        cluster.kube.kubectl("delete", "node", node)
        cluster.kube.kubectl("delete", "pod", node, "-n", cluster.namespace, "--grace-period=0", "--force")


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
