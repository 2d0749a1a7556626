"""Packing: which placement groups an attempt asks Ray for, and whether its workers landed as they should.

A node has room for `acceleratorsPerNode` workers. A tensor-parallel group that fits on a node must be on one, and a
whole rank that fits on a node too; then Ray is asked for a single node (STRICT_PACK). Where a rank needs several nodes,
every bundle asks for so large a share of the node's slot units that no more whole tensor-parallel groups fit than there
is room for: Ray itself then splits none, whatever nodes it takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_ray_engine.config import EngineConfig

_RESOURCE_UNIT = 10_000
"""Ray counts resources in ten-thousandths."""
_CORE_SHARE = 0.001
"""Slot units that the engine core of a rank asks for, so that it stays in the slot."""


@dataclass(frozen=True)
class Group:
    """A placement group: its first bundles are of workers, one accelerator each."""

    name: str
    bundles: tuple[Mapping[str, float], ...]
    strategy: str


def nodes_per_rank(config: EngineConfig) -> int:
    """Return on how many nodes a rank's workers should be."""
    return math.ceil(config.world_size / workers_per_node(config))


def workers_per_node(config: EngineConfig) -> int:
    """Return how many workers of a rank may be on a node: whole tensor-parallel groups, where that needs no more nodes.

    Never more than the node has accelerators.
    """
    room = config.accelerators_per_node
    whole = room - room % config.tensor
    if whole and math.ceil(config.world_size / whole) == math.ceil(config.world_size / room):
        return whole
    return room


def slot_share(config: EngineConfig) -> float:
    """Return how many units of the slot a worker's bundle asks for."""
    units, room = float(config.accelerators_per_node), workers_per_node(config)
    if nodes_per_rank(config) == 1:
        return 1.0
    if config.makes_ranks:
        units -= _CORE_SHARE
    return math.floor(units / room * _RESOURCE_UNIT) / _RESOURCE_UNIT


def groups(config: EngineConfig) -> tuple[Group, ...]:
    """Return the placement groups of this job, one for each of its ranks."""
    worker = {config.accelerator_key: 1.0, config.slot_resource: slot_share(config)}
    bundles = [worker] * config.world_size
    strategy = "STRICT_PACK" if nodes_per_rank(config) == 1 else "PACK"
    if config.makes_ranks:  # vLLM puts the rank's engine core into the bundle after those of its workers
        stays = {} if strategy == "STRICT_PACK" else {config.slot_resource: _CORE_SHARE}
        bundles = [*bundles, {"CPU": 1.0, **stays}]
    return tuple(Group(name, tuple(bundles), strategy) for name in config.group_names)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _needs(config: EngineConfig) -> str:
    nodes = _count(nodes_per_rank(config), "node")
    if len(config.ranks) == 1:
        return f"needs {config.workers} {config.accelerator_key} on {nodes}"
    ranks = _count(len(config.ranks), "rank")
    return f"needs {config.workers} {config.accelerator_key} for {ranks}, each on {nodes}"


def fits(resources: Mapping[str, float], config: EngineConfig) -> int:
    """Return how many workers a node with these resources could hold."""
    slot = resources.get(config.slot_resource, 0) / slot_share(config)
    return int(min(resources.get(config.accelerator_key, 0), slot))


def explain(
    config: EngineConfig, total: Mapping[str, Mapping[str, float]], free: Mapping[str, Mapping[str, float]]
) -> str:
    """Say why placement groups wait, from the total and free resources of the living nodes, by node id."""
    text = f"{_needs(config)} in slot {config.slot_resource}; "
    slot = [node for node, resources in total.items() if resources.get(config.slot_resource, 0) > 0]
    if not slot:
        return text + "no Ray node of this slot has joined the cluster"
    has = [fits(total[node], config) for node in slot]
    available = [fits(free.get(node, {}), config) for node in slot]
    text += f"{sum(available)} free"
    together = min(config.world_size, workers_per_node(config))
    if sum(has) < config.workers:
        return text + f", {sum(has)} in all on {_count(len(slot), 'node')}"
    if max(has) < together:
        return text + f", but the largest node has {max(has)}"
    if sum(available) < config.workers:
        return text + f", {sum(has) - sum(available)} still in use"
    return text + f", but the largest free node has {max(available)}" if max(available) < together else text


def complaint(config: EngineConfig, ranks: Sequence[Sequence[str]]) -> str:
    """Say how the workers of the ranks landed, if not as they should; `ranks` has each worker's node, in rank order."""
    found = []
    may = 1 if workers_per_node(config) % config.tensor == 0 else config.tensor  # else it cannot be helped
    for rank, nodes in zip(config.ranks, ranks, strict=True):
        widest = max(
            len(set(nodes[first : first + config.tensor])) for first in range(0, config.world_size, config.tensor)
        )
        used = len(set(nodes))
        if widest <= may and used <= nodes_per_rank(config):
            continue
        spread = ", ".join(f"{count} on {node}" for node, count in Counter(nodes).items())
        found.append(
            f"rank {rank} is on {_count(used, 'node')} where {nodes_per_rank(config)} would do, a tensor-parallel group"
            f" on up to {widest}: {spread}"
        )
    return "; ".join(found)


def home(bundle_nodes: Mapping[int, str]) -> str:
    """Return the node of a rank's engine core, which is in the last bundle."""
    return bundle_nodes[max(bundle_nodes)]


def by_node(nodes: Sequence[str], first: str) -> list[int]:
    """Return the positions in `nodes`, those of node `first` before the others, and equal ones together.

    This is also the order that vLLM gives a rank's workers in (get_bundles_sorted_by_node).
    """
    return sorted(range(len(nodes)), key=lambda position: (nodes[position] != first, nodes[position], position))
