"""Small builders: a world in which everything is well, and the few words it takes to make it otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from vllm_ray_operator.api.spec import VLLMDeploymentSpec
from vllm_ray_operator.api.status import (
    Attempt,
    ContainerRef,
    Endpoint,
    Rank,
    ReplicaStatus,
    Session,
    Stop,
    VLLMDeploymentStatus,
)
from vllm_ray_operator.plan import names, planner
from vllm_ray_operator.plan.actions import Action, Create, Delete, Emit, Plan
from vllm_ray_operator.plan.revision import Defaults, choose_cluster, choose_engine
from vllm_ray_operator.plan.world import (
    AttemptView,
    Cluster,
    Deployment,
    EngineState,
    Job,
    JobStatus,
    Leftovers,
    Manifest,
    Pod,
    Revision,
    World,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
NAME = "chat"
UID = "1a2b3c4d-0000-0000-0000-000000000000"
DEFAULTS = Defaults(engine_image="example/engine:1")
PLAIN: Mapping[str, Any] = {"standby": False}  # first stop, then start
SPEC: Mapping[str, Any] = {
    "model": {"uri": "hf://org/tiny"},
    "parallelism": {"tensor": 2},
    "replicas": 1,
    "rollout": PLAIN,
}
NOTHING_LEFT = Leftovers(complete=True)
JOB_IP = "10.0.1.1"


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def spec_with(**parts: Any) -> dict[str, Any]:
    """The usual spec with parts replaced."""
    return {**SPEC, **parts}


def deployment(
    raw: Mapping[str, Any] = SPEC, status: VLLMDeploymentStatus | None = None, generation: int = 1
) -> Deployment:
    spec = VLLMDeploymentSpec.model_validate(raw)
    if "drainTimeoutSeconds" not in raw.get("engine", {}):  # no drain unless a test is about it
        spec = spec.model_copy(update={"engine": spec.engine.model_copy(update={"drain_timeout_seconds": 0})})
    return Deployment(
        namespace="default",
        name=NAME,
        uid=UID,
        generation=generation,
        resource_version="1",
        spec=spec,
        raw_spec=raw,
        status=status or VLLMDeploymentStatus(),
    )


def stored(manifest: Manifest) -> Revision:
    """A ControllerRevision as it is read back."""
    return Revision(
        name=manifest["metadata"]["name"],
        kind=manifest["metadata"]["labels"][names.REVISION_KIND],
        number=manifest["revision"],
        written=manifest["data"]["written"],
        resolved=manifest["data"]["resolved"],
    )


def revisions_for(
    raw: Mapping[str, Any], defaults: Defaults = DEFAULTS, known: Sequence[Revision] = ()
) -> tuple[Revision, ...]:
    """``known`` and those that the spec adds."""
    world = World(deployment(raw), revisions=tuple(known))
    cluster = choose_cluster(world, defaults)
    chosen = (cluster, choose_engine(world, cluster))
    return (*known, *(stored(c.create) for c in chosen if c.create is not None))


def pod(name: str, group: str = "slot-0", **changes: Any) -> Pod:
    values: dict[str, Any] = {
        "name": name,
        "uid": f"uid-{name}",
        "cluster": "c",
        "group": group,
        "is_head": False,
        "ip": "10.0.1.9",
        "node": "node-1",
        "ready": True,
        "deleting": False,
        "restarts": 0,
    }
    return Pod(**{**values, **changes})


def worker_ip(group: str, number: int = 0) -> str:
    return f"10.0.{1 + int(group.rpartition('-')[2])}.{1 + number}"


def head(name: str = "head", **changes: Any) -> Pod:
    return pod(name, group="headgroup", is_head=True, ip="10.0.0.1", **changes)


def cluster(
    name: str, pods: Sequence[Pod], groups: Sequence[tuple[str, int]] = (("slot-0", 1),), **rest: Any
) -> Cluster:
    values: dict[str, Any] = {
        "name": name,
        "uid": f"uid-{name}",
        "resource_version": "7",
        "revision": "",
        "deleting": False,
        "head_ready": True,
        "groups": tuple(groups),
        "pods": tuple(pods),
        "submissions": (),
    }
    return Cluster(**{**values, **rest})


def ref(of: Pod) -> ContainerRef:
    return ContainerRef(pod=of.name, uid=of.uid, restarts=of.restarts)


def stop(reason: str = "EngineExited", *, at: datetime = NOW, failure: bool = True, recycle: bool = False) -> Stop:
    return Stop(reason=reason, message=f"because of {reason}", time=at, failure=failure, recycle=recycle)


def engine(*, ready: bool = True, **changes: Any) -> EngineState:
    values: dict[str, Any] = {"phase": "Serving" if ready else "Loading", "message": "loading weights", "ready": ready}
    return EngineState(**{**values, **changes})


def job(status: JobStatus = "RUNNING", **changes: Any) -> Job:
    return Job(status=status, **{"ray_job_ids": ("02000000",), "driver_ip": JOB_IP, **changes})


def view(state: Job | str | None = None, **rest: Any) -> AttemptView:
    """What is seen of an attempt; without arguments one that serves."""
    if state is None and not rest:
        return AttemptView(job=job(), engine=engine())
    return AttemptView(job=state, **rest)  # type: ignore[arg-type]


UNKNOWN = AttemptView(job=None)


class Scene:
    """One deployment in a world that can be changed between steps. Statuses are kept as the API server keeps them."""

    def __init__(self, raw: Mapping[str, Any] = SPEC, defaults: Defaults = DEFAULTS) -> None:
        self.defaults = defaults
        self.now = NOW
        self.generation = 1
        self.raw = raw
        self.status = VLLMDeploymentStatus()
        self.revisions: tuple[Revision, ...] = ()
        self.clusters: dict[str, Cluster] = {}
        self.orphans: tuple[Pod, ...] = ()
        self.services: dict[str, Manifest] = {}
        self.slices: dict[str, Manifest] = {}
        self.budgets: dict[str, Manifest] = {}
        self.views: dict[str, AttemptView] = {}
        self.problems: tuple[Any, ...] = ()
        self.last = Plan(self.status, (), None)
        numbers = count(1)
        self._lives = count(1)
        self.new_nonce: Callable[[], str] = lambda: f"n{next(numbers)}"

    @property
    def world(self) -> World:
        return World(
            deployment=deployment(self.raw, self.status, self.generation),
            revisions=self.revisions,
            clusters=tuple(self.clusters.values()),
            services=self.services,
            endpoint_slices=self.slices,
            budgets=self.budgets,
            attempts=self.views,
            problems=self.problems,
            orphans=self.orphans,
        )

    @property
    def replica(self) -> ReplicaStatus:
        return self.status.replicas[0]

    @property
    def phase(self) -> str:
        return self.replica.phase

    @property
    def attempt(self) -> Attempt:
        attempt = self.replica.attempt
        assert attempt is not None, self.replica
        return attempt

    @property
    def target(self) -> Cluster:
        return self.clusters[self.status.ray_cluster or ""]

    def plan(self) -> Plan:
        self.last = planner.plan(self.world, self.now, self.new_nonce, self.defaults)
        return self.last

    def step(self) -> tuple[Action, ...]:
        """Plan, write the status, and leave the actions (but events, budgets) to the test. Objects of ours are kept."""
        plan = self.plan()
        self.status = VLLMDeploymentStatus.model_validate_json(plan.status.model_dump_json(by_alias=True))
        for action in plan.actions:
            if isinstance(action, Delete) and action.kind == "EndpointSlice":
                del self.slices[action.name]
            if isinstance(action, Delete) and action.kind == "PodDisruptionBudget":
                del self.budgets[action.name]
            manifest = getattr(action, "manifest", None)
            if manifest is None:
                continue
            kind, name = manifest["kind"], manifest["metadata"]["name"]
            if kind == "ControllerRevision" and isinstance(action, Create):
                self.revisions = (*self.revisions, stored(manifest))
            elif kind == "Service":
                self.services[name] = manifest
            elif kind == "EndpointSlice":
                self.slices[name] = manifest
            elif kind == "PodDisruptionBudget":
                self.budgets[name] = manifest
        return tuple(a for a in plan.actions if not isinstance(a, Emit) and not _of_budget(a))

    def events(self) -> list[str]:
        """The reasons of the events of the last plan."""
        return [a.reason for a in self.last.actions if isinstance(a, Emit)]

    def change(self, **parts: Any) -> None:
        """The user edits the spec."""
        self.raw = {**self.raw, **parts}
        self.generation += 1

    def make_cluster(self, slots: Iterable[int] | None = None, pods: int = 1) -> Cluster:
        """The RayCluster of the wanted revision comes up, slots included."""
        wanted = list(range(self.raw.get("replicas", 1)) if slots is None else slots)
        name = self.status.ray_cluster or ""
        workers = [
            pod(f"w{i}-{n}", f"slot-{i}", cluster=name, ip=f"10.0.{1 + i}.{1 + n}") for i in wanted for n in range(pods)
        ]
        groups = [(f"slot-{i}", pods) for i in wanted]
        self.clusters[name] = cluster(name, [head(cluster=name), *workers], groups)
        return self.clusters[name]

    def add_cluster(self, manifest: Manifest) -> Cluster:
        """A RayCluster comes up as its manifest has it. Its pods are no others' ever, whatever their names."""
        name, groups = manifest["metadata"]["name"], manifest["spec"]["workerGroupSpecs"]
        sizes = [(group["groupName"], group["replicas"]) for group in groups]
        life = next(self._lives)
        workers = [
            pod(f"{name}-{group}-{n}", group, cluster=name, uid=f"uid-{life}-{group}-{n}", ip=worker_ip(group, n))
            for group, size in sizes
            for n in range(size)
        ]
        self.clusters[name] = cluster(
            name, [head(f"{name}-head", uid=f"uid-{life}-head", cluster=name), *workers], sizes, uid=f"uid-{life}"
        )
        return self.clusters[name]

    def change_cluster(self, **changes: Any) -> None:
        self.clusters[self.target.name] = replace(self.target, **changes)

    def change_pod(self, name: str, **changes: Any) -> None:
        pods = tuple(replace(p, **changes) if p.name == name else p for p in self.target.pods)
        self.change_cluster(pods=pods)

    def see(self, seen: AttemptView, attempt: Attempt | None = None) -> None:
        self.views[(attempt or self.attempt).instance_id] = seen


def _of_budget(action: Action) -> bool:
    manifest = getattr(action, "manifest", None)
    return (manifest["kind"] if manifest else getattr(action, "kind", "")) == "PodDisruptionBudget"


def begun(raw: Mapping[str, Any] = SPEC) -> Scene:
    """A deployment whose revisions are stored and whose RayCluster is up; no attempt yet."""
    scene = Scene(raw)
    scene.step()
    actions = scene.step()
    for action in actions:
        if isinstance(action, Create) and action.manifest["kind"] == "RayCluster":
            if scene.status.ray_cluster is None:
                scene.add_cluster(action.manifest)
            else:
                groups = action.manifest["spec"]["workerGroupSpecs"]
                scene.make_cluster(pods=max((group["replicas"] for group in groups), default=1))
    return scene


def starting(raw: Mapping[str, Any] = SPEC) -> Scene:
    """An attempt is written down, not submitted yet."""
    scene = begun(raw)
    scene.step()
    for replica in scene.status.replicas:
        assert replica.attempt is not None
        scene.views[replica.attempt.instance_id] = AttemptView(job="absent")
    return scene


def serving(raw: Mapping[str, Any] = SPEC) -> Scene:
    """All replicas serve, and nothing is left to do."""
    scene = starting(raw)
    for replica in scene.status.replicas:
        assert replica.attempt is not None
        ip = f"10.0.{1 + replica.index}.1"
        scene.views[replica.attempt.instance_id] = AttemptView(job=job(driver_ip=ip), engine=engine())
    scene.step()
    scene.step()
    return scene


def attempt_on(on: Cluster, **changes: Any) -> Attempt:
    """An attempt made for a cluster as it is."""
    assert on.head is not None
    values: dict[str, Any] = {
        "number": 7,
        "nonce": "abc",
        "instance_id": "chat-1a2b3c4d-a7-abc",
        "engine_revision": "e",
        "ray_cluster": on.name,
        "session": Session(head=ref(on.head), slot=[ref(p) for p in on.slot("slot-0")]),
        "start_time": NOW,
        "ranks": [Rank(rank=0, instance_id="chat-1a2b3c4d-a7-abc")],
    }
    return Attempt(**{**values, **changes})


def endpoint(address: str = JOB_IP) -> Endpoint:
    return Endpoint(address=address, port=8000, pod="w0-0", node="node-1")
