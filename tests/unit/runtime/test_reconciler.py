"""The loop: what is written and done, in which order, and when the key comes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client import generate_latest

from tests.unit.runtime.doubles import ScriptedEngine, StoredKube
from tests.unit.runtime.virtual import EPOCH, VirtualClock, in_virtual_time
from vllm_ray_operator.api.spec import VLLMDeploymentSpec
from vllm_ray_operator.api.status import Fence, ReplicaStatus, VLLMDeploymentStatus
from vllm_ray_operator.clients.bundle import Clients, Key, Observation
from vllm_ray_operator.clients.protocols import VLLM_DEPLOYMENTS, ApiError, Conflict, EngineEndpoint, Object
from vllm_ray_operator.clients.ray import RayClient
from vllm_ray_operator.plan.actions import Action, Emit, Plan
from vllm_ray_operator.plan.world import Deployment, Problem, World
from vllm_ray_operator.runtime.metrics import Metrics
from vllm_ray_operator.runtime.queue import WorkQueue
from vllm_ray_operator.runtime.reconciler import RESYNC_SECONDS, Outcome, Reconciler

KEY = Key("default", "chat")
ACT = Emit("Normal", "Acted", "an action")
PROBLEM = Problem("QuotaExceeded", "no room for the RayCluster")
PENDING = VLLMDeploymentStatus(observed_generation=1, current_replicas=1, replicas=[ReplicaStatus(index=0)])
ENGINES = {"chat-a1": EngineEndpoint("10.0.0.1", 8070, "chat-a1")}


@dataclass
class Stage:
    """A reconciler whose planner and executor do as told; everything that happened, in order."""

    kube: StoredKube = field(default_factory=StoredKube)
    plan: Plan = field(default_factory=lambda: Plan(PENDING, (ACT,), None))
    problems: tuple[Problem, ...] = ()
    observe_error: Exception | None = None
    leading: bool = True
    log: list[str] = field(default_factory=list)
    carried: list[tuple[Problem, ...]] = field(default_factory=list)
    followed: list[tuple[Key, Mapping[str, EngineEndpoint]]] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    before_write: Object | None = None

    def __post_init__(self) -> None:
        self.kube.put(VLLM_DEPLOYMENTS, "default", manifest())
        clients = Clients(kube=self.kube, ray=RayClient(), engine=ScriptedEngine(), clock=VirtualClock())
        self.reconciler = Reconciler(
            clients,
            observe=self._observe,
            planner=self._plan,
            execute=self._execute,
            follow=lambda key, engines: self.followed.append((key, engines)),
            leads=lambda: self.leading,
            metrics=self.metrics,
        )

    async def reconcile(self) -> Outcome:
        return await self.reconciler.reconcile(KEY)

    def stored(self) -> Object:
        return self.kube.objects["vllmdeployments", "default", "chat"]

    async def _observe(self, key: Key, clients: Clients, problems: tuple[Problem, ...]) -> Observation | None:
        self.log.append("observe")
        self.carried.append(problems)
        if self.observe_error is not None:
            raise self.observe_error
        if ("vllmdeployments", key.namespace, key.name) not in self.kube.objects:
            return None
        deployment = observed(await clients.kube.get(VLLM_DEPLOYMENTS, key.namespace, key.name))
        return Observation(World(deployment), ray={}, engines=ENGINES)

    def _plan(self, world: World, now: datetime) -> Plan:
        self.log.append("plan")
        assert now == datetime.fromtimestamp(VirtualClock().now(), UTC)
        if self.before_write is not None:
            self.kube.put(VLLM_DEPLOYMENTS, "default", self.before_write)
        return self.plan

    async def _execute(
        self, actions: Sequence[Action], observation: Observation, clients: Clients
    ) -> tuple[Problem, ...]:
        assert observation.engines == ENGINES
        self.log.append(f"act {len(actions)} after {len(self.kube.writes)} writes")
        return self.problems


def manifest(**status: Any) -> Object:
    return {
        "apiVersion": "vllm-ray.dev/v1alpha1",
        "kind": "VLLMDeployment",
        "metadata": {"name": "chat", "uid": "1a2b", "generation": 1},
        "spec": {"model": {"uri": "hf://org/model"}},
        **({"status": status} if status else {}),
    }


def observed(resource: Object) -> Deployment:
    return Deployment(
        namespace="default",
        name="chat",
        uid=resource["metadata"]["uid"],
        generation=resource["metadata"]["generation"],
        resource_version=resource["metadata"]["resourceVersion"],
        spec=VLLMDeploymentSpec.model_validate(resource["spec"]),
        raw_spec=resource["spec"],
        status=VLLMDeploymentStatus.model_validate(resource.get("status") or {}),
    )


@in_virtual_time
async def test_the_status_is_written_before_anything_is_done_and_the_next_pass_comes_at_once() -> None:
    stage = Stage()
    assert await stage.reconcile() == Outcome(again=True)
    assert stage.log == ["observe", "plan", "act 1 after 1 writes"]
    assert stage.stored()["status"] == PENDING.to_wire()
    assert stage.stored()["spec"] == manifest()["spec"]


@in_virtual_time
async def test_at_rest_nothing_is_written() -> None:
    stage = Stage()
    await stage.reconcile()
    assert await stage.reconcile() == Outcome()
    assert stage.kube.writes == ["replace_status vllmdeployments"]


@in_virtual_time
async def test_a_conflict_drops_the_whole_plan() -> None:
    stage = Stage()
    stage.before_write = manifest()
    assert await stage.reconcile() == Outcome(again=True)
    assert stage.log == ["observe", "plan"], "nothing is done after a status that was not written"


@in_virtual_time
@pytest.mark.parametrize("error", [ApiError("no answer"), ApiError("overloaded", 429)])
async def test_a_status_that_cannot_be_written_ends_the_pass(error: ApiError) -> None:
    class Faulty(StoredKube):
        async def replace_status(self, *_: object) -> Object:
            raise error

    stage = Stage(kube=Faulty())
    with pytest.raises(ApiError):
        await stage.reconcile()
    assert stage.log == ["observe", "plan"]


@in_virtual_time
async def test_problems_are_carried_shown_and_cleared() -> None:
    stage = Stage(problems=(PROBLEM,))
    await stage.reconcile()
    outcome = await stage.reconcile()
    assert stage.carried == [(), (PROBLEM,)]
    assert outcome == Outcome(failed=True)
    stage.problems = ()
    assert await stage.reconcile() == Outcome(again=True), "what is over has to leave the conditions"
    assert await stage.reconcile() == Outcome()
    assert stage.carried[2:] == [(PROBLEM,), ()]


@in_virtual_time
@pytest.mark.parametrize(
    ("wake_after", "expected"),
    [(None, None), (0.0, None), (0.2, 1.0), (30.0, 30.0)],
    ids=["nothing", "at once: only by the back-off", "too soon", "later"],
)
async def test_a_plan_cannot_hurry_what_failed(wake_after: float | None, expected: float | None) -> None:
    stage = Stage(problems=(PROBLEM,), plan=Plan(PENDING, (ACT,), wake_after))
    await stage.reconcile()
    assert await stage.reconcile() == Outcome(failed=True, wake_after=expected)


@in_virtual_time
async def test_who_does_not_lead_any_more_writes_and_does_nothing() -> None:
    stage = Stage(leading=False)
    assert await stage.reconcile() == Outcome()
    assert stage.kube.writes == []
    assert stage.log == ["observe", "plan"]


@in_virtual_time
async def test_a_resource_that_is_gone_is_forgotten() -> None:
    stage = Stage(problems=(PROBLEM,))
    await stage.reconcile()
    assert b'name="chat"' in generate_latest(stage.metrics.registry)
    stage.kube.objects.clear()
    assert await stage.reconcile() == Outcome(gone=True)
    assert stage.followed == [(KEY, ENGINES), (KEY, {})]
    assert b'name="chat"' not in generate_latest(stage.metrics.registry)
    stage.kube.put(VLLM_DEPLOYMENTS, "default", manifest())
    await stage.reconcile()
    assert stage.carried[-1] == (), "a new resource of that name has no part in the old one's problems"


def invalid() -> Exception:
    try:
        VLLMDeploymentSpec.model_validate({"model": {"uri": "hf://a/b"}, "replicas": "many"})
    except ValueError as error:
        return error
    raise AssertionError("it is valid")


@in_virtual_time
async def test_a_stored_object_that_cannot_be_read_is_told_once_and_left_alone() -> None:
    stage = Stage(observe_error=invalid())
    foreign = {"type": "Progressing", "status": "True"}
    stage.kube.put(VLLM_DEPLOYMENTS, "default", manifest(conditions=[foreign], lastAttempt=7))
    assert await stage.reconcile() == Outcome()
    await asyncio.sleep(60)
    assert await stage.reconcile() == Outcome()
    assert stage.kube.writes == ["replace_status vllmdeployments"]
    status = stage.stored()["status"]
    assert status["lastAttempt"] == 7
    kept, ready = status["conditions"]
    assert kept == foreign
    assert (ready["type"], ready["status"], ready["reason"]) == ("Ready", "False", "InvalidObject")
    assert "replicas: Input should be a valid integer" in ready["message"]
    assert stage.log == ["observe", "observe"]


@in_virtual_time
async def test_metrics_count_attempts_and_fences_once() -> None:
    fence = Fence(attempt=1, time=datetime(2027, 1, 1, tzinfo=UTC), how="PodsGone")
    after = PENDING.model_copy(
        update={"last_attempt": 2, "ready_replicas": 1, "replicas": [ReplicaStatus(index=0, last_fence=fence)]}
    )
    stage = Stage(plan=Plan(after, (), None))
    for _ in range(3):
        await stage.reconcile()
    read = stage.metrics.registry.get_sample_value
    assert read("vllm_ray_operator_attempts_total") == 2
    assert read("vllm_ray_operator_fences_total", {"how": "PodsGone"}) == 1
    labels = {"namespace": "default", "name": "chat"}
    assert read("vllm_ray_operator_deployment_replicas_ready", labels) == 1


class Worked:
    """A stage with its queue and one worker; when each pass began."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.queue: WorkQueue[Key] = WorkQueue(VirtualClock(), lambda: 0.0)
        self.times: list[float] = []
        original = stage.reconciler.reconcile

        async def timed(key: Key) -> Outcome:
            self.times.append(round(VirtualClock().now() - EPOCH, 3))
            return await original(key)

        stage.reconciler.reconcile = timed  # type: ignore[method-assign]

    async def run(self, seconds: float) -> list[float]:
        worker = asyncio.create_task(self.stage.reconciler.work(self.queue))
        await asyncio.sleep(seconds)
        self.queue.close()
        await worker
        return self.times


@in_virtual_time
async def test_a_key_at_rest_is_looked_at_again_slowly() -> None:
    worked = Worked(Stage())
    worked.queue.add(KEY)
    assert await worked.run(650) == [0, 0, RESYNC_SECONDS, 2 * RESYNC_SECONDS]


@in_virtual_time
async def test_the_plan_says_when_to_look_again() -> None:
    worked = Worked(Stage(plan=Plan(PENDING, (), 20.0)))
    worked.queue.add(KEY)
    assert await worked.run(50) == [0, 0, 20, 40]


@in_virtual_time
async def test_passes_that_fail_back_off_and_leave_the_worker_alive(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(observe_error=ApiError("the API server cannot be reached"))
    worked = Worked(stage)
    worked.queue.add(KEY)
    with caplog.at_level(logging.WARNING):
        assert await worked.run(20) == [0, 1, 3, 7, 15]
    assert caplog.messages[0] == "the pass failed: the API server cannot be reached"
    assert "Traceback" not in caplog.text


@in_virtual_time
async def test_a_fault_in_our_own_code_is_logged_with_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    worked = Worked(Stage(observe_error=ZeroDivisionError("ours")))
    worked.queue.add(KEY)
    await worked.run(2)
    assert "Traceback" in caplog.text


@in_virtual_time
async def test_lasting_problems_back_off_even_if_the_plan_wants_to_go_on_at_once() -> None:
    worked = Worked(Stage(problems=(PROBLEM,), plan=Plan(PENDING, (ACT,), 0.0)))
    worked.queue.add(KEY)
    times = await worked.run(300)
    assert len(times) <= 11


@in_virtual_time
async def test_problems_that_come_and_go_do_not_spin() -> None:
    stage = Stage()
    worked = Worked(stage)
    original = stage._execute

    async def flapping(*arguments: Any) -> tuple[Problem, ...]:
        await original(*arguments)
        return () if stage.carried[-1] else (replace(PROBLEM),)

    stage.reconciler._execute = flapping
    worked.queue.add(KEY)
    assert len(await worked.run(300)) <= 25


@in_virtual_time
async def test_endless_conflicts_are_paced() -> None:
    class Contended(StoredKube):
        async def replace_status(self, *_: object) -> Object:
            raise Conflict("changed", 409)

    worked = Worked(Stage(kube=Contended()))
    worked.queue.add(KEY)
    assert len(await worked.run(60)) <= 10 + 60 * 2 + 1
