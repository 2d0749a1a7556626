"""The argument list of `vllm serve`, and which arguments are not the user's to give.

The user's list is judged after vLLM's own parser has read it, so abbreviations, underscores, short flags and
`--config` files make no difference.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from vllm_ray_engine import reasons
from vllm_ray_engine.config import EXTERNAL, EngineConfig
from vllm_ray_engine.reasons import EngineFailure

_PODS = "Ray spreads an engine over pods: use spec.parallelism and spec.cluster.workers.acceleratorsPerNode"
_PLAIN_HTTP = "the operator and the Service reach the engine over plain HTTP on spec.engine.port"

OWNED: Mapping[str, str] = MappingProxyType(
    {
        "model": "use spec.model.uri",
        "model_tag": "use spec.model.uri",
        "revision": "use spec.model.revision",
        "served_model_name": "use spec.model.servedName",
        "tensor_parallel_size": "use spec.parallelism.tensor",
        "pipeline_parallel_size": "use spec.parallelism.pipeline",
        "prefill_context_parallel_size": "context parallelism over more accelerators is not supported yet",
        "data_parallel_": "data parallelism is not supported yet; spec.replicas gives independent engines",
        "distributed_executor_backend": "engines always run on Ray",
        "port": "use spec.engine.port",
        "host": "the engine listens on every address of its pod; the port is spec.engine.port",
        "headless": _PODS,
        "nnodes": _PODS,
        "node_rank": _PODS,
        "master_": _PODS,
        "device_ids": "Ray assigns the accelerators: use spec.cluster.workers.acceleratorsPerNode",
        "ray_workers_use_nsight": "the operator places Ray workers without a runtime environment of their own",
        "worker_cls": "the operator needs vLLM's Ray workers; use --worker-extension-cls",
        "uds": _PLAIN_HTTP,
        "grpc": _PLAIN_HTTP,
        "ssl_": _PLAIN_HTTP,
    }
)
"""Attributes of vLLM's parsed arguments that the user may not set, with what to do instead.

A name that ends in _ stands for all that begin with it. Which of them exist depends on vLLM's version.
"""

ABORT_SECONDS = 3
"""Of the stop grace, left for vLLM to end after it aborted what did not finish."""

Parse = Callable[[list[str]], Namespace]

_MODEL_FLAG = re.compile(r"--model(=.*)?", re.DOTALL)


def command_line(config: EngineConfig) -> list[str]:
    """Return what follows `vllm` on the command line: the operator's arguments, then the user's."""
    owned = [
        f"--served-model-name={config.served_name}",
        f"--host={config.host}",
        f"--port={config.port}",
        f"--tensor-parallel-size={config.tensor}",
        f"--pipeline-parallel-size={config.pipeline}",
        "--distributed-executor-backend=ray",
        *(f"--{name.replace('_', '-')}={value}" for name, value in _data_values(config).items()),
        # Of the time that the launcher gives it at its end, to requests in flight; the user may say otherwise.
        f"--shutdown-timeout={max(1, int(config.stop_grace_seconds) - ABORT_SECONDS)}",
    ]
    if config.revision is not None:
        owned.append(f"--revision={config.revision}")
    return ["serve", config.model, *owned, *config.args]


def _data_values(config: EngineConfig) -> dict[str, Any]:
    """Return the values of data parallelism that the operator gives, none without it."""
    if config.data == 1:
        return {}
    if config.data_mode == EXTERNAL:
        return {
            "data_parallel_size": config.data,
            "data_parallel_rank": config.data_rank,
            "data_parallel_address": config.data_address,
            "data_parallel_rpc_port": config.data_rpc_port,
        }
    # Fewer local ranks than ranks: else vLLM takes them all to be on this node, and talks to them over local sockets.
    return {"data_parallel_size": config.data, "data_parallel_size_local": 1, "data_parallel_backend": "ray"}


def _owned_values(config: EngineConfig) -> dict[str, Any]:
    """Return the values that the operator gives; the others of `OWNED` must keep vLLM's defaults."""
    return {
        "model_tag": config.model,
        "revision": config.revision,
        "served_model_name": [config.served_name],
        "host": config.host,
        "port": config.port,
        "tensor_parallel_size": config.tensor,
        "pipeline_parallel_size": config.pipeline,
        "distributed_executor_backend": "ray",
        **_data_values(config),
    }


def _instead(name: str) -> str | None:
    """Return what to do instead of setting this attribute, None when it is the user's."""
    for owned, instead in OWNED.items():
        if name == owned or (owned.endswith("_") and name.startswith(owned)):
            return instead
    return None


def _refuse(name: str, asked: object) -> EngineFailure:
    flag = "--" + name.replace("_", "-") if name != "model_tag" else "the model argument"
    return EngineFailure(
        reasons.OWNED_ARGUMENT, f"spec.engine.args: {flag} (here {asked!r}) is the operator's: {_instead(name)}"
    )


def check(parse: Parse, config: EngineConfig) -> Namespace:
    """Parse the final command line and return the result.

    `parse` is vLLM's parser. The user's arguments are also parsed alone, because a value from a `--config` file would
    otherwise be overridden without a word. A user may repeat an owned argument with the operator's own value.
    Raises EngineFailure(OwnedArgument); the parser itself exits, or raises, on arguments that it does not accept.
    """
    for argument in config.args:
        # vLLM moves this one to the front before it parses, which would end in an error that does not name it.
        if _MODEL_FLAG.fullmatch(argument):
            raise _refuse("model", argument)
    ours = _owned_values(config)
    plain = parse(["serve", config.model])
    users = parse(["serve", config.model, *config.args])
    for name, default in vars(plain).items():
        value = getattr(users, name)
        if value != default and _instead(name) and not (name in ours and value == ours[name]):
            raise _refuse(name, value)
    final = parse(command_line(config))
    for name, value in ours.items():
        if getattr(final, name) != value:
            raise _refuse(name, getattr(final, name))
    return final
