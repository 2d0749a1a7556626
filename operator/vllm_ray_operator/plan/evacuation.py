"""Replicas leave nodes that are cordoned: as in a roll, no more at a time than may be unavailable (invariant I5).

Pods that are being deleted are no matter of choice: those replicas have a stop by the time that this is asked.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_ray_operator.plan import pods, roster, stopping
from vllm_ray_operator.plan.actions import Emit
from vllm_ray_operator.plan.aim import Aim, Draft
from vllm_ray_operator.plan.rollout import Limits


def take(aim: Aim, drafts: Iterable[Draft], limits: Limits) -> None:
    """Retire the engines on cordoned nodes: those that serve nobody at once, the others as far as enough stay ready."""
    drafts = list(drafts)
    ready = sum(draft.status.phase == "Ready" for draft in drafts)
    for draft in sorted(drafts, key=lambda d: (roster.worth(d.status), d.status.index)):
        attempt = draft.status.attempt
        if attempt is None or attempt.stop is not None:
            continue
        leaving = pods.cordoned(attempt, aim.world)
        if not leaving:
            continue
        worth, why = roster.worth(draft.status), pods.why_cordoned(leaving)
        left = ready - 1 if worth == roster.SERVES else ready
        if worth == roster.NOTHING or left >= limits.stay_ready:
            stopping.retire(aim, draft, "NodeDrained", why)
            draft.actions.append(Emit("Normal", "NodeDrained", f"replica {draft.status.index} leaves: {why}"))
            ready = left
        elif worth == roster.SERVES:
            draft.set(message=f"{why}: it leaves when more than {limits.stay_ready} replicas are ready")
