"""A namespace of the control plane for each module, and operator processes that end with their test."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.kube import Kube
from tests.integration.lab import LEASE, Cluster, Operators, account


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
    kube.kubectl("delete", "clusterrole", f"{name}-all", f"{name}-here")
    kube.kubectl("delete", "clusterrolebinding", f"{name}-all")


@pytest.fixture
def operators(cluster: Cluster, tmp_path: Path) -> Iterator[Operators]:
    operators = Operators(cluster, tmp_path)
    yield operators
    operators.end()
    cluster.kube.kubectl("delete", "vllmdeployments", "--all", "-n", cluster.namespace)
    cluster.kube.kubectl("delete", "lease", LEASE, "-n", cluster.namespace, "--ignore-not-found")
