"""Placement: the engine uses the launcher's placement group, found by its name in the attempt's namespace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_ray_engine.context import Context


def use_launcher_group(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrap initialize_ray_cluster(parallel_config, ...), which makes a group of its own unless the config holds one."""

    @functools.wraps(original)
    def initialize_ray_cluster(parallel_config: Any, *args: Any, **kwargs: Any) -> Any:
        import ray

        if not ray.is_initialized():
            # The namespace is ours by identity.default_namespace.
            ray.init(address="auto", runtime_env=getattr(parallel_config, "ray_runtime_env", None))
        if context.group is not None:
            parallel_config.placement_group = context.group.find()
        return original(parallel_config, *args, **kwargs)

    return initialize_ray_cluster


def rank_order(bundle_nodes: dict[int, str], driver_node: str) -> list[int]:
    """Return the bundle of each rank, in rank order.

    Ranks of one node are neighbours, so that tensor-parallel groups stay on a node where they fit; the engine's own
    node comes first, the others in the order of their lowest bundle.
    """
    nodes = sorted(dict.fromkeys(bundle_nodes[bundle] for bundle in sorted(bundle_nodes)), key=driver_node.__ne__)
    return sorted(bundle_nodes, key=lambda bundle: (nodes.index(bundle_nodes[bundle]), bundle))
