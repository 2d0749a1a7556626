"""Pods of a replica that are not going to stay: deleted by somebody, on a cordoned node, or on one that is lost."""

from __future__ import annotations

import math
from collections.abc import Iterable

from vllm_ray_operator.plan import adoption, names
from vllm_ray_operator.plan.actions import Delete, Emit
from vllm_ray_operator.plan.aim import Aim, Draft
from vllm_ray_operator.plan.world import Cluster, Pod

# A pod on a node that has not answered for this long is not waited for. Kubernetes takes a node for lost after 50 s of
# silence, from which this counts; one that restarts is back by then, as a rule.
LOST_SECONDS = 60.0
# For pods in which no engine runs: Kubernetes' own default. Their own is made for a drain.
GRACE_SECONDS = 30


def patience_left(aim: Aim, pod: Pod) -> float:
    """Return for how long a pod whose node does not answer is still waited for, in seconds; 0 or less: no more."""
    return math.inf if pod.lost_since is None else LOST_SECONDS - (aim.now - pod.lost_since).total_seconds()


def why_lost(pod: Pod) -> str:
    """Say in words that the node of a pod does not answer."""
    return f"node {pod.node} has not answered for {LOST_SECONDS:.0f} s"


def why_deleted(pods: Iterable[Pod]) -> str:
    """Say in words that pods are being deleted."""
    return f"its pods {', '.join(sorted(pod.name for pod in pods))} are being deleted"


def why_cordoned(pods: Iterable[Pod]) -> str:
    """Say in words that the nodes of pods are cordoned."""
    return "; ".join(f"node {pod.node} of its pod {pod.name} is cordoned" for pod in sorted(pods, key=lambda p: p.name))


def head_that_leaves(cluster: Cluster) -> Pod | None:
    """Return the head if its node is cordoned and its engines would not outlive it."""
    head = cluster.head
    return head if head is not None and head.cordoned and not cluster.outlives_head else None


def obstacle(aim: Aim, cluster: Cluster | None, index: int) -> str:
    """Say why no attempt of a replica may begin in the pods that are there; empty when they are to stay.

    A head on a cordoned node goes when it can: as long as others run in its RayCluster, one may begin there too.
    """
    if cluster is None:
        return ""
    if (head := head_that_leaves(cluster)) is not None:
        attempts = (a for replica in aim.world.deployment.status.replicas for a in replica.attempts)
        if all(a.stop is not None for a in attempts if a.ray_cluster == cluster.name):
            return f"node {head.node} of the Ray cluster's head is cordoned"
    return why_cordoned(pod for pod in cluster.slot(names.slot(index)) if pod.cordoned)


def let_go(aim: Aim, draft: Draft, cluster: Cluster) -> None:
    """Delete the pods of a replica without attempts that are of no use: KubeRay makes others only when they are gone.

    On a cordoned node an engine would have to leave again; the next pod cannot get there, so this does not go round in
    circles: without room elsewhere it waits.

    A pod on a node that does not answer is kept by Kubernetes until the node is back or its Node object is deleted. The
    last attempt is proven gone without its word. If it lives on somewhere, Ray has dropped its node, and another one's
    accelerators are others.
    """
    unknown = adoption.obstacle(aim, cluster)  # an engine may run in it of which the status was lost
    for pod in cluster.slot(names.slot(draft.status.index)):
        if pod.lost_since is not None:
            _let_go_of_lost(aim, draft, pod)
        elif pod.cordoned and not pod.deleting and not unknown:
            why = f"node {pod.node} is cordoned"
            draft.actions.append(Delete("Pod", pod.name, pod.uid, why, grace_seconds=GRACE_SECONDS))
            text = f"replica {draft.status.index}: deleting pod {pod.name}, so that another is made elsewhere: {why}"
            draft.actions.append(Emit("Normal", "PodOnCordonedNode", text))


def _let_go_of_lost(aim: Aim, draft: Draft, pod: Pod) -> None:
    left = patience_left(aim, pod)
    if left > 0:
        draft.wake(left)
        return
    why = why_lost(pod)
    draft.actions.append(Delete("Pod", pod.name, pod.uid, why, grace_seconds=0))
    text = f"replica {draft.status.index}: deleting its pod {pod.name}, {why}"
    draft.actions.append(Emit("Warning", "PodOnLostNode", text))
