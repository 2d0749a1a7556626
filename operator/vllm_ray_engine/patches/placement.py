"""Placement: the engine uses the launcher's placement groups, found by their names in the attempt's namespace."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from vllm_ray_engine import report
from vllm_ray_engine.launcher.packing import by_node, home
from vllm_ray_engine.patches.context import Context, GroupRef
from vllm_ray_engine.standby import warm
from vllm_ray_engine.standby.warm import Warming

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
            ray.init(address="auto", runtime_env=warm.hooked(getattr(parallel_config, "ray_runtime_env", None)))
        if context.group is not None and parallel_config.placement_group is None:
            parallel_config.placement_group = wait_created(context.group, Warming(parallel_config))
        return original(parallel_config, *args, **kwargs)

    return initialize_ray_cluster


def use_rank_groups(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrap CoreEngineActorManager.create_dp_placement_groups, which fails at once where the accelerators are not free.

    It returns the group of each data-parallel rank, and the rank's number among those of its node.
    """

    @functools.wraps(original)
    def create_dp_placement_groups(*args: Any, **kwargs: Any) -> Any:
        if not context.rank_groups:
            return original(*args, **kwargs)
        import ray

        warming = Warming(None)
        groups = [wait_created(ref, warming) for ref in context.rank_groups]
        homes = [home(ray.util.placement_group_table(group)["bundles_to_node_id"]) for group in groups]
        order = by_node(homes, ray.get_runtime_context().get_node_id())
        local = [homes[: number + 1].count(homes[number]) - 1 for number in order]
        return [groups[number] for number in order], local

    return create_dp_placement_groups


def wait_created(ref: GroupRef, warming: Warming) -> Any:
    """Wait until the group is there and return Ray's handle of it. While it is pending, the engine warms up.

    Then the launcher is told that only the group is missing. Raises ValueError when no group has the name and none is
    to come, SystemExit when the group was removed.
    """
    import ray

    group = None
    told = False
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
            warming.end()
            return group
        if state == "REMOVED":
            raise SystemExit(f"placement group {ref.name or ref.id} was removed: this attempt is over")
        if state == "PENDING" and not told:
            warming.begin()
            if told := warming.ready():
                report.send(report.WAITING)
        time.sleep(POLL_SECONDS)
