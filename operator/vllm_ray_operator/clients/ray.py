"""A Ray cluster's dashboard: the Jobs API, the package store and the State API.

What proves an absence must really come from Ray: the 404 of a proxy, an HTML page or an answer that was cut off is an
error here, never "there is none".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import quote, urlsplit

import aiohttp

from vllm_ray_operator.clients.http import SessionHolder, excerpt, failure_in_words
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
    RowT,
)

TIMEOUT = aiohttp.ClientTimeout(total=10, sock_connect=3)
# Ray's State API gives its data source 0.8 of this, so that it answers before we hang up.
STATE_TIMEOUT_SECONDS = 8
# The most that Ray answers, and the most that its data source hands to it.
STATE_LIMIT = 10_000
LOG_LINES = 200

JobState = Literal["PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]
JOB_STATES: frozenset[str] = frozenset(get_args(JobState))

# In the order in which an actor passes them, so that one that moves on meanwhile is still met. ALIVE comes again after
# RESTARTING, from where it may go back.
LIVE_ACTOR_STATES = ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "ALIVE", "RESTARTING", "ALIVE")


@dataclass(frozen=True)
class Answer:
    """An HTTP answer, read."""

    status: int
    text: str

    def json(self) -> Any:
        """Return the parsed body; ValueError if it is not JSON."""
        return json.loads(self.text)


class RayClient(SessionHolder):
    """Implements :class:`vllm_ray_operator.clients.protocols.Ray`. One connection pool; ``close`` it."""

    async def job(self, ray: RayEndpoint, submission_id: str) -> JobRow | None:
        """Return the submission, or None if Ray does not know it."""
        answer = await self._call(ray, "GET", f"/api/jobs/{_part(submission_id)}")
        if _unknown_job(answer, submission_id):
            return None
        body = _json_object(ray, answer)
        if body.get("submission_id") != submission_id or body.get("status") not in JOB_STATES:
            raise _unexpected(ray, answer)
        return _job_row(body)

    async def jobs(self, ray: RayEndpoint) -> tuple[JobRow, ...]:
        """Return all submissions. Ray answers with all or with an error: nothing limits the list, or cuts it off."""
        answer = await self._call(ray, "GET", "/api/jobs/")
        try:
            rows = answer.json() if answer.status == 200 else None
            # Programs that opened a Ray job of their own, without being submitted, are listed too.
            listed = [row for row in rows if row["type"] == "SUBMISSION"] if isinstance(rows, list) else None
            if listed is None or any(row["status"] not in JOB_STATES for row in listed):
                raise _unexpected(ray, answer)
            return tuple(_job_row(row) for row in listed)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _unexpected(ray, answer) from error

    async def job_log_tail(self, ray: RayEndpoint, submission_id: str, limit: int) -> str:
        """Return the end of the submission's log, "" if there is none yet.

        Not by the Jobs API: that reads the whole log, however long, into the head's memory.
        """
        answer = await self._call(ray, "GET", f"/api/jobs/{_part(submission_id)}")
        node = None if _unknown_job(answer, submission_id) else _json_object(ray, answer).get("driver_node_id")
        if not isinstance(node, str) or not node:
            return ""
        query = [
            ("node_id", node),
            ("filename", f"job-driver-{submission_id}.log"),
            ("lines", str(LOG_LINES)),
            ("timeout", str(STATE_TIMEOUT_SECONDS)),
        ]
        answer = await self._call(ray, "GET", "/api/v0/logs/file", query=query)
        if answer.status != 200:
            raise _unexpected(ray, answer)
        return answer.text[-limit:]

    async def submit(
        self,
        ray: RayEndpoint,
        submission_id: str,
        entrypoint: str,
        resources: Mapping[str, float],
        runtime_env: Mapping[str, Any],
        metadata: Mapping[str, str],
    ) -> None:
        """Submit a job."""
        body = {
            "submission_id": submission_id,
            "entrypoint": entrypoint,
            "entrypoint_resources": dict(resources),
            "runtime_env": dict(runtime_env),
            "metadata": dict(metadata),
        }
        answer = await self._call(ray, "POST", "/api/jobs/", body=body)
        if answer.status == 200:
            _json_object(ray, answer)
            return
        # Ray wraps its own 400 into a 500 on the way from the agent; the text is what can be told by.
        if f"submission_id {submission_id} already exists" in answer.text:
            raise Conflict(f"Ray knows the submission {submission_id} already", 409, "AlreadyExists")
        if answer.status in (400, 422):
            raise Invalid(f"Ray refuses the job: {excerpt(answer.text)}", answer.status)
        raise _unexpected(ray, answer)

    async def stop(self, ray: RayEndpoint, submission_id: str) -> bool:
        """Ask for a stop; NotFound if Ray does not know the submission."""
        answer = await self._call(ray, "POST", f"/api/jobs/{_part(submission_id)}/stop")
        if _unknown_job(answer, submission_id):
            raise NotFound(f"Ray does not know the submission {submission_id}", 404)
        stopped = _json_object(ray, answer).get("stopped")
        if not isinstance(stopped, bool):
            raise _unexpected(ray, answer)
        return stopped

    async def has_package(self, ray: RayEndpoint, name: str) -> bool:
        """Whether GCS holds the package. Asking also keeps it there for some minutes."""
        answer = await self._call(ray, "GET", f"/api/packages/gcs/{_part(name)}")
        if answer.status == 200 and not answer.text.strip():
            return True
        if answer.status == 404 and answer.text.strip() == f"Package gcs://{name} does not exist":
            return False
        raise _unexpected(ray, answer)

    async def put_package(self, ray: RayEndpoint, name: str, content: bytes) -> None:
        """Upload a package."""
        answer = await self._call(ray, "PUT", f"/api/packages/gcs/{_part(name)}", data=content)
        if answer.status != 200:
            raise _unexpected(ray, answer)

    async def actors(self, ray: RayEndpoint, filters: Mapping[str, str]) -> Rows[ActorRow]:
        """List actors, dead ones too as long as they can all be listed.

        GCS remembers up to 100,000 dead actors but hands out 10,000, and knows no filter by namespace. When dead ones
        crowd the answer, the live ones are asked for by state, which GCS does filter by.
        """
        listing = await self._state(ray, "actors", filters, _actor_row)
        if listing.complete or "state" in filters:
            return listing
        found: dict[str, ActorRow] = {}
        complete = True
        for state in LIVE_ACTOR_STATES:
            part = await self._state(ray, "actors", {**filters, "state": state}, _actor_row)
            complete = complete and part.complete
            found.update((row.actor_id, row) for row in part.rows)
        return Rows(tuple(found.values()), complete)

    async def placement_groups(self, ray: RayEndpoint, filters: Mapping[str, str]) -> Rows[PlacementGroupRow]:
        """List placement groups, removed ones too."""
        return await self._state(ray, "placement_groups", filters, _placement_group_row)

    async def _state(
        self, ray: RayEndpoint, what: str, filters: Mapping[str, str], parse: Callable[[Mapping[str, Any]], RowT]
    ) -> Rows[RowT]:
        # Without detail: all that is needed is in the short rows; the long ones carry runtime environments.
        query = [("limit", str(STATE_LIMIT)), ("timeout", str(STATE_TIMEOUT_SECONDS))]
        for key, value in filters.items():
            query += [("filter_keys", key), ("filter_predicates", "="), ("filter_values", value)]
        answer = await self._call(ray, "GET", f"/api/v0/{what}", query=query)
        body = _json_object(ray, answer)
        try:
            listing = body["data"]["result"]
            # Ray compares without regard to case; we do not.
            rows = [row for row in listing["result"] if all(row.get(key) == value for key, value in filters.items())]
            # total, minus what its source cut off; minus what the filters dropped; minus what the limit cut off.
            whole = (
                body["result"] is True
                and listing["num_after_truncation"] == listing["total"]
                and listing["num_filtered"] == len(listing["result"])
                and not listing["partial_failure_warning"]
                and not listing.get("warnings")
            )
            return Rows(tuple(parse(row) for row in rows), whole)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _unexpected(ray, answer) from error

    async def _call(
        self,
        ray: RayEndpoint,
        method: str,
        path: str,
        *,
        query: list[tuple[str, str]] | None = None,
        body: Any = None,
        data: bytes | None = None,
    ) -> Answer:
        headers = {}
        if ray.token is not None:
            # The first is for Ray itself, the second outlives proxies that take the first for themselves.
            headers = {"Authorization": f"Bearer {ray.token}", "x-ray-authorization": f"Bearer {ray.token}"}
        try:
            async with self.session.request(
                method, ray.url + path, params=query, json=body, data=data, headers=headers, timeout=TIMEOUT
            ) as response:
                answer = Answer(response.status, (await response.read()).decode(errors="replace"))
        except (aiohttp.ClientError, OSError) as error:
            words = failure_in_words(error, TIMEOUT)
            raise ApiError(f"the Ray dashboard at {ray.url} does not answer: {words}") from error
        if answer.status in (401, 403):
            raise Forbidden(_refused(ray), answer.status)
        return answer


def _part(text: str) -> str:
    return quote(text, safe="")


def _refused(ray: RayEndpoint) -> str:
    if ray.token is None:
        return f"the Ray dashboard at {ray.url} asks for a token, but the RayCluster has none set"
    return f"the Ray dashboard at {ray.url} refuses the token in {ray.token_source or 'use'}"


def _unknown_job(answer: Answer, submission_id: str) -> bool:
    return answer.status == 404 and answer.text.strip() == f"Job {submission_id} does not exist"


def _unexpected(ray: RayEndpoint, answer: Answer) -> ApiError:
    message = f"the Ray dashboard at {ray.url} gave an unexpected answer (HTTP {answer.status}): {excerpt(answer.text)}"
    return ApiError(message, answer.status)


def _json_object(ray: RayEndpoint, answer: Answer) -> dict[str, Any]:
    if answer.status == 200:
        try:
            body = answer.json()
        except ValueError:
            body = None
        if isinstance(body, dict):
            return body
    raise _unexpected(ray, answer)


def _job_row(body: Mapping[str, Any]) -> JobRow:
    driver = body.get("driver_info") or {}
    # The agent's address is that of the node the launcher is on, known before it opens a Ray job. The driver in
    # driver_info is the last one, whichever process opened it.
    agent = urlsplit(body.get("driver_agent_http_address") or "").hostname
    return JobRow(
        submission_id=body["submission_id"],
        status=body["status"],
        message=body.get("message") or "",
        job_id=body.get("job_id"),
        driver_ip=agent or driver.get("node_ip_address"),
        metadata={key: value for key, value in (body.get("metadata") or {}).items() if isinstance(value, str)},
    )


def _actor_row(row: Mapping[str, Any]) -> ActorRow:
    return ActorRow(
        actor_id=row["actor_id"],
        name=row.get("name") or "",
        namespace=row.get("ray_namespace") or "",
        job_id=row.get("job_id") or "",
        state=row["state"],
        node_id=row.get("node_id") or "",
        pid=int(row.get("pid") or 0),
    )


def _placement_group_row(row: Mapping[str, Any]) -> PlacementGroupRow:
    return PlacementGroupRow(
        placement_group_id=row["placement_group_id"],
        name=row.get("name") or "",
        creator_job_id=row.get("creator_job_id") or "",
        state=row["state"],
    )
