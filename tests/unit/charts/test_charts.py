"""The charts, rendered by helm."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_ray_operator.runtime import settings

ROOT = Path(__file__).resolve().parents[3]
OPERATOR = ROOT / "charts" / "vllm-ray-operator"
CRDS = ROOT / "charts" / "vllm-ray-operator-crds"
LEASE_NAME = "vllm-ray-operator"
Object = dict[str, Any]


@pytest.fixture(scope="session")
def helm() -> str:
    """The helm of the tools that the cluster tests use, or one that is installed."""
    done = subprocess.run(
        [sys.executable, "-m", "e2e.cluster", "tools"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = str(Path(done.stdout.strip()) / "helm") if done.returncode == 0 else shutil.which("helm")
    assert found, f"there is no helm: {done.stderr}"
    return found


def run(helm: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm, *map(str, args)], capture_output=True, text=True, check=False)


def render(helm: str, *args: str, chart: Path = OPERATOR, release: str = "vllm-ray-operator") -> list[Object]:
    done = run(helm, "template", release, chart, "--namespace", "system", *args)
    assert done.returncode == 0, done.stderr
    return [obj for obj in yaml.safe_load_all(done.stdout) if obj]


def one(objects: list[Object], kind: str) -> Object:
    found = [obj for obj in objects if obj["kind"] == kind]
    assert len(found) == 1, [f"{obj['kind']}/{obj['metadata']['name']}" for obj in objects]
    return found[0]


def parted(objects: list[Object]) -> tuple[list[Object], list[Object]]:
    """All but what is about nodes, and that."""
    nodes = [obj for obj in objects if obj["metadata"]["name"].endswith("-nodes")]
    return [obj for obj in objects if obj not in nodes], nodes


def container(objects: list[Object]) -> Object:
    containers = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert len(containers) == 1
    result: Object = containers[0]
    return result


@pytest.mark.parametrize("chart", [OPERATOR, CRDS], ids=lambda chart: chart.name)
def test_lint(helm: str, chart: Path) -> None:
    done = run(helm, "lint", "--strict", chart)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("chart", [OPERATOR, CRDS], ids=lambda chart: chart.name)
def test_versions_are_those_of_the_project(chart: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    metadata = yaml.safe_load((chart / "Chart.yaml").read_text())
    assert (metadata["version"], metadata["appVersion"]) == (version, version)


def test_the_crd_chart_has_the_crd_and_keeps_it(helm: str) -> None:
    objects = render(helm, chart=CRDS)
    crd = one(objects, "CustomResourceDefinition")
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    crd["metadata"].pop("annotations")
    assert crd == yaml.safe_load((ROOT / "crds" / "vllm-ray.dev_vllmdeployments.yaml").read_text())


def test_one_operator_at_a_time(helm: str) -> None:
    spec = one(render(helm), "Deployment")["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}


def test_security(helm: str) -> None:
    objects = render(helm)
    pod = one(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container(objects)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["volumes"] == [{"name": "tmp", "emptyDir": {}}]
    assert container(objects)["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)


def test_resources_and_probes(helm: str) -> None:
    operator = container(render(helm))
    assert operator["resources"] == {
        "requests": {"cpu": "50m", "memory": "128Mi"},
        "limits": {"memory": "512Mi"},
    }
    ports = {port["name"]: port["containerPort"] for port in operator["ports"]}
    variables = {variable.name: variable.default for variable in settings._VARIABLES}
    assert ports == {
        "metrics": int(variables["VLLM_RAY_OPERATOR_METRICS_PORT"]),
        "health": int(variables["VLLM_RAY_OPERATOR_HEALTH_PORT"]),
    }
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert operator[probe]["httpGet"] == {"path": path, "port": "health"}


def environment(objects: list[Object]) -> dict[str, str]:
    """Return the operator's environment as the kubelet would set it."""
    fields = {"metadata.name": "operator-0", "metadata.namespace": "system", "metadata.uid": "1-2-3"}
    return {
        entry["name"]: entry["value"] if "value" in entry else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container(objects)["env"]
    }


def test_the_operator_understands_its_environment(helm: str) -> None:
    values = ("--set", "watchNamespaces={a,b}", "--set", "defaults.engineImage=e:1", "--set", "workers=3")
    env = environment(render(helm, *values, "--set", "log.level=debug", "--set", "log.format=text"))
    loaded = settings.load(env)
    assert loaded.engine_image == "e:1"
    assert loaded.namespaces == ("a", "b")
    assert loaded.workers == 3
    assert (loaded.log_level, loaded.log_format) == ("debug", "text")
    assert loaded.pod_namespace == "system"
    assert loaded.identity == "operator-0_1-2-3"
    assert set(env) <= {variable.name for variable in settings._VARIABLES}


def test_the_defaults_are_the_operators(helm: str) -> None:
    loaded, bare = settings.load(environment(render(helm))), settings.load({})
    assert (loaded.engine_image, loaded.namespaces, loaded.workers) == (None, (), bare.workers)
    assert (loaded.log_level, loaded.log_format) == (bare.log_level, bare.log_format)


def granted(role: Object) -> set[str]:
    """Return all rights of a role, written `verb group/resource[name]`."""
    rights = set()
    for rule in role["rules"]:
        assert set(rule) <= {"apiGroups", "resources", "verbs", "resourceNames"}
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for name in rule.get("resourceNames", [""]):
                    suffix = f"[{name}]" if name else ""
                    rights |= {f"{verb} {group}/{resource}{suffix}" for verb in rule["verbs"]}
    return rights


def rights(verbs: str, resource: str) -> set[str]:
    return {f"{verb} {resource}" for verb in verbs.split()}


CLUSTER_RIGHTS = (
    rights("get list watch", "vllm-ray.dev/vllmdeployments")
    | rights("update", "vllm-ray.dev/vllmdeployments/status")
    | rights("update", "vllm-ray.dev/vllmdeployments/finalizers")
    | rights("list watch create patch delete", "ray.io/rayclusters")
    | rights("get list watch create patch", "/services")
    | rights("get list watch create patch delete", "discovery.k8s.io/endpointslices")
    | rights("create", "discovery.k8s.io/endpointslices/restricted")
    | rights("list create delete", "apps/controllerrevisions")
    | rights("get list create patch delete", "policy/poddisruptionbudgets")
    | rights("get list watch delete", "/pods")
    | rights("get", "/secrets")
    | rights("create", "events.k8s.io/events")
)


WATCHING = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole"}


def test_rights_are_exactly_these(helm: str) -> None:
    objects, nodes = parted(render(helm))
    assert granted(one(objects, "ClusterRole")) == CLUSTER_RIGHTS
    assert granted(one(nodes, "ClusterRole")) == rights("list watch", "/nodes")
    lease = rights("create", "coordination.k8s.io/leases")
    lease |= rights("get update", f"coordination.k8s.io/leases[{LEASE_NAME}]")
    assert granted(one(objects, "Role")) == lease
    assert one(objects, "Role")["metadata"]["namespace"] == "system"


@pytest.mark.parametrize("release", ["vllm-ray-operator", "other"])
def test_bindings_meet(helm: str, release: str) -> None:
    objects, nodes = parted(render(helm, release=release))
    account = one(objects, "ServiceAccount")["metadata"]
    assert one(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == account["name"]
    for part, binding, role in (
        (objects, "ClusterRoleBinding", "ClusterRole"),
        (nodes, "ClusterRoleBinding", "ClusterRole"),
        (objects, "RoleBinding", "Role"),
    ):
        bound = one(part, binding)
        assert bound["roleRef"]["kind"] == role
        assert bound["roleRef"]["name"] == one(part, role)["metadata"]["name"]
        assert bound["subjects"] == [
            {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
        ]
    labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert one(objects, "Deployment")["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_rights_end_where_the_watches_do(helm: str) -> None:
    """Above all the one to read Secrets. Its own namespace may be among those that are watched; nodes are in none."""
    objects, nodes = parted(render(helm, "--set", "watchNamespaces={system,team}"))
    assert [obj["kind"] for obj in nodes] == ["ClusterRole", "ClusterRoleBinding"]
    assert not [obj for obj in objects if obj["kind"] == "ClusterRoleBinding"]
    bindings = [obj for obj in objects if obj["kind"] == "RoleBinding"]
    role = one(objects, "ClusterRole")["metadata"]["name"]
    watching = [b["metadata"]["namespace"] for b in bindings if b["roleRef"] == {**WATCHING, "name": role}]
    assert watching == ["system", "team"]
    account = one(objects, "ServiceAccount")["metadata"]
    subject = {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    assert all(binding["subjects"] == [subject] for binding in bindings)
    names = [(b["metadata"]["namespace"], b["metadata"]["name"]) for b in bindings]
    assert len(names) == len(set(names)) == 3, "the third is that of the lease"


def test_a_service_account_of_ones_own(helm: str) -> None:
    objects = render(helm, "--set", "serviceAccount.create=false,serviceAccount.name=mine,rbac.create=false")
    assert [obj["kind"] for obj in objects] == ["Deployment"]
    assert objects[0]["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    done = run(helm, "template", "x", OPERATOR, "--set", "serviceAccount.create=false")
    assert done.returncode != 0
    assert "serviceAccount.name is needed" in done.stderr


@pytest.mark.parametrize(
    ("values", "image"),
    [
        ("image.repository=r/op", "r/op:0.1.0"),
        ("image.repository=r/op,image.tag=x", "r/op:x"),
        (f"image.repository=r/op,image.digest=sha256:{'0' * 64}", f"r/op@sha256:{'0' * 64}"),
    ],
)
def test_image(helm: str, values: str, image: str) -> None:
    assert container(render(helm, "--set", values))["image"] == image


def test_what_is_passed_to_the_pod(helm: str, tmp_path: Path) -> None:
    values: Object = {
        "imagePullSecrets": [{"name": "pull"}],
        "podLabels": {"team": "ml"},
        "podAnnotations": {"note": "x"},
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
        "serviceAccount": {"annotations": {"role": "arn:x"}},
    }
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    objects = render(helm, "--values", str(path))
    template = one(objects, "Deployment")["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "ml"
    assert template["metadata"]["annotations"] == {"note": "x"}
    for key in ("imagePullSecrets", "nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert template["spec"][key] == values[key]
    assert one(objects, "ServiceAccount")["metadata"]["annotations"] == {"role": "arn:x"}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("replicas=2", "replicas"),
        ("image.repo=x", "repo"),
        ("log.level=loud", "level"),
        ("workers=0", "workers"),
        ("workers=many", "workers"),
        ("watchNamespaces={A_b}", "watchNamespaces"),
        ("defaults.engineImage=a b", "engineImage"),
        ("image.digest=sha256:1", "digest"),
        ("rbac.create=1", "create"),
    ],
)
def test_wrong_values_are_refused(helm: str, value: str, named: str) -> None:
    done = run(helm, "template", "x", OPERATOR, "--set", value)
    assert done.returncode != 0
    assert named in done.stderr
    done = run(helm, "template", "x", CRDS, "--set", value)
    assert done.returncode != 0


def test_every_value_is_in_the_schema_and_has_a_use() -> None:
    """A value that nothing reads would be a promise that is not kept."""
    templates = "".join(path.read_text() for path in (OPERATOR / "templates").iterdir())
    read = set(re.findall(r"\.Values\.([A-Za-z.]+)", templates))

    def leaves(values: Object, path: str = "") -> set[str]:
        found = set()
        for key, value in values.items():
            here = f"{path}{key}"
            whole = not isinstance(value, dict) or not value or here in read
            found |= {here} if whole else leaves(value, here + ".")
        return found

    assert leaves(yaml.safe_load((OPERATOR / "values.yaml").read_text())) == read
