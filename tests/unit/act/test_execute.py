"""Actions, carried out on the fakes: idempotent, apart from each other, and honest about what failed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine
from tests.fakes.kube import FakeKube, Hook, Verb, fail_always
from tests.fakes.ray import FakeDashboard, FakeRay
from vllm_ray_operator.act import engine_package, execute
from vllm_ray_operator.api.spec import Model, VLLMDeploymentSpec
from vllm_ray_operator.api.status import VLLMDeploymentStatus
from vllm_ray_operator.clients.bundle import Clients, Observation
from vllm_ray_operator.clients.problems import KUBERAY_MISSING
from vllm_ray_operator.clients.protocols import (
    CONTROLLER_REVISIONS,
    EVENTS,
    PODS,
    RAY_CLUSTERS,
    SERVICES,
    ApiError,
    Conflict,
    EngineEndpoint,
    Forbidden,
    Invalid,
    KindMissing,
    RayEndpoint,
    Resource,
)
from vllm_ray_operator.plan import names
from vllm_ray_operator.plan.actions import (
    Action,
    Apply,
    Create,
    Delete,
    DrainEngine,
    Emit,
    PatchCluster,
    StopJob,
    SubmitJob,
)
from vllm_ray_operator.plan.world import Deployment, Problem, World

CLUSTER = "chat-12345678"
URL = f"http://{CLUSTER}-head-svc.default.svc:8265"
ID = "chat-1a2b3c4d-a7-x9k2q1"


@dataclass
class Lab:
    kube: FakeKube = field(default_factory=FakeKube)
    ray: FakeRay = field(default_factory=FakeRay)
    dashboard: FakeDashboard = field(default_factory=lambda: FakeDashboard(token="ray-token"))

    def __post_init__(self) -> None:
        clock = FakeClock()
        self.ray.dashboards[URL] = self.dashboard
        self.engine = FakeEngine(clock)
        self.clients = Clients(self.kube, self.ray, self.engine, clock)
        spec = VLLMDeploymentSpec(model=Model(uri="file:///m"))
        deployment = Deployment("default", "chat", "1a2b3c4d-0", 1, "7", spec, {}, VLLMDeploymentStatus())
        endpoint = RayEndpoint(URL, "ray-token", "Secret default/chat")
        self.observation = Observation(World(deployment), {CLUSTER: endpoint}, {})

    async def do(self, *actions: Action) -> tuple[Problem, ...]:
        return await execute(actions, self.observation, self.clients)

    def fail(self, error: ApiError, verb: Verb, resource: Resource) -> Hook:
        hook = fail_always(error, verb=verb, resource=resource)
        self.kube.before.append(hook)
        return hook


@pytest.fixture
async def lab() -> Lab:
    return Lab()


def manifest(resource: Resource, name: str, **fields: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": names.selector("chat")}
    return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata, **fields}


def submit(submission_id: str = ID, cluster: str = CLUSTER) -> SubmitJob:
    return SubmitJob(cluster, submission_id, "exec x", {"vd-driver-0": 1}, {"A": "b"}, {"whose": "ours"})


CREATE_CLUSTER = Create(manifest(RAY_CLUSTERS, CLUSTER, spec={"a": 1}))
APPLY_SERVICE = Apply(manifest(SERVICES, "chat", spec={"ports": [{"port": 8000}]}))
TEST = {"op": "test", "path": "/metadata/resourceVersion", "value": "0"}
PATCH = PatchCluster(CLUSTER, (TEST, {"op": "add", "path": "/spec/b", "value": 2}), "why")
EMIT = Emit("Warning", "OutOfMemory", "too little memory")

FIRST_AND_AGAIN: dict[str, Action] = {
    "create": CREATE_CLUSTER,
    "apply": APPLY_SERVICE,
    "delete of what is not there": Delete("Pod", "gone", None, "why"),
    "patch of what is not there": PATCH,
    "submit": submit(),
    "stop of what was never submitted": StopJob(CLUSTER, "never"),
    "emit": EMIT,
}


@pytest.mark.parametrize("action", FIRST_AND_AGAIN.values(), ids=FIRST_AND_AGAIN.keys())
async def test_twice_is_as_good_as_once(lab: Lab, action: Action) -> None:
    assert await lab.do(action) == ()
    objects = {r.kind: lab.kube.objects(r) for r in (RAY_CLUSTERS, SERVICES, EVENTS)}
    assert await lab.do(action) == ()
    assert {r.kind: lab.kube.objects(r) for r in (RAY_CLUSTERS, SERVICES, EVENTS)} == objects
    assert len(lab.dashboard.jobs) <= 1


async def test_create_leaves_what_is_there_as_it_is(lab: Lab) -> None:
    await lab.do(CREATE_CLUSTER)
    await lab.do(Create(manifest(RAY_CLUSTERS, CLUSTER, spec={"a": 99})))
    assert lab.kube.objects(RAY_CLUSTERS)[0]["spec"] == {"a": 1}


@pytest.mark.parametrize(
    ("metadata", "ours"),
    [
        ({}, False),
        ({"labels": names.selector("other")}, False),
        ({"labels": names.selector("chat")}, True),
        ({"ownerReferences": [names.owner_reference("chat", "1a2b3c4d-0")]}, True),
    ],
    ids=["of a user", "of another deployment", "by its labels", "by its owner"],
)
async def test_a_service_of_somebody_else_is_not_taken_over(lab: Lab, metadata: dict[str, Any], ours: bool) -> None:
    theirs = {"metadata": {"namespace": "default", "name": "chat", **metadata}, "spec": {"selector": {"app": "web"}}}
    before = lab.kube.put(SERVICES, theirs)
    problems = await lab.do(APPLY_SERVICE)
    assert [p.reason for p in problems] == ([] if ours else ["NameTaken"])
    assert (lab.kube.objects(SERVICES) == [before]) is not ours
    if not ours:
        assert "Service chat is there already" in problems[0].message


async def test_what_was_observed_as_ours_is_not_asked_for_again(lab: Lab) -> None:
    await lab.do(APPLY_SERVICE)
    assert [call.verb for call in lab.kube.calls] == ["get", "apply"]
    lab.kube.calls.clear()
    world = replace(lab.observation.world, services={"chat": lab.kube.objects(SERVICES)[0]})
    lab.observation = replace(lab.observation, world=world)
    await lab.do(APPLY_SERVICE)
    assert [call.verb for call in lab.kube.calls] == ["apply"]


async def test_a_patch_of_what_was_observed(lab: Lab) -> None:
    await lab.do(CREATE_CLUSTER)
    version = lab.kube.objects(RAY_CLUSTERS)[0]["metadata"]["resourceVersion"]
    operations = ({**TEST, "value": version}, {"op": "add", "path": "/spec/b", "value": 2})
    assert await lab.do(PatchCluster(CLUSTER, operations, "why")) == ()
    assert lab.kube.objects(RAY_CLUSTERS)[0]["spec"] == {"a": 1, "b": 2}


async def test_a_patch_of_what_has_changed_since_does_nothing(lab: Lab) -> None:
    await lab.do(CREATE_CLUSTER)
    assert await lab.do(PATCH) == ()
    assert lab.kube.objects(RAY_CLUSTERS)[0]["spec"] == {"a": 1}


async def test_delete_spares_a_later_object_of_the_same_name(lab: Lab) -> None:
    await lab.do(CREATE_CLUSTER)
    uid = lab.kube.objects(RAY_CLUSTERS)[0]["metadata"]["uid"]
    assert await lab.do(Delete("RayCluster", CLUSTER, "another-uid", "why")) == ()
    assert len(lab.kube.objects(RAY_CLUSTERS)) == 1
    assert await lab.do(Delete("RayCluster", CLUSTER, uid, "why")) == ()
    assert lab.kube.objects(RAY_CLUSTERS) == []


async def test_a_job_is_submitted_with_the_engine_package(lab: Lab) -> None:
    assert await lab.do(submit()) == ()
    package = engine_package.installed()
    job = lab.dashboard.jobs[ID]
    assert (job.entrypoint, job.resources) == ("exec x", {"vd-driver-0": 1})
    assert job.row.metadata == {"whose": "ours"}
    assert job.runtime_env == {"py_modules": [f"gcs://{package.name}"], "env_vars": {"A": "b"}}
    assert lab.dashboard.packages == {package.name: package.content}
    assert [method for method, _ in lab.ray.calls] == ["has_package", "put_package", "has_package", "submit"]
    lab.ray.calls.clear()
    assert await lab.do(submit("second")) == ()
    assert [method for method, _ in lab.ray.calls] == ["has_package", "submit"]


async def test_a_package_that_does_not_stay(lab: Lab) -> None:
    lab.dashboard.loses_packages = True
    (problem,) = await lab.do(submit())
    assert problem.reason == "RayUnreachable"
    assert "engine package" in problem.message
    assert lab.dashboard.jobs == {}


async def test_a_stop(lab: Lab) -> None:
    await lab.do(submit())
    assert await lab.do(StopJob(CLUSTER, ID)) == ()
    assert lab.dashboard.jobs[ID].row.status == "STOPPED"


async def test_an_event(lab: Lab) -> None:
    await lab.do(EMIT)
    (event,) = lab.kube.objects(EVENTS)
    assert (event["reason"], event["regarding"]["uid"]) == ("OutOfMemory", "1a2b3c4d-0")


REFUSED = Invalid("RayCluster.ray.io is invalid: spec.headGroupSpec.template: Required value", 422, "Invalid")
TOO_OLD = Invalid('strict decoding error: unknown field "spec.authOptions"', 400, "BadRequest")
NO_RIGHT = Forbidden('User "u" cannot create resource "rayclusters" in API group "ray.io"', 403, "Forbidden")
WEBHOOK = ApiError('failed calling webhook "x"', 500, "InternalError")

PROBLEMS = {
    "cluster refused": (CREATE_CLUSTER, REFUSED, "create", RAY_CLUSTERS, "ClusterRefused", "spec.headGroupSpec"),
    "KubeRay too old": (CREATE_CLUSTER, TOO_OLD, "create", RAY_CLUSTERS, "ClusterRefused", "spec.cluster.auth"),
    "slot refused": (PATCH, REFUSED, "json_patch", RAY_CLUSTERS, "ClusterRefused", "spec.headGroupSpec"),
    "service refused": (APPLY_SERVICE, Invalid("spec.ports", 422), "apply", SERVICES, "ServiceRefused", "spec.ports"),
    "no right": (CREATE_CLUSTER, NO_RIGHT, "create", RAY_CLUSTERS, "Forbidden", 'cannot create resource "rayclusters"'),
    "KubeRay missing": (CREATE_CLUSTER, KindMissing("x", 404), "create", RAY_CLUSTERS, "KubeRayMissing", "chart"),
    "KubeRay missing, patch": (PATCH, KindMissing("x", 404), "json_patch", RAY_CLUSTERS, "KubeRayMissing", "chart"),
    "webhook": (CREATE_CLUSTER, WEBHOOK, "create", RAY_CLUSTERS, "KubernetesUnavailable", "failed calling webhook"),
    "no right to delete": (
        Delete("Pod", "p", None, "why"),
        Forbidden('cannot delete resource "pods"', 403),
        "delete",
        PODS,
        "Forbidden",
        'cannot delete resource "pods"',
    ),
}


@pytest.mark.parametrize(
    ("action", "error", "verb", "resource", "reason", "words"), PROBLEMS.values(), ids=PROBLEMS.keys()
)
async def test_problems_of_the_api_server(
    lab: Lab, action: Action, error: ApiError, verb: Verb, resource: Resource, reason: str, words: str
) -> None:
    lab.fail(error, verb, resource)
    (problem,) = await lab.do(action)
    assert problem.reason == reason
    assert words in problem.message


UNPROBLEMATIC = {
    "created meanwhile": (CREATE_CLUSTER, "create", RAY_CLUSTERS),
    "changed meanwhile": (APPLY_SERVICE, "apply", SERVICES),
    "patched meanwhile": (PATCH, "json_patch", RAY_CLUSTERS),
    "told already": (EMIT, "create", EVENTS),
}


@pytest.mark.parametrize(("action", "verb", "resource"), UNPROBLEMATIC.values(), ids=UNPROBLEMATIC.keys())
async def test_a_conflict_is_no_problem(lab: Lab, action: Action, verb: Verb, resource: Resource) -> None:
    lab.fail(Conflict("changed", 409), verb, resource)
    assert await lab.do(action) == ()


async def test_an_event_that_cannot_be_posted_is_no_problem(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    lab.fail(Forbidden("no right to create events", 403), "create", EVENTS)
    assert await lab.do(EMIT) == ()
    assert "no right to create events" in caplog.text


NOT_ANSWERING = ApiError(f"the Ray dashboard at {URL} does not answer: no connection")
TOKEN_REFUSED = Forbidden(f"the Ray dashboard at {URL} refuses the token in Secret default/chat", 403)


@pytest.mark.parametrize("error", [NOT_ANSWERING, TOKEN_REFUSED], ids=["no answer", "token refused"])
@pytest.mark.parametrize("action", [submit(), StopJob(CLUSTER, ID)], ids=["submit", "stop"])
async def test_problems_of_ray(lab: Lab, error: ApiError, action: Action) -> None:
    lab.dashboard.error = error
    assert await lab.do(action) == (Problem("RayUnreachable", str(error)),)


async def test_a_silent_dashboard_is_not_tried_for_every_replica(lab: Lab) -> None:
    lab.dashboard.error = NOT_ANSWERING
    problems = await lab.do(*(submit(f"job-{n}") for n in range(64)))
    assert problems == (Problem("RayUnreachable", str(NOT_ANSWERING)),)
    assert len(lab.ray.calls) <= 16


async def test_a_job_that_ray_refuses(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise Invalid("Ray refuses the job: TypeError", 400)

    monkeypatch.setattr(lab.ray, "submit", refuse)
    assert await lab.do(submit()) == (Problem("JobRefused", "Ray refuses the job: TypeError"),)


async def test_nothing_is_asked_of_a_dashboard_that_was_not_to_be_reached(lab: Lab) -> None:
    """Why it was not stands in the observation."""
    assert await lab.do(submit(cluster="other"), StopJob("other", ID)) == ()
    assert lab.ray.calls == []


async def test_a_failure_does_not_keep_the_others_from_running(lab: Lab) -> None:
    lab.fail(REFUSED, "create", RAY_CLUSTERS)
    lab.ray.dashboards["http://other"] = FakeDashboard()
    lab.observation.ray["other"] = RayEndpoint("http://other")  # type: ignore[index]
    revision = Create(manifest(CONTROLLER_REVISIONS, "chat-engine-1"))
    problems = await lab.do(CREATE_CLUSTER, submit(), submit("elsewhere", "other"), APPLY_SERVICE, revision, EMIT)
    assert [p.reason for p in problems] == ["ClusterRefused"]
    assert [len(lab.kube.objects(r)) for r in (SERVICES, CONTROLLER_REVISIONS, EVENTS)] == [1, 1, 1]
    assert list(lab.ray.dashboards["http://other"].jobs) == ["elsewhere"]


async def test_nothing_is_submitted_on_a_cluster_that_could_not_be_made(lab: Lab) -> None:
    lab.fail(REFUSED, "create", RAY_CLUSTERS)
    await lab.do(CREATE_CLUSTER, submit())
    assert lab.dashboard.jobs == {}


async def test_the_same_problem_is_told_once(lab: Lab) -> None:
    lab.kube.kinds_missing.add(RAY_CLUSTERS)
    assert await lab.do(CREATE_CLUSTER, PATCH) == (KUBERAY_MISSING,)


async def test_calls_to_ray_run_side_by_side_but_the_order_around_them_stays(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two submissions that wait for each other end only if they run at the same time."""
    meet = asyncio.Barrier(2)
    submit_one = lab.ray.submit

    async def rendezvous(*args: Any) -> None:
        await asyncio.wait_for(meet.wait(), 5)
        assert len(lab.kube.objects(SERVICES)) == 1
        assert lab.kube.objects(EVENTS) == []
        await submit_one(*args)

    monkeypatch.setattr(lab.ray, "submit", rendezvous)
    assert await lab.do(APPLY_SERVICE, submit("a"), submit("b"), EMIT) == ()
    assert sorted(lab.dashboard.jobs) == ["a", "b"]
    assert len(lab.kube.objects(EVENTS)) == 1


async def test_a_lost_reply_does_no_harm(lab: Lab) -> None:
    """Each action is carried out, its reply is lost, and it is carried out again."""
    lost: list[str] = []

    def lose(call: object) -> None:
        if len(lost) < 2:
            lost.append(str(call))
            raise ApiError("the Kubernetes API server did not answer within 30 s")

    lab.kube.after.append(lose)
    problems = await lab.do(CREATE_CLUSTER, APPLY_SERVICE)
    assert [p.reason for p in problems] == ["KubernetesUnavailable"] * 2
    assert await lab.do(CREATE_CLUSTER, APPLY_SERVICE) == ()
    assert [len(lab.kube.objects(r)) for r in (RAY_CLUSTERS, SERVICES)] == [1, 1]


async def test_a_launcher_is_told_to_drain(lab: Lab) -> None:
    lab.observation = replace(lab.observation, engines={ID: EngineEndpoint("10.0.1.9", 8070, ID, None)})
    assert await lab.do(DrainEngine(ID)) == (), "nobody listens: the next pass tells it again"
    lab.engine.start("10.0.1.9", 8070, ID)
    assert await lab.do(DrainEngine(ID), DrainEngine("chat-1a2b3c4d-a8-gone")) == ()
    assert lab.engine.drained == [ID]
