"""PodDisruptionBudgets: what an eviction may take, as a roll may (invariant I5).

A budget counts pods, but a replica counts whole. So one budget is for the pods of the replicas that serve, and leaves
at most one of them to evictions, and none when no further replica may be unavailable. The replica whose pod goes
drains, serves no more, and is not in the selector any more: its other pods may go too, and one of the next replica if
another may be unavailable. In between nothing can go: the evicted pod is missing, and the API server refuses evictions
until a budget's change has been taken in. All that as long as an operator keeps them: to a budget that nobody changes a
pod that was made anew is as good as one with an engine.

Heads have a budget of their own, which leaves none of them: all engines of a RayCluster go with its head, undrained,
unless what the head knows is kept elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ray_operator.api.status import ReplicaStatus
from vllm_ray_operator.plan import names, roster
from vllm_ray_operator.plan.actions import Action, Apply, Delete
from vllm_ray_operator.plan.rollout import Limits
from vllm_ray_operator.plan.traffic import contains
from vllm_ray_operator.plan.world import Deployment, Manifest, World


def sync(world: World, replicas: Sequence[ReplicaStatus], limits: Limits) -> list[Action]:
    """Return what brings the budgets in step with the replicas."""
    wanted = {budget["metadata"]["name"]: budget for budget in budgets(world, replicas, limits)}
    actions: list[Action] = [Apply(b) for name, b in wanted.items() if not contains(world.budgets.get(name), b)]
    actions.extend(
        Delete("PodDisruptionBudget", name, live["metadata"].get("uid"), "there is nothing to protect")
        for name, live in world.budgets.items()
        if name not in wanted
    )
    return actions


def budgets(world: World, replicas: Sequence[ReplicaStatus], limits: Limits) -> list[Manifest]:
    """Return the budgets that there are to be."""
    serving = [r for r in replicas if roster.worth(r) != roster.NOTHING]
    draining = [r for r in replicas if r.phase == "Draining"]
    ready = sum(r.phase == "Ready" for r in replicas)
    result = list[Manifest]()
    if serving:
        sizes = {cluster.name: dict(cluster.groups) for cluster in world.clusters}
        homes = [(r.attempt.ray_cluster, names.slot(r.index)) for r in serving if r.attempt is not None]
        pods = sum(sizes.get(home, {}).get(slot, 0) for home, slot in homes)
        one = 1 if ready > limits.stay_ready else 0
        indices = [str(r.index) for r in serving]
        name = names.replicas_budget(world.deployment.name)
        result.append(_manifest(world.deployment, name, pods - one, {names.REPLICA: indices}))
    carrying = {r.attempt.ray_cluster for r in (*serving, *draining) if r.attempt is not None}
    heads = sorted(name for name in carrying if (cluster := world.cluster(name)) is None or not cluster.outlives_head)
    if heads:
        name = names.heads_budget(world.deployment.name)
        where = {"ray.io/cluster": heads, "ray.io/node-type": ["head"]}
        result.append(_manifest(world.deployment, name, len(heads), where))
    return result


def _manifest(deployment: Deployment, name: str, least: int, where: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return a budget. A number of pods that must be available is all that one can tell of pods of a RayCluster."""
    expressions = [{"key": key, "operator": "In", "values": values} for key, values in where.items()]
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": name,
            "namespace": deployment.namespace,
            "labels": names.selector(deployment.name),
            "ownerReferences": [names.owner_reference(deployment.name, deployment.uid)],
        },
        "spec": {
            "minAvailable": least,
            "selector": {"matchLabels": names.selector(deployment.name), "matchExpressions": expressions},
        },
    }
