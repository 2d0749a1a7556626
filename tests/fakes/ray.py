"""Ray dashboards in memory: what the operator depends on, and the ways in which they let it down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vllm_ray_operator.clients.protocols import (
    ActorRow,
    ApiError,
    Conflict,
    Forbidden,
    JobRow,
    NotFound,
    PlacementGroupRow,
    RayEndpoint,
    Rows,
)

TERMINAL = ("STOPPED", "SUCCEEDED", "FAILED")


@dataclass
class FakeJob:
    row: JobRow
    entrypoint: str
    resources: Mapping[str, float]
    runtime_env: Mapping[str, Any]
    log: str = ""
    stops: int = 0

    @property
    def environment(self) -> Mapping[str, str]:
        env_vars: Mapping[str, str] = self.runtime_env["env_vars"]
        return env_vars


@dataclass
class FakeDashboard:
    """One Ray cluster. ``error``: what every request gets instead of an answer."""

    token: str | None = None
    jobs: dict[str, FakeJob] = field(default_factory=dict)
    actors: list[ActorRow] = field(default_factory=list)
    placement_groups: list[PlacementGroupRow] = field(default_factory=list)
    packages: dict[str, bytes] = field(default_factory=dict)
    error: ApiError | None = None
    truncated: bool = False
    loses_packages: bool = False
    ends_at_stop: bool = True  # a stop takes everything with it at once

    def run(self, submission_id: str, driver_ip: str, ray_job_id: str = "02000000") -> None:
        """Start a pending job as its launcher would: a placement group and two workers."""
        job = self.jobs[submission_id]
        job.row = replace(job.row, status="RUNNING", driver_ip=driver_ip, job_id=ray_job_id, message="running")
        self.placement_groups.append(PlacementGroupRow(f"pg-{submission_id}", submission_id, ray_job_id, "CREATED"))
        self.actors += [
            ActorRow(f"{submission_id}-{n}", f"worker-{n}", submission_id, ray_job_id, "ALIVE", f"node{n}", 100 + n)
            for n in range(2)
        ]

    def end(
        self,
        submission_id: str,
        status: Literal["STOPPED", "SUCCEEDED", "FAILED"],
        result: Mapping[str, str] | None = None,
        *,
        leak: bool = False,
    ) -> None:
        """End a job; with it its actors and group, unless they leak."""
        job = self.jobs[submission_id]
        if result is not None:
            job.log += f"VLLM_RAY_ENGINE_RESULT {json.dumps(result)}\n"
        job.row = replace(job.row, status=status, message=f"ended: {status}")
        if not leak:
            self.clear(submission_id)

    def clear(self, instance_id: str) -> None:
        self.actors = [replace(a, state="DEAD") if a.namespace == instance_id else a for a in self.actors]
        self.placement_groups = [
            replace(g, state="REMOVED") if g.name == instance_id else g for g in self.placement_groups
        ]

    def restart_head(self) -> None:
        """Lose everything that GCS knew."""
        self.jobs, self.actors, self.placement_groups, self.packages = {}, [], [], {}


class FakeRay:
    """Dashboards by URL. A URL that is not there does not answer."""

    def __init__(self) -> None:
        self.dashboards: dict[str, FakeDashboard] = {}
        self.calls: list[tuple[str, str]] = []  # (method, what it is about)

    async def job(self, ray: RayEndpoint, submission_id: str) -> JobRow | None:
        job = self._dashboard(ray, "job", submission_id).jobs.get(submission_id)
        return job.row if job else None

    async def jobs(self, ray: RayEndpoint) -> tuple[JobRow, ...]:
        return tuple(job.row for job in self._dashboard(ray, "jobs", "all").jobs.values())

    async def job_log_tail(self, ray: RayEndpoint, submission_id: str, limit: int) -> str:
        return self._dashboard(ray, "job_log_tail", submission_id).jobs[submission_id].log[-limit:]

    async def submit(
        self,
        ray: RayEndpoint,
        submission_id: str,
        entrypoint: str,
        resources: Mapping[str, float],
        runtime_env: Mapping[str, Any],
        metadata: Mapping[str, str],
    ) -> None:
        dashboard = self._dashboard(ray, "submit", submission_id)
        if submission_id in dashboard.jobs:
            raise Conflict(f"submission_id {submission_id} already exists", 409, "AlreadyExists")
        missing = [m for m in runtime_env.get("py_modules", ()) if m.removeprefix("gcs://") not in dashboard.packages]
        row = JobRow(submission_id, "PENDING", "waiting for resources", None, None, dict(metadata))
        if missing:
            row = replace(row, status="FAILED", message=f"runtime_env setup failed: {missing}")
        dashboard.jobs[submission_id] = FakeJob(row, entrypoint, dict(resources), dict(runtime_env))

    async def stop(self, ray: RayEndpoint, submission_id: str) -> bool:
        dashboard = self._dashboard(ray, "stop", submission_id)
        job = dashboard.jobs.get(submission_id)
        if job is None:
            raise NotFound(f"Job {submission_id} does not exist", 404)
        job.stops += 1
        if job.row.status in TERMINAL:
            return False
        if dashboard.ends_at_stop:
            dashboard.end(submission_id, "STOPPED")
        return True

    async def has_package(self, ray: RayEndpoint, name: str) -> bool:
        return name in self._dashboard(ray, "has_package", name).packages

    async def put_package(self, ray: RayEndpoint, name: str, content: bytes) -> None:
        dashboard = self._dashboard(ray, "put_package", name)
        if not dashboard.loses_packages:
            dashboard.packages[name] = content

    async def actors(self, ray: RayEndpoint, filters: Mapping[str, str]) -> Rows[ActorRow]:
        dashboard = self._dashboard(ray, "actors", str(dict(filters)))
        wanted = {"namespace" if key == "ray_namespace" else key: value for key, value in filters.items()}
        rows = tuple(a for a in dashboard.actors if all(getattr(a, k) == v for k, v in wanted.items()))
        return Rows(rows, not dashboard.truncated)

    async def placement_groups(self, ray: RayEndpoint, filters: Mapping[str, str]) -> Rows[PlacementGroupRow]:
        dashboard = self._dashboard(ray, "placement_groups", str(dict(filters)))
        rows = tuple(g for g in dashboard.placement_groups if all(getattr(g, k) == v for k, v in filters.items()))
        return Rows(rows, not dashboard.truncated)

    def _dashboard(self, ray: RayEndpoint, method: str, about: str) -> FakeDashboard:
        self.calls.append((method, about))
        dashboard = self.dashboards.get(ray.url)
        if dashboard is None:
            raise ApiError(f"the Ray dashboard at {ray.url} does not answer: no connection")
        if dashboard.error is not None:
            raise dashboard.error
        if dashboard.token is not None and ray.token != dashboard.token:
            raise Forbidden(f"the Ray dashboard at {ray.url} refuses the token", 403)
        return dashboard
