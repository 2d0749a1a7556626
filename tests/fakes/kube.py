"""An API server in memory, honest where the operator depends on it.

Like the real one: resourceVersions that are preconditions, no write for a change that changes nothing, generations,
the status subresource, AlreadyExists, JSON patches with tests, uid preconditions, label selectors, graceful deletion of
pods, finalizers, garbage collection by owner references, server-side apply that drops what it applied before.
Unlike it: no schemas, no defaults, and every list is atomic under apply.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vllm_ray_operator.clients.protocols import (
    PODS,
    RAY_CLUSTERS,
    SERVICES,
    VLLM_DEPLOYMENTS,
    ApiError,
    Conflict,
    Invalid,
    KindMissing,
    NotFound,
    Object,
    Resource,
)

Verb = Literal["get", "list", "create", "apply", "replace", "json_patch", "replace_status", "delete"]
READS: frozenset[Verb] = frozenset({"get", "list"})
WITH_STATUS = frozenset({VLLM_DEPLOYMENTS, RAY_CLUSTERS, PODS, SERVICES})
SERVER_FIELDS = ("uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
CREATION_TIME = "2030-01-01T00:00:00Z"
DELETION_TIME = "2030-01-02T00:00:00Z"

Address = tuple[Resource, str, str]


@dataclass(frozen=True)
class Call:
    """A request. ``name`` is empty for lists."""

    verb: Verb
    resource: Resource
    namespace: str
    name: str


Hook = Callable[[Call], None]


class FakeKube:
    """``before`` and ``after`` see every call and may raise: refusals and lost requests, or lost replies."""

    def __init__(self) -> None:
        self.before: list[Hook] = []
        self.after: list[Hook] = []
        self.calls: list[Call] = []
        self.kinds_missing: set[Resource] = set()
        self.changed: list[Callable[[Resource, Object], None]] = []
        self._objects: dict[Address, Object] = {}
        self._applied: dict[Address, Object] = {}
        self._versions = itertools.count(1)
        self._uids = itertools.count(1)

    # What tests look at and do behind the operator's back.

    @property
    def writes(self) -> list[Call]:
        return [call for call in self.calls if call.verb not in READS]

    def objects(self, resource: Resource) -> list[Object]:
        return [copy.deepcopy(o) for (r, _, _), o in sorted(self._objects.items(), key=_order) if r == resource]

    def peek(self, resource: Resource, namespace: str, name: str) -> Object | None:
        return copy.deepcopy(self._objects.get((resource, namespace, name)))

    def put(self, resource: Resource, obj: Mapping[str, Any]) -> Object:
        """Store an object as it is, status included, whatever was there."""
        obj = {"apiVersion": resource.api_version, "kind": resource.kind, **copy.deepcopy(dict(obj))}
        address = (resource, obj["metadata"]["namespace"], obj["metadata"]["name"])
        old = self._objects.get(address)
        obj["metadata"] = {**_server_fields(old), **obj["metadata"]}
        return self._store(address, obj) if old else self._add(address, obj)

    def set_status(self, resource: Resource, namespace: str, name: str, status: Mapping[str, Any]) -> Object:
        address = (resource, namespace, name)
        return self._store(address, {**self._objects[address], "status": copy.deepcopy(dict(status))})

    def remove(self, resource: Resource, namespace: str, name: str) -> None:
        """Take an object away at once, as a kubelet does with a pod that has ended; then what it owned."""
        address = (resource, namespace, name)
        gone = self._objects.pop(address)
        self._applied.pop(address, None)
        self._notify(resource, gone)
        owned = [a for a, o in self._objects.items() if gone["metadata"]["uid"] in _owners(o)]
        for other, space, owned_name in owned:
            if (other, space, owned_name) in self._objects:
                self._delete((other, space, owned_name))

    # The protocol.

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        with self._call("get", resource, namespace, name):
            return copy.deepcopy(self._found((resource, namespace, name)))

    async def list(
        self, resource: Resource, namespace: str, selector: Mapping[str, str], *, fields: str = ""
    ) -> Sequence[Object]:
        with self._call("list", resource, namespace, ""):
            return [
                o
                for o in self.objects(resource)
                if o["metadata"]["namespace"] == namespace
                and selector.items() <= (o["metadata"].get("labels") or {}).items()
                and _has_fields(o, fields)
            ]

    async def create(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        name = obj["metadata"]["name"]
        with self._call("create", resource, namespace, name):
            address = (resource, namespace, name)
            if address in self._objects:
                raise Conflict(f'{resource.plural} "{name}" already exists', 409, "AlreadyExists")
            if obj["metadata"].get("resourceVersion"):
                raise Invalid("resourceVersion should not be set on objects to be created", 400, "BadRequest")
            return self._add(address, _new(resource, namespace, obj))

    async def apply(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        name = obj["metadata"]["name"]
        with self._call("apply", resource, namespace, name):
            address = (resource, namespace, name)
            desired = _new(resource, namespace, obj)
            old = self._objects.get(address)
            previous = self._applied.get(address, {})
            self._applied[address] = copy.deepcopy(desired)
            if old is None:
                return self._add(address, desired)
            return self._store(address, _merge(old, desired, previous))

    async def replace(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        with self._call("replace", resource, namespace, obj["metadata"]["name"]):
            address, old = self._precondition(resource, namespace, obj)
            new = copy.deepcopy(dict(obj))
            new["metadata"] = {**new["metadata"], **_server_fields(old)}
            if resource in WITH_STATUS:
                _carry(old, new, "status")
            return self._store(address, new)

    async def json_patch(
        self, resource: Resource, namespace: str, name: str, operations: Sequence[Mapping[str, Any]]
    ) -> Object:
        with self._call("json_patch", resource, namespace, name):
            address = (resource, namespace, name)
            old = self._found(address)
            try:
                new = patched(old, operations)
            except (LookupError, ValueError) as error:
                raise Conflict("the server rejected our request due to an error in our request", 422) from error
            if resource in WITH_STATUS:
                _carry(old, new, "status")
            new["metadata"] = {**new["metadata"], **_server_fields(old)}
            return self._store(address, new)

    async def replace_status(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        with self._call("replace_status", resource, namespace, obj["metadata"]["name"]):
            address, old = self._precondition(resource, namespace, obj)
            return self._store(address, {**old, "status": copy.deepcopy(obj.get("status") or {})})

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str | None, *, grace_seconds: int | None = None
    ) -> None:
        with self._call("delete", resource, namespace, name):
            address = (resource, namespace, name)
            found = self._found(address)["metadata"]["uid"]
            if uid is not None and uid != found:
                raise Conflict(f"Precondition failed: UID in precondition: {uid}, UID in object meta: {found}", 409)
            self._delete(address)

    # Inside.

    def _call(self, verb: Verb, resource: Resource, namespace: str, name: str) -> _Around:
        return _Around(self, Call(verb, resource, namespace, name))

    def _found(self, address: Address) -> Object:
        resource, namespace, name = address
        if address not in self._objects:
            raise NotFound(f'{resource.plural} "{name}" not found in {namespace}', 404, "NotFound")
        return self._objects[address]

    def _precondition(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> tuple[Address, Object]:
        metadata = obj["metadata"]
        address = (resource, namespace, metadata["name"])
        old = self._found(address)
        for key in ("resourceVersion", "uid"):
            if metadata.get(key, old["metadata"][key]) != old["metadata"][key]:
                raise Conflict(f"{resource.kind} {metadata['name']}: the object has been modified", 409, "Conflict")
        return address, old

    def _add(self, address: Address, obj: Object) -> Object:
        uid = f"{next(self._uids):08x}-0000-4000-8000-000000000000"
        metadata = {"uid": uid, "generation": 1, "creationTimestamp": CREATION_TIME, **obj["metadata"]}
        return self._commit(address, {**obj, "metadata": metadata})

    def _store(self, address: Address, obj: Object) -> Object:
        """Store a changed object; one that is not changed keeps its resourceVersion, and nobody is told."""
        old = self._objects[address]
        if obj == old:
            return copy.deepcopy(old)
        if _content(obj) != _content(old):
            obj = {**obj, "metadata": {**obj["metadata"], "generation": old["metadata"]["generation"] + 1}}
        let_go = old["metadata"].get("finalizers") and not obj["metadata"].get("finalizers")
        if let_go and obj["metadata"].get("deletionTimestamp"):
            self.remove(*address)
            return copy.deepcopy(obj)
        return self._commit(address, obj)

    def _commit(self, address: Address, obj: Object) -> Object:
        obj = copy.deepcopy(obj)
        obj["metadata"]["resourceVersion"] = str(next(self._versions))
        self._objects[address] = obj
        self._notify(address[0], obj)
        return copy.deepcopy(obj)

    def _delete(self, address: Address) -> None:
        resource, obj = address[0], self._objects[address]
        if resource == PODS or obj["metadata"].get("finalizers"):
            if not obj["metadata"].get("deletionTimestamp"):
                self._commit(address, {**obj, "metadata": {**obj["metadata"], "deletionTimestamp": DELETION_TIME}})
            return
        self.remove(*address)

    def _notify(self, resource: Resource, obj: Object) -> None:
        for listener in self.changed:
            listener(resource, copy.deepcopy(obj))


class _Around:
    """Runs the hooks around a call: what ``before`` raises did not happen, what ``after`` raises did."""

    def __init__(self, kube: FakeKube, call: Call) -> None:
        self._kube, self._call = kube, call

    def __enter__(self) -> None:
        self._kube.calls.append(self._call)
        for hook in self._kube.before:
            hook(self._call)
        if self._call.resource in self._kube.kinds_missing:
            raise KindMissing(f"the API server does not serve {self._call.resource.plural}", 404, "NotFound")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for hook in self._kube.after:
                hook(self._call)


def fail_once(error: ApiError, *, verb: Verb, resource: Resource) -> Hook:
    """Return a hook that raises ``error`` for the first such call."""
    left = [error]

    def hook(call: Call) -> None:
        if left and (call.verb, call.resource) == (verb, resource):
            raise left.pop()

    return hook


def fail_always(error: ApiError, *, verb: Verb, resource: Resource) -> Hook:
    """Return a hook that raises ``error`` for every such call."""

    def hook(call: Call) -> None:
        if (call.verb, call.resource) == (verb, resource):
            raise error

    return hook


def patched(document: Object, operations: Sequence[Mapping[str, Any]]) -> Object:
    """Return the document after a JSON patch. LookupError or ValueError if it cannot be applied."""
    result = copy.deepcopy(document)
    for operation in operations:
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        target: Any = result
        for part in path:
            target = target[int(part) if isinstance(target, list) else part]
        key: Any = last
        if isinstance(target, list):
            key = len(target) if last == "-" else int(last)
        match operation["op"]:
            case "test":
                if target[key] != operation["value"]:
                    raise ValueError(f"test of {operation['path']} failed")
            case "add" if isinstance(target, list):
                if key > len(target):
                    raise IndexError(operation["path"])
                target.insert(key, copy.deepcopy(operation["value"]))
            case "add":
                target[key] = copy.deepcopy(operation["value"])
            case "replace":
                if isinstance(target, dict) and key not in target:
                    raise KeyError(key)
                target[key] = copy.deepcopy(operation["value"])
            case "remove":
                del target[key]
            case other:
                raise ValueError(f"unknown operation {other}")
    return result


def _new(resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
    new = copy.deepcopy(dict(obj))
    new["metadata"] = {**new["metadata"], "namespace": namespace}
    if resource in WITH_STATUS:
        new.pop("status", None)
    return new


def _merge(current: Any, desired: Any, previous: Any) -> Any:
    """Return ``current`` with ``desired`` put on, less what only ``previous`` had put on."""
    if not isinstance(current, dict) or not isinstance(desired, dict):
        return copy.deepcopy(desired)
    previous = previous if isinstance(previous, dict) else {}
    result = {key: value for key, value in current.items() if key in desired or key not in previous}
    for key in current.keys() & previous.keys() - desired.keys():
        # Of a map that was applied, what others put into it stays.
        if isinstance(current[key], dict) and isinstance(previous[key], dict):
            rest = _merge(current[key], {}, previous[key])
            if rest:
                result[key] = rest
    for key, value in desired.items():
        result[key] = _merge(current.get(key), value, previous.get(key))
    return result


def _has_fields(obj: Object, fields: str) -> bool:
    for path, _, wanted in (field.partition("=") for field in fields.split(",") if field):
        value: Any = obj
        for part in path.split("."):
            value = (value or {}).get(part)
        if str(value or False).lower() != wanted:
            return False
    return True


def _server_fields(obj: Object | None) -> dict[str, Any]:
    return {key: obj["metadata"][key] for key in SERVER_FIELDS if key in obj["metadata"]} if obj else {}


def _carry(old: Object, new: Object, key: str) -> None:
    new.pop(key, None)
    if key in old:
        new[key] = copy.deepcopy(old[key])


def _content(obj: Object) -> dict[str, Any]:
    return {key: value for key, value in obj.items() if key not in ("metadata", "status")}


def _owners(obj: Object) -> Iterator[str]:
    return (reference["uid"] for reference in obj["metadata"].get("ownerReferences") or ())


def _order(item: tuple[Address, Object]) -> tuple[str, str, str]:
    (resource, namespace, name), _ = item
    return resource.plural, namespace, name
