"""The operator, installed with its own charts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from e2e.kube import Kube
from e2e.waiting import say

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = "vllm-ray-system"
RELEASE = "vllm-ray-operator"


def install_operator(
    kube: Kube, operator_image: str, engine_image: str, values: Mapping[str, str] | None = None
) -> None:
    """Install (or upgrade) CRDs and operator by helm, and wait until the operator is ready.

    ``values``: more values of the chart, by their path.

    Raises:
        CommandError: helm or the operator did not succeed.
    """
    repository, _, tag = operator_image.rpartition(":")
    say("installing the CRDs and the operator with helm")
    install = ("upgrade", "--install", "--namespace", NAMESPACE, "--create-namespace")
    kube.helm(*install, f"{RELEASE}-crds", str(ROOT / "charts" / f"{RELEASE}-crds"))
    kube.helm(
        *(*install, RELEASE, str(ROOT / "charts" / RELEASE)),
        *("--set-string", f"image.repository={repository}", "--set-string", f"image.tag={tag}"),
        *("--set-string", f"defaults.engineImage={engine_image}"),
        *(word for path, value in (values or {}).items() for word in ("--set-string", f"{path}={value}")),
    )
    kube.kubectl("-n", NAMESPACE, "rollout", "status", f"deployment/{RELEASE}", "--timeout=120s", seconds=150)
