"""What the planner aims at, and the draft of a step towards it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from vllm_ray_operator.api.status import Attempt, ReplicaStatus
from vllm_ray_operator.plan.actions import Action
from vllm_ray_operator.plan.raycluster import ResolvedCluster
from vllm_ray_operator.plan.revision import Chosen, ResolvedEngine, ray_cluster
from vllm_ray_operator.plan.roster import REPLACED, Roster
from vllm_ray_operator.plan.submissions import Census
from vllm_ray_operator.plan.world import AttemptView, World


@dataclass(frozen=True)
class Home:
    """Where a replica is carried: a RayCluster, and the cluster revision that it is made from."""

    name: str
    revision: Chosen[ResolvedCluster]


@dataclass(frozen=True)
class Aim:
    """What the deployment's replicas are to be, and the world they are in.

    ``roster``: which replicas there are to be. ``census``: what Ray's lists say. ``clusters``, ``engines``: the stored
    revisions that replicas are on, by name. ``held``: the roll is paused or stalled, so that a replica which was not
    taken yet starts again as it was.
    """

    world: World
    now: datetime
    roster: Roster
    census: Census
    cluster: Chosen[ResolvedCluster]
    clusters: Mapping[str, Chosen[ResolvedCluster]]
    engine: Chosen[ResolvedEngine]
    engines: Mapping[str, ResolvedEngine]
    held: bool
    take_number: Callable[[], int]
    new_nonce: Callable[[], str]

    def engine_of(self, attempt: Attempt) -> ResolvedEngine:
        """Return the engine revision that an attempt was started from."""
        return self.engines.get(attempt.engine_revision, self.engine.resolved)

    def is_newest(self, revision: str) -> bool:
        """Whether an engine revision is what the user asks for by now. The same in other words is no change."""
        return revision in self._newest

    @cached_property
    def _newest(self) -> frozenset[str]:
        same = (name for name, engine in self.engines.items() if engine == self.engine.resolved)
        return frozenset({self.engine.name, *same})

    def home(self, replica: ReplicaStatus) -> Home:
        """Return where a replica is carried. A shared RayCluster that is made anew takes all of them along."""
        kept = None if self._move_together else self.clusters.get(replica.cluster_revision or "")
        return self._home(kept or self.cluster, replica.index)

    @cached_property
    def _move_together(self) -> bool:
        paused = self.world.deployment.spec.rollout.paused
        return self.cluster.resolved.policy == "Shared" and not self.is_beside and not paused

    @cached_property
    def is_beside(self) -> bool:
        """Whether new RayClusters come up beside the old ones, with new replicas."""
        return self.world.deployment.spec.rollout.cluster_upgrade == "BlueGreen"

    def is_at_home(self, replica: ReplicaStatus) -> bool:
        """Whether a replica is carried where the user asks for, or is taken there."""
        return self._move_together or self.home(replica).name == self.newest_home(replica.index).name

    def dismissal(self, replica: ReplicaStatus) -> tuple[str, str]:
        """Return reason and message of the end of a replica that is not to run."""
        if self.is_beside and not self.roster.suspended and not self.is_at_home(replica):
            return REPLACED, "a replica of the new cluster revision serves in its place"
        return self.roster.dismissal

    def newest_home(self, index: int) -> Home:
        """Return where the user asks for a replica to be carried."""
        return self._home(self.cluster, index)

    def _home(self, cluster: Chosen[ResolvedCluster], index: int) -> Home:
        key = (cluster.name, index if cluster.resolved.policy == "PerReplica" else None)
        home = self._known_homes.get(key)
        if home is None:
            home = self._known_homes[key] = Home(ray_cluster(self.world.deployment.name, cluster, index), cluster)
        return home

    @cached_property
    def _known_homes(self) -> dict[tuple[str, int | None], Home]:
        return {}

    def is_given_up(self, cluster: str) -> bool:
        """Whether a RayCluster carries no replica any more: it goes when the attempts in it are gone."""
        return cluster not in self._homes

    @cached_property
    def _homes(self) -> frozenset[str]:
        roster, replicas = self.roster, self.world.deployment.status.replicas
        shared = not roster.suspended and self.cluster.resolved.policy == "Shared"  # it is there without replicas, too
        homes = (self.home(replica).name for replica in replicas if replica.index in roster.running)
        return frozenset({*homes, *([self.newest_home(0).name] if shared else [])})

    def is_outdated(self, index: int, attempt: Attempt) -> bool:
        """Whether the user asks for something else by now than what an attempt was started from."""
        return not self.is_newest(attempt.engine_revision) or attempt.ray_cluster != self.newest_home(index).name

    def next_revision(self, replica: ReplicaStatus) -> str:
        """Return the name of the engine revision that a replica's next attempt is started from."""
        if self.held and replica.revision is not None and replica.revision in self.engines:
            return replica.revision
        return self.engine.name

    def view(self, attempt: Attempt) -> AttemptView:
        """Return what was observed of an attempt."""
        return self.world.attempts.get(attempt.instance_id) or AttemptView(job=None)

    @property
    def is_new(self) -> bool:
        """Whether the spec asks for other revisions than the stored status was made from."""
        status = self.world.deployment.status
        return (status.cluster_revision, status.engine_revision) != (self.cluster.name, self.engine.name)

    @property
    def is_resumed(self) -> bool:
        """Whether a pause of the roll has just ended."""
        stored = self.world.deployment.status.rollout
        return stored is not None and stored.paused and not self.world.deployment.spec.rollout.paused


@dataclass
class Draft:
    """A step in the making."""

    status: ReplicaStatus
    actions: list[Action] = field(default_factory=list)
    wake_after: float | None = None

    def set(self, **changes: object) -> None:
        """Change fields of the replica's status."""
        old = self.status
        new = {n: value for n, value in changes.items() if (was := getattr(old, n)) is not value and was != value}
        if new:
            self.status = old.model_copy(update=new)

    def wake(self, seconds: float) -> None:
        """Look again after that time at the latest."""
        self.wake_after = seconds if self.wake_after is None else min(self.wake_after, seconds)
