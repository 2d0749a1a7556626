"""Prestarted workers: Ray worker processes that are started, and have imported vLLM, before their actors exist.

A raylet starts workers ahead of demand when it is asked to (NodeManagerService.PrestartWorkers, internal to Ray), and
gives an actor one of them if job and runtime environment are exactly the same. They hold no accelerator: Ray assigns
devices to the actor, not to the process. They end with the Ray job that they were started for.

Only an optimisation: whatever is not as expected is logged once, and the workers start cold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ray_engine import versions
from vllm_ray_engine.log import say

KNOWN_RAY = ((2, 52), (2, 60))
"""The first and the last version of Ray with which reuse of prestarted workers was seen to work."""

KEEP_SECONDS = 30 * 24 * 3600
"""How long Ray keeps an idle worker of ours; it goes earlier with its job."""

CALL_SECONDS = 10.0

_FIELDS = frozenset({"language", "job_id", "runtime_env_info", "keep_alive_duration_secs", "num_workers"})


class NotPossible(Exception):
    """This Ray cannot be asked for workers; the message says why."""


@dataclass(frozen=True)
class Node:
    """A node's raylet and how many workers to ask it for."""

    address: str
    workers: int


def prestart(resources: Mapping[str, float], workers: int, runtime_env: Mapping[str, Any]) -> int:
    """Ask for workers for actors of this driver's job, and return how many; never raises.

    resources: what one actor asks for, by which the nodes are found. workers: how many actors there will be in all.
    runtime_env: that of the actors. Ray must be initialised.
    """
    try:
        _check_version(versions.installed("ray"))
        import ray

        nodes = choose(ray.nodes(), resources, workers)
        _ask(nodes, ray.get_runtime_context(), runtime_env)
    except Exception as error:  # an optimisation must not end an engine, whatever Ray changed
        say(f"workers are not prestarted and start cold: {error}")
        return 0
    return sum(node.workers for node in nodes)


def _check_version(version: str | None) -> None:
    first, last = KNOWN_RAY
    if not first <= versions.parse(version) <= last:
        known = " to ".join(".".join(map(str, known)) for known in KNOWN_RAY)
        raise NotPossible(f"known to work with Ray {known}, this is {version}")


def choose(nodes: Sequence[Mapping[str, Any]], resources: Mapping[str, float], workers: int) -> list[Node]:
    """Return the living nodes that could hold actors, each with as many as it could; `nodes` are as ray.nodes() says.

    Where the group will be placed is not known yet, so there may be more workers than actors.
    """
    chosen = []
    for node in nodes:
        total = node["Resources"] if node["Alive"] else {}
        room = min(int(total.get(name, 0) / need) for name, need in resources.items())
        if room:
            chosen.append(Node(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}", min(room, workers)))
    return chosen


def merged_environment(job: str, actor: Mapping[str, Any]) -> str:
    """Return an actor's runtime environment as Ray writes it, from its job's; Ray compares the text.

    As in CoreWorker::OverrideTaskOrActorRuntimeEnvInfo: without a field of its own an actor has its job's, unchanged.
    Otherwise its fields replace those of the job, environment variables one by one, and the result is written with
    sorted keys, without spaces, in UTF-8.
    """
    own = {name: value for name, value in actor.items() if value}
    if not own:
        return job
    merged = json.loads(job or "{}")
    if "env_vars" in own:
        own["env_vars"] = {**merged.get("env_vars", {}), **own["env_vars"]}
    return json.dumps({**merged, **own}, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _ask(nodes: Sequence[Node], context: Any, runtime_env: Mapping[str, Any]) -> None:
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.utils import get_runtime_env_info
    from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc
    from ray.runtime_env import RuntimeEnv

    absent = _FIELDS - set(node_manager_pb2.PrestartWorkersRequest.DESCRIPTOR.fields_by_name)
    if absent:
        raise NotPossible(f"PrestartWorkersRequest has no {', '.join(sorted(absent))}")
    serialized = merged_environment(context.get_runtime_env_string(), runtime_env)
    info = get_runtime_env_info(RuntimeEnv.deserialize(serialized))
    info.serialized_runtime_env = serialized
    channels, calls = [], []
    try:
        for node in nodes:
            request = node_manager_pb2.PrestartWorkersRequest(
                language=common_pb2.Language.PYTHON,
                job_id=bytes.fromhex(context.get_job_id()),
                runtime_env_info=info,
                keep_alive_duration_secs=KEEP_SECONDS,
                num_workers=node.workers,
            )
            # Ray's own channel knows of token authentication and TLS.
            channels.append(init_grpc_channel(node.address))
            stub = node_manager_pb2_grpc.NodeManagerServiceStub(channels[-1])
            calls.append(stub.PrestartWorkers.future(request, timeout=CALL_SECONDS))
        for call in calls:
            call.result()
    finally:
        for channel in channels:
            channel.close()
