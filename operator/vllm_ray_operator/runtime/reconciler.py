"""The loop: observe, plan, write the status, act. One key at a time, any number of keys side by side.

Pure wiring. All that touches the world comes in from outside, so that a simulation can run this very code.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from vllm_ray_operator.api.status import Condition, VLLMDeploymentStatus
from vllm_ray_operator.clients.bundle import Clients, Key, Observation
from vllm_ray_operator.clients.protocols import VLLM_DEPLOYMENTS, ApiError, Conflict, EngineEndpoint, NotFound
from vllm_ray_operator.plan.actions import Action, Plan
from vllm_ray_operator.plan.world import Deployment, Problem, World
from vllm_ray_operator.runtime.logging import bound, fields
from vllm_ray_operator.runtime.metrics import Metrics
from vllm_ray_operator.runtime.queue import WorkQueue

log = logging.getLogger(__name__)

RESYNC_SECONDS = 300.0
PROBLEM_POLL_SECONDS = 1.0

Observe = Callable[[Key, Clients, tuple[Problem, ...]], Awaitable[Observation | None]]
Planner = Callable[[World, datetime], Plan]
Execute = Callable[[Sequence[Action], Observation, Clients], Awaitable[tuple[Problem, ...]]]
Follow = Callable[[Key, Mapping[str, EngineEndpoint]], None]


@dataclass(frozen=True)
class Outcome:
    """What came of one pass.

    ``again``: something was written or is over, so that the next pass should come at once.
    ``failed``: part of it has to be tried again, after the key's back-off.
    ``wake_after``: when to look again in any case, in seconds; None if only an event gives reason to.
    """

    gone: bool = False
    again: bool = False
    failed: bool = False
    wake_after: float | None = None


class Reconciler:
    """Reconciles deployments.

    ``leads`` tells right before every write whether we still may; ``follow`` gets the launchers to watch.
    """

    def __init__(
        self,
        clients: Clients,
        observe: Observe,
        planner: Planner,
        execute: Execute,
        follow: Follow,
        leads: Callable[[], bool],
        metrics: Metrics,
    ) -> None:
        self._clients = clients
        self._observe = observe
        self._planner = planner
        self._execute = execute
        self._follow = follow
        self._leads = leads
        self._metrics = metrics
        self._problems: dict[Key, tuple[Problem, ...]] = {}

    async def work(self, queue: WorkQueue[Key]) -> None:
        """Work on keys until the queue is closed. An error in a pass costs that pass only."""
        while (key := await queue.get()) is not None:
            try:
                await self._work_on(key, queue)
            finally:
                queue.done(key)

    async def _work_on(self, key: Key, queue: WorkQueue[Key]) -> None:
        with bound(namespace=key.namespace, name=key.name):
            started = self._clients.clock.now()
            try:
                outcome = await self.reconcile(key)
            except Exception as error:
                self._metrics.count_pass("error", self._clients.clock.now() - started)
                delay = queue.retry(key)
                # An API that does not answer is part of life; a trace is for what should not happen.
                trace = not isinstance(error, ApiError)
                log.warning("the pass failed: %s", error, exc_info=trace, extra=fields(retry_seconds=round(delay, 1)))
                return
        self._metrics.count_pass("problem" if outcome.failed else "ok", self._clients.clock.now() - started)
        schedule(queue, key, outcome)

    async def reconcile(self, key: Key) -> Outcome:
        """Make one pass. ApiError when the world could not be read or the status not written."""
        carried = self._problems.get(key, ())
        try:
            observation = await self._observe(key, self._clients, carried)
        except ValidationError as error:
            return await self._report_invalid(key, error)
        if observation is None:
            self._forget(key)
            return Outcome(gone=True)
        self._follow(key, observation.engines)
        deployment = observation.world.deployment
        plan = self._planner(observation.world, datetime.fromtimestamp(self._clients.clock.now(), UTC))
        if not self._leads():
            return Outcome()
        written = plan.status != deployment.status
        if written:
            try:
                await self._write_status(deployment, plan.status)
            except Conflict:
                log.debug("changed by somebody else meanwhile, looking again")
                return Outcome(again=True, wake_after=plan.wake_after)
            self._metrics.count_changes(deployment.status, plan.status)
            _log_changes(deployment, plan.status)
        self._metrics.show(key, plan.status)
        problems = await self._execute(plan.actions, observation, self._clients) if self._leads() else ()
        self._problems[key] = problems
        for problem in (p for p in problems if p not in carried):
            log.warning(problem.message, extra=fields(reason=problem.reason, generation=deployment.generation))
        return _outcome(plan, written=written, problems=problems, carried=carried)

    def _forget(self, key: Key) -> None:
        self._problems.pop(key, None)
        self._follow(key, {})
        self._metrics.forget(key)

    async def _write_status(self, deployment: Deployment, status: VLLMDeploymentStatus) -> None:
        manifest = {
            "apiVersion": VLLM_DEPLOYMENTS.api_version,
            "kind": VLLM_DEPLOYMENTS.kind,
            "metadata": {
                "namespace": deployment.namespace,
                "name": deployment.name,
                "uid": deployment.uid,
                "resourceVersion": deployment.resource_version,
            },
            "spec": deployment.raw_spec,
            "status": status.to_wire(),
        }
        await self._clients.kube.replace_status(VLLM_DEPLOYMENTS, deployment.namespace, manifest)

    async def _report_invalid(self, key: Key, error: ValidationError) -> Outcome:
        """Say on the resource that it cannot be read. All else stays as it is until somebody repairs it."""
        try:
            resource = await self._clients.kube.get(VLLM_DEPLOYMENTS, key.namespace, key.name)
            now = datetime.fromtimestamp(self._clients.clock.now(), UTC)
            if _set_unreadable(resource, error, now) and self._leads():
                log.warning("the stored object cannot be read: %s", _in_words(error))
                await self._clients.kube.replace_status(VLLM_DEPLOYMENTS, key.namespace, resource)
        except (Conflict, NotFound):
            return Outcome(again=True)
        return Outcome()


def schedule(queue: WorkQueue[Key], key: Key, outcome: Outcome) -> None:
    """Tell the queue when the key of a finished pass is due again."""
    if outcome.gone:
        queue.drop(key)
        return
    if outcome.failed:
        queue.retry(key)
    elif outcome.again:
        queue.add(key)  # a back-off ends with a pass that leaves nothing to do, not with one that may lead to the next
    else:
        queue.forget_failures(key)
    queue.add_after(key, RESYNC_SECONDS if outcome.wake_after is None else outcome.wake_after)


def _outcome(plan: Plan, *, written: bool, problems: Sequence[Problem], carried: Sequence[Problem]) -> Outcome:
    if not problems:
        # Problems that are over have to leave the conditions.
        return Outcome(again=written or bool(carried), wake_after=plan.wake_after)
    # What failed must not be tried again and again at full speed, whatever the plan would like.
    wake = PROBLEM_POLL_SECONDS if written else plan.wake_after
    return Outcome(failed=True, wake_after=max(wake, PROBLEM_POLL_SECONDS) if wake else None)


def _log_changes(deployment: Deployment, after: VLLMDeploymentStatus) -> None:
    before = {replica.index: replica for replica in deployment.status.replicas}
    for replica in after.replicas:
        old = before.get(replica.index)
        if old is None or old.phase != replica.phase:
            log.info(
                "replica %d is %s%s",
                replica.index,
                replica.phase,
                f": {replica.message}" if replica.message else "",
                extra=fields(
                    generation=deployment.generation,
                    replica=replica.index,
                    phase=replica.phase,
                    attempt=replica.attempt.instance_id if replica.attempt else None,
                ),
            )


def _set_unreadable(resource: dict[str, Any], error: ValidationError, now: datetime) -> bool:
    """Set the Ready condition of a raw resource to the error. Return whether that changed anything."""
    status = resource.setdefault("status", {})
    conditions = status.setdefault("conditions", [])
    old = next((c for c in conditions if isinstance(c, dict) and c.get("type") == "Ready"), None)
    new = Condition(
        type="Ready",
        status="False",
        reason="InvalidObject",
        message=_in_words(error),
        observed_generation=resource["metadata"]["generation"],
        last_transition_time=now,
    ).to_wire()
    if old is not None:
        if old.get("status") == new["status"]:
            new["lastTransitionTime"] = old["lastTransitionTime"]
        if old == new:
            return False
        conditions.remove(old)
    conditions.append(new)
    return True


def _in_words(error: ValidationError) -> str:
    faults = [f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors(include_input=False)]
    return "The stored object cannot be read; apply it again, corrected. " + "; ".join(faults)[:1024]
