"""Which RayClusters there are, and which slots in them.

A replica is carried by the RayCluster of its cluster revision (`Aim.home`). When it is taken to another revision, its
old slot goes with all its pods before the new one is made: no accelerators to spare are needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_ray_operator.api.status import Attempt, ReplicaStatus
from vllm_ray_operator.plan import fence, names, raycluster
from vllm_ray_operator.plan.actions import Action, Create, Delete
from vllm_ray_operator.plan.aim import Aim, Draft, Home
from vllm_ray_operator.plan.raycluster import ResolvedCluster
from vllm_ray_operator.plan.revision import Chosen
from vllm_ray_operator.plan.world import World


def replaced(
    world: World, cluster: Chosen[ResolvedCluster], kept: Mapping[str, Chosen[ResolvedCluster]], *, held: bool
) -> frozenset[int]:
    """Return the indices of the replicas in whose place others come up beside them, in other RayClusters.

    One that has no attempt is not among them: it moves itself, unless the roll is held (`settle`).
    """
    spec = world.deployment.spec
    if spec.rollout.cluster_upgrade != "BlueGreen" or spec.suspend:
        return frozenset()
    stay = [r for r in world.deployment.status.replicas if held or r.attempts]
    before = {r.index: kept.get(r.cluster_revision or "") for r in stay}
    return frozenset(index for index, chosen in before.items() if chosen and chosen.digest != cluster.digest)


def settle(aim: Aim, draft: Draft) -> None:
    """Write down which cluster revision a replica is on.

    It is the newest at once where that costs nothing, or is the same in other words, or where all replicas share a
    RayCluster. All else is for a roll to decide.
    """
    replica = draft.status
    costs_nothing = not replica.attempts and not aim.held
    home = aim.newest_home(replica.index) if costs_nothing or aim.is_at_home(replica) else aim.home(replica)
    before = aim.clusters.get(replica.cluster_revision or "")
    if replica.cluster_revision is not None and (before is None or before.digest != home.revision.digest):
        draft.set(revision=None)  # what it ran may not fit the new pods
    draft.set(cluster_revision=home.revision.name)


def sync(aim: Aim, replicas: Sequence[ReplicaStatus]) -> list[Action]:
    """Keep the RayClusters that carry replicas, with their slots; others go when no attempt is left in them."""
    world, actions, suspended = aim.world, list[Action](), aim.roster.suspended
    homes, carried = _homes(aim, replicas)
    busy = frozenset[str]()
    if suspended or any(cluster.name not in homes for cluster in world.clusters):
        busy = _busy(world, replicas)
    staying = [(attempt.ray_cluster, r.index) for r in replicas for attempt in r.attempts]
    taken = _slots(world)
    for name, index in staying:
        if name in homes and name in taken.get(names.slot(index), ()):
            carried[name].add(index)  # until the attempt is gone

    def may_be(index: int, home: str) -> bool:
        """Whether a replica may have its slot there: it has, or it has none elsewhere any more."""
        places = taken.get(names.slot(index), set())
        return home in places or not places

    for cluster in world.clusters:
        if cluster.deleting:
            continue
        home = homes.get(cluster.name)
        if cluster.name not in busy and (suspended or home is None):
            why = "spec.suspend is true" if suspended else "no replica is on it any more"
            actions.append(Delete("RayCluster", cluster.name, cluster.uid, why))
        elif home is not None:
            wanted = {i for i in carried[cluster.name] if may_be(i, cluster.name)}
            patch = raycluster.sync_slots(cluster, home.revision.resolved, wanted)
            if patch is not None:
                actions.append(patch)
    for name, home in homes.items():
        if world.cluster(name) is None and not suspended and all(may_be(i, name) for i in carried[name]):
            revision = home.revision
            made = raycluster.manifest(world.deployment, name, revision.name, revision.resolved, carried[name])
            actions.append(Create(made))
    return actions


def _homes(aim: Aim, replicas: Sequence[ReplicaStatus]) -> tuple[Mapping[str, Home], dict[str, set[int]]]:
    """Return the RayClusters of the replicas, and which of these are to run in each."""
    homes, carried = dict[str, Home](), dict[str, set[int]]()
    if aim.cluster.resolved.policy == "Shared":
        shared = aim.newest_home(0)  # it is there without replicas, too
        homes[shared.name], carried[shared.name] = shared, set()
    for replica in replicas:
        if replica.index in aim.roster.asked or replica.index in aim.roster.surge:
            home = aim.home(replica)
            homes[home.name] = home
            slots = carried.setdefault(home.name, set())
            if replica.index in aim.roster.running:
                slots.add(replica.index)
    return homes, carried


def _busy(world: World, replicas: Sequence[ReplicaStatus]) -> frozenset[str]:
    """Return the RayClusters that attempts are on, or were when the status was stored."""
    known = (*replicas, *world.deployment.status.replicas)
    return frozenset(a.ray_cluster for r in known for a in r.attempts if not _is_stranded(a, world))


def _slots(world: World) -> Mapping[str, set[str]]:
    """Return by worker group the RayClusters that have pods in it that stay, or are to."""
    slots: dict[str, set[str]] = {}
    for cluster in world.clusters:
        groups = {group for group, size in cluster.groups if size}
        groups |= {pod.group for pod in cluster.pods if not pod.is_head and not pod.deleting}
        for group in groups:
            slots.setdefault(group, set()).add(cluster.name)
    return slots


def _is_stranded(attempt: Attempt, world: World) -> bool:
    """Whether the end of its RayCluster is the proof that is left: its pods are gone, but Ray does not say so."""
    return attempt.stop is not None and attempt.stop.recycle and not fence.survivors(attempt, world)
