"""The launcher's side of Ray: its driver, the placement group that it owns, and the actors of its namespace.

All Ray calls are made from one thread, because they can hang for as long as Ray's control store is away, and the
launcher must go on answering signals meanwhile. The others read the latest `View`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_ray_engine.config import EngineConfig
from vllm_ray_engine.placement import rank_order

PENDING = "PENDING"
CREATED = "CREATED"

POLL_PENDING_SECONDS = 0.1
POLL_ACTORS_SECONDS = 1.0
EXPLAIN_SECONDS = 2.0


@dataclass(frozen=True)
class View:
    """What Ray said last. node_ips, node_names: of each worker's node, in the order of the workers' ranks.

    workers_alive is as old as `seen` (monotonic clock).
    """

    placement: str = PENDING
    explanation: str = "connecting to Ray"
    node_ips: tuple[str, ...] = ()
    node_names: tuple[str, ...] = ()
    workers_alive: int = 0
    seen: float = 0.0


def fits(resources: Mapping[str, float], config: EngineConfig) -> int:
    """Return how many workers a node with these resources could hold."""
    return int(min(resources.get(config.accelerator_key, 0), resources.get(config.slot_resource, 0)))


def explain(
    config: EngineConfig, total: Mapping[str, Mapping[str, float]], free: Mapping[str, Mapping[str, float]]
) -> str:
    """Say why the placement group waits, from the total and free resources of the living nodes, by node id."""
    key, need = config.accelerator_key, config.world_size
    slot = [node for node, resources in total.items() if resources.get(config.slot_resource, 0) > 0]
    text = f"needs {need} {key} in slot {config.slot_resource}; "
    if not slot:
        return text + "no Ray node of this slot has joined the cluster"
    has = sum(fits(total[node], config) for node in slot)
    available = sum(fits(free.get(node, {}), config) for node in slot)
    text += f"{available} free"
    if has < need:
        return text + f", {has} in all on {len(slot)} node{'s' if len(slot) > 1 else ''}"
    return text if available >= need else text + f", {has - available} still in use"


class Cluster:
    """Connects, makes the placement group and watches it, in a thread, until released."""

    def __init__(self, config: EngineConfig, notify: Callable[[], None]) -> None:
        """`notify` is called, from the Ray thread, whenever the view or the failure changed."""
        self._config = config
        self._notify = notify
        self._release = threading.Event()
        self._stop = threading.Event()
        self._released = threading.Event()
        self.view = View()
        self.failure: str | None = None
        """Why the Ray thread ended before it was told to."""
        self._thread = threading.Thread(target=self._run, name="ray", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def release(self, timeout: float) -> bool:
        """Have the placement group removed, which ends its actors. Returns whether Ray confirmed it in time."""
        if self._thread.ident is None:
            return True
        self._release.set()
        return self._released.wait(timeout)

    def close(self, timeout: float) -> bool:
        """Release, and disconnect from Ray. Returns whether that was done in time."""
        if self._thread.ident is None:
            return True
        self._stop.set()
        self._release.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _show(self, **changes: Any) -> None:
        before, self.view = self.view, replace(self.view, **changes)
        if replace(before, seen=0) != replace(self.view, seen=0):
            self._notify()

    def _run(self) -> None:
        try:
            import ray

            ray.init(address="auto", namespace=self._config.instance_id, log_to_driver=False)
        except Exception as error:
            self.failure = f"cannot connect to Ray: {error}"
            self._released.set()
            self._notify()
            return
        try:
            self._own_group()
        except Exception as error:
            self.failure = f"Ray failed: {error}"
            self._notify()
        finally:
            self._released.set()
            self._stop.wait()
            ray.shutdown()

    def _own_group(self) -> None:
        import ray

        group = ray.util.placement_group(self._config.bundles, strategy="PACK", name=self._config.engine_id)
        try:
            if self._wait_created(group):
                self._watch_actors()
        finally:
            ray.util.remove_placement_group(group)
            while ray.util.placement_group_table(group).get("state") != "REMOVED":
                time.sleep(0.05)

    def _wait_created(self, group: Any) -> bool:
        """Return True once the group is there, False when released before."""
        import ray

        explain_at = 0.0
        while not self._release.wait(POLL_PENDING_SECONDS):
            try:
                table = ray.util.placement_group_table(group)
                if table.get("state") == CREATED:
                    self._created(table["bundles_to_node_id"])
                    return True
                if (now := time.monotonic()) >= explain_at:
                    explain_at = now + EXPLAIN_SECONDS
                    self._show(explanation=self._explain(), seen=now)
            except Exception as error:  # the control store may be restarting
                self._show(explanation=f"Ray does not answer: {error}")
        return False

    def _explain(self) -> str:
        import ray
        from ray._private.state import available_resources_per_node

        total = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        return explain(self._config, total, available_resources_per_node())

    def _created(self, bundle_nodes: Mapping[int, str]) -> None:
        import ray

        order = rank_order(dict(bundle_nodes), ray.get_runtime_context().get_node_id())
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        of_rank = [nodes[bundle_nodes[bundle]] for bundle in order]
        self._show(
            placement=CREATED,
            explanation="",
            node_ips=tuple(node["NodeManagerAddress"] for node in of_rank),
            # In a pod the host's name is the pod's.
            node_names=tuple(f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in of_rank),
            seen=time.monotonic(),
        )

    def _watch_actors(self) -> None:
        import ray

        while not self._release.wait(POLL_ACTORS_SECONDS):
            try:
                # Named actors of our namespace that are not dead; vLLM puts the instance id in each worker's name.
                names = ray.util.list_named_actors()
            except Exception:  # noqa: S112  the control store may be restarting: the view gets old, which is noticed
                continue
            self._show(workers_alive=sum(self._config.engine_id in name for name in names), seen=time.monotonic())
