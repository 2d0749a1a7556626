"""kopf as a watcher: every event of our resource, or of an object of ours, puts a key in the queue. Nothing else.

Only low-level event handlers are used: they leave no annotation and no finalizer on anything, and an event that is
lost costs no more than the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import kopf
from kopf._cogs.structs.references import Insights  # of spawn_tasks(insights=...): what kopf found and watches

from vllm_ray_operator.clients.bundle import Key
from vllm_ray_operator.clients.protocols import (
    CORDONED,
    ENDPOINT_SLICES,
    NODES,
    PODS,
    RAY_CLUSTERS,
    SERVICES,
    VLLM_DEPLOYMENTS,
    ApiError,
    Resource,
)
from vllm_ray_operator.plan import names
from vllm_ray_operator.runtime.clock import cancel

log = logging.getLogger(__name__)

CHILDREN = (RAY_CLUSTERS, PODS, SERVICES, ENDPOINT_SLICES)
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
KIND_POLL_SECONDS = 10.0
RESTART_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)


class Watches:
    """kopf's watches, started again when they end.

    ``changed`` gets the key of every event. ``is_served`` tells whether the API server knows a kind, ``may_see_nodes``
    whether nodes may be watched: without that right a cordon is not seen, and all else is. ``take_signals`` is called
    after each start: kopf has the process's signal handlers for itself by then, and they are not its business here.
    """

    def __init__(
        self,
        namespaces: Sequence[str],
        changed: Callable[[Key], None],
        is_served: Callable[[Resource], Awaitable[bool]],
        may_see_nodes: Callable[[], Awaitable[bool]],
        take_signals: Callable[[], None],
    ) -> None:
        self._namespaces = tuple(namespaces)
        self._is_served = is_served
        self._take_signals = take_signals
        self._changed = changed
        self._may_see_nodes = may_see_nodes
        self._insights = Insights()

    def unready(self) -> str:
        """Return why deployments are not watched; "" if they are. Without KubeRay they are all the same."""
        if not self._insights.ready_resources.is_set():
            return "the watches have not started"
        if VLLM_DEPLOYMENTS in self._unwatched():
            return "VLLMDeployments are not watched: is their CRD installed?"
        return ""

    async def run(self) -> None:
        """Watch until cancelled. Watches that break down, such as for a right that is missing, are started again."""
        failures = 0
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                appeared = await self._watch()
            except Exception as error:
                log.warning("the watches broke down, starting them again: %s", error)
            else:
                log.info("watching anew: %s are served now", appeared.plural)
            failures = failures + 1 if loop.time() - started < 2 * RESTART_SECONDS[-1] else 1
            await asyncio.sleep(RESTART_SECONDS[min(failures, len(RESTART_SECONDS)) - 1])

    async def _watch(self) -> Resource:
        """Run kopf until a kind is served that it does not watch, and return that.

        It is not left to ``kopf.operator``, which in the end cancels every task of the loop.
        """
        self._insights = Insights()
        handlers = registry(self._changed, nodes=await self._may_see_nodes())
        tasks: list[asyncio.Task[Any]] = []
        appearance = asyncio.create_task(self._wait_for_unwatched(), name="watch for kinds")
        try:
            tasks += await kopf.spawn_tasks(
                registry=handlers,
                settings=settings(),
                # kopf would make one of the user's name, which an arbitrary user id in a container does not have.
                identity=cast(Any, names.MANAGER),
                clusterwide=not self._namespaces,
                namespaces=self._namespaces,
                insights=self._insights,
            )
            self._take_signals()
            done, _ = await asyncio.wait([appearance, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {appearance}:
                task.result()
                raise RuntimeError(f"{task.get_name()} ended")
            return appearance.result()
        finally:
            self._insights = Insights()
            await cancel(appearance, *tasks)

    async def _wait_for_unwatched(self) -> Resource:
        """Return a kind that kopf does not watch although it is served.

        kopf could look for new kinds by itself. It would load every CRD of the cluster for that, and miss a kind when
        the API server's discovery document lags behind the CRD (seen with a CRD of a megabyte).
        """
        await self._insights.ready_resources.wait()
        while True:
            await asyncio.sleep(KIND_POLL_SECONDS)
            for resource in self._unwatched():
                try:
                    if await self._is_served(resource):
                        return resource
                except ApiError as error:
                    log.debug("whether %s are served is not known: %s", resource.plural, error)

    def _unwatched(self) -> list[Resource]:
        watched = {(kind.group, kind.plural) for kind in self._insights.watched_resources}
        return [kind for kind in (VLLM_DEPLOYMENTS, *CHILDREN) if (_group(kind), kind.plural) not in watched]


def registry(changed: Callable[[Key], None], *, nodes: bool) -> kopf.OperatorRegistry:
    """Return kopf's handlers. ``nodes``: also of them."""
    result = kopf.OperatorRegistry()

    @kopf.on.login(registry=result)
    async def login(**arguments: Any) -> kopf.ConnectionInfo | None:
        return connection(**arguments)

    @kopf.on.event(*_selector(VLLM_DEPLOYMENTS), registry=result)
    async def resource_changed(namespace: str | None, name: str | None, **_: Any) -> None:
        if namespace and name:
            changed(Key(namespace, name))

    async def child_changed(namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        owner = labels.get(names.DEPLOYMENT)
        if namespace and owner:
            changed(Key(namespace, owner))

    for kind in CHILDREN:
        kopf.on.event(*_selector(kind), registry=result)(child_changed)

    if not nodes:
        return result
    tenants = Tenants()

    @kopf.on.event(*_selector(PODS), registry=result)
    async def pod_changed(body: kopf.Body, type: str | None, **_: Any) -> None:
        tenants.note(body, gone=type == "DELETED")

    @kopf.on.event(*_selector(NODES), registry=result)
    async def node_cordoned_or_not(name: str | None, **_: Any) -> None:
        for key in tenants.of(name):
            changed(key)

    return result


class Tenants:
    """Which deployments have pods on which nodes, by what the watch of pods tells."""

    def __init__(self) -> None:
        self._pods: dict[str, tuple[str, Key]] = {}  # by uid

    def note(self, pod: Mapping[str, Any], *, gone: bool) -> None:
        """Take an event of a pod in."""
        metadata, node = pod["metadata"], (pod.get("spec") or {}).get("nodeName")
        owner = (metadata.get("labels") or {}).get(names.DEPLOYMENT)
        if gone or not node or not owner:
            self._pods.pop(metadata["uid"], None)
        else:
            self._pods[metadata["uid"]] = (node, Key(metadata["namespace"], owner))

    def of(self, node: str | None) -> set[Key]:
        """Return the deployments with pods on a node."""
        return {key for place, key in self._pods.values() if place == node}


def settings() -> kopf.OperatorSettings:
    """Return kopf's settings: watch whole streams, filter at the server, write nothing."""
    result = kopf.OperatorSettings()
    result.process.ultimate_exiting_timeout = None  # else kopf would kill us some time after watches were restarted
    result.posting.enabled = False
    result.peering.standalone = True
    result.scanning.disabled = True  # see Watches._wait_for_unwatched
    result.watching.server_timeout = 300
    result.watching.client_timeout = 310
    result.watching.connect_timeout = 30
    result.watching.inactivity_timeout = 70  # API servers send a bookmark about once a minute
    result.watching.chunk_size = 500
    result.networking.request_timeout = 30
    result.networking.connect_timeout = 10
    result.queueing.idle_timeout = 1.0  # our handlers take no time; kopf's task of an object need not live on
    for kind in CHILDREN:
        result.watching.label_selectors[_selector(kind)] = f"{names.MANAGED_BY}={names.MANAGER}"
    # Of the nodes only those that are cordoned: one that is, or is no more, comes into sight or leaves it. All others,
    # which change all the time, are none of our business.
    result.watching.field_selectors[_selector(NODES)] = CORDONED
    return result


def connection(**arguments: Any) -> kopf.ConnectionInfo | None:
    """Return how to reach the API server: by the pod's service account, outside of a pod by the kubeconfig."""
    token, host = SERVICE_ACCOUNT / "token", os.environ.get("KUBERNETES_SERVICE_HOST")
    if not host or not token.exists():
        return kopf.login_with_kubeconfig(**arguments)
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    # By address, not by name: watches have to survive an outage of the cluster's DNS.
    return kopf.ConnectionInfo(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        ca_path=str(SERVICE_ACCOUNT / "ca.crt"),
        token=token.read_text().strip(),
    )


def _selector(resource: Resource) -> tuple[str, str, str]:
    """Return the kind as kopf wants it: group ("" for the core), version, plural."""
    return _group(resource), resource.api_version.rpartition("/")[2], resource.plural


def _group(resource: Resource) -> str:
    return resource.api_version.rpartition("/")[0]
