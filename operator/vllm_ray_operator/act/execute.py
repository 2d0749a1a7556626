"""Carries out a plan's actions, in order; one that fails does not keep the others from running."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ray_operator.act import engine_package, events
from vllm_ray_operator.clients import problems
from vllm_ray_operator.clients.bundle import Clients, Observation
from vllm_ray_operator.clients.protocols import (
    CONTROLLER_REVISIONS,
    ENDPOINT_SLICES,
    EVENTS,
    POD_DISRUPTION_BUDGETS,
    PODS,
    RAY_CLUSTERS,
    SERVICES,
    ApiError,
    Conflict,
    Invalid,
    KindMissing,
    NotFound,
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
from vllm_ray_operator.plan.world import Problem

log = logging.getLogger(__name__)

CONCURRENT_RAY_CALLS = 16

RESOURCES: Mapping[str, Resource] = {
    resource.kind: resource
    for resource in (RAY_CLUSTERS, PODS, SERVICES, ENDPOINT_SLICES, CONTROLLER_REVISIONS, POD_DISRUPTION_BUDGETS)
}


async def execute(actions: Sequence[Action], observation: Observation, clients: Clients) -> tuple[Problem, ...]:
    """Carry out the actions and return what failed for a reason that the user has to see.

    Neighbouring calls to Ray run side by side; all else runs one by one, in order. Somebody else having changed or
    removed an object meanwhile is no problem: the change itself brings the next pass.
    """
    executor = _Executor(observation, clients)
    for to_ray, group in itertools.groupby(actions, lambda action: isinstance(action, SubmitJob | StopJob)):
        if to_ray:
            await asyncio.gather(*(executor.carry_out(action) for action in group))
        else:
            for action in group:
                await executor.carry_out(action)
    return tuple(dict.fromkeys(executor.problems))


class _Executor:
    def __init__(self, observation: Observation, clients: Clients) -> None:
        self._deployment = observation.world.deployment
        self._known = {
            SERVICES.kind: observation.world.services,
            ENDPOINT_SLICES.kind: observation.world.endpoint_slices,
            POD_DISRUPTION_BUDGETS.kind: observation.world.budgets,
        }
        self._dashboards = observation.ray
        self._launchers = observation.engines
        self._clients = clients
        self._broken_clusters: set[str] = set()  # could not be made, or their dashboards do not answer
        self._ray_calls = asyncio.Semaphore(CONCURRENT_RAY_CALLS)
        self.problems: list[Problem] = []

    async def carry_out(self, action: Action) -> None:
        match action:
            case Create(manifest):
                await self._write(manifest, create=True)
            case Apply(manifest):
                await self._write(manifest, create=False)
            case PatchCluster():
                await self._patch_cluster(action)
            case Delete():
                await self._delete(action)
            case SubmitJob():
                await self._submit(action)
            case StopJob():
                await self._stop(action)
            case DrainEngine(instance_id):
                await self._drain(instance_id)
            case Emit():
                await self._emit(action)

    def _problem(self, error: ApiError, kind: str, name: str) -> None:
        self.problems.append(problems.of_write(error, kind, name))

    async def _write(self, manifest: Mapping[str, Any], *, create: bool) -> None:
        kind, name = str(manifest["kind"]), str(manifest["metadata"]["name"])
        kube = self._clients.kube
        write = kube.create if create else kube.apply
        try:
            if not create and await self._is_anothers(kind, name):
                self.problems.append(problems.name_taken(kind, name))
                return
            await write(RESOURCES[kind], self._deployment.namespace, manifest)
        except Conflict:
            pass  # it is there already, or changed under us: the next pass looks
        except ApiError as error:
            if kind == RAY_CLUSTERS.kind:
                self._broken_clusters.add(name)
            self._problem(error, kind, name)

    async def _is_anothers(self, kind: str, name: str) -> bool:
        """Whether an object of that name is somebody else's: applying would take it over, deletion take it along."""
        if name in self._known.get(kind, {}):
            return False
        try:
            found = await self._clients.kube.get(RESOURCES[kind], self._deployment.namespace, name)
        except NotFound:
            return False
        metadata = found["metadata"]
        owners = {owner["uid"] for owner in metadata.get("ownerReferences") or ()}
        labelled = names.selector(self._deployment.name).items() <= (metadata.get("labels") or {}).items()
        return not labelled and self._deployment.uid not in owners

    async def _patch_cluster(self, action: PatchCluster) -> None:
        log.info("changing RayCluster %s: %s", action.name, action.why)
        try:
            await self._clients.kube.json_patch(
                RAY_CLUSTERS, self._deployment.namespace, action.name, action.operations
            )
        except (Conflict, NotFound) as error:
            if isinstance(error, KindMissing):
                self._problem(error, RAY_CLUSTERS.kind, action.name)
        except ApiError as error:
            self._problem(error, RAY_CLUSTERS.kind, action.name)

    async def _delete(self, action: Delete) -> None:
        log.info("deleting %s %s: %s", action.kind, action.name, action.why)
        try:
            resource, namespace = RESOURCES[action.kind], self._deployment.namespace
            await self._clients.kube.delete(
                resource, namespace, action.name, action.uid, grace_seconds=action.grace_seconds
            )
        except (Conflict, NotFound):
            pass  # the one that was meant is gone
        except ApiError as error:
            self._problem(error, action.kind, action.name)

    async def _submit(self, action: SubmitJob) -> None:
        async with self._ray_calls:
            dashboard = self._dashboard(action.cluster)
            if dashboard is None:
                return
            try:
                await self._submit_to(dashboard, action)
            except Conflict:
                pass  # submitted before, by a request whose answer was lost
            except Invalid as error:
                self.problems.append(Problem("JobRefused", str(error)))
            except ApiError as error:
                self._ray_problem(error, action.cluster)

    async def _submit_to(self, dashboard: RayEndpoint, action: SubmitJob) -> None:
        """Submit. GCS drops a package when the last job that uses it ends, and asking for one keeps it for minutes:
        so it is asked for right before the job is, also after it was uploaded.
        """
        ray, package = self._clients.ray, engine_package.installed()
        if not await ray.has_package(dashboard, package.name):
            await ray.put_package(dashboard, package.name, package.content)
            if not await ray.has_package(dashboard, package.name):
                raise ApiError(f"the Ray dashboard at {dashboard.url} took the engine package but does not have it")
        runtime_env = {"py_modules": [package.uri], "env_vars": dict(action.environment)}
        await ray.submit(
            dashboard, action.submission_id, action.entrypoint, action.resources, runtime_env, action.metadata
        )

    async def _stop(self, action: StopJob) -> None:
        async with self._ray_calls:
            dashboard = self._dashboard(action.cluster)
            if dashboard is None:
                return
            try:
                await self._clients.ray.stop(dashboard, action.submission_id)
            except NotFound:
                pass  # never submitted, or known to a head that is no more
            except ApiError as error:
                self._ray_problem(error, action.cluster)

    def _dashboard(self, cluster: str) -> RayEndpoint | None:
        """Return the dashboard; None if it could not be reached, now or when it was observed, which was told then."""
        return None if cluster in self._broken_clusters else self._dashboards.get(cluster)

    def _ray_problem(self, error: ApiError, cluster: str) -> None:
        self.problems.append(Problem("RayUnreachable", str(error)))
        if error.status is None:
            self._broken_clusters.add(cluster)  # each further try would cost seconds

    async def _drain(self, instance_id: str) -> None:
        """Tell the launcher. One that does not hear it is told again: its state does not say that it drains."""
        if (launcher := self._launchers.get(instance_id)) is not None:
            try:
                await self._clients.engine.drain(launcher)
            except ApiError as error:
                log.info("the engine cannot be told that it drains: %s", error)

    async def _emit(self, action: Emit) -> None:
        manifest = events.event(self._deployment, action, self._clients.clock.now())
        try:
            await self._clients.kube.create(EVENTS, self._deployment.namespace, manifest)
        except Conflict:
            pass  # told already
        except ApiError as error:
            # What the event tells stands in the status too; it is not worth another pass.
            log.warning("the event %s cannot be posted: %s", action.reason, error)
