"""Heads on nodes that do not answer.

Kubernetes keeps such a pod until the node is back, and KubeRay makes no other head before. So it is deleted without the
node's word, when nothing is lost with it: every engine in its RayCluster has ended or is given up, and neither Ray nor
an engine answers. As long as something answers, only the kubelet may be away, and all may serve.

No fence goes by it. With its Ray gone, an attempt is proven gone by the end of its slot's containers, one by one: what
lives on beside the old head, on a node that is cut off, keeps its replica from starting until that node is back. The
other replicas start with the new head. Their pods were made anew; no raylet of theirs knows the old one.
"""

from __future__ import annotations

from vllm_ray_operator.api.status import Attempt
from vllm_ray_operator.plan.actions import Action, Delete, Emit
from vllm_ray_operator.plan.aim import Aim
from vllm_ray_operator.plan.pods import patience_left, why_lost
from vllm_ray_operator.plan.world import AttemptView, Cluster, Pod


def fault(aim: Aim, attempt: Attempt, view: AttemptView) -> str:
    """Say that an attempt is lost with the node of its head; "" if it is not, or may not be."""
    cluster = aim.world.cluster(attempt.ray_cluster)
    head = cluster.lost_head if cluster is not None else None
    if head is None or patience_left(aim, head) > 0 or _answers(view):
        return ""
    return f"node {head.node} of the Ray cluster's head does not answer, and neither does Ray nor the engine"


def let_go(aim: Aim) -> list[Action]:
    """Return what deletes lost heads that nothing needs any more."""
    actions = list[Action]()
    for cluster, head in _lost_heads(aim):
        if patience_left(aim, head) <= 0 and not _is_needed(aim, cluster):
            why = why_lost(head)
            actions.append(Delete("Pod", head.name, head.uid, why, grace_seconds=0))
            text = f"RayCluster {cluster.name}: deleting its head pod {head.name}, {why}"
            actions.append(Emit("Warning", "PodOnLostNode", text))
    return actions


def wakes(aim: Aim) -> list[float]:
    """Return when lost heads have been waited for long enough, in seconds."""
    return [left for _, head in _lost_heads(aim) if (left := patience_left(aim, head)) > 0]


def _lost_heads(aim: Aim) -> list[tuple[Cluster, Pod]]:
    """Return the lost heads of RayClusters that are to stay, with those."""
    there = ((cluster, cluster.lost_head) for cluster in aim.world.clusters if not cluster.deleting)
    return [(cluster, head) for cluster, head in there if head is not None]


def _is_needed(aim: Aim, cluster: Cluster) -> bool:
    """Whether an attempt in the RayCluster goes on, or something of it answers."""
    replicas = aim.world.deployment.status.replicas
    attempts = (a for replica in replicas for a in replica.attempts if a.ray_cluster == cluster.name)
    return any(attempt.stop is None or _answers(aim.view(attempt)) for attempt in attempts)


def _answers(view: AttemptView) -> bool:
    return view.job is not None or view.engine is not None or view.unasked
