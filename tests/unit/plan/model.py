"""A small world in which plans are carried out: pods come and go, jobs run, things break. Pure, synchronous, seeded.

It is harsher than the real one: nothing but the planner keeps two attempts of a replica apart (no accelerators are
counted), so that its fences carry all of the weight. :meth:`World.check` holds the invariants of the design.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from tests.unit.plan import build
from vllm_ray_operator.api.status import Attempt, ReplicaStatus, VLLMDeploymentStatus
from vllm_ray_operator.plan import engine_job, fence, names, planner, stopping, submissions
from vllm_ray_operator.plan import world as seen
from vllm_ray_operator.plan.actions import (
    Action,
    Apply,
    Create,
    Delete,
    Emit,
    PatchCluster,
    Plan,
    StopJob,
    SubmitJob,
)

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
JOB_START_SECONDS = 900.0  # Ray gives up a job that has not started by then
LATE_SECONDS = 50.0  # how late a submission may arrive whose sender has given up
Life = tuple[str, int]  # uid and restarts of a pod's Ray container


class Refused(Exception):
    """The API said no, or did not answer."""


@dataclass
class Pod:
    name: str
    uid: str
    cluster: str
    owner: str
    group: str
    ip: str
    ready_at: float
    node: str | None = None  # none: it waits for one that takes pods
    restarts: int = 0
    gone_at: float | None = None

    @property
    def is_head(self) -> bool:
        return self.group == "headgroup"

    @property
    def life(self) -> Life:
        return (self.uid, self.restarts)


@dataclass
class Job:
    id: str
    replica: int
    session: Life
    submitted_at: float
    start_at: float
    status: seen.JobStatus = "PENDING"
    ready_at: float = 0.0
    end_at: float | None = None
    end_as: seen.JobStatus = "FAILED"
    stopping: bool = False
    waits: bool = False  # a standby: no accelerators and no actors yet, nothing that could hang
    imported_at: float = 0.0
    metadata: Mapping[str, str] = field(default_factory=dict)
    deaf: bool = False  # ignores stops
    leaks: bool = False  # its processes outlive it
    driver: Pod | None = None
    processes: set[Life] = field(default_factory=set)

    @property
    def terminal(self) -> bool:
        return self.status in seen.TERMINAL


@dataclass
class RayCluster:
    name: str
    uid: str
    manifest: dict[str, Any]
    version: int = 1
    gone_at: float | None = None
    silent_until: float = 0.0
    partial_until: float = 0.0

    @property
    def groups(self) -> list[tuple[str, int]]:
        return [(g["groupName"], g["replicas"]) for g in self.manifest["spec"]["workerGroupSpecs"]]

    @property
    def outlives_head(self) -> bool:
        return "gcsFaultToleranceOptions" in self.manifest["spec"]


class World:
    """The world, its operator included. ``log`` tells what happened."""

    def __init__(self, random: Random, raw: Mapping[str, Any]) -> None:
        self.random = random
        self.raw: Mapping[str, Any] = raw
        self.generation = 1
        self.time = 0.0
        self.status = VLLMDeploymentStatus()
        self.revisions: dict[str, seen.Revision] = {}
        self.clusters: dict[str, RayCluster] = {}
        self.pods: dict[str, Pod] = {}  # by uid
        self.services: dict[str, Any] = {}
        self.slices: dict[str, Any] = {}
        self.budgets: dict[str, Any] = {}
        self.jobs: list[Job] = []  # all there ever were
        self.records: dict[tuple[Life, str], Job] = {}  # what each GCS knows
        self.late: list[tuple[float, SubmitJob, Life]] = []
        self.cordoned = dict.fromkeys(("node-1", "node-2", "node-3"), False)
        self.deaf_engines: set[str] = set()  # launchers that do not answer
        self.log: list[str] = []
        self.ids: dict[str, int] = {}  # instance ids ever written down, with their numbers
        self.used: set[str] = set()
        self.restored = False  # an older status was put in the place of the newest
        self._serial = 0
        self.deleted_uids: list[str] = []

    # -- time ------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        return EPOCH + timedelta(seconds=self.time)

    def serial(self) -> str:
        self._serial += 1
        return f"{self._serial:05d}"

    def advance(self, seconds: float) -> None:
        """Let time pass, in small steps."""
        end = self.time + seconds
        while self.time < end:
            self.time = min(end, self.time + 2.0)
            self._kuberay()
            self._ray()
            self.check()

    def _kuberay(self) -> None:
        for name, cluster in list(self.clusters.items()):
            if cluster.gone_at is not None and cluster.gone_at <= self.time:
                del self.clusters[name]
        owners = {c.uid for c in self.clusters.values()}
        for pod in list(self.pods.values()):
            if pod.owner not in owners:
                self.delete_pod(pod)
            if pod.gone_at is not None and pod.gone_at <= self.time:
                self._end_life(pod)
                del self.pods[pod.uid]
        for cluster in self.clusters.values():
            if cluster.gone_at is None:
                for group, count in (("headgroup", 1), *cluster.groups):
                    self._scale(cluster, group, count)
        for pod in self.pods.values():
            if pod.node is None and (free := [node for node, closed in self.cordoned.items() if not closed]):
                pod.node, pod.ready_at = self.random.choice(free), self.time + self.random.uniform(1, 15)

    def _scale(self, cluster: RayCluster, group: str, count: int) -> None:
        pods = [p for p in self.pods.values() if p.owner == cluster.uid and p.group == group]
        alive = [p for p in pods if p.gone_at is None]
        for pod in alive[count:]:
            self.delete_pod(pod)
        taken = {p.name for p in self.pods.values()}
        for n in range(count + len(pods)):
            name = f"{cluster.name}-{group}-{n}"  # names come again, uids do not
            if len(alive) < count and name not in taken:
                serial = self.serial()
                ip = f"10.{int(serial)}.0.1"
                pod = Pod(name, f"uid-{serial}", cluster.name, cluster.uid, group, ip, ready_at=math.inf)
                self.pods[pod.uid] = pod
                alive.append(pod)

    def _ray(self) -> None:
        for arrival in [a for a in self.late if a[0] <= self.time]:
            self.late.remove(arrival)
            head = self.head(arrival[1].cluster)
            if head is not None and head.life == arrival[2]:  # else its connection broke
                self._accept(arrival[1])
        for job in self.jobs:
            cluster = next((c for c in self.clusters.values() if self.known(c).get(job.id) is job), None)
            if job.end_at is not None and job.end_at <= self.time and not job.terminal:
                job.status = job.end_as
                job.processes = job.processes if job.leaks and not job.waits else set()
            if job.status != "PENDING" or cluster is None:
                continue
            slot = self.slot(cluster, job.replica)
            if self.time - job.submitted_at > JOB_START_SECONDS:
                job.status = "FAILED"
            elif slot and job.start_at <= self.time and all(self.is_ready(p) for p in slot):
                job.status = "STOPPED" if job.stopping else "RUNNING"
                if not job.stopping:
                    job.processes = {p.life for p in slot}
                    job.driver = slot[0]
                    job.ready_at = self.time + self.random.uniform(2, 40)
                    job.imported_at = self.time + self.random.uniform(1, 30)
        self._hand_over()

    def _hand_over(self) -> None:
        """A living Ray gives a waiting placement group the accelerators that nobody holds any more."""
        for job in self.jobs:
            if (
                job.waits
                and job.status == "RUNNING"
                and any(self.known(c).get(job.id) is job for c in self.clusters.values())
            ):
                others = [
                    j for j in self.jobs if j is not job and j.replica == job.replica and j.processes and not j.waits
                ]
                if not others and job.processes:
                    self.note(f"{job.id} takes the accelerators")
                    job.waits = False
                    job.ready_at = self.time + self.random.uniform(1, 20)

    # -- what is where ---------------------------------------------------------------------------------------------

    def head(self, cluster: str) -> Pod | None:
        owner = self.clusters[cluster].uid if cluster in self.clusters else ""
        heads = [p for p in self.pods.values() if p.owner == owner and p.is_head and p.gone_at is None]
        return heads[0] if heads else None

    def slot(self, cluster: RayCluster, replica: int) -> list[Pod]:
        group = names.slot(replica)
        return [p for p in self.pods.values() if p.owner == cluster.uid and p.group == group and p.gone_at is None]

    def is_ready(self, pod: Pod) -> bool:
        return pod.ready_at <= self.time

    def is_cordoned(self, pod: Pod) -> bool:
        return pod.node is not None and self.cordoned[pod.node]

    def known(self, cluster: RayCluster) -> dict[str, Job]:
        """The jobs that the living GCS of a cluster knows."""
        memory = self.memory(cluster)
        return {job_id: job for (life, job_id), job in self.records.items() if life == memory}

    def memory(self, cluster: RayCluster) -> Life | None:
        """Where the living head of a cluster keeps what it knows: in its own life, or outside of it."""
        head = self.head(cluster.name)
        if head is None:
            return None
        return (cluster.uid, 0) if cluster.outlives_head else head.life

    def ray(self, cluster: RayCluster) -> RayCluster | None:
        """The cluster if its dashboard answers."""
        head = self.head(cluster.name)
        return cluster if head and self.is_ready(head) and cluster.silent_until <= self.time else None

    # -- faults ----------------------------------------------------------------------------------------------------

    def _end_life(self, pod: Pod) -> None:
        """A Ray container ends, and with it all that ran in it."""
        for job in self.jobs:
            if pod.life in job.processes:
                job.processes.discard(pod.life)
                if not job.terminal and job.end_at is None:
                    job.end_at, job.end_as = self.time + self.random.uniform(0, 15), "FAILED"

    def restart_container(self, pod: Pod) -> None:
        self._end_life(pod)
        pod.restarts += 1
        pod.ready_at = self.time + self.random.uniform(1, 15)

    def delete_pod(self, pod: Pod) -> None:
        if pod.gone_at is None:
            pod.gone_at = self.time + self.random.choice((1, 10, 30, 120))

    def recycle_pod(self, pod: Pod) -> None:
        """Delete a pod with little grace, whatever it has by itself or was given before."""
        self.delete_pod(pod)
        pod.gone_at = min(pod.gone_at or math.inf, self.time + self.random.choice((1, 10, 30)))

    def restore(self, status: VLLMDeploymentStatus) -> None:
        """The API server comes back with an older status. Nothing is on its way to Ray by then."""
        self.restored, self.status, self.late = True, status, []

    # -- the operator ----------------------------------------------------------------------------------------------

    def observe(self) -> seen.World:
        attempts = written(self.status)
        deployment = build.deployment(self.raw, self.status, self.generation)
        clusters = [self._see_cluster(c) for c in self.clusters.values()]
        asked = submissions.are_needed(deployment, clusters)
        return seen.World(
            deployment=deployment,
            revisions=tuple(self.revisions.values()),
            clusters=tuple(replace(c, submissions=self._list(self.clusters[c.name], asked)) for c in clusters),
            services=dict(self.services),
            endpoint_slices=dict(self.slices),
            budgets=dict(self.budgets),
            attempts={a.instance_id: self._see_attempt(a) for a in attempts},
            orphans=tuple(self._see_pod(p) for p in self.pods.values() if p.cluster not in self.clusters),
        )

    def _see_cluster(self, cluster: RayCluster) -> seen.Cluster:
        head = self.head(cluster.name)
        head_ready = head is not None and self.is_ready(head)
        return seen.Cluster(
            name=cluster.name,
            uid=cluster.uid,
            resource_version=str(cluster.version),
            revision=cluster.manifest["metadata"]["labels"][names.CLUSTER_REVISION],
            deleting=cluster.gone_at is not None,
            head_ready=head_ready,
            outlives_head=cluster.outlives_head,
            groups=tuple(cluster.groups),
            pods=tuple(self._see_pod(p) for p in self.pods.values() if p.cluster == cluster.name),
            ray_error="Ray does not answer" if head_ready and self.ray(cluster) is None else "",
            submissions=None,
        )

    def _list(self, cluster: RayCluster, asked: bool) -> tuple[seen.Submission, ...] | None:
        if self.ray(cluster) is None or not asked:
            return None
        return tuple(seen.Submission(j.id, j.status, j.metadata) for j in self.known(cluster).values())

    def _see_pod(self, pod: Pod) -> seen.Pod:
        return seen.Pod(
            name=pod.name,
            uid=pod.uid,
            cluster=pod.cluster,
            group=pod.group,
            is_head=pod.is_head,
            ip=pod.ip,
            node=pod.node,
            ready=self.is_ready(pod),
            deleting=pod.gone_at is not None,
            ends=EPOCH + timedelta(seconds=pod.gone_at) if pod.gone_at is not None else None,
            cordoned=self.is_cordoned(pod),
            restarts=pod.restarts,
        )

    def _see_attempt(self, attempt: Attempt) -> seen.AttemptView:
        cluster = self.clusters.get(attempt.ray_cluster)
        if cluster is None or self.ray(cluster) is None:
            return seen.AttemptView(job=None)
        job, leftovers, engine = self.known(cluster).get(attempt.instance_id), None, None
        if attempt.end_time is not None or (job is not None and job.terminal):
            rows = tuple(f"actor on {uid}" for uid, _ in sorted(job.processes)) if job else ()
            complete = cluster.partial_until <= self.time
            leftovers = seen.Leftovers(complete=complete, actors=rows if complete else ())
        if job is None:
            return seen.AttemptView(job="absent", leftovers=leftovers)
        if job.status == "RUNNING" and job.driver is not None and job.id not in self.deaf_engines and job.processes:
            engine = build.engine(ready=not job.waits and job.ready_at <= self.time)
            if job.waits and job.imported_at <= self.time:
                engine = build.engine(ready=False, phase="Standby")
        ran = job.driver is not None
        view = build.job(
            job.status, ray_job_ids=("02",) if ran else (), driver_ip=job.driver.ip if job.driver else None
        )
        return seen.AttemptView(job=view, leftovers=leftovers, engine=engine)

    def plan(self, world: seen.World) -> Plan:
        return planner.plan(world, self.now, self.serial, build.DEFAULTS)

    def write_status(self, plan: Plan) -> None:
        before = self.status
        self.status = VLLMDeploymentStatus.model_validate_json(plan.status.model_dump_json(by_alias=True))
        assert self.status == plan.status, "a status changes on its way through the API server"
        assert self.status.last_attempt >= before.last_attempt, "I1: the counter went back"
        known = {a.instance_id for a in written(before)}
        # What was written down only in a status that is lost was never begun.
        highest = max((n for i, n in self.ids.items() if not self.restored or i in self.used), default=0)
        for replica in self.status.replicas:
            for attempt in (a for a in replica.attempts if a.instance_id not in known):
                if attempt.stop is not None and attempt.stop.reason == "UnknownAttempt":
                    assert self.restored, f"{attempt.instance_id} was known"
                    continue
                assert not self.raw.get("suspend"), f"{attempt.instance_id} is begun while suspended"
                assert attempt.instance_id not in self.ids, f"I1: {attempt.instance_id} came again"
                assert attempt.number > highest, f"I1: number {attempt.number} is not new"
                self.ids[attempt.instance_id] = attempt.number
        running = [r for r in self.status.replicas if not is_stopped(r)]
        beside = self.raw["replicas"] if self.is_beside else 0
        assert len(running) <= self.raw["replicas"] + max(self.policy("maxSurge"), beside), "I5: more than may surge"
        if plan.status != before:
            self.note(f"status {' '.join(map(_word, self.status.replicas))}")

    @property
    def is_per_replica(self) -> bool:
        return bool(self.raw["cluster"].get("policy") == "PerReplica")

    @property
    def is_beside(self) -> bool:
        return bool(self.raw.get("rollout", {}).get("clusterUpgrade") == "BlueGreen")

    def policy(self, field: str) -> int:
        return int(self.raw.get("rollout", {}).get(field, {"maxUnavailable": 1, "maxSurge": 0}[field]))

    def check_roll(self, observed: seen.World, plan: Plan) -> None:
        """I5: a roll takes an engine that serves only if enough stay ready, and none while it is paused.

        When nodes are cordoned, as many have to stay.
        """
        before = {r.attempt.instance_id: r for r in self.status.replicas if r.attempt is not None}
        taken, replaced, dismissed = [], [], []
        for replica in plan.status.replicas:
            attempt = replica.attempt
            old = before.get(attempt.instance_id) if attempt is not None else None
            if attempt is None or old is None or old.attempt is None or old.attempt.stop is not None:
                continue
            engine = observed.attempts[attempt.instance_id].engine
            goes = any(pod.deleting for pod in fence.survivors(old.attempt, observed))  # whatever is decided
            serves = old.phase == "Ready" and engine is not None and engine.ready and not goes
            if attempt.stop is not None and attempt.stop.reason == "ScaledDown" and serves:
                dismissed.append(replica.index)
            if attempt.stop is not None and attempt.stop.reason == "Replaced" and serves:
                replaced.append(replica.index)
            if attempt.stop is not None and attempt.stop.reason == "NodeDrained" and serves:
                taken.append(replica.index)
            if attempt.stop is not None and attempt.stop.reason == "NewRevision":
                assert not observed.deployment.spec.rollout.paused, f"replica {replica.index} is taken in a pause"
                shared = plan.status.ray_cluster  # when it is made anew, it takes all along
                if serves and (self.is_beside or shared in (None, attempt.ray_cluster)):
                    taken.append(replica.index)
        self._check_scale(observed, plan, dismissed)
        ready = [r.index for r in plan.status.replicas if r.phase == "Ready"]
        if taken and self.raw.get("rollout", {}).get("type") != "Recreate":
            least = self.raw["replicas"] - self.policy("maxUnavailable")
            assert len(ready) >= least, f"I5: {taken} are taken, {ready} stay ready, {least} have to"
        enough = len(ready) + len(taken) >= self.raw["replicas"]
        assert enough or not replaced, f"I5: {replaced} are replaced, {ready} stay ready, {taken} are taken"

    def _check_scale(self, observed: seen.World, plan: Plan, dismissed: list[int]) -> None:
        """One that serves leaves only if all that stay serve too, and nothing is forgotten that is asked for."""
        asked = [r for r in plan.status.replicas if not leaves(r) and not r.surge]
        assert sum(not is_stopped(r) for r in asked) <= self.raw["replicas"], "more stay than are asked for"
        there = {r.index for r in plan.status.replicas}
        lost = [r.index for r in self.status.replicas if r.index not in there and not leaves(r) and not r.surge]
        assert len(asked) >= self.raw["replicas"] or not lost, f"what is known of replicas {lost} was forgotten"
        if dismissed:
            unseen = {r.index for r in self.status.replicas if r.attempt is not None and _is_down(observed, r)}
            idle = [r.index for r in asked if r.index in unseen and r.phase not in ("Stopping", "Draining")]
            assert not idle, f"{dismissed} serve and leave, {idle} do not and stay"

    def execute(self, action: Action, observed: seen.World, *, late: bool = False) -> None:
        """Carry out one action. Refused if it was not. A submission goes only to the head that was observed."""
        if not isinstance(action, Emit):
            self.note(_brief(action) + (" (late)" if late else ""))
        match action:
            case Create(manifest) | Apply(manifest):
                self._store(manifest["kind"], manifest["metadata"]["name"], manifest)
            case PatchCluster(name, operations):
                self._patch(name, operations)
            case Delete(kind, name, uid):
                self._delete(kind, name, uid, observed)
            case SubmitJob(cluster):
                head = self.head(cluster)
                if cluster not in self.clusters or self.ray(self.clusters[cluster]) is None or head is None:
                    raise Refused
                meant = observed.cluster(cluster)
                if meant is None or meant.head is None or (meant.head.uid, meant.head.restarts) != head.life:
                    raise Refused
                if late:
                    self.late.append((self.time + self.random.uniform(0, LATE_SECONDS), action, head.life))
                else:
                    self._accept(action)
            case StopJob(cluster, submission_id):
                self._stop(cluster, submission_id)

    def _store(self, kind: str, name: str, manifest: Mapping[str, Any]) -> None:
        if kind == "ControllerRevision":
            self.revisions.setdefault(name, build.stored(manifest))
        elif kind == "RayCluster":
            owned = f"uid-{self.serial()}"
            self.clusters.setdefault(name, RayCluster(name, owned, deepcopy(dict(manifest))))
            self.check_slots()
        else:
            {"Service": self.services, "EndpointSlice": self.slices, "PodDisruptionBudget": self.budgets}[kind][
                name
            ] = manifest

    def _patch(self, name: str, operations: Any) -> None:
        cluster = self.clusters.get(name)
        if cluster is None or operations[0]["value"] != str(cluster.version):
            raise Refused
        spec = deepcopy(cluster.manifest)
        for operation in operations[1:]:
            patch(spec, operation)
        removed = {g for g, _ in cluster.groups} - {g["groupName"] for g in spec["spec"]["workerGroupSpecs"]}
        left = [p.name for p in self.pods.values() if p.owner == cluster.uid and p.group in removed]
        assert not left, f"KubeRay forgets the pods {left} of the groups {removed}"
        cluster.manifest = spec
        cluster.version += 1
        self.check_slots()

    def _delete(self, kind: str, name: str, uid: str | None, observed: seen.World) -> None:
        if kind == "RayCluster":
            cluster = self.clusters.get(name)
            if cluster is not None and cluster.uid == uid and cluster.gone_at is None:
                cluster.gone_at = self.time + self.random.uniform(0, 10)
        elif kind == "Pod":
            assert uid is not None
            pod = self.pods.get(uid)
            if pod is not None:
                owners = [
                    r.index
                    for r in self.status.replicas
                    for a in r.attempts
                    if a.stop and a.stop.recycle and a.ray_cluster == pod.cluster
                ]
                around = written(self.status) if pod.is_head else self._attempts_in(pod.group)
                idle = not any(a.ray_cluster == pod.cluster for a in around)
                if not (idle and observed.pods[uid].cordoned):
                    slots = {names.slot(i) for i in owners}
                    assert pod.group in slots, f"I3: {pod.name} is not in a slot to be recycled"
                serving = [r.index for r in self.status.replicas if r.phase == "Ready" and r.index in owners]
                assert not serving, f"{pod.name} is deleted under replica {serving}, which serves"
                self.recycle_pod(pod)
        else:
            kinds = {"EndpointSlice": self.slices, "PodDisruptionBudget": self.budgets}
            {"ControllerRevision": self.revisions, **kinds}[kind].pop(name, None)

    def _attempts_in(self, group: str) -> list[Attempt]:
        return [a for r in self.status.replicas if names.slot(r.index) == group for a in r.attempts]

    def _accept(self, action: SubmitJob) -> None:
        cluster, submission_id = self.clusters[action.cluster], action.submission_id
        if submission_id in self.known(cluster):
            return
        assert submission_id not in self.used, f"I1: {submission_id} runs a second time"
        assert submission_id in self.ids, f"{submission_id} was not written down first"
        self.used.add(submission_id)
        memory = self.memory(cluster)
        assert memory is not None
        (resource,) = action.resources
        replica = int(resource.rpartition("-")[2])
        start_at = self.time + self.random.choice((0, 2, 10, 60))
        job = Job(submission_id, replica, memory, self.time, start_at, metadata=action.metadata)
        job.waits = json.loads(action.environment[engine_job.CONFIG_VARIABLE])["standby"]
        job.deaf, job.leaks = self.random.random() < 0.15, self.random.random() < 0.2
        self.records[memory, submission_id] = job
        self.jobs.append(job)

    def _stop(self, cluster: str, submission_id: str) -> None:
        attempts = {a.instance_id: a for a in written(self.status)}
        assert submission_id in attempts, f"I3: {submission_id} is not ours"
        stop = attempts[submission_id].stop
        assert stop is not None, f"{submission_id} is stopped without an intent"
        assert not stopping.is_draining(stop), f"{submission_id} is stopped while it drains"
        if cluster not in self.clusters or self.ray(self.clusters[cluster]) is None:
            raise Refused
        job = self.known(self.clusters[cluster]).get(submission_id)
        if job is not None and not job.terminal and not job.stopping:
            job.stopping = True
            if job.status == "RUNNING" and (not job.deaf or job.waits):
                job.end_at, job.end_as = self.time + self.random.uniform(1, 10), "STOPPED"

    # -- invariants ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """I2: no replica has two attempts with processes, standbys that wait apart. The rest is checked elsewhere."""
        for replica in {j.replica for j in self.jobs if j.processes}:
            alive = [j.id for j in self.jobs if j.replica == replica and j.processes and not j.waits]
            assert len(alive) <= 1, f"I2: replica {replica} has {alive} alive at once"

    def check_slots(self) -> None:
        """No replica has slots in two RayClusters: no accelerators to spare are needed, whatever is changed."""
        slots = Counter(group for cluster in self.clusters.values() for group, size in cluster.groups if size)
        twice = [group for group, number in slots.items() if number > 1]
        assert not twice, f"{twice} are in two RayClusters at once"

    def check_traffic(self) -> None:
        """I4: exactly the Ready replicas are in traffic, each with the address of its attempt."""
        expected = {
            names.endpoint_slice(build.NAME, r.index): r.attempt.endpoint.address
            for r in self.status.replicas
            if r.phase == "Ready" and r.attempt and r.attempt.endpoint
        }
        entries = {name: manifest["endpoints"][0] for name, manifest in self.slices.items()}
        in_traffic = {name: e["addresses"][0] for name, e in entries.items() if e["conditions"]["ready"]}
        assert in_traffic == expected, "I4"

    def note(self, text: str) -> None:
        self.log.append(f"{self.time:7.0f} s  {text}")


def written(status: VLLMDeploymentStatus) -> list[Attempt]:
    """All attempts of a status, standbys too."""
    return [attempt for replica in status.replicas for attempt in replica.attempts]


def leaves(replica: ReplicaStatus) -> bool:
    """Whether a replica is there only until its attempts are gone."""
    reasons = {attempt.stop.reason for attempt in replica.attempts if attempt.stop is not None}
    return bool({"ScaledDown", "Replaced"} & reasons)


def is_stopped(replica: ReplicaStatus) -> bool:
    """Whether all attempts of a replica are to end, for whatever reason; it may start again or leave."""
    return bool(replica.attempts) and all(attempt.stop is not None for attempt in replica.attempts)


def _word(replica: ReplicaStatus) -> str:
    waiting = f"+{replica.standby.number}" if replica.standby else ""
    return f"{replica.index}:{replica.phase}{replica.attempt.number if replica.attempt else ''}{waiting}"


def _is_down(observed: seen.World, replica: ReplicaStatus) -> bool:
    """Whether the launcher itself says that a replica does not serve."""
    attempt = replica.attempt
    engine = observed.attempts[attempt.instance_id].engine if attempt is not None else None
    return engine is not None and not engine.ready


def patch(target: Any, operation: Mapping[str, Any]) -> None:
    """One JSON patch operation."""
    *path, last = operation["path"].strip("/").split("/")
    for part in path:
        target = target[int(part) if isinstance(target, list) else part]
    if isinstance(target, dict):
        change: Callable[[], Any] = lambda: target.__setitem__(last, operation["value"])  # noqa: E731
        assert operation["op"] in ("add", "replace")
        change()
    elif operation["op"] == "remove":
        del target[int(last)]
    elif last == "-":
        target.append(operation["value"])
    else:
        raise AssertionError(operation)


def _brief(action: Action) -> str:
    manifest = getattr(action, "manifest", None)
    what = manifest["metadata"]["name"] if manifest else getattr(action, "submission_id", getattr(action, "name", ""))
    kind = manifest["kind"] if manifest else getattr(action, "kind", "")
    why = getattr(action, "why", "")
    return f"{type(action).__name__} {kind} {what} {why}".strip()
