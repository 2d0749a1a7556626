"""Rolls: which replicas may be taken from what they run to what the user asks for (invariant I5).

Nothing here is remembered but how far a roll has come. Which replica is next follows from what they all are now, so a
spec that changes in the middle goes straight to the newest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from vllm_ray_operator.api.spec import Rollout, VLLMDeploymentSpec
from vllm_ray_operator.api.status import ReplicaStatus, RolloutStatus
from vllm_ray_operator.plan import roster, standby, stopping
from vllm_ray_operator.plan.aim import Aim, Draft
from vllm_ray_operator.plan.revision import ResolvedEngine
from vllm_ray_operator.plan.world import World

# What one replica may take beyond the time for its drain and its start.
DEADLINE_MARGIN_SECONDS = 600


@dataclass(frozen=True)
class Limits:
    """What a roll has to keep to: how many replicas stay ready, how many there may be beyond those asked for, and
    how many may be on their way at once.
    """

    stay_ready: int
    surge: int
    width: int


def limits(policy: Rollout, replicas: int) -> Limits:
    """Return the limits of a roll. As in a Deployment, shares of few replicas that come to nothing allow one."""
    unavailable = min(replicas, _count(policy.max_unavailable, replicas, math.floor))
    surge = _count(policy.max_surge, replicas, math.ceil)
    if policy.type == "Recreate":
        return Limits(0, 0, replicas)
    if not unavailable and not surge:
        unavailable = 1
    return Limits(max(0, replicas - unavailable), surge, unavailable + surge)


def _count(value: int | str, replicas: int, to_integer: Callable[[float], int]) -> int:
    if isinstance(value, int):
        return value
    return to_integer(int(value.removesuffix("%")) * replicas / 100)


def is_held(world: World, cluster: str, engine: str) -> bool:
    """Whether no replica may be taken to these revisions: the roll is paused or past its deadline."""
    stored = world.deployment.status.rollout
    stalled = stored is not None and stored.stalled and _leads_to(stored, cluster, engine)
    return world.deployment.spec.rollout.paused or stalled


def _leads_to(roll: RolloutStatus, cluster: str, engine: str) -> bool:
    return (roll.cluster_revision, roll.revision) == (cluster, engine)


def surge(world: World, allowed: int) -> int:
    """Return how many replicas there are to be beyond those asked for."""
    status = world.deployment.status
    if status.rollout is None:
        return 0
    if is_held(world, status.rollout.cluster_revision, status.rollout.revision):
        # No new ones; but what is there may stand in for a replica that does not come back.
        return min(allowed, sum(r.surge and bool(r.attempts) for r in status.replicas))
    return allowed


def take(aim: Aim, drafts: Iterable[Draft], limits: Limits) -> None:
    """Retire the engines whose turn it is: those that cost nothing at once, the others as far as enough stay ready.

    One that serves first gets a standby. As many standbys come up at once as replicas may be on their way.
    """
    if aim.held:
        return
    drafts = list(drafts)
    outdated = [draft for draft in drafts if _is_to_be_taken(aim, draft.status)]
    ready = sum(draft.status.phase == "Ready" for draft in drafts)
    room = limits.width - sum(draft.status.standby is not None for draft in drafts)
    if any(standby.blames_spec(draft.status) for draft in drafts):
        room = 0
    for draft in sorted(outdated, key=lambda d: (roster.worth(d.status), d.status.index)):
        worth = roster.worth(draft.status)
        left = ready - 1 if worth == roster.SERVES else ready
        if worth == roster.SERVES and _needs_standby(aim, draft.status):
            room -= room > 0 and standby.prepare(aim, draft)
        elif worth == roster.NOTHING or left >= limits.stay_ready:
            stopping.retire(aim, draft, "NewRevision", "the spec has changed")
            # Whatever comes now, it starts again as that.
            draft.set(cluster_revision=aim.cluster.name, revision=aim.engine.name)
            ready = left


def _needs_standby(aim: Aim, replica: ReplicaStatus) -> bool:
    """Whether a replica that serves is not to be taken before its standby is ready. In new pods there can be none."""
    policy = aim.world.deployment.spec.rollout
    if not aim.is_at_home(replica):
        return False
    if not policy.standby or policy.type == "Recreate" or not standby.fits(aim, replica):
        return False
    return not standby.is_ready(aim, replica) and not standby.is_given_up(aim, replica)


def _is_to_be_taken(aim: Aim, replica: ReplicaStatus) -> bool:
    attempt = replica.attempt
    if attempt is None or attempt.stop is not None or replica.index not in _in_question(aim):
        return False
    if aim.is_beside and not aim.is_at_home(replica):
        return False  # another takes its place
    return aim.is_outdated(replica.index, attempt)


def _in_question(aim: Aim) -> frozenset[int]:
    """Return the replicas that a roll is about: while new ones come up beside old ones, all of them."""
    return aim.roster.running if aim.roster.old else aim.roster.asked


def is_updated(aim: Aim, replica: ReplicaStatus) -> bool:
    """Whether a replica is what the user asks for, ready or not."""
    if replica.attempt is not None:
        return not aim.is_outdated(replica.index, replica.attempt)
    return replica.revision is not None and aim.is_newest(replica.revision) and aim.is_at_home(replica)


def progress(aim: Aim, replicas: Sequence[ReplicaStatus]) -> RolloutStatus | None:
    """Return how far the roll is, None when there is none or it is complete."""
    policy, stored = aim.world.deployment.spec.rollout, aim.world.deployment.status.rollout
    if aim.roster.suspended:
        # One that is held goes on as it was; else all start as the newest.
        return stored.model_copy(update={"paused": policy.paused}) if stored is not None and aim.held else None
    wanted = [r for r in replicas if r.index in _in_question(aim)]
    count = len(aim.roster.asked)
    done = min(count, sum(is_updated(aim, r) and r.phase == "Ready" for r in wanted))
    if done == count and not aim.roster.old:
        return None
    if stored is None or not _leads_to(stored, aim.cluster.name, aim.engine.name):
        if stored is None and not any(_was_otherwise(aim, r) for r in wanted):
            return None
        return RolloutStatus(
            cluster_revision=aim.cluster.name,
            revision=aim.engine.name,
            updated_ready=done,
            progress_time=aim.now,
            paused=policy.paused,
        )
    # What was in the way may have been something else than the new revision: then it may be tried.
    recovered = stored.stalled and all(r.phase == "Ready" and r.standby_failure is None for r in wanted)
    goes_on = done > stored.updated_ready or recovered or (stored.paused and not policy.paused)
    since = aim.now if goes_on else stored.progress_time
    return RolloutStatus(
        cluster_revision=stored.cluster_revision,
        revision=stored.revision,
        updated_ready=max(done, min(stored.updated_ready, count)),
        progress_time=since,
        paused=policy.paused,
        stalled=not policy.paused and aim.now - since >= deadline(aim.world.deployment.spec, aim.engine.resolved),
    )


def _was_otherwise(aim: Aim, replica: ReplicaStatus) -> bool:
    """Whether a replica runs, or ran last, something else than is asked for: else its start is no roll."""
    if replica.attempt is not None:
        return aim.is_outdated(replica.index, replica.attempt)
    return replica.revision is not None and not aim.is_newest(replica.revision)


def deadline(spec: VLLMDeploymentSpec, engine: ResolvedEngine) -> timedelta:
    """Return how long a roll may go without getting one more replica ready."""
    if spec.rollout.progress_deadline_seconds is not None:
        return timedelta(seconds=spec.rollout.progress_deadline_seconds)
    one = spec.engine.drain_timeout_seconds + engine.startup_timeout_seconds
    return timedelta(seconds=one + DEADLINE_MARGIN_SECONDS)


def wake_after(aim: Aim, after: RolloutStatus | None) -> float | None:
    """Return when the deadline has to be looked at, in seconds."""
    if after is None or after.paused or after.stalled:
        return None
    passes = after.progress_time + deadline(aim.world.deployment.spec, aim.engine.resolved)
    return max(0.0, (passes - aim.now).total_seconds())
