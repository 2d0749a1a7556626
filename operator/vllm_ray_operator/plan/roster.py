"""Which replicas there are to be, by index.

A choice is not remembered as such: it follows from what the replicas are. What follows from it is written down at once
(the stop of one that leaves, the ``surge`` of one that a roll adds), and counts for the next choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice

from vllm_ray_operator.api.status import ReplicaStatus
from vllm_ray_operator.plan import fence
from vllm_ray_operator.plan.world import World

# What is lost with a replica.
NOTHING, PERHAPS, SERVES = range(3)

SCALED_DOWN = "ScaledDown"
SUSPENDED = "Suspended"
REPLACED = "Replaced"


@dataclass(frozen=True)
class Roster:
    """The indices of the replicas that are ``asked`` for and have room, and of those that a roll has beyond.

    ``old``: those asked for that stand in for new ones, in RayClusters of another revision, which are not ready yet.
    """

    asked: frozenset[int]
    surge: frozenset[int]
    suspended: bool = False
    old: frozenset[int] = frozenset()

    @cached_property
    def running(self) -> frozenset[int]:
        """Those that are to run, or to start."""
        return frozenset() if self.suspended else self.asked | self.surge

    @property
    def dismissal(self) -> tuple[str, str]:
        """Reason and message of the end of a replica that is not to run."""
        if self.suspended:
            return SUSPENDED, "spec.suspend is true"
        return SCALED_DOWN, "spec.replicas is smaller"


def choose(world: World, replicas: int, surge: int) -> Roster:
    """Choose so many replicas. ``surge``: how many a roll may have beyond them.

    The healthiest stay, of those that are alike the lowest indices; new ones take the lowest free indices. One that
    leaves already stays only if there would be too few without it. The replicas of a roll's surge stand back as long
    as it goes on: else each one that it restarts would lose its place to them.
    """
    spec, stored = world.deployment.spec, world.deployment.status.replicas
    surge = 0 if spec.suspend else surge
    apart = surge > 0 or spec.suspend
    ranked = sorted(stored, key=lambda r: (apart and r.surge, *_rank(world, r)))
    asked = [r.index for r in ranked[:replicas]]
    beyond = [r.index for r in ranked[replicas:] if apart and r.surge][:surge]
    free = _free(stored)
    asked += islice(free, replicas - len(asked))
    beyond += islice(free, surge - len(beyond))
    return Roster(frozenset(asked), frozenset(beyond), spec.suspend)


def choose_beside(world: World, replicas: int, old: frozenset[int], *, held: bool) -> Roster:
    """Choose so many replicas while new ones come up beside the ``old``, in RayClusters of their own.

    As many new ones are there as are asked for. Those that serve stay, new or old; the new before the old, so that one
    of the old goes for each new one that is ready. While the roll is ``held`` it is the other way round: none is taken.
    """
    stored = world.deployment.status.replicas

    def rank(replica: ReplicaStatus) -> tuple[bool, int, bool, bool, int]:
        leaves, lack, fails, index = _rank(world, replica)
        return (leaves, lack, (replica.index in old) != held, fails, index)

    ranked = sorted(stored, key=rank)
    new = [r.index for r in ranked if r.index not in old][:replicas]
    either = old.union(new)
    line = [r.index for r in ranked if r.index in either]
    free = list(islice(_free(stored), replicas - len(new)))
    asked = frozenset([*line, *free][:replicas])
    return Roster(asked, frozenset([*new, *free]) - asked, old=asked & old)


def _free(stored: Sequence[ReplicaStatus]) -> Iterator[int]:
    """Return the indices that no replica has, lowest first."""
    taken = {r.index for r in stored}
    return (index for index in count() if index not in taken)


def worth(replica: ReplicaStatus) -> int:
    """Return what is lost with a replica. One that is silent may serve all the same: it may be us who are cut off."""
    if replica.phase == "Ready":
        return SERVES
    silent = replica.attempt is not None and replica.attempt.silent_time is not None
    return PERHAPS if silent else NOTHING


def _rank(world: World, replica: ReplicaStatus) -> tuple[bool, int, bool, int]:
    """Return where a replica stands in the line of those that stay."""
    attempts = replica.attempts
    stops = [attempt.stop for attempt in attempts if attempt.stop is not None]
    leaves = any(stop.reason in (SCALED_DOWN, REPLACED) for stop in stops)
    fails = replica.failures > 0 or any(stop.failure for stop in stops)
    return (leaves, -_worth_by_now(world, replica), fails or not attempts, replica.index)


def _worth_by_now(world: World, replica: ReplicaStatus) -> int:
    """Return what is lost with a replica, with what was seen of it after its status was written."""
    value = worth(replica)
    if value != SERVES or replica.attempt is None:
        return value
    if fence.deleted(replica.attempt, world):
        return NOTHING
    view = world.attempts.get(replica.attempt.instance_id)
    if view is None or view.engine is None:
        return PERHAPS
    return SERVES if view.engine.ready else NOTHING
