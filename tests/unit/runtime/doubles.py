"""Small doubles: one stored Lease, one stored deployment, launchers that answer as told."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ray_operator.clients.protocols import (
    ApiError,
    Conflict,
    EngineEndpoint,
    NotFound,
    Object,
    Resource,
)


class StoredKube:
    """Objects with resource versions, as the API server keeps them.

    ``fault`` is raised by the next ``fault_count`` calls; ``lose_replies`` has writes done but answered by an error;
    ``delay`` seconds pass before each answer.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.writes: list[str] = []
        self.version = 0
        self.fault: ApiError | None = None
        self.fault_count = 0
        self.lose_replies = False
        self.delay = 0.0

    def put(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        self.version += 1
        stored = copy.deepcopy(dict(obj))
        stored["metadata"] = {**obj["metadata"], "namespace": namespace, "resourceVersion": str(self.version)}
        self.objects[resource.plural, namespace, obj["metadata"]["name"]] = stored
        return copy.deepcopy(stored)

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        await self._answer()
        try:
            return copy.deepcopy(self.objects[resource.plural, namespace, name])
        except KeyError:
            raise NotFound(f"{resource.plural} {name} not found", 404) from None

    async def create(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        await self._answer()
        if (resource.plural, namespace, obj["metadata"]["name"]) in self.objects:
            raise Conflict("exists", 409, "AlreadyExists")
        return await self._written("create", resource, namespace, obj)

    async def replace(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        return await self._replace("replace", resource, namespace, obj)

    async def replace_status(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        stored = self.objects.get((resource.plural, namespace, obj["metadata"]["name"]), {})
        version = {"resourceVersion": obj["metadata"]["resourceVersion"]}
        whole = {**stored, "metadata": {**obj["metadata"], **stored.get("metadata", {}), **version}}
        return await self._replace("replace_status", resource, namespace, {**whole, "status": obj["status"]})

    async def list(self, resource: Resource, namespace: str, selector: Mapping[str, str]) -> Sequence[Object]:
        raise NotImplementedError

    async def apply(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        raise NotImplementedError

    async def json_patch(
        self, resource: Resource, namespace: str, name: str, operations: Sequence[Mapping[str, Any]]
    ) -> Object:
        raise NotImplementedError

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str | None) -> None:
        raise NotImplementedError

    async def _replace(self, verb: str, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        await self._answer()
        stored = self.objects.get((resource.plural, namespace, obj["metadata"]["name"]))
        if stored is None:
            raise NotFound("not found", 404)
        if obj["metadata"]["resourceVersion"] != stored["metadata"]["resourceVersion"]:
            raise Conflict("the object has been modified", 409, "Conflict")
        return await self._written(verb, resource, namespace, obj)

    async def _written(self, verb: str, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        self.writes.append(f"{verb} {resource.plural}")
        stored = self.put(resource, namespace, obj)
        if self.lose_replies:
            raise ApiError("the connection was closed")
        return stored

    async def _answer(self) -> None:
        await asyncio.sleep(self.delay)
        if self.fault is not None and self.fault_count > 0:
            self.fault_count -= 1
            raise self.fault


class ScriptedEngine:
    """Launchers by instance id: their state, or the error they answer with. ``changed`` wakes the long polls."""

    def __init__(self) -> None:
        self.states: dict[str, dict[str, Any] | ApiError] = {}
        self.calls = 0
        self._changed = asyncio.Condition()

    async def set(self, instance_id: str, state: dict[str, Any] | ApiError) -> None:
        async with self._changed:
            self.states[instance_id] = state
            self._changed.notify_all()

    async def version(self, instance_id: str, version: int) -> None:
        await self.set(instance_id, {"version": version, "instanceId": instance_id})

    async def state(self, engine: EngineEndpoint, since: int | None, wait_seconds: float) -> Mapping[str, Any]:
        self.calls += 1

        def news() -> bool:
            state = self.states[engine.instance_id]
            return since is None or isinstance(state, ApiError) or state.get("version") != since

        async with self._changed:
            try:
                async with asyncio.timeout(wait_seconds):
                    await self._changed.wait_for(news)
            except TimeoutError:
                pass
            state = self.states[engine.instance_id]
        if isinstance(state, ApiError):
            raise state
        return state
