"""Where the worker was that died: vLLM's log tells its rank, the placement group the node of each rank."""

from __future__ import annotations

import re
from dataclasses import replace

from vllm_ray_engine import reasons
from vllm_ray_engine.reasons import Cause


def name_nodes(cause: Cause, nodes: tuple[str, ...]) -> Cause:
    """Return the cause with the nodes of the dead workers named; `nodes` in the order of the ranks."""
    if cause.reason != reasons.WORKER_DIED:
        return cause
    # RayExecutorV2's monitor: "RayWorkerProc rank=[1] died unexpectedly".
    told = re.search(r"RayWorkerProc rank=\[?(\d+(?:, \d+)*)", cause.line)
    ranks = [rank for rank in map(int, told[1].split(", ")) if rank < len(nodes)] if told else []
    if not ranks:
        return cause
    who = ", ".join(f"rank {rank} on {nodes[rank]}" for rank in ranks)
    return replace(
        cause, message=f"the worker of {who} died without saying why: look for an out-of-memory kill or a lost node"
    )
