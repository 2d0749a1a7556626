"""A VLLMDeployment as a user sees it: its status, and a chat through its Service."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from e2e.kube import Kube
from e2e.waiting import wait_for

# Runs in the head pod: inside the cluster, through its DNS and the Service, as any client would.
_CHAT = """
import json, sys, urllib.request
body = json.dumps({"model": sys.argv[2], "messages": [{"role": "user", "content": sys.argv[3]}],
                   "max_tokens": 16, "temperature": 0}).encode()
request = urllib.request.Request(sys.argv[1] + "/chat/completions", body, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


def condition(deployment: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return a condition of the resource, or an empty mapping."""
    conditions = deployment.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), {})


def is_ready(deployment: Mapping[str, Any]) -> bool:
    """Whether the status says Ready for the spec as it is now."""
    ready = condition(deployment, "Ready")
    generation = deployment.get("metadata", {}).get("generation")
    return ready.get("status") == "True" and ready.get("observedGeneration") == generation


def describe(deployment: Mapping[str, Any]) -> str:
    """Return the status in one line."""
    ready = condition(deployment, "Ready")
    replicas = deployment.get("status", {}).get("replicas", [])
    parts = [f"replica {r['index']} {r['phase']}: {r.get('message', '')}".rstrip(": ") for r in replicas]
    return " | ".join([f"{ready.get('reason', 'no status yet')}: {ready.get('message', '')}".rstrip(": "), *parts])


def wait_ready(kube: Kube, name: str, namespace: str, seconds: float) -> dict[str, Any]:
    """Wait until the deployment is Ready and return it, printing its status whenever it changes."""
    latest: dict[str, Any] = {}

    def probe() -> dict[str, Any] | None:
        latest.clear()
        latest.update(kube.get("vllmdeployment", name, "-n", namespace))
        return dict(latest) if is_ready(latest) else None

    return wait_for(
        f"VLLMDeployment {namespace}/{name} to be ready", probe, seconds=seconds, describe=lambda: describe(latest)
    )


def chat(kube: Kube, deployment: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    """Return a chat completion that went through the deployment's Service."""
    namespace, pod = deployment["metadata"]["namespace"], head_pod(kube, deployment)
    command = ["python3", "-c", _CHAT, deployment["status"]["endpoint"], served_name(deployment), prompt]
    answer = kube.kubectl("exec", "-n", namespace, pod, "-c", "ray", "--", *command, seconds=120)
    result: dict[str, Any] = json.loads(answer)
    return result


def head_pod(kube: Kube, deployment: Mapping[str, Any], index: int | None = None) -> str:
    """Return the name of the pod of a Ray head: of that replica's, or of the first replica's that serves.

    Raises:
        LookupError: there is none, for instance because no replica serves.
    """
    selector = f"ray.io/cluster={ray_cluster(deployment, index)},ray.io/node-type=head"
    heads = kube.items("pods", "-n", deployment["metadata"]["namespace"], "-l", selector)
    if not heads:
        raise LookupError(f"there is no pod with {selector}")
    return str(heads[0]["metadata"]["name"])


def ray_cluster(deployment: Mapping[str, Any], index: int | None = None) -> str:
    """Return the name of the RayCluster that a replica is in, or the first that serves.

    Raises:
        LookupError: no such replica serves.
    """
    for replica in deployment["status"]["replicas"]:
        if index in (None, replica["index"]) and replica["phase"] == "Ready":
            return str(replica["attempt"]["rayCluster"])
    raise LookupError(f"replica {'of any index' if index is None else index} does not serve: {describe(deployment)}")


def served_name(deployment: Mapping[str, Any]) -> str:
    """Return the name that clients use for the model."""
    model = deployment["spec"]["model"]
    return str(model.get("servedName") or model["uri"].rstrip("/").rpartition("/")[2])
