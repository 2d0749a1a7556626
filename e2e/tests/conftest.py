"""The operator installed by its charts on the one-machine cluster; KUBECONFIG and VRO_* come from e2e.run_tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from e2e.install import install_operator
from e2e.kube import Kube


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.e2e)
        item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def kube() -> Kube:
    """The cluster, with the operator running in it under exactly the chart's role."""
    cluster = Kube(tools=Path(os.environ["VRO_TOOLS"]), kubeconfig=Path(os.environ["KUBECONFIG"]))
    install_operator(cluster, os.environ["VRO_OPERATOR_IMAGE"], os.environ["VRO_ENGINE_IMAGE"])
    return cluster
