"""The planner: one observed world to one status and the actions of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime

from vllm_ray_operator.api.status import ReplicaStatus, VLLMDeploymentStatus
from vllm_ray_operator.plan import (
    adoption,
    clusters,
    disruption,
    evacuation,
    lost_head,
    names,
    raycluster,
    revision,
    rollout,
    roster,
    status,
    submissions,
    traffic,
)
from vllm_ray_operator.plan.actions import Action, Create, Delete, Plan
from vllm_ray_operator.plan.aim import Aim
from vllm_ray_operator.plan.raycluster import ResolvedCluster, Unresolvable
from vllm_ray_operator.plan.replica import plan_replica
from vllm_ray_operator.plan.revision import Chosen, Defaults, ResolvedEngine
from vllm_ray_operator.plan.starting import head_obstacle, start_obstacle
from vllm_ray_operator.plan.status import Place
from vllm_ray_operator.plan.world import Problem, World

RAY_ERROR_POLL_SECONDS = 5.0
KIND_POLL_SECONDS = 10.0  # no event tells that a kind is served


def plan(world: World, now: datetime, new_nonce: Callable[[], str], defaults: Defaults) -> Plan:
    """Plan one step.

    Pure: the same arguments give the same plan. ``new_nonce`` is called once per new attempt. The caller writes the
    status first, and carries out the actions only if that succeeded.
    """
    deployment = world.deployment
    spec, stored = deployment.spec, deployment.status
    asked: tuple[Chosen[ResolvedCluster], Chosen[ResolvedEngine]] | None = None
    try:
        asked = _ask(world, defaults)
    except Unresolvable as error:
        world = replace(world, problems=(Problem(error.reason, str(error)), *world.problems))
    now_used = revision.current(world)
    waits = spec.rollout.paused and now_used is not None and asked != now_used
    if waits:
        asked = now_used
    unsaved = tuple(Create(chosen.create) for chosen in asked or () if chosen.create is not None)
    # Nothing is made from a revision that is not stored: the next operator could resolve it otherwise. Until it is,
    # and as long as the spec cannot be resolved, what runs is looked after as it was.
    target = asked if asked is not None and not unsaved else now_used
    if target is None or not world.clusters_known:
        return _report(world, now, unsaved)
    cluster, engine = target
    census = submissions.count(world)
    counter = _Counter(stored.last_attempt if census.unknown else max(stored.last_attempt, census.highest))
    held = rollout.is_held(world, cluster.name, engine.name)
    kept = revision.clusters(world), revision.engines(world)
    room = raycluster.capacity(deployment, cluster.name, cluster.resolved)
    count = min(spec.replicas, room)
    if count < spec.replicas:
        world = replace(world, problems=(_too_many(spec.replicas, room), *world.problems))
    limits = rollout.limits(spec.rollout, count)
    old = clusters.replaced(world, cluster, kept[0], held=held)
    if old:
        chosen = roster.choose_beside(world, count, old, held=held)
    else:
        chosen = roster.choose(world, count, min(rollout.surge(world, limits.surge), room - count))
    aim = Aim(world, now, chosen, census, cluster, kept[0], engine, kept[1], held, counter.take, new_nonce)

    drafts = [plan_replica(aim, r, wanted=r.index in chosen.running) for r in _records(world, chosen, census)]
    counter.value = max(counter.value, adoption.adopt(aim, drafts))
    evacuation.take(aim, drafts, limits)
    rollout.take(aim, drafts, limits)
    staying = chosen.asked | chosen.running
    replicas = [d.status for d in drafts if d.status.index in staying or d.status.attempts]
    actions: list[Action] = [*unsaved, *(action for draft in drafts for action in draft.actions)]
    wakes = [*([0.0] if unsaved else []), *lost_head.wakes(aim)]
    wakes += [draft.wake_after for draft in drafts if draft.wake_after is not None]
    actions += [*clusters.sync(aim, replicas), *lost_head.let_go(aim), *evacuation.let_go_of_heads(aim)]
    actions += [*traffic.sync(world, replicas, engine.resolved.port), *disruption.sync(world, replicas, limits)]
    if not unsaved:
        actions.extend(_prune(world, cluster.name, engine.name, replicas))
    generation = stored.observed_generation if unsaved else deployment.generation
    after, news = _status(aim, replicas, counter.value, generation, waits=waits)
    if any(cluster.ray_error for cluster in world.clusters):
        wakes.append(RAY_ERROR_POLL_SECONDS)
    if (deadline := rollout.wake_after(aim, after.rollout)) is not None:
        wakes.append(deadline)
    return Plan(after, (*actions, *news), min(wakes, default=None))


def _too_many(replicas: int, room: int) -> Problem:
    return Problem(
        "TooManyReplicas",
        f"spec.replicas is {replicas}, but one RayCluster holds at most {room} slots of this shape, since Kubernetes "
        f"stores no object beyond 1.5 MiB: no more than {room} replicas are made. Ask for fewer, make "
        "spec.cluster.workers.template smaller, or set spec.cluster.policy to PerReplica",
    )


def _records(world: World, chosen: roster.Roster, census: submissions.Census) -> list[ReplicaStatus]:
    """Return what is known of the replicas that are there or are to be."""
    known = {r.index: r for r in world.deployment.status.replicas}
    asked = chosen.asked | chosen.surge
    for index in {*asked, *(one.replica for one in census.unknown)} - known.keys():
        known[index] = ReplicaStatus(index=index)
    for index in asked:
        surge = index in chosen.surge
        if known[index].surge != surge:
            known[index] = known[index].model_copy(update={"surge": surge})
    return [known[index] for index in sorted(known)]


def _ask(world: World, defaults: Defaults) -> tuple[Chosen[ResolvedCluster], Chosen[ResolvedEngine]]:
    cluster = revision.choose_cluster(world, defaults)
    return cluster, revision.choose_engine(world, cluster)


class _Counter:
    """The deployment-wide attempt counter. It only grows."""

    def __init__(self, value: int) -> None:
        self.value = value

    def take(self) -> int:
        self.value += 1
        return self.value


def _prune(world: World, cluster: str, engine: str, replicas: Sequence[ReplicaStatus]) -> list[Action]:
    in_use = {cluster, engine, *(c.revision for c in world.clusters)}
    in_use |= {attempt.engine_revision for r in replicas for attempt in r.attempts}
    in_use |= {name for r in replicas for name in (r.cluster_revision, r.revision) if name is not None}
    surplus = revision.surplus(world, sorted(in_use))
    return [Delete("ControllerRevision", r.name, None, "beyond the history limit") for r in surplus]


def _status(
    aim: Aim, replicas: list[ReplicaStatus], last_attempt: int, generation: int, *, waits: bool
) -> tuple[VLLMDeploymentStatus, list[Action]]:
    deployment, problems = aim.world.deployment, aim.world.problems
    count = deployment.spec.replicas
    wanted = [r for r in replicas if r.index in aim.roster.asked]
    roll = rollout.progress(aim, replicas)
    updated = sum(rollout.is_updated(aim, r) for r in wanted)
    judged = status.verdicts(
        status.Situation(replicas, aim.roster, updated, roll, waits, deployment.spec.restart.crash_loop_after),
        status.cluster_verdict(_places(aim, replicas), problems, suspended=aim.roster.suspended),
        problems,
    )
    conditions = status.conditions(deployment.status, judged, generation, aim.now)
    ready = sum(r.phase == "Ready" for r in wanted)
    after = VLLMDeploymentStatus(
        observed_generation=generation,
        last_attempt=last_attempt,
        cluster_revision=aim.cluster.name,
        engine_revision=aim.engine.name,
        ray_cluster=aim.newest_home(0).name if aim.cluster.resolved.policy == "Shared" else None,
        endpoint=traffic.base_url(deployment, aim.engine.resolved.port),
        current_replicas=sum(r.phase != "Stopped" for r in replicas),
        ready_replicas=ready,
        updated_replicas=updated,
        rollout=roll,
        replica_summary=f"{ready}/{count}",
        selector=",".join(f"{key}={value}" for key, value in sorted(names.worker_selector(deployment.name).items())),
        replicas=replicas,
        conditions=conditions,
    )
    return after, list(status.news(deployment.status, conditions, problems))


def _places(aim: Aim, replicas: Sequence[ReplicaStatus]) -> list[Place]:
    """Return the RayClusters that carry replicas, with what each lacks. A shared one has to be there without any.

    While the deployment is suspended they are those that have not gone yet.
    """
    world, places = aim.world, list[Place]()
    if aim.roster.suspended:
        return [Place(cluster.name, cluster, head_obstacle(cluster)) for cluster in world.clusters]
    running = [r for r in replicas if r.index in aim.roster.running]
    for replica in running:
        name = aim.home(replica).name
        places.append(Place(name, world.cluster(name), start_obstacle(aim, replica)))
    if not running and aim.cluster.resolved.policy == "Shared":
        name = aim.newest_home(0).name
        places.append(Place(name, world.cluster(name), head_obstacle(world.cluster(name))))
    return places


def _report(world: World, now: datetime, unsaved: tuple[Create, ...]) -> Plan:
    """Nothing can be made, or concluded of what was: say why, if there is a reason other than that it is to begin."""
    deployment, problems = world.deployment, world.problems
    wake_after = 0.0 if unsaved else None if world.clusters_known else KIND_POLL_SECONDS
    if not problems:
        return Plan(deployment.status, unsaved, wake_after)
    cluster = status.cluster_verdict((), problems, suspended=False)
    old, loop = deployment.status, deployment.spec.restart.crash_loop_after
    asked = roster.choose(world, deployment.spec.replicas, 0)
    situation = status.Situation(old.replicas, asked, old.updated_replicas, old.rollout, False, loop)
    judged = status.verdicts(situation, cluster, problems)
    conditions = status.conditions(deployment.status, judged, deployment.generation, now)
    summary = f"{deployment.status.ready_replicas}/{deployment.spec.replicas}"
    after = deployment.status.model_copy(
        update={
            "observed_generation": deployment.generation,
            "conditions": conditions,
            "replica_summary": summary,
        }
    )
    return Plan(after, (*unsaved, *status.news(deployment.status, conditions, problems)), wake_after)
