"""The Ray client against answers as Ray 2.60.0 gives them (recorded), and against what is not Ray at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.unit.clients.conftest import Request, Served
from vllm_ray_operator.clients import ray as ray_module
from vllm_ray_operator.clients.protocols import (
    ActorRow,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    JobRow,
    NotFound,
    PlacementGroupRow,
    RayEndpoint,
    Rows,
)
from vllm_ray_operator.clients.ray import RayClient

ID = "chat-1a2b3c4d-a7-x9k2q1"
NODE = "dac1a0ed4a79f6a5f62ce4ba0a54971ef926c6447d690e40b747d7fd"
PACKAGE = "_ray_pkg_0123456789abcdef.zip"

WAITING = "Job has not started yet. It may be waiting for resources (CPUs, GPUs, memory, custom resources)."
PENDING = {
    "type": "SUBMISSION",
    "job_id": None,
    "submission_id": ID,
    "driver_info": None,
    "status": "PENDING",
    "entrypoint": "exec python3 -m vllm_ray_engine.guard",
    "message": WAITING,
    "error_type": None,
    "start_time": 1796025672932,
    "end_time": None,
    "metadata": None,
    "runtime_env": {"env_vars": {"A": "b"}},
    "driver_agent_http_address": None,
    "driver_node_id": None,
    "driver_exit_code": None,
}
STARTED = {"driver_agent_http_address": "http://10.0.0.5:52365", "driver_node_id": NODE, "status": "RUNNING"}
DRIVER = {"id": "02000000", "node_ip_address": "10.0.0.6", "pid": "3981"}
RUNNING = {**PENDING, **STARTED, "message": "Job is currently running.", "job_id": "02000000", "driver_info": DRIVER}

ALREADY_EXISTS = f"""Traceback (most recent call last):
  File "/ray/dashboard/modules/job/job_head.py", line 134, in _raise_error
    raise RuntimeError(f"Request failed with status code {{status}}: {{error_text}}.")
RuntimeError: Request failed with status code 400: Traceback (most recent call last):
  File "/ray/dashboard/modules/job/job_manager.py", line 553, in submit_job
    raise ValueError(
ValueError: Job with submission_id {ID} already exists. Please use a different submission_id.
.
"""
WRONG_TYPE = """Traceback (most recent call last):
  File "/ray/dashboard/modules/job/common.py", line 483, in __post_init__
    raise TypeError(f"entrypoint must be a string, got {type(self.entrypoint)}")
TypeError: entrypoint must be a string, got <class 'int'>
"""
NO_AGENT = "No available agent to submit job, please try again later."
PROXY_PAGE = "<!DOCTYPE html><html><head><title>404 Not Found</title></head><body>nginx</body></html>"

DEAD_ACTOR = {
    "actor_id": "c50490e77e54c10b4c966e7102000000",
    "class_name": "RayWorkerProc",
    "state": "DEAD",
    "job_id": "02000000",
    "name": "w1",
    "node_id": NODE,
    "pid": 4364,
    "ray_namespace": ID,
}
LIVE_ACTOR = {**DEAD_ACTOR, "actor_id": "d39e6d23316527ffdbd70fbd02000000", "state": "ALIVE", "name": "w0", "pid": 4288}
UNPLACED_ACTOR = {**DEAD_ACTOR, "actor_id": "aa", "state": "PENDING_CREATION", "name": None, "node_id": None, "pid": 0}
GROUP = {
    "placement_group_id": "3d464d795121d989d2e7774ed29002000000",
    "name": ID,
    "creator_job_id": "02000000",
    "state": "CREATED",
}


def state(*rows: dict[str, Any], **changes: Any) -> web.Response:
    """An answer of the State API, whole unless changed."""
    count = len(rows)
    listing = {
        "total": count,
        "num_after_truncation": count,
        "num_filtered": count,
        "result": list(rows),
        "partial_failure_warning": "",
        "warnings": None,
        **changes,
    }
    return web.json_response({"result": True, "msg": "", "data": {"result": listing}})


@pytest.fixture
async def ray() -> AsyncIterator[RayClient]:
    async with RayClient() as client:
        yield client


@pytest.fixture
def endpoint(served: Served) -> RayEndpoint:
    return RayEndpoint(served.url, "ray-token", "Secret default/chat (key auth_token)")


Call = Callable[[RayClient, RayEndpoint], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "job": lambda ray, endpoint: ray.job(endpoint, ID),
    "jobs": lambda ray, endpoint: ray.jobs(endpoint),
    "job_log_tail": lambda ray, endpoint: ray.job_log_tail(endpoint, ID, 100),
    "submit": lambda ray, endpoint: ray.submit(endpoint, ID, "exec true", {}, {}, {}),
    "stop": lambda ray, endpoint: ray.stop(endpoint, ID),
    "has_package": lambda ray, endpoint: ray.has_package(endpoint, PACKAGE),
    "put_package": lambda ray, endpoint: ray.put_package(endpoint, PACKAGE, b"x"),
    "actors": lambda ray, endpoint: ray.actors(endpoint, {"ray_namespace": ID}),
    "placement_groups": lambda ray, endpoint: ray.placement_groups(endpoint, {"name": ID}),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@every_call
@pytest.mark.parametrize(
    ("status", "text"),
    [
        pytest.param(404, PROXY_PAGE, id="the 404 of a proxy"),
        pytest.param(404, "404: Not Found", id="no such route"),
        pytest.param(404, f"Job other-than-{ID} does not exist", id="the 404 of something else"),
        pytest.param(500, "Traceback (most recent call last):\nKeyError: 'x'", id="a fault of Ray's"),
        pytest.param(502, "Bad Gateway", id="a bad gateway"),
        pytest.param(429, '{"result": false, "msg": "Max number of in-progress requests"}', id="too many requests"),
    ],
)
async def test_an_error_that_is_not_about_what_was_asked(
    ray: RayClient, endpoint: RayEndpoint, served: Served, call: Call, status: int, text: str
) -> None:
    served.answer = lambda _: web.Response(status=status, text=text)
    await _is_unexpected(call(ray, endpoint))


# Nothing in the answer to a PUT is Ray's own: it is the GET that follows which tells.
# An empty list of submissions is one.
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"put_package", "jobs"}))
@pytest.mark.parametrize(
    "text", [pytest.param(PROXY_PAGE, id="a sign-in page"), pytest.param("[]", id="JSON that is no object")]
)
async def test_a_good_answer_that_is_not_rays(
    ray: RayClient, endpoint: RayEndpoint, served: Served, name: str, text: str
) -> None:
    served.answer = lambda _: web.Response(text=text)
    await _is_unexpected(CALLS[name](ray, endpoint))


async def _is_unexpected(call: Awaitable[Any]) -> None:
    with pytest.raises(ApiError, match="unexpected answer") as caught:
        await call
    assert type(caught.value) is ApiError
    assert "<" not in str(caught.value)


@every_call
@pytest.mark.parametrize(
    ("status", "text", "token", "words"),
    [
        (401, "Unauthorized: Missing authentication token", None, "asks for a token, but the RayCluster has none"),
        (403, "Forbidden: Invalid authentication token", "t0psecret", "refuses the token in Secret default/chat"),
    ],
)
async def test_a_token_that_is_refused_is_told_by_its_secret(
    ray: RayClient, served: Served, call: Call, status: int, text: str, token: str | None, words: str
) -> None:
    served.answer = lambda _: web.Response(status=status, text=text)
    with pytest.raises(Forbidden, match=words) as caught:
        await call(ray, RayEndpoint(served.url, token, "Secret default/chat (key auth_token)"))
    assert "t0psecret" not in str(caught.value)


@every_call
async def test_every_request_carries_the_token_twice(
    ray: RayClient, endpoint: RayEndpoint, served: Served, call: Call
) -> None:
    served.answer = lambda _: web.Response(status=500)
    with pytest.raises(ApiError):
        await call(ray, endpoint)
    sent = served.last.headers
    assert (sent["authorization"], sent["x-ray-authorization"]) == ("Bearer ray-token", "Bearer ray-token")


@every_call
async def test_nobody_listens(ray: RayClient, call: Call, unused_tcp_port: int) -> None:
    with pytest.raises(ApiError, match="does not answer: no connection \\(Connection refused\\)") as caught:
        await call(ray, RayEndpoint(f"http://127.0.0.1:{unused_tcp_port}"))
    assert caught.value.status is None


async def test_a_dashboard_that_hangs(
    ray: RayClient, endpoint: RayEndpoint, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_module, "TIMEOUT", aiohttp.ClientTimeout(total=0.2, sock_connect=0.2))
    release = asyncio.Event()

    async def hang(_: Request) -> web.StreamResponse:
        await release.wait()
        return web.Response()

    served.answer = hang
    try:
        with pytest.raises(ApiError, match=r"does not answer: no answer within 0\.2 s"):
            await ray.job(endpoint, ID)
    finally:
        release.set()


async def test_a_connection_that_breaks(ray: RayClient, endpoint: RayEndpoint, served: Served) -> None:
    async def break_off(_: Request) -> web.StreamResponse:
        raise asyncio.CancelledError

    served.answer = break_off
    with pytest.raises(ApiError, match="does not answer: the connection was closed before the answer came"):
        await ray.job(endpoint, ID)


async def test_a_name_that_is_not_known(ray: RayClient) -> None:
    with pytest.raises(ApiError, match=r"its name chat-head-svc\.invalid is not known"):
        await ray.job(RayEndpoint("http://chat-head-svc.invalid:8265"), ID)


@pytest.mark.parametrize(
    ("body", "row"),
    [
        pytest.param(PENDING, JobRow(ID, "PENDING", WAITING, None, None), id="pending"),
        pytest.param({**PENDING, **STARTED}, JobRow(ID, "RUNNING", WAITING, None, "10.0.0.5"), id="before ray.init"),
        pytest.param(
            RUNNING, JobRow(ID, "RUNNING", "Job is currently running.", "02000000", "10.0.0.5"), id="where the agent is"
        ),
        pytest.param(
            {**RUNNING, "driver_agent_http_address": None},
            JobRow(ID, "RUNNING", "Job is currently running.", "02000000", "10.0.0.6"),
            id="without an agent's address",
        ),
        pytest.param(
            {**RUNNING, "driver_agent_http_address": "http://[fd00::5]:52365"},
            JobRow(ID, "RUNNING", "Job is currently running.", "02000000", "fd00::5"),
            id="IPv6",
        ),
    ],
)
async def test_a_job(ray: RayClient, endpoint: RayEndpoint, served: Served, body: Any, row: JobRow) -> None:
    served.answers(web.json_response(body))
    assert await ray.job(endpoint, ID) == row
    assert (served.last.method, served.last.path) == ("GET", f"/api/jobs/{ID}")


async def test_a_job_that_ray_does_not_know(ray: RayClient, endpoint: RayEndpoint, served: Served) -> None:
    served.answers(web.Response(status=404, text=f"Job {ID} does not exist"))
    assert await ray.job(endpoint, ID) is None


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({**RUNNING, "submission_id": "other"}, id="another job"),
        pytest.param({**RUNNING, "status": "NEW_STATE"}, id="unknown state"),
        pytest.param({}, id="nothing"),
    ],
)
async def test_a_job_that_makes_no_sense(ray: RayClient, endpoint: RayEndpoint, served: Served, body: Any) -> None:
    served.answers(web.json_response(body))
    with pytest.raises(ApiError, match="unexpected answer"):
        await ray.job(endpoint, ID)


async def test_the_end_of_a_log_is_read_from_the_node_that_has_it(
    ray: RayClient, endpoint: RayEndpoint, served: Served
) -> None:
    served.answers(web.json_response(RUNNING), web.Response(text="first line\nlast line\n"))
    assert await ray.job_log_tail(endpoint, ID, 10) == "last line\n"
    assert served.last.path == "/api/v0/logs/file"
    query = dict(served.last.query)
    assert (query["node_id"], query["filename"]) == (NODE, f"job-driver-{ID}.log")
    assert int(query["lines"]) > 0


@pytest.mark.parametrize("job", [PENDING, None], ids=["not started", "unknown"])
async def test_no_log_yet(ray: RayClient, endpoint: RayEndpoint, served: Served, job: Any) -> None:
    served.answers(
        web.json_response(job) if job else web.Response(status=404, text=f"Job {ID} does not exist"),
    )
    assert await ray.job_log_tail(endpoint, ID, 10) == ""


# A program that opened a Ray job by itself, and how it stands in the list (Ray 2.60, utils.get_driver_jobs).
NOT_SUBMITTED = {**PENDING, "type": "DRIVER", "job_id": "01000000", "submission_id": None, "status": "SUCCEEDED"}


async def test_all_submissions(ray: RayClient, endpoint: RayEndpoint, served: Served) -> None:
    other = {**PENDING, "submission_id": "raysubmit_x", "metadata": {"whose": "theirs"}}
    served.answers(web.json_response([RUNNING, other, NOT_SUBMITTED]))
    rows = await ray.jobs(endpoint)
    assert (served.last.method, served.last.path) == ("GET", "/api/jobs/")
    assert [(row.submission_id, row.status, row.metadata) for row in rows] == [
        (ID, "RUNNING", {}),
        ("raysubmit_x", "PENDING", {"whose": "theirs"}),
    ]


async def test_no_submission(ray: RayClient, endpoint: RayEndpoint, served: Served) -> None:
    served.answers(web.json_response([NOT_SUBMITTED]))
    assert await ray.jobs(endpoint) == ()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(PROXY_PAGE, id="a sign-in page"),
        pytest.param("{}", id="no list"),
        pytest.param("[1]", id="a list of something else"),
        pytest.param(json.dumps([PENDING])[:-9], id="cut off"),
        pytest.param(json.dumps([{**PENDING, "status": "RESTING"}]), id="a status that is none"),
    ],
)
async def test_a_list_that_is_not_whole(ray: RayClient, endpoint: RayEndpoint, served: Served, text: str) -> None:
    served.answers(web.Response(text=text))
    await _is_unexpected(ray.jobs(endpoint))


async def test_submit(ray: RayClient, endpoint: RayEndpoint, served: Served) -> None:
    served.answers(web.json_response({"job_id": ID, "submission_id": ID}))
    runtime_env = {"env_vars": {"A": "b"}}
    await ray.submit(endpoint, ID, "exec python3 -m x", {"vd-driver-0": 1}, runtime_env, {"whose": "ours"})
    assert (served.last.method, served.last.path) == ("POST", "/api/jobs/")
    assert json.loads(served.last.body) == {
        "submission_id": ID,
        "entrypoint": "exec python3 -m x",
        "entrypoint_resources": {"vd-driver-0": 1},
        "runtime_env": {"env_vars": {"A": "b"}},
        "metadata": {"whose": "ours"},
    }


@pytest.mark.parametrize(
    ("status", "text", "kind", "words"),
    [
        pytest.param(500, ALREADY_EXISTS, Conflict, "knows the submission", id="known already"),
        pytest.param(400, WRONG_TYPE, Invalid, "TypeError: entrypoint must be a string", id="refused"),
        pytest.param(500, NO_AGENT, ApiError, "No available agent to submit job", id="no agent"),
    ],
)
async def test_submit_refused(
    ray: RayClient, endpoint: RayEndpoint, served: Served, status: int, text: str, kind: type[ApiError], words: str
) -> None:
    served.answers(web.Response(status=status, text=text))
    with pytest.raises(ApiError, match=words) as caught:
        await ray.submit(endpoint, ID, "exec true", {}, {}, {})
    assert type(caught.value) is kind
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("stopped", [True, False])
async def test_stop(ray: RayClient, endpoint: RayEndpoint, served: Served, stopped: bool) -> None:
    served.answers(web.json_response({"stopped": stopped}))
    assert await ray.stop(endpoint, ID) is stopped
    assert (served.last.method, served.last.path) == ("POST", f"/api/jobs/{ID}/stop")


async def test_stop_of_a_job_that_ray_does_not_know(ray: RayClient, endpoint: RayEndpoint, served: Served) -> None:
    served.answers(web.Response(status=404, text=f"Job {ID} does not exist"))
    with pytest.raises(NotFound):
        await ray.stop(endpoint, ID)


async def test_packages(ray: RayClient, endpoint: RayEndpoint, served: Served) -> None:
    served.answers(
        web.Response(status=404, text=f"Package gcs://{PACKAGE} does not exist"), web.Response(), web.Response()
    )
    assert not await ray.has_package(endpoint, PACKAGE)
    await ray.put_package(endpoint, PACKAGE, b"PK content")
    assert (served.last.method, served.last.body) == ("PUT", b"PK content")
    assert await ray.has_package(endpoint, PACKAGE)
    assert {request.path for request in served.requests} == {f"/api/packages/gcs/{PACKAGE}"}


async def test_actors(ray: RayClient, endpoint: RayEndpoint, served: Served) -> None:
    served.answers(state(DEAD_ACTOR, LIVE_ACTOR, UNPLACED_ACTOR, total=7, num_after_truncation=7, num_filtered=3))
    rows = await ray.actors(endpoint, {"ray_namespace": ID})
    assert rows == Rows(
        (
            ActorRow("c50490e77e54c10b4c966e7102000000", "w1", ID, "02000000", "DEAD", NODE, 4364),
            ActorRow("d39e6d23316527ffdbd70fbd02000000", "w0", ID, "02000000", "ALIVE", NODE, 4288),
            ActorRow("aa", "", ID, "02000000", "PENDING_CREATION", "", 0),
        ),
        complete=True,
    )
    assert served.last.path == "/api/v0/actors"
    filters = [pair for pair in served.last.query if pair[0].startswith("filter")]
    assert filters == [("filter_keys", "ray_namespace"), ("filter_predicates", "="), ("filter_values", ID)]
    assert dict(served.last.query)["limit"] == "10000"


async def test_placement_groups(ray: RayClient, endpoint: RayEndpoint, served: Served) -> None:
    other = {**GROUP, "name": ID.upper()}  # Ray compares without regard to case
    served.answers(state(GROUP, other))
    rows = await ray.placement_groups(endpoint, {"name": ID})
    assert rows == Rows((PlacementGroupRow(GROUP["placement_group_id"], ID, "02000000", "CREATED"),), complete=True)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"total": 10_001}, id="cut off at the source"),
        pytest.param({"num_filtered": 2}, id="cut off by the limit"),
        pytest.param({"partial_failure_warning": "1 node failed to reply"}, id="a part did not answer"),
        pytest.param({"warnings": ["something"]}, id="warnings"),
    ],
)
async def test_an_answer_that_is_not_whole(
    ray: RayClient, endpoint: RayEndpoint, served: Served, changes: dict[str, Any]
) -> None:
    served.answer = lambda _: state(GROUP, **changes)
    assert not (await ray.placement_groups(endpoint, {"name": ID})).complete
    served.answer = lambda _: state(**changes)
    assert not (await ray.actors(endpoint, {"job_id": "02000000"})).complete


async def test_dead_actors_do_not_crowd_out_the_live_ones(
    ray: RayClient, endpoint: RayEndpoint, served: Served
) -> None:
    def answer(request: Request) -> web.Response:
        states = [v for k, v in request.query if k == "filter_values" and v != ID]
        if not states:
            return state(DEAD_ACTOR, total=20_000, num_after_truncation=10_000)
        return state(LIVE_ACTOR) if states == ["ALIVE"] else state()

    served.answer = answer
    rows = await ray.actors(endpoint, {"ray_namespace": ID})
    assert rows.complete
    assert [row.name for row in rows.rows] == ["w0"]
    asked = [dict(r.query[i : i + 1]).get("filter_values") for r in served.requests for i in range(len(r.query))]
    assert [v for v in asked if v and v != ID] == list(ray_module.LIVE_ACTOR_STATES)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"result": False, "msg": "no such column", "data": {"result": None}}, id="refused"),
        pytest.param({"result": True, "msg": "", "data": {}}, id="no listing"),
        pytest.param({"result": True, "data": {"result": {"result": [{"name": "x"}]}}}, id="no counts"),
    ],
)
async def test_state_that_makes_no_sense(ray: RayClient, endpoint: RayEndpoint, served: Served, body: Any) -> None:
    served.answer = lambda _: web.json_response(body)
    with pytest.raises(ApiError, match="unexpected answer"):
        await ray.actors(endpoint, {"ray_namespace": ID})


async def test_rows_without_their_columns(ray: RayClient, endpoint: RayEndpoint, served: Served) -> None:
    served.answer = lambda _: state({"ray_namespace": ID})
    with pytest.raises(ApiError, match="unexpected answer"):
        await ray.actors(endpoint, {"ray_namespace": ID})
