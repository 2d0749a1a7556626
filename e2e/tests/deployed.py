"""Variants of the example, each in a namespace of its own, so that tests can work beside one another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import yaml

from e2e.demo import EXAMPLE
from e2e.kube import Kube
from e2e.serving import describe, is_ready, wait_ready
from e2e.waiting import wait_for

Object = dict[str, Any]


@dataclass(frozen=True)
class Deployed:
    """A VLLMDeployment whose namespace has its name."""

    kube: Kube
    name: str

    def get(self) -> Object:
        return self.kube.get("vllmdeployment", self.name, "-n", self.name)

    def patch(self, spec: Object) -> None:
        """Change the spec; null removes a field."""
        change = json.dumps({"spec": spec})
        self.kube.kubectl("patch", "vd", self.name, "-n", self.name, "--type=merge", "-p", change)

    def ready(self, seconds: float) -> Object:
        return wait_ready(self.kube, self.name, self.name, seconds)

    def watch(self, what: str, seen: list[Object], done: Callable[[Object], object], seconds: float) -> Object:
        """Wait until the resource is as asked for; each state on the way is in ``seen``, too."""

        def probe() -> Object | None:
            seen.append(self.get())
            return seen[-1] if done(seen[-1]) else None

        return wait_for(what, probe, seconds=seconds, poll=0.5, describe=lambda: describe(seen[-1]))

    def roll(self, what: str, seen: list[Object], seconds: float = 600) -> Object:
        """Wait until a change of the spec is carried out."""
        return self.watch(what, seen, is_ready, seconds)

    def pods(self, labels: str = "") -> dict[str, Object]:
        """Return its pods by uid. ``labels``: more that they have to have."""
        selector = ",".join(filter(None, (f"vllm-ray.dev/deployment={self.name}", labels)))
        return {pod["metadata"]["uid"]: pod for pod in self.kube.items("pods", "-n", self.name, "-l", selector)}

    def workers(self) -> set[str]:
        """Return the uids of its worker pods."""
        return set(self.pods("ray.io/node-type=worker"))

    def ray_clusters(self) -> set[str]:
        """Return the names of the RayClusters that are there."""
        return {cluster["metadata"]["name"] for cluster in self.kube.items("rayclusters", "-n", self.name)}


@contextmanager
def deployed(kube: Kube, name: str, **changes: Object) -> Iterator[Deployed]:
    """Apply the example with engines of one accelerator and parts of its spec changed; delete it at the end."""
    manifest = yaml.safe_load(EXAMPLE.read_text())
    manifest["metadata"] = {"name": name, "namespace": name}
    spec = manifest["spec"]
    spec["parallelism"] = {"tensor": 1}
    spec["engine"]["drainTimeoutSeconds"] = 10
    for part, values in changes.items():
        spec[part] = {**spec.get(part, {}), **values}
    kube.kubectl("create", "namespace", name)
    kube.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest))
    made = Deployed(kube, name)
    try:
        yield made
    finally:
        kube.kubectl("delete", "vd", name, "-n", name)
        wait_for("its pods to be gone", lambda: not made.pods(), seconds=120)
        kube.kubectl("delete", "namespace", name, "--wait=false")


def attempts(resource: Object) -> list[Object]:
    """Return the attempts of all replicas; of those that are about to change, the old."""
    return [r["attempt"] for r in resource.get("status", {}).get("replicas", []) if r.get("attempt")]


def serving(resource: Object) -> int:
    """Return how many replicas serve."""
    return sum(replica["phase"] == "Ready" for replica in resource["status"]["replicas"])


def summary(seen: Iterable[list[Object]]) -> list[str]:
    """Return the different states of the replicas that were seen, as the golden sequences of the unit tests."""
    lines: list[str] = []
    for replicas in seen:
        parts = []
        for replica in replicas:
            attempt, standby = replica.get("attempt"), replica.get("standby")
            number = attempt["number"] if attempt else ""
            parts.append(f"{replica['phase']}{number}" + (f"+{standby['number']}" if standby else ""))
        line = "  ".join(parts)
        if not lines or lines[-1] != line:
            lines.append(line)
    return lines
