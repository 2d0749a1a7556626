"""Placement: the engine uses the launcher's placement group, found by its name in the attempt's namespace."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from vllm_ray_engine import report
from vllm_ray_engine.context import Context, GroupRef

POLL_SECONDS = 0.05
"""Between two looks at a pending group: PlacementGroup.wait notices its creation up to a second late."""


def use_launcher_group(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrap initialize_ray_cluster(parallel_config, ...), which makes a group of its own unless the config holds one.

    An engine gets here with everything imported, and waits as long as its launcher lets it.
    """

    @functools.wraps(original)
    def initialize_ray_cluster(parallel_config: Any, *args: Any, **kwargs: Any) -> Any:
        import ray

        if not ray.is_initialized():
            # The namespace is ours by identity.default_namespace.
            ray.init(address="auto", runtime_env=getattr(parallel_config, "ray_runtime_env", None))
        if context.group is not None:
            parallel_config.placement_group = wait_created(context.group)
        return original(parallel_config, *args, **kwargs)

    return initialize_ray_cluster


def wait_created(ref: GroupRef) -> Any:
    """Wait until the group is there and return Ray's handle of it, having told the launcher that only this is missing.

    Raises ValueError when no group has the name and none is to come, SystemExit when the group was removed.
    """
    import ray

    report.send(report.WAITING)
    group = None
    while True:
        try:
            group = group or ref.find()
            state = ray.util.placement_group_table(group).get("state")
        except Exception:
            # The launcher has not made it yet, or Ray's control store is restarting.
            if not ref.awaited:
                raise
            state = None
        if state == "CREATED":
            return group
        if state == "REMOVED":
            raise SystemExit(f"placement group {ref.name or ref.id} was removed: this attempt is over")
        time.sleep(POLL_SECONDS)


def rank_order(bundle_nodes: Mapping[int, str], driver_node: str) -> list[int]:
    """Return the bundle of each worker, in the order of the workers' ranks.

    This is vLLM's own order (get_bundles_sorted_by_node): the engine's node comes first, the others by their ids, so
    the ranks of one node are neighbours.
    """
    return sorted(bundle_nodes, key=lambda bundle: (bundle_nodes[bundle] != driver_node, bundle_nodes[bundle], bundle))
