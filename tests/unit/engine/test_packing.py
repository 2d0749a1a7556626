"""Which placement groups are asked for, why they wait, how they landed; as tables of named cases."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ray_engine.launcher import packing
from vllm_ray_engine.launcher.cluster import landed, owned_actors
from vllm_ray_engine.launcher.packing import by_node

from .conftest import DATA, configure

BASE = DATA["instanceId"]
EXTERNAL = {"dataMode": "External", "dataRank": 1, "dataAddress": "10.0.0.1", "dataRpcPort": 9100}


def shape(tensor: int, pipeline: int, per_node: int, **more: Any) -> dict[str, Any]:
    return {"tensor": tensor, "pipeline": pipeline, "acceleratorsPerNode": per_node, **more}


# configuration: strategy, nodes of a rank, workers that a node holds, slot units of a worker
PACKED: dict[str, tuple[dict[str, Any], tuple[str, int, int, float]]] = {
    "one worker": (shape(1, 1, 8), ("STRICT_PACK", 1, 8, 1.0)),
    "a part of a node": (shape(4, 1, 8), ("STRICT_PACK", 1, 8, 1.0)),
    "a whole node": (shape(4, 2, 8), ("STRICT_PACK", 1, 8, 1.0)),
    "odd groups on one node": (shape(3, 2, 8), ("STRICT_PACK", 1, 6, 1.0)),
    "two whole nodes": (shape(8, 2, 8), ("PACK", 2, 8, 1.0)),
    "a group wider than a node": (shape(16, 1, 8), ("PACK", 2, 8, 1.0)),
    "one accelerator on each node": (shape(2, 2, 1), ("PACK", 4, 1, 1.0)),
    "no group is split": (shape(3, 2, 4), ("PACK", 2, 3, 1.3333)),
    "two groups to a node": (shape(3, 4, 8), ("PACK", 2, 6, 1.3333)),
    "whole groups would need more nodes": (shape(5, 3, 8), ("PACK", 2, 8, 1.0)),
    "ranks that span nodes leave room for their core": (shape(8, 2, 8, data=2), ("PACK", 2, 8, 0.9998)),
    "ranks within a node": (shape(2, 1, 8, data=4), ("STRICT_PACK", 1, 8, 1.0)),
}


@pytest.mark.parametrize("name", PACKED)
def test_packing(name: str) -> None:
    changes, expected = PACKED[name]
    config = configure(**changes)
    strategies = {group.strategy for group in packing.groups(config)}
    assert strategies == {expected[0]}
    assert (packing.nodes_per_rank(config), packing.workers_per_node(config)) == expected[1:3]
    assert packing.slot_share(config) == expected[3]


@pytest.mark.parametrize("name", PACKED)
def test_a_node_holds_no_more_workers_than_it_should(name: str) -> None:
    config = configure(**PACKED[name][0])
    room, share = packing.workers_per_node(config), packing.slot_share(config)
    node = {"GPU": float(config.accelerators_per_node), "vd-slot-0": float(config.accelerators_per_node)}
    core = 0.001 if config.makes_ranks and config.world_size > room else 0
    assert room * share + core <= node["vd-slot-0"]
    if packing.nodes_per_rank(config) > 1:
        assert packing.fits(node, config) == room


def test_group_of_one_rank() -> None:
    (group,) = packing.groups(configure())
    assert (group.name, group.bundles) == (BASE, ({"GPU": 1.0, "vd-slot-0": 1.0},) * 2)
    (group,) = packing.groups(configure(data=3, **EXTERNAL))
    assert (group.name, group.bundles) == (f"{BASE}_dp1", ({"GPU": 1.0, "vd-slot-0": 1.0},) * 2)


def test_groups_of_ranks_hold_a_bundle_for_the_engine_core() -> None:
    groups = packing.groups(configure(data=2, acceleratorsPerNode=2))
    assert [group.name for group in groups] == [f"{BASE}_group0", f"{BASE}_group1"]
    assert [dict(bundle) for bundle in groups[0].bundles] == [{"GPU": 1.0, "vd-slot-0": 1.0}] * 2 + [{"CPU": 1.0}]
    groups = packing.groups(configure(data=2, acceleratorsPerNode=1))
    assert dict(groups[1].bundles[2]) == {"CPU": 1.0, "vd-slot-0": 0.001}


FOUR = {"GPU": 4.0, "vd-slot-0": 4.0, "CPU": 8.0}
TWO = {"GPU": 2.0, "vd-slot-0": 2.0}
OTHER = {"GPU": 8.0, "vd-slot-1": 8.0}
Nodes = dict[str, dict[str, float]]
EXPLAINED: dict[str, tuple[dict[str, Any], Nodes, Nodes, str]] = {
    "no node of the slot": (
        shape(4, 1, 4), {"a": OTHER}, {"a": OTHER},
        "needs 4 GPU on 1 node in slot vd-slot-0; no Ray node of this slot has joined the cluster",
    ),
    "too few in all": (
        shape(4, 1, 2), {"a": TWO}, {"a": TWO},
        "needs 4 GPU on 2 nodes in slot vd-slot-0; 2 free, 2 in all on 1 node",
    ),
    "too few on several": (
        shape(8, 1, 4), {"a": FOUR, "b": TWO}, {"a": FOUR},
        "needs 8 GPU on 2 nodes in slot vd-slot-0; 4 free, 6 in all on 2 nodes",
    ),
    "in use": (
        shape(8, 1, 4), {"a": FOUR, "b": FOUR}, {"a": FOUR, "b": {}},
        "needs 8 GPU on 2 nodes in slot vd-slot-0; 4 free, 4 still in use",
    ),
    "enough, but on no one node": (
        shape(8, 1, 8), {"a": FOUR, "b": FOUR}, {"a": FOUR, "b": FOUR},
        "needs 8 GPU on 1 node in slot vd-slot-0; 8 free, but the largest node has 4",
    ),
    "enough is free, but on no one node": (
        shape(4, 1, 4), {"a": FOUR, "b": FOUR}, {"a": TWO, "b": TWO},
        "needs 4 GPU on 1 node in slot vd-slot-0; 4 free, but the largest free node has 2",
    ),
    "another's accelerators do not count": (
        shape(4, 1, 4), {"a": TWO, "b": OTHER}, {"a": {}, "b": OTHER},
        "needs 4 GPU on 1 node in slot vd-slot-0; 0 free, 2 in all on 1 node",
    ),
    "ranks": (
        shape(2, 1, 4, data=4), {"a": FOUR}, {"a": FOUR},
        "needs 8 GPU for 4 ranks, each on 1 node in slot vd-slot-0; 4 free, 4 in all on 1 node",
    ),
    "about to be placed": (
        shape(4, 1, 4), {"a": FOUR}, {"a": FOUR}, "needs 4 GPU on 1 node in slot vd-slot-0; 4 free",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPLAINED)
def test_explain(name: str) -> None:
    changes, total, free, expected = EXPLAINED[name]
    assert packing.explain(configure(**changes), total, free) == expected


LANDED: dict[str, tuple[dict[str, Any], list[list[str]], str]] = {
    "as it should": (shape(2, 2, 2), [["a", "a", "b", "b"]], ""),
    "as it must": (shape(5, 3, 8), [["a"] * 8 + ["b"] * 7], ""),
    "a group that is wider than a node": (shape(4, 1, 2), [["a", "a", "b", "b"]], ""),
    "one node too many": (
        shape(2, 2, 2),
        [["a", "a", "b", "c"]],
        "rank 0 is on 3 nodes where 2 would do, a tensor-parallel group on up to 2: 2 on a, 1 on b, 1 on c",
    ),
    "a group that is split": (
        shape(2, 3, 4),
        [["a", "a", "a", "b", "b", "b"]],
        "rank 0 is on 2 nodes where 2 would do, a tensor-parallel group on up to 2: 3 on a, 3 on b",
    ),
    "one rank of two": (
        shape(2, 1, 2, data=2),
        [["a", "a"], ["b", "c"]],
        "rank 1 is on 2 nodes where 1 would do, a tensor-parallel group on up to 2: 1 on b, 1 on c",
    ),
}


@pytest.mark.parametrize("name", LANDED)
def test_complaint(name: str) -> None:
    changes, nodes, expected = LANDED[name]
    assert packing.complaint(configure(**changes), nodes) == expected


ORDERS = {
    "one node": (["a", "a"], "a", [0, 1]),
    "the engine's node comes first": (["a", "b"], "b", [1, 0]),
    "those of a node are neighbours": (["a", "b", "a", "b"], "a", [0, 2, 1, 3]),
    "none on the engine's node": (["c", "b", "c", "b"], "a", [1, 3, 0, 2]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_order_by_node(name: str) -> None:
    nodes, first, expected = ORDERS[name]
    assert by_node(nodes, first) == expected


def test_where_the_workers_of_ranks_are() -> None:
    assert landed(configure(), [{1: "a", 0: "b"}], "a") == (("a", "b"),)
    # Three groups of two workers and a core each; the ranks are dealt out by the cores' nodes.
    bundle_nodes = [{0: "b", 1: "b", 2: "b"}, {0: "c", 1: "a", 2: "a"}, {0: "b", 1: "a", 2: "b"}]
    ranks = landed(configure(data=3), bundle_nodes, "a")
    assert ranks == (("a", "c"), ("b", "b"), ("b", "a"))


def test_whose_actors_are_counted() -> None:
    names = [f"vllm_Worker_{BASE}_dp{rank}_TP{i}" for rank in (1, 12) for i in (0, 1)] + ["somebody-else"]
    assert owned_actors(configure(data=20), names) == 4
    assert owned_actors(configure(data=20, **EXTERNAL), names) == 2
    assert owned_actors(configure(), [f"vllm_Worker_{BASE}"]) == 1
