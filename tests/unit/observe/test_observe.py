"""Observation over the fakes: what becomes of what the APIs say, or do not say."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine
from tests.fakes.kube import FakeKube, fail_always
from tests.fakes.kuberay import FakeKubeRay
from tests.fakes.ray import FakeDashboard, FakeRay
from vllm_ray_operator.clients.bundle import Clients, Key, Observation
from vllm_ray_operator.clients.protocols import (
    CONTROLLER_REVISIONS,
    NODES,
    PODS,
    RAY_CLUSTERS,
    SECRETS,
    VLLM_DEPLOYMENTS,
    ActorRow,
    ApiError,
    EngineEndpoint,
    Forbidden,
    JobRow,
    RayEndpoint,
)
from vllm_ray_operator.observe import kube as observe_kube
from vllm_ray_operator.observe import observe
from vllm_ray_operator.observe.engine import parse_state
from vllm_ray_operator.observe.ray import last_words
from vllm_ray_operator.observe.words import MAX_MESSAGE_CHARACTERS
from vllm_ray_operator.plan import names
from vllm_ray_operator.plan.world import AttemptView, EngineState, Job, Leftovers, Problem, Submission

KEY = Key("default", "chat")
ID = "chat-1a2b3c4d-a7-x9k2q1"
CLUSTER = "chat-12345678"
URL = f"http://{CLUSTER}-head-svc.default.svc:8265"
WORKER_IP = "10.0.0.3"
UNREACHABLE = ApiError(f"the Ray dashboard at {URL} does not answer: no connection")


def attempt(**changes: Any) -> dict[str, Any]:
    return {
        "number": 7,
        "nonce": "x9k2q1",
        "instanceId": ID,
        "engineRevision": "chat-engine-1",
        "rayCluster": CLUSTER,
        "session": {"head": {"pod": "h", "uid": "u", "restarts": 0}, "slot": []},
        "startTime": "2030-01-01T00:00:00Z",
        **changes,
    }


SEEN = {"rayJobIds": ["02000000"]}
ENDED = {"endTime": "2030-01-01T00:01:00Z"}


@dataclass
class Lab:
    """A deployment with one attempt on a RayCluster that runs: a head and two workers."""

    clock: FakeClock = field(default_factory=FakeClock)
    kube: FakeKube = field(default_factory=FakeKube)
    ray: FakeRay = field(default_factory=FakeRay)

    def __post_init__(self) -> None:
        self.engine = FakeEngine(self.clock)
        self.clients = Clients(self.kube, self.ray, self.engine, self.clock)
        self.kuberay = FakeKubeRay(self.kube, self.ray)
        self.attempt_is()
        template = {"metadata": {"labels": names.selector("chat")}, "spec": {"containers": [{"name": "ray"}]}}
        cluster = {
            "metadata": {
                "namespace": "default",
                "name": CLUSTER,
                "labels": {**names.selector("chat"), names.CLUSTER_REVISION: "chat-cluster-12345678"},
            },
            "spec": {
                "authOptions": {"mode": "token"},
                "headGroupSpec": {"template": template},
                "workerGroupSpecs": [{"groupName": "slot-0", "replicas": 2, "template": template}],
            },
        }
        self.kube.put(RAY_CLUSTERS, cluster)
        self.kuberay.step()

    def attempt_is(self, **changes: Any) -> None:
        self.put({"replicas": [{"index": 0, "phase": "Starting", "attempt": attempt(**changes)}]})

    def put(self, status: dict[str, Any], spec: dict[str, Any] | None = None) -> None:
        spec = spec or {"model": {"uri": "file:///m"}}
        manifest = {"metadata": {"namespace": "default", "name": "chat"}, "spec": spec, "status": status}
        self.kube.put(VLLM_DEPLOYMENTS, manifest)

    @property
    def dashboard(self) -> FakeDashboard:
        return self.ray.dashboards[URL]

    async def submit(self) -> None:
        await self.ray.submit(RayEndpoint(URL, self.dashboard.token), ID, "exec x", {}, {}, {})

    async def see(self, *problems: Problem) -> Observation:
        seen = await observe(KEY, self.clients, problems)
        assert seen is not None
        return seen

    async def view(self) -> AttemptView:
        return (await self.see()).world.attempts[ID]


@pytest.fixture
async def lab() -> Lab:
    return Lab()


async def test_a_deployment_that_is_gone_or_going(lab: Lab) -> None:
    assert await observe(Key("default", "other"), lab.clients, ()) is None
    stored = lab.kube.peek(VLLM_DEPLOYMENTS, "default", "chat")
    assert stored is not None
    stored["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    lab.kube.put(VLLM_DEPLOYMENTS, stored)
    assert await observe(KEY, lab.clients, ()) is None


async def test_the_cluster_and_its_pods(lab: Lab) -> None:
    world = (await lab.see()).world
    cluster = world.cluster(CLUSTER)
    assert cluster is not None
    assert (cluster.revision, cluster.head_ready, cluster.groups) == ("chat-cluster-12345678", True, (("slot-0", 2),))
    assert cluster.head is not None
    assert cluster.head.is_head
    slot = cluster.slot("slot-0")
    assert [(pod.group, pod.ready, pod.deleting, pod.restarts) for pod in slot] == [("slot-0", True, False, 0)] * 2
    assert WORKER_IP in {pod.ip for pod in slot}
    assert all(pod.node for pod in slot)


@pytest.mark.parametrize("kept", [True, False])
async def test_engines_are_asked_while_there_is_no_head(lab: Lab, kept: bool) -> None:
    """They may outlive it; and that they do not answer either must be seen before a lost head is given up."""
    lab.attempt_is(**SEEN, endpoint={"address": WORKER_IP, "port": 8000, "pod": "w", "node": "n"})
    stored = lab.kube.peek(RAY_CLUSTERS, "default", CLUSTER)
    assert stored is not None
    if kept:
        stored["spec"]["gcsFaultToleranceOptions"] = {"redisAddress": "redis:6379"}
    lab.kube.put(RAY_CLUSTERS, stored)
    head = next(pod for pod in lab.kube.objects(PODS) if pod["metadata"]["labels"]["ray.io/node-type"] == "head")
    lab.kube.remove(PODS, "default", head["metadata"]["name"])
    seen = await lab.see()
    assert (seen.world.attempts[ID].unasked, set(seen.engines)) == (False, {ID})
    assert seen.ray == {}, "there is no dashboard to ask"
    assert seen.world.clusters[0].outlives_head is kept


async def test_pods_on_cordoned_nodes_and_pods_that_are_deleted(lab: Lab) -> None:
    tolerant, leaving, _ = lab.kube.objects(PODS)
    cordoned = [pod["spec"]["nodeName"] for pod in (tolerant, leaving)]
    for node in (*cordoned, "elsewhere"):
        lab.kube.put(NODES, {"metadata": {"namespace": "", "name": node}, "spec": {"unschedulable": True}})
    tolerant["spec"]["tolerations"] = [{"operator": "Exists"}]
    leaving["metadata"]["deletionTimestamp"] = "2030-01-02T00:00:00Z"
    lab.kube.put(PODS, tolerant)
    lab.kube.put(PODS, leaving)
    seen = {pod.name: pod for pod in (await lab.see()).world.pods.values()}
    assert {name for name, pod in seen.items() if pod.cordoned} == {leaving["metadata"]["name"]}
    gone = seen[leaving["metadata"]["name"]]
    assert (gone.deleting, gone.ends) == (True, datetime(2030, 1, 2, tzinfo=UTC))
    lab.kube.put(NODES, {"metadata": {"namespace": "", "name": cordoned[1]}, "spec": {}})
    assert not any(pod.cordoned for pod in (await lab.see()).world.pods.values())


async def test_pods_and_clusters_of_others_are_not_ours(lab: Lab) -> None:
    others = {"metadata": {"namespace": "default", "name": "other-1", "labels": names.selector("other")}, "spec": {}}
    lab.kube.put(RAY_CLUSTERS, others)
    lab.kube.put(PODS, {**others, "spec": {"containers": []}})
    world = (await lab.see()).world
    assert [c.name for c in world.clusters] == [CLUSTER]
    assert len(world.clusters[0].pods) == 3


async def test_pods_outlive_their_cluster(lab: Lab) -> None:
    """What they run may still hold accelerators: a world without them would fence an attempt that is alive."""
    pods = {pod["metadata"]["uid"] for pod in lab.kube.objects(PODS)}
    lab.kube.remove(RAY_CLUSTERS, "default", CLUSTER)
    world = (await lab.see()).world
    assert world.clusters == ()
    assert {pod.uid for pod in world.orphans} == set(world.pods) == pods
    assert all(pod.deleting for pod in world.orphans)


async def test_a_cluster_of_an_earlier_deployment_of_that_name_is_not_taken_over(lab: Lab) -> None:
    """The garbage collector is about to delete it, with every engine that would be started on it."""
    stored = lab.kube.peek(RAY_CLUSTERS, "default", CLUSTER)
    assert stored is not None
    for uid, there in (("the-uid-of-an-earlier-one", False), ((await lab.see()).world.deployment.uid, True)):
        stored["metadata"]["ownerReferences"] = [names.owner_reference("chat", uid)]
        lab.kube.put(RAY_CLUSTERS, stored)
        world = (await lab.see()).world
        assert [c.name for c in world.clusters] == ([CLUSTER] if there else [])
        assert len(world.orphans) == (0 if there else 3)


async def test_without_the_right_to_see_nodes_no_cordon_is_seen_and_all_else_is(lab: Lab) -> None:
    lab.kube.before.append(fail_always(Forbidden("nodes is forbidden", 403), verb="list", resource=NODES))
    world = (await lab.see()).world
    assert [pod.cordoned for pod in world.clusters[0].pods] == [False] * 3
    assert world.problems == ()


async def test_revisions(lab: Lab) -> None:
    labels = {**names.selector("chat"), names.REVISION_KIND: "engine"}
    manifest = {"revision": 4, "data": {"written": {"a": 1}, "resolved": {"b": 2}}}
    metadata = {"namespace": "default", "name": "chat-engine-1", "labels": labels}
    await lab.kube.create(CONTROLLER_REVISIONS, "default", {"metadata": metadata, **manifest})
    (revision,) = (await lab.see()).world.revisions
    assert (revision.name, revision.kind, revision.number) == ("chat-engine-1", "engine", 4)
    assert (revision.written, revision.resolved) == ({"a": 1}, {"b": 2})


async def test_a_revision_of_an_earlier_deployment_of_that_name_is_not_used(lab: Lab) -> None:
    """It is about to go away too, and what is made from it would be made anew then."""
    metadata = {
        "namespace": "default",
        "name": "chat-engine-1",
        "labels": {**names.selector("chat"), names.REVISION_KIND: "engine"},
        "ownerReferences": [names.owner_reference("chat", "the-uid-of-an-earlier-one")],
    }
    manifest = {"metadata": metadata, "revision": 4, "data": {"written": {}, "resolved": {}}}
    await lab.kube.create(CONTROLLER_REVISIONS, "default", manifest)
    assert (await lab.see()).world.revisions == ()


async def test_kuberay_is_missing(lab: Lab) -> None:
    lab.kube.kinds_missing.add(RAY_CLUSTERS)
    carried = Problem("Forbidden", "x")
    world = (await lab.see(carried)).world
    assert (world.clusters, world.clusters_known) == ((), False)
    assert [p.reason for p in world.problems] == ["Forbidden", "KubeRayMissing"]
    assert "kuberay-operator" in world.problems[1].message


async def test_an_object_that_cannot_be_read(lab: Lab) -> None:
    lab.put({}, {"model": {"uri": "file:///m"}, "replicas": "many"})
    with pytest.raises(ValidationError, match="replicas"):
        await observe(KEY, lab.clients, ())


@pytest.mark.parametrize("resource", [PODS, RAY_CLUSTERS], ids=lambda r: r.plural)
async def test_an_api_server_that_cannot_be_read_is_never_an_empty_world(lab: Lab, resource: Any) -> None:
    lab.kube.before.append(fail_always(ApiError("the API server did not answer"), verb="list", resource=resource))
    with pytest.raises(ApiError):
        await observe(KEY, lab.clients, ())


async def test_the_token_comes_from_the_secret_of_the_cluster(lab: Lab) -> None:
    seen = await lab.see()
    endpoint = seen.ray[CLUSTER]
    assert (endpoint.url, endpoint.token) == (URL, f"token-of-{CLUSTER}")
    assert f"Secret default/{CLUSTER}" in endpoint.token_source
    assert "token-of" not in repr(seen.ray)


@pytest.mark.parametrize(
    ("name", "given", "secret"),
    [
        pytest.param("chat-12345678", None, "chat-12345678", id="its own name"),
        pytest.param("a" * 44 + "-12345678", None, "a" * 41 + "-12345678", id="53 characters: the last 50"),
        pytest.param("abc4" + "b" * 40 + "-12345678", None, "r" + "b" * 40 + "-12345678", id="no leading digit"),
        pytest.param("chat-12345678", "mine", "mine", id="given"),
    ],
)
def test_the_name_of_the_secret_as_kuberay_makes_it(name: str, given: str | None, secret: str) -> None:
    options = {"mode": "token", **({"secretName": given} if given else {})}
    assert observe_kube.token_secret({"metadata": {"name": name}, "spec": {"authOptions": options}}) == secret


TOKENS = {
    "not made yet": (None, None, f"waiting for KubeRay to make Secret {CLUSTER}", ()),
    "no such key": ({"other": "eA=="}, None, "holds no Ray token under the key auth_token", ()),
    "not base64": ({"auth_token": "%"}, None, "holds no Ray token", ()),
    "empty": ({"auth_token": ""}, None, "holds no Ray token", ()),
    "no right to read it": (
        {"auth_token": base64.b64encode(b"x").decode()},
        Forbidden('secrets "chat" is forbidden: User "u" cannot get resource "secrets"', 403),
        'cannot get resource "secrets"',
        ("Forbidden",),
    ),
}


@pytest.mark.parametrize(("data", "error", "words", "reasons"), TOKENS.values(), ids=TOKENS.keys())
async def test_without_a_token_ray_is_not_asked(
    lab: Lab, data: dict[str, str] | None, error: ApiError | None, words: str, reasons: tuple[str, ...]
) -> None:
    if data is None:
        lab.kube.remove(SECRETS, "default", CLUSTER)
    else:
        lab.kube.put(SECRETS, {"metadata": {"namespace": "default", "name": CLUSTER}, "data": data})
    if error is not None:
        lab.kube.before.append(fail_always(error, verb="get", resource=SECRETS))
    seen = await lab.see()
    assert seen.ray == {}
    assert lab.ray.calls == []
    assert words in seen.world.clusters[0].ray_error
    assert tuple(p.reason for p in seen.world.problems) == reasons
    assert seen.world.attempts[ID] == AttemptView(job=None, unasked=True)


async def test_a_head_that_is_not_ready_is_not_asked(lab: Lab) -> None:
    lab.kube.set_status(RAY_CLUSTERS, "default", CLUSTER, {"conditions": []})
    seen = await lab.see()
    assert seen.ray == {}
    assert seen.world.attempts[ID] == AttemptView(job=None)
    assert lab.ray.calls == []


async def test_the_launcher_of_an_engine_that_was_seen_is_asked_whatever_the_head_does(lab: Lab) -> None:
    """A dashboard that hangs makes the head's pod unready after a while: no reason to send clients away."""
    lab.attempt_is(endpoint={"address": WORKER_IP, "port": 8000, "pod": "w", "node": "n"})
    lab.engine.start(WORKER_IP, names.control_port(0), ID, f"token-of-{CLUSTER}").serve()
    lab.kube.set_status(RAY_CLUSTERS, "default", CLUSTER, {"conditions": []})
    seen = await lab.see()
    assert seen.ray == {}
    assert seen.engines == {ID: EngineEndpoint(WORKER_IP, names.control_port(0), ID, f"token-of-{CLUSTER}")}
    engine = seen.world.attempts[ID].engine
    assert engine is not None
    assert engine.ready


async def test_an_attempt_whose_cluster_is_gone(lab: Lab) -> None:
    lab.attempt_is(rayCluster="chat-00000000")
    assert await lab.view() == AttemptView(job=None, unasked=True)


async def test_a_dashboard_that_does_not_answer_is_told_and_knows_nothing(lab: Lab) -> None:
    lab.dashboard.error = UNREACHABLE
    world = (await lab.see()).world
    assert world.attempts[ID] == AttemptView(job=None)
    assert world.clusters[0].ray_error == str(UNREACHABLE)


async def test_a_silent_dashboard_is_not_asked_for_every_replica(lab: Lab) -> None:
    attempts = [attempt(instanceId=f"{ID}-{n}") for n in range(64)]
    lab.put({"replicas": [{"index": n, "phase": "Starting", "attempt": a} for n, a in enumerate(attempts)]})
    lab.dashboard.error = UNREACHABLE
    world = (await lab.see()).world
    assert set(world.attempts.values()) == {AttemptView(job=None)}
    assert len(world.attempts) == 64
    assert len(lab.ray.calls) <= 16


async def test_a_job_that_ray_does_not_know(lab: Lab) -> None:
    assert await lab.view() == AttemptView(job="absent")


async def test_at_rest_ray_is_not_asked_for_all_submissions(lab: Lab) -> None:
    lab.attempt_is(**SEEN)
    await lab.submit()
    cluster = (await lab.see()).world.cluster(CLUSTER)
    assert cluster is not None
    assert cluster.submissions is None
    assert ("jobs", "all") not in lab.ray.calls


@pytest.mark.parametrize(
    ("status", "spec"),
    [
        ({}, {}),
        ({"replicas": [{"index": 0, "phase": "Backoff"}]}, {}),
        ({"replicas": [{"index": 0, "phase": "Ready", "attempt": attempt(**SEEN)}]}, {"replicas": 2}),
        ({"replicas": [{"index": 0, "phase": "Starting", "attempt": attempt()}]}, {}),
    ],
    ids=["no status", "one that starts again", "one more", "one that may not be submitted yet"],
)
async def test_all_submissions_when_an_attempt_may_begin(
    lab: Lab, status: dict[str, Any], spec: dict[str, Any]
) -> None:
    lab.put(status, {"model": {"uri": "file:///m"}, **spec})
    await lab.ray.submit(RayEndpoint(URL, lab.dashboard.token), "other", "exec x", {}, {}, {"a": "b"})
    cluster = (await lab.see()).world.cluster(CLUSTER)
    assert cluster is not None
    assert cluster.submissions == (Submission("other", "PENDING", {"a": "b"}),)


async def test_a_list_of_a_dashboard_that_does_not_answer(lab: Lab) -> None:
    lab.put({})
    lab.dashboard.error = UNREACHABLE
    cluster = (await lab.see()).world.cluster(CLUSTER)
    assert cluster is not None
    assert cluster.submissions is None
    assert cluster.ray_error == str(UNREACHABLE)


async def test_a_list_of_a_head_that_has_restarted_since_it_was_seen(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know what an earlier life of it started."""

    async def restart(_: RayEndpoint) -> tuple[JobRow, ...]:
        (head,) = (p for p in lab.kube.objects(PODS) if p["metadata"]["labels"]["ray.io/node-type"] == "head")
        head["status"]["containerStatuses"][0]["restartCount"] += 1
        lab.kube.put(PODS, head)
        return ()

    lab.put({})
    monkeypatch.setattr(lab.ray, "jobs", restart)
    cluster = (await lab.see()).world.cluster(CLUSTER)
    assert cluster is not None
    assert cluster.submissions is None


async def test_a_pending_job_has_no_launcher(lab: Lab) -> None:
    await lab.submit()
    seen = await lab.see()
    assert seen.world.attempts[ID] == AttemptView(job=Job("PENDING", "waiting for resources"))
    assert seen.engines == {}


async def test_a_running_job_and_its_launcher(lab: Lab) -> None:
    await lab.submit()
    lab.dashboard.run(ID, WORKER_IP)
    launcher = lab.engine.start(WORKER_IP, names.control_port(0), ID, f"token-of-{CLUSTER}")
    launcher.serve("10.0.0.3", "10.0.0.4")
    seen = await lab.see()
    endpoint = EngineEndpoint(WORKER_IP, names.control_port(0), ID, f"token-of-{CLUSTER}")
    assert seen.engines == {ID: endpoint}
    view = seen.world.attempts[ID]
    assert view.job == Job("RUNNING", "running", ("02000000",), WORKER_IP)
    assert view.engine == EngineState("Serving", "serving", ready=True, ranks=((0, ID, ("10.0.0.3", "10.0.0.4")),))
    assert view.leftovers is None


async def test_a_standby_is_asked_at_a_port_of_its_own(lab: Lab) -> None:
    standby = "chat-1a2b3c4d-a8-y7"
    waiting = attempt(number=8, instanceId=standby, turn=1, standby=True)
    lab.put({"replicas": [{"index": 0, "phase": "Ready", "attempt": attempt(), "standby": waiting}]})
    for instance in (ID, standby):
        await lab.ray.submit(RayEndpoint(URL, lab.dashboard.token), instance, "exec x", {}, {}, {})
        lab.dashboard.run(instance, WORKER_IP)
    launcher = lab.engine.start(WORKER_IP, 8071, standby, f"token-of-{CLUSTER}")
    launcher.serve()
    seen = await lab.see()
    assert {instance: endpoint.port for instance, endpoint in seen.engines.items()} == {ID: 8070, standby: 8071}
    assert seen.world.attempts[ID].engine is None
    assert seen.world.attempts[standby].engine is not None


async def test_a_launcher_that_does_not_answer_yet_is_followed_all_the_same(lab: Lab) -> None:
    await lab.submit()
    lab.dashboard.run(ID, WORKER_IP)
    seen = await lab.see()
    assert list(seen.engines) == [ID]
    assert seen.world.attempts[ID].engine is None


async def test_the_launcher_of_another_attempt_is_not_ours(lab: Lab) -> None:
    await lab.submit()
    lab.dashboard.run(ID, WORKER_IP)
    lab.engine.start(WORKER_IP, names.control_port(0), "chat-1a2b3c4d-a6-old", f"token-of-{CLUSTER}")
    assert (await lab.view()).engine is None


RESULT = {"outcome": "Failed", "reason": "OutOfMemory", "message": "too little memory"}


async def test_an_ended_job_with_its_last_words_and_nothing_left(lab: Lab) -> None:
    await lab.submit()
    lab.dashboard.run(ID, WORKER_IP)
    lab.dashboard.end(ID, "FAILED", RESULT)
    view = await lab.view()
    assert view.job == Job("FAILED", "ended: FAILED", ("02000000",), WORKER_IP, RESULT)
    assert view.leftovers == Leftovers(complete=True)
    assert view.leftovers.none


async def test_last_words_in_the_jobs_message_spare_the_log(lab: Lab) -> None:
    await lab.submit()
    lab.dashboard.end(ID, "FAILED")
    job = lab.dashboard.jobs[ID]
    job.row = replace(job.row, message=f"last logs:\nVLLM_RAY_ENGINE_RESULT {json.dumps(RESULT)}\n")
    view = await lab.view()
    assert isinstance(view.job, Job)
    assert view.job.result == RESULT
    assert "job_log_tail" not in {method for method, _ in lab.ray.calls}


async def test_no_line_of_the_log_is_taken_for_rays_words(lab: Lab) -> None:
    """Nobody has taken secrets out of it; without a result its end would stand in status and events."""
    await lab.submit()
    lab.dashboard.end(ID, "FAILED")
    told = "Job entrypoint command failed with exit code 1"
    message = f"{told}, last available logs (truncated to 20,000 chars):\nHF_TOKEN=hf_secret\n"
    lab.dashboard.jobs[ID].row = replace(lab.dashboard.jobs[ID].row, message=message)
    view = await lab.view()
    assert isinstance(view.job, Job)
    assert view.job.message == told


async def test_a_log_that_cannot_be_read_does_not_hide_that_the_job_has_ended(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: object) -> str:
        raise ApiError("its node is gone")

    await lab.submit()
    lab.dashboard.end(ID, "FAILED", RESULT)
    monkeypatch.setattr(lab.ray, "job_log_tail", lost)
    view = await lab.view()
    assert isinstance(view.job, Job)
    assert (view.job.status, view.job.result) == ("FAILED", None)


async def test_what_is_left_of_an_ended_attempt(lab: Lab) -> None:
    await lab.submit()
    lab.dashboard.run(ID, WORKER_IP)
    lab.dashboard.end(ID, "FAILED", leak=True)
    leftovers = (await lab.view()).leftovers
    assert leftovers is not None
    assert not leftovers.none
    assert leftovers.actors == ("worker-0 (ALIVE) on node node0, pid 100", "worker-1 (ALIVE) on node node1, pid 101")
    assert leftovers.placement_groups == (f"{ID} (CREATED)",)


def stray(job_id: str, namespace: str = "anonymous", state: str = "ALIVE") -> ActorRow:
    return ActorRow(f"stray-{job_id}", "stray", namespace, job_id, state, "node9", 9)


STRAYS = {
    "of a Ray job id seen earlier": (stray("05000000"), ("05000000",), 1),
    "of a Ray job that made actors in our namespace": (stray("02000000"), (), 1),
    "of another attempt's Ray job": (stray("07000000"), (), 0),
    "dead": (stray("02000000", state="DEAD"), (), 0),
    "restarting": (stray("02000000", state="RESTARTING"), (), 1),
    "the supervisor that the Jobs API made": (stray("02000000", "SUPERVISOR_ACTOR_RAY_NAMESPACE"), (), 0),
}


@pytest.mark.parametrize(("actor", "seen_earlier", "count"), STRAYS.values(), ids=STRAYS.keys())
async def test_actors_outside_the_namespace(
    lab: Lab, actor: ActorRow, seen_earlier: tuple[str, ...], count: int
) -> None:
    lab.attempt_is(rayJobIds=list(seen_earlier))
    await lab.submit()
    lab.dashboard.run(ID, WORKER_IP)
    lab.dashboard.end(ID, "FAILED")
    # The one that the Jobs API tells is the last one opened, here by accident.
    lab.dashboard.jobs[ID].row = replace(lab.dashboard.jobs[ID].row, job_id="03000000")
    lab.dashboard.actors.append(actor)
    view = await lab.view()
    assert view.leftovers is not None
    assert len(view.leftovers.actors) == count
    assert isinstance(view.job, Job)
    assert set(view.job.ray_job_ids) == {"02000000", "03000000", *seen_earlier}


async def test_a_cut_off_answer_proves_nothing(lab: Lab) -> None:
    await lab.submit()
    lab.dashboard.end(ID, "FAILED")
    lab.dashboard.truncated = True
    leftovers = (await lab.view()).leftovers
    assert leftovers == Leftovers(complete=False)
    assert not leftovers.none


async def test_leftovers_that_cannot_be_read_leave_the_job_known(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> Any:
        raise UNREACHABLE

    await lab.submit()
    lab.dashboard.end(ID, "FAILED")
    monkeypatch.setattr(lab.ray, "actors", fail)
    world = (await lab.see()).world
    view = world.attempts[ID]
    assert isinstance(view.job, Job)
    assert view.leftovers is None
    assert world.clusters[0].ray_error == str(UNREACHABLE)


async def test_leftovers_are_read_after_the_end_even_if_ray_has_forgotten_the_job(lab: Lab) -> None:
    lab.attempt_is(**ENDED)
    assert await lab.view() == AttemptView(job="absent", leftovers=Leftovers(complete=True))


@pytest.mark.parametrize("ended", [False, True], ids=["job absent", "job ended, nothing left"])
async def test_absence_told_by_a_head_that_restarted_meanwhile_is_not_believed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """The pods were read before the restart, Ray after it: the new GCS knows nothing of what still runs."""
    await lab.submit()
    lab.dashboard.run(ID, WORKER_IP)
    lab.dashboard.end(ID, "FAILED", leak=True)
    ask = lab.ray.actors if ended else lab.ray.job
    restarted: list[bool] = []

    async def restart_then_answer(*args: Any) -> Any:
        if not restarted:
            restarted.append(True)
            (head,) = [p for p in lab.kube.objects(PODS) if p["metadata"]["labels"]["ray.io/node-type"] == "head"]
            lab.kuberay.restart_container(head)
        return await ask(*args)

    monkeypatch.setattr(lab.ray, "actors" if ended else "job", restart_then_answer)
    assert await lab.view() == AttemptView(job=None)


async def test_a_dashboard_elsewhere(lab: Lab) -> None:
    lab.ray.dashboards["http://127.0.0.1:9999"] = lab.ray.dashboards.pop(URL)
    lab.clients = replace(lab.clients, dashboard_url=lambda namespace, cluster: "http://127.0.0.1:9999")
    assert await lab.view() == AttemptView(job="absent")


@pytest.mark.parametrize(
    ("log", "result"),
    [
        ("", None),
        ("nothing of the kind\n", None),
        (f"x\nVLLM_RAY_ENGINE_RESULT {json.dumps(RESULT)}\n", RESULT),
        (f"VLLM_RAY_ENGINE_RESULT {json.dumps(RESULT)}\nRunning entrypoint for job x: exec\n", RESULT),
        ('VLLM_RAY_ENGINE_RESULT {"a": "1"}\nVLLM_RAY_ENGINE_RESULT {"a": "2"}', {"a": "2"}),
        ('VLLM_RAY_ENGINE_RESULT {"a": "1"}\nVLLM_RAY_ENGINE_RESULT {"a": "2', {"a": "1"}),
        ('VLLM_RAY_ENGINE_RESULT {"a": "1", "line": null}', {"a": "1"}),
        ("VLLM_RAY_ENGINE_RESULT [1]", None),
    ],
)
def test_last_words(log: str, result: dict[str, str] | None) -> None:
    assert last_words(log) == result


@pytest.mark.parametrize(
    ("reply", "state"),
    [
        ({"phase": "Loading", "message": "loading weights"}, EngineState("Loading", "loading weights", ready=False)),
        (
            {"phase": "Placing", "message": "", "placement": {"state": "PENDING", "explanation": "needs 2 GPU"}},
            EngineState("Placing", "needs 2 GPU", ready=False),
        ),
        (
            {"phase": "Failed", "message": "x", "health": None, "cause": {"reason": "PortInUse", "line": None}},
            EngineState("Failed", "x", ready=False, cause={"reason": "PortInUse"}),
        ),
        ({"phase": "Serving", "health": {"ready": "yes"}}, EngineState("Serving", "", ready=False)),
        ({"message": "no phase"}, None),
        ({"phase": "Serving", "ranks": [{"rank": "first"}]}, None),
        ({"phase": "Serving", "health": []}, EngineState("Serving", "", ready=False)),
        ({"phase": "Serving", "health": "good"}, None),
    ],
)
def test_a_launchers_reply(reply: dict[str, Any], state: EngineState | None) -> None:
    assert parse_state(reply) == state


async def test_what_ray_and_launchers_say_is_short_enough_for_a_status(lab: Lab) -> None:
    """It stands there several times for every replica, and an object has little more than a megabyte."""
    long = "word\n" * 5000
    await lab.submit()
    job = lab.dashboard.jobs[ID]
    lab.dashboard.end(ID, "FAILED")
    job.row = replace(job.row, message=long)
    view = await lab.view()
    result, state = (
        last_words(f"VLLM_RAY_ENGINE_RESULT {json.dumps({'message': long})}"),
        parse_state({"phase": "Failed", "message": long, "health": {"reason": long}, "cause": {"message": long}}),
    )
    assert isinstance(view.job, Job)
    assert result is not None
    assert state is not None
    assert state.cause is not None
    for text in (view.job.message, result["message"], state.message, state.reason, state.cause["message"]):
        assert text.startswith("word word")
        assert len(text) == MAX_MESSAGE_CHARACTERS
