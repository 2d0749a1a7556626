"""Where the worker was that died: vLLM's log tells its rank, the placement group the node of each rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from vllm_ray_engine import reasons
from vllm_ray_engine.reasons import Cause

_DEAD_RANKS = re.compile(r"RayWorkerProc rank=\[?(\d+(?:, \d+)*)\]? died")
"""What RayExecutorV2's monitor says: "RayWorkerProc rank=[1] died unexpectedly"."""
WITH_THE_NODE = "died with its Ray node: look at that pod and its node"


def name_nodes(cause: Cause, lines: Iterable[str], nodes: tuple[str, ...], dead_nodes: tuple[str, ...] = ()) -> Cause:
    """Return the cause with the nodes of the dead workers named.

    lines: the engine's output; nodes: in the order of the ranks; dead_nodes: those known to be dead. A lost connection
    that took only some of the workers was not that to Ray's head: their node died.
    """
    if cause.reason not in {reasons.WORKER_DIED, reasons.RAY_CONNECTION_LOST}:
        return cause
    if dead_nodes:
        ranks = [rank for rank, node in enumerate(nodes) if node in dead_nodes]
        who = _workers(ranks, nodes) if ranks else f"workers on {', '.join(dead_nodes)}"
        return replace(cause, reason=reasons.WORKER_DIED, message=f"{who} {WITH_THE_NODE}")
    told = next((match for line in (cause.line, *lines) if (match := _DEAD_RANKS.search(line))), None)
    ranks = [rank for rank in map(int, told[1].split(", ")) if rank < len(nodes)] if told else []
    if not ranks:
        return cause
    who = _workers(ranks, nodes)
    if cause.reason == reasons.WORKER_DIED:
        message = f"{who} died without saying why: look for an out-of-memory kill or a lost node"
        return replace(cause, message=message)
    if len(ranks) < len(nodes):
        return replace(cause, reason=reasons.WORKER_DIED, message=f"{who} {WITH_THE_NODE}")
    return cause


def _workers(ranks: Iterable[int], nodes: Sequence[str]) -> str:
    return "the worker of " + ", ".join(f"rank {rank} on {nodes[rank]}" for rank in ranks)
