"""The launcher's side of Ray: its driver, the placement groups that it owns, and the actors of its namespace.

All Ray calls are made from one thread, because they can hang for as long as Ray's control store is away, and the
launcher must go on answering signals meanwhile. The others read the latest `View`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_ray_engine.config import EngineConfig
from vllm_ray_engine.launcher import packing
from vllm_ray_engine.launcher.packing import by_node, home
from vllm_ray_engine.launcher.raylets import Raylets

PENDING = "PENDING"
CREATED = "CREATED"

POLL_PENDING_SECONDS = 0.1
POLL_ACTORS_SECONDS = 1.0
EXPLAIN_SECONDS = 2.0


@dataclass(frozen=True)
class View:
    """What Ray said last. node_ips, node_names: for each rank of the job each worker's node, in rank order.

    explanation: why the groups wait, or what is wrong with where they landed. workers_most: the most that there were at
    once. dead_nodes: names of nodes without their raylet.
    """

    placement: str = PENDING
    explanation: str = "connecting to Ray"
    node_ips: tuple[tuple[str, ...], ...] = ()
    node_names: tuple[tuple[str, ...], ...] = ()
    workers_alive: int = 0
    workers_most: int = 0
    dead_nodes: tuple[str, ...] = ()


def landed(
    config: EngineConfig, bundle_nodes: Sequence[Mapping[int, str]], driver_node: str
) -> tuple[tuple[str, ...], ...]:
    """Return for each rank of the job the node of each worker, in rank order, as the engine will deal them out.

    `bundle_nodes`: of each placement group, the node of each bundle.
    """
    homes = [home(nodes) if config.makes_ranks else driver_node for nodes in bundle_nodes]
    ranks = []
    for number in by_node(homes, driver_node):
        workers = [bundle_nodes[number][bundle] for bundle in range(config.world_size)]
        ranks.append(tuple(workers[position] for position in by_node(workers, homes[number])))
    return tuple(ranks)


def owned_actors(config: EngineConfig, names: Iterable[str]) -> int:
    """Return how many of the actors are workers of this job: vLLM puts the instance id in each worker's name."""
    # Another rank's job may run in the same namespace: _dp1 is not _dp12.
    ours = re.compile(re.escape(config.engine_id) + r"(?!\d)")
    return sum(ours.search(name) is not None for name in names)


class Cluster:
    """Connects, makes the placement groups and watches them, in a thread, until released."""

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
        """Have the placement groups removed, which ends their actors. Returns whether Ray confirmed it in time."""
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
        if before != self.view:
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
            self._own_groups()
        except Exception as error:
            self.failure = f"Ray failed: {error}"
            self._notify()
        finally:
            self._released.set()
            self._stop.wait()
            ray.shutdown()

    def _own_groups(self) -> None:
        import ray

        made: list[Any] = []
        try:
            for group in packing.groups(self._config):
                bundles = [dict(bundle) for bundle in group.bundles]
                made.append(ray.util.placement_group(bundles, strategy=group.strategy, name=group.name))
            if (raylets := self._wait_created(made)) is not None:
                self._watch(raylets)
        finally:
            for group in made:
                ray.util.remove_placement_group(group)
            while any(ray.util.placement_group_table(group).get("state") != "REMOVED" for group in made):
                time.sleep(0.05)

    def _wait_created(self, groups: Sequence[Any]) -> Raylets | None:
        """Return the raylets of the groups' nodes once the groups are there, None when released before."""
        import ray

        explain_at = 0.0
        while not self._release.wait(POLL_PENDING_SECONDS):
            try:
                tables = [ray.util.placement_group_table(group) for group in groups]
                if all(table.get("state") == CREATED for table in tables):
                    return self._created([table["bundles_to_node_id"] for table in tables])
                if (now := time.monotonic()) >= explain_at:
                    explain_at = now + EXPLAIN_SECONDS
                    self._show(explanation=self._explain())
            except Exception as error:  # the control store may be restarting
                self._show(explanation=f"Ray does not answer: {error}")
        return None

    def _explain(self) -> str:
        import ray
        from ray._private.state import available_resources_per_node

        total = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        return packing.explain(self._config, total, available_resources_per_node())

    def _created(self, bundle_nodes: Sequence[Mapping[int, str]]) -> Raylets:
        import ray

        nodes = {node["NodeID"]: node for node in ray.nodes()}
        landing = landed(self._config, bundle_nodes, ray.get_runtime_context().get_node_id())
        of_ranks = [[nodes[node] for node in workers] for workers in landing]
        names = tuple(tuple(map(_name, workers)) for workers in of_ranks)
        self._show(
            placement=CREATED,
            explanation=packing.complaint(self._config, names),
            node_ips=tuple(tuple(node["NodeManagerAddress"] for node in workers) for workers in of_ranks),
            node_names=names,
        )
        used = (node for workers in of_ranks for node in workers)
        return Raylets({_name(node): (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in used})

    def _watch(self, raylets: Raylets) -> None:
        import ray

        while not self._release.wait(POLL_ACTORS_SECONDS):
            self._show(dead_nodes=raylets.dead())
            try:
                names = ray.util.list_named_actors()  # of our namespace, that are not dead
            except Exception:  # noqa: S112  the control store may be restarting; the engine serves on
                continue
            alive = owned_actors(self._config, names)
            most = max(alive, self.view.workers_most)
            self._show(workers_alive=alive, workers_most=most)


def _name(node: Mapping[str, Any]) -> str:
    # In a pod the host's name is the pod's.
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
