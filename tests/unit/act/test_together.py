"""Planner, observation and actions together, over the fakes: the whole path, without a cluster."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest

from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine
from tests.fakes.kube import FakeKube, fail_once
from tests.fakes.kuberay import FakeKubeRay
from tests.fakes.ray import FakeDashboard, FakeRay
from vllm_ray_operator.act import execute
from vllm_ray_operator.api.status import ReplicaStatus, VLLMDeploymentStatus
from vllm_ray_operator.clients.bundle import Clients, Key
from vllm_ray_operator.clients.protocols import (
    ENDPOINT_SLICES,
    EVENTS,
    PODS,
    RAY_CLUSTERS,
    VLLM_DEPLOYMENTS,
    ApiError,
    Conflict,
)
from vllm_ray_operator.observe import observe
from vllm_ray_operator.plan import names
from vllm_ray_operator.plan.planner import plan
from vllm_ray_operator.plan.revision import Defaults
from vllm_ray_operator.plan.world import Problem

KEY = Key("default", "chat")
SPEC = {
    "replicas": 2,
    "model": {"uri": "file:///models/tiny", "servedName": "tiny"},
    "engine": {"image": "registry.example/engine:1"},
    "parallelism": {"tensor": 2},
    "cluster": {"workers": {"acceleratorsPerNode": 1}},
}


@dataclass
class Lab:
    """A world in memory and the operator's loop, one pass at a time."""

    clock: FakeClock = field(default_factory=FakeClock)
    kube: FakeKube = field(default_factory=FakeKube)
    ray: FakeRay = field(default_factory=FakeRay)
    problems: tuple[Problem, ...] = ()

    def __post_init__(self) -> None:
        self.engine = FakeEngine(self.clock)
        self.kuberay = FakeKubeRay(self.kube, self.ray)
        self.clients = Clients(self.kube, self.ray, self.engine, self.clock)
        self._nonces = (f"nonce{n}" for n in itertools.count(1))
        self.kube.put(VLLM_DEPLOYMENTS, {"metadata": {"namespace": "default", "name": "chat"}, "spec": SPEC})

    async def reconcile(self) -> bool:
        """Make one pass as the runtime does; return whether the status was written."""
        observation = await observe(KEY, self.clients, self.problems)
        if observation is None:
            return False
        world = observation.world
        decided = plan(
            world,
            datetime.fromtimestamp(self.clock.now(), UTC),
            new_nonce=lambda: next(self._nonces),
            defaults=Defaults(engine_image=None),
        )
        written = decided.status != world.deployment.status
        if written:
            manifest = {
                "metadata": {
                    "name": "chat",
                    "uid": world.deployment.uid,
                    "resourceVersion": world.deployment.resource_version,
                },
                "status": decided.status.to_wire(),
            }
            await self.kube.replace_status(VLLM_DEPLOYMENTS, "default", manifest)
        self.problems = await execute(decided.actions, observation, self.clients)
        return written

    async def pass_by(self) -> None:
        """One step of everything: the operator, KubeRay, the launchers of pending jobs, a few seconds."""
        await self.reconcile()
        self.kuberay.step()
        for dashboard in self.ray.dashboards.values():
            self._start_jobs(dashboard)
        await self.clock.advance(3)

    def _start_jobs(self, dashboard: FakeDashboard) -> None:
        for submission_id, job in dashboard.jobs.items():
            if job.row.status == "PENDING":
                (resource,) = job.resources
                slot = names.slot(int(resource.rsplit("-", 1)[1]))
                pods = [p for p in self.kube.objects(PODS) if p["metadata"]["labels"]["ray.io/group"] == slot]
                ips = [p["status"]["podIP"] for p in pods]
                dashboard.run(submission_id, ips[0], ray_job_id=f"{len(dashboard.actors) + 2:02x}000000")
                config = json.loads(job.runtime_env["env_vars"]["VLLM_RAY_ENGINE_CONFIG"])
                launcher = self.engine.start(ips[0], config["controlPort"], submission_id, dashboard.token)
                if config["standby"]:
                    launcher.set("Standby", "waiting for accelerators")
                else:
                    launcher.serve(*ips)
        for (address, _), launcher in self.engine.launchers.items():
            if launcher.state["phase"] == "Standby" and self._is_alone(dashboard, address):
                launcher.serve(address)

    @staticmethod
    def _is_alone(dashboard: FakeDashboard, address: str) -> bool:
        """Whether only one job runs there: then its placement group gets the accelerators."""
        running = [j for j in dashboard.jobs.values() if j.row.status == "RUNNING" and j.row.driver_ip == address]
        return len(running) == 1

    async def until(self, reached: Callable[[VLLMDeploymentStatus], bool], what: str, passes: int = 60) -> None:
        for _ in range(passes):
            await self.pass_by()
            if reached(self.status):
                return
        raise AssertionError(f"not reached in {passes} passes: {what}\n{self.status!r}\nproblems: {self.problems}")

    @property
    def status(self) -> VLLMDeploymentStatus:
        stored = self.kube.peek(VLLM_DEPLOYMENTS, "default", "chat")
        assert stored is not None
        return VLLMDeploymentStatus.model_validate(stored.get("status") or {})

    @property
    def dashboard(self) -> FakeDashboard:
        (dashboard,) = self.ray.dashboards.values()
        return dashboard

    def replica(self, index: int) -> ReplicaStatus:
        return next(r for r in self.status.replicas if r.index == index)

    async def until_ready(self) -> None:
        await self.until(lambda s: s.ready_replicas == 2, "two ready replicas")


@pytest.fixture
async def lab() -> Lab:
    return Lab()


async def test_from_apply_to_ready(lab: Lab) -> None:
    await lab.until_ready()
    assert sorted(lab.dashboard.jobs) == sorted(r.attempt.instance_id for r in lab.status.replicas if r.attempt)
    assert all(job.runtime_env["py_modules"] == [f"gcs://{n}" for n in lab.dashboard.packages]
               for job in lab.dashboard.jobs.values())  # fmt: skip
    ready = lab.status.condition("Ready")
    assert ready is not None
    assert (ready.status, ready.reason) == ("True", "AllReplicasReady")


async def test_at_rest_nothing_is_written(lab: Lab) -> None:
    await lab.until_ready()
    for _ in range(5):
        await lab.pass_by()
    lab.kube.calls.clear()
    lab.ray.calls.clear()
    for _ in range(20):
        assert not await lab.reconcile()
        await lab.clock.advance(10)
    assert lab.kube.writes == []
    assert {method for method, _ in lab.ray.calls} <= {"job"}


async def test_a_failed_engine_is_fenced_and_started_again_with_its_cause_told(lab: Lab) -> None:
    await lab.until_ready()
    first = lab.replica(0).attempt
    assert first is not None
    result = {"outcome": "Failed", "reason": "OutOfMemory", "message": "the GPU has too little memory"}
    lab.dashboard.end(first.instance_id, "FAILED", result)
    lab.engine.launchers.clear()
    for instance_id, job in lab.dashboard.jobs.items():
        if job.row.status == "RUNNING":
            assert job.row.driver_ip is not None
            lab.engine.start(job.row.driver_ip, names.control_port(0), instance_id, lab.dashboard.token).serve()
    await lab.until(lambda s: s.ready_replicas == 2 and s.last_attempt == 3, "a third attempt that is ready")
    replica = lab.replica(0)
    assert replica.attempt is not None
    assert replica.attempt.instance_id != first.instance_id
    assert replica.last_failure is not None
    assert replica.last_failure.reason == "OutOfMemory"
    assert replica.last_fence is not None
    assert replica.last_fence.how == "JobEnded"


async def test_a_leak_keeps_the_fence_open_until_the_slot_is_recycled(lab: Lab) -> None:
    await lab.until_ready()
    first = lab.replica(0).attempt
    assert first is not None
    slot = names.slot(0)
    before = {p["metadata"]["uid"] for p in lab.kube.objects(PODS) if p["metadata"]["labels"]["ray.io/group"] == slot}
    lab.dashboard.end(first.instance_id, "FAILED", leak=True)
    await lab.until(lambda s: s.replicas[0].last_fence is not None, "a fence")
    fence = lab.replica(0).last_fence
    assert fence is not None
    assert fence.how == "PodsGone"
    after = {p["metadata"]["uid"] for p in lab.kube.objects(PODS) if p["metadata"]["labels"]["ray.io/group"] == slot}
    assert not before & after


async def test_a_lost_reply_to_the_submission_leads_to_one_job(lab: Lab) -> None:
    await lab.until(lambda s: any(r.attempt for r in s.replicas), "an attempt")
    dashboard = lab.dashboard
    submit = lab.ray.submit
    lost: list[object] = []

    async def lose_reply(*args: object, **kwargs: object) -> None:
        await submit(*args, **kwargs)  # type: ignore[arg-type]
        if len(lost) < 2:
            lost.append(args)
            raise ApiError("no answer within 10 s")

    lab.ray.submit = lose_reply  # type: ignore[method-assign]
    await lab.until_ready()
    assert len(lost) == 2
    assert len(dashboard.jobs) == 2


async def test_a_roll_goes_through_all_layers(lab: Lab) -> None:
    await lab.until_ready()
    before = {r.attempt.instance_id for r in lab.status.replicas if r.attempt}
    pods = {p["metadata"]["uid"] for p in lab.kube.objects(PODS)}
    resource = lab.kube.peek(VLLM_DEPLOYMENTS, "default", "chat")
    assert resource is not None
    resource["spec"]["engine"] = {**resource["spec"]["engine"], "args": ["--seed=1"], "drainTimeoutSeconds": 9}
    resource["metadata"]["generation"] += 1
    lab.kube.put(VLLM_DEPLOYMENTS, resource)
    await lab.until(lambda s: s.rollout is not None, "a roll")
    ready = []
    while lab.status.rollout is not None:
        await lab.pass_by()
        ready.append(lab.status.ready_replicas)
        assert len(ready) < 60
    assert (ready[-1], min(ready)) == (2, 1)
    attempts = [r.attempt for r in lab.status.replicas if r.attempt is not None]
    assert [(a.standby, a.turn, a.endpoint.port if a.endpoint else 0) for a in attempts] == [(True, 1, 8001)] * 2
    assert not before & {a.instance_id for a in attempts}
    assert sorted(lab.engine.drained) == sorted(before), "each was told to drain, once"
    assert {p["metadata"]["uid"] for p in lab.kube.objects(PODS)} == pods, "in the pods that were there"
    ports = [s["ports"][0]["port"] for s in lab.kube.objects(ENDPOINT_SLICES)]
    assert ports == [8001, 8001]


async def test_a_conflict_on_the_status_drops_the_plan(lab: Lab) -> None:
    lab.kube.before.append(fail_once(Conflict("changed", 409), verb="replace_status", resource=VLLM_DEPLOYMENTS))
    with pytest.raises(Conflict):
        for _ in range(5):
            await lab.pass_by()
    assert lab.kube.calls[-1].verb == "replace_status"
    await lab.until_ready()


async def test_kuberay_missing_is_told_and_goes_on_by_itself(lab: Lab) -> None:
    lab.kube.kinds_missing.add(RAY_CLUSTERS)
    for _ in range(3):
        await lab.reconcile()
        await lab.clock.advance(1)
    ready = lab.status.condition("Ready")
    assert ready is not None
    assert ready.reason == "KubeRayMissing"
    assert "kuberay-operator" in ready.message
    assert [e["reason"] for e in lab.kube.objects(EVENTS)] == ["KubeRayMissing"]
    lab.kube.kinds_missing.clear()
    await lab.until_ready()


async def test_a_dashboard_that_does_not_answer_is_told(lab: Lab) -> None:
    await lab.until_ready()
    lab.dashboard.error = ApiError("the Ray dashboard at http://x does not answer: no connection")
    before = len(lab.kube.writes)
    for _ in range(5):
        await lab.reconcile()
        await lab.clock.advance(1)
    assert all(replica.attempt is not None for replica in lab.status.replicas)
    lab.dashboard.error = None
    await lab.until_ready()
    assert lab.status.last_attempt == 2
    assert len(lab.kube.writes) > before


async def test_deletion_leaves_nothing(lab: Lab) -> None:
    await lab.until_ready()
    await lab.kube.delete(VLLM_DEPLOYMENTS, "default", "chat", None)
    lab.kuberay.step()
    assert not await lab.reconcile()
    assert {o["kind"] for r in (PODS, RAY_CLUSTERS) for o in lab.kube.objects(r)} == set()
