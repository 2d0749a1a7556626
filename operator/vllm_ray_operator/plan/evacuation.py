"""Replicas leave nodes that are cordoned: as in a roll, no more at a time than may be unavailable (invariant I5).

Pods that are being deleted are no matter of choice: those replicas have a stop by the time that this is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_ray_operator.plan import adoption, fence, pods, roster, stopping
from vllm_ray_operator.plan.actions import Action, Delete, Emit
from vllm_ray_operator.plan.aim import Aim, Draft
from vllm_ray_operator.plan.rollout import Limits
from vllm_ray_operator.plan.world import Pod


def take(aim: Aim, drafts: Iterable[Draft], limits: Limits) -> None:
    """Retire the engines on cordoned nodes: those that serve nobody at once, the others as far as enough stay ready."""
    drafts = list(drafts)
    ready = _Ready(sum(draft.status.phase == "Ready" for draft in drafts), limits.stay_ready)
    for cluster in aim.world.clusters:
        head = pods.head_that_leaves(cluster)
        if head is not None:
            # It takes all along: they leave together, or not at all.
            why = f"node {head.node} of the Ray cluster's head is cordoned"
            _take(aim, [draft for draft in drafts if _runs_in(draft, cluster.name)], why, ready)
    leaving = [(draft, found) for draft in drafts if (found := _cordoned(aim, draft))]
    for draft, found in sorted(leaving, key=lambda one: (roster.worth(one[0].status), one[0].status.index)):
        _take(aim, [draft], pods.why_cordoned(found), ready)


class _Ready:
    """How many replicas are ready, and how many have to stay so."""

    def __init__(self, number: int, stay: int) -> None:
        self.number, self.stay = number, stay


def _cordoned(aim: Aim, draft: Draft) -> list[Pod]:
    attempt = draft.status.attempt
    return fence.cordoned(attempt, aim.world) if attempt is not None and attempt.stop is None else []


def _runs_in(draft: Draft, cluster: str) -> bool:
    attempt = draft.status.attempt
    return attempt is not None and attempt.stop is None and attempt.ray_cluster == cluster


def _take(aim: Aim, leaving: Sequence[Draft], why: str, ready: _Ready) -> None:
    """Retire these together if enough stay ready without them."""
    worths = [roster.worth(draft.status) for draft in leaving]
    left = ready.number - worths.count(roster.SERVES)
    if left >= ready.stay or all(worth == roster.NOTHING for worth in worths):
        for draft in leaving:
            stopping.retire(aim, draft, stopping.NODE_DRAINED, why)
            draft.actions.append(Emit("Normal", "NodeDrained", f"replica {draft.status.index} leaves: {why}"))
        ready.number = left
        return
    for draft, worth in zip(leaving, worths, strict=True):
        if worth == roster.SERVES:
            one = "it leaves" if len(leaving) == 1 else f"the {len(leaving)} replicas on it leave together"
            draft.set(message=f"{why}: {one} when at least {ready.stay} others are ready")


def let_go_of_heads(aim: Aim) -> list[Action]:
    """Return what deletes the heads on cordoned nodes whose engines have left: KubeRay makes others elsewhere."""
    actions = list[Action]()
    for cluster in aim.world.clusters:
        head = pods.head_that_leaves(cluster)
        idle = not any(a.ray_cluster == cluster.name for r in aim.world.deployment.status.replicas for a in r.attempts)
        if head is not None and idle and not cluster.deleting and not adoption.obstacle(aim, cluster):
            why = f"node {head.node} is cordoned"
            actions.append(Delete("Pod", head.name, head.uid, why, grace_seconds=pods.GRACE_SECONDS))
            text = f"RayCluster {cluster.name}: deleting head {head.name}, so that another is made elsewhere: {why}"
            actions.append(Emit("Normal", "PodOnCordonedNode", text))
    return actions
