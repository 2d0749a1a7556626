"""From an API's refusal to a problem that the user is shown."""

from __future__ import annotations

from vllm_ray_operator.clients.protocols import RAY_CLUSTERS, ApiError, Forbidden, Invalid, KindMissing
from vllm_ray_operator.plan.world import Problem

KUBERAY_MISSING = Problem(
    "KubeRayMissing",
    "KubeRay is not installed: the API server does not know RayCluster (ray.io/v1). Install the kuberay-operator "
    "chart with its CRDs; this goes on by itself then.",
)

KUBERAY_TOO_OLD = Problem(
    "ClusterRefused",
    "This KubeRay knows no token authentication: upgrade it, with its CRDs, to 1.5.1 or newer, or set "
    "spec.cluster.auth to Disabled.",
)


def of_write(error: ApiError, kind: str, name: str) -> Problem:
    """Return the problem to show for a write to the Kubernetes API that failed."""
    is_cluster = kind == RAY_CLUSTERS.kind
    match error:
        case KindMissing():
            return KUBERAY_MISSING if is_cluster else Problem("KindMissing", str(error))
        case Invalid() if is_cluster and 'unknown field "spec.authOptions"' in str(error):
            return KUBERAY_TOO_OLD
        case Invalid():
            reason = "ClusterRefused" if is_cluster else f"{kind}Refused"
            return Problem(reason, f"the API server refuses {kind} {name}: {error}")
        case Forbidden():
            return Problem("Forbidden", f"the operator may not write {kind} {name}: {error}")
        case _:
            return Problem("KubernetesUnavailable", f"{kind} {name} cannot be written: {error}")


def name_taken(kind: str, name: str) -> Problem:
    """Return the problem to show when an object of that name is there that is not ours."""
    return Problem(
        "NameTaken",
        f"{kind} {name} is there already and is not this VLLMDeployment's: delete it, or give the VLLMDeployment "
        "another name",
    )
