"""kopf as a watcher: every event of our resource, or of an object of ours, puts a key in the queue. Nothing else.

Only low-level event handlers are used: they leave no annotation and no finalizer on anything, and an event that is
lost costs no more than the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kopf

from vllm_ray_operator.api import GROUP, PLURAL, VERSION
from vllm_ray_operator.clients.bundle import Key
from vllm_ray_operator.plan import names
from vllm_ray_operator.runtime.clock import cancel

log = logging.getLogger(__name__)

CHILDREN = (
    ("ray.io", "v1", "rayclusters"),
    ("", "v1", "pods"),
    ("", "v1", "services"),
    ("discovery.k8s.io", "v1", "endpointslices"),
)
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
RESTART_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)


class Watches:
    """kopf's watches, started again when they end.

    ``changed`` gets the key of every event. ``take_signals`` is called after each start: kopf has the process's signal
    handlers for itself by then, and they are not its business here.
    """

    def __init__(
        self, namespaces: Sequence[str], changed: Callable[[Key], None], take_signals: Callable[[], None]
    ) -> None:
        self._namespaces = tuple(namespaces)
        self._take_signals = take_signals
        self._registry = registry(changed)
        self._ready = asyncio.Event()

    def unready(self) -> str:
        """Return why nothing is watched; "" if all is."""
        return "" if self._ready.is_set() else "the watches have not started"

    async def run(self) -> None:
        """Watch until cancelled. Watches that break down, such as for a right that is missing, are started again."""
        failures = 0
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                await self._watch()
                log.warning("the watches ended, starting them again")
            except Exception as error:
                log.warning("the watches broke down, starting them again: %s", error)
            failures = failures + 1 if loop.time() - started < 2 * RESTART_SECONDS[-1] else 1
            await asyncio.sleep(RESTART_SECONDS[min(failures, len(RESTART_SECONDS)) - 1])

    async def _watch(self) -> None:
        """Run kopf once. It is not left to ``kopf.operator``, which in the end cancels every task of the loop."""
        tasks: Sequence[asyncio.Task[Any]] = ()
        try:
            tasks = list(
                await kopf.spawn_tasks(
                    registry=self._registry,
                    settings=settings(),
                    clusterwide=not self._namespaces,
                    namespaces=self._namespaces,
                    ready_flag=self._ready,
                )
            )
            self._take_signals()
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._ready.clear()
            await cancel(*tasks)


def registry(changed: Callable[[Key], None]) -> kopf.OperatorRegistry:
    """Return kopf's handlers."""
    result = kopf.OperatorRegistry()

    @kopf.on.login(registry=result)
    async def login(**arguments: Any) -> kopf.ConnectionInfo | None:
        return connection(**arguments)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=result)
    async def resource_changed(namespace: str | None, name: str | None, **_: Any) -> None:
        if namespace and name:
            changed(Key(namespace, name))

    async def child_changed(namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        owner = labels.get(names.DEPLOYMENT)
        if namespace and owner:
            changed(Key(namespace, owner))

    for group, version, plural in CHILDREN:
        kopf.on.event(group, version, plural, registry=result)(child_changed)
    return result


def settings() -> kopf.OperatorSettings:
    """Return kopf's settings: watch whole streams, filter at the server, write nothing."""
    result = kopf.OperatorSettings()
    result.process.ultimate_exiting_timeout = None  # else kopf would kill us some time after watches were restarted
    result.posting.enabled = False
    result.peering.standalone = True
    result.watching.server_timeout = 300
    result.watching.client_timeout = 310
    result.watching.connect_timeout = 30
    result.watching.inactivity_timeout = 70  # API servers send a bookmark about once a minute
    result.watching.chunk_size = 500
    result.networking.request_timeout = 30
    result.networking.connect_timeout = 10
    result.queueing.idle_timeout = 1.0  # our handlers take no time; kopf's task of an object need not live on
    for kind in CHILDREN:
        result.watching.label_selectors[kind] = f"{names.MANAGED_BY}={names.MANAGER}"
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
