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
from vllm_ray_engine.config import EngineConfig
from vllm_ray_engine.reasons import EngineFailure

_NO_DATA_PARALLELISM = "data parallelism is not supported yet"
_ONE_JOB = "the operator starts one Ray job per engine and places its workers itself"
_PLAIN_HTTP = "the operator and the Service reach the engine over plain HTTP on spec.engine.port"

OWNED: Mapping[str, str] = MappingProxyType(
    {
        "model": "use spec.model.uri",
        "model_tag": "use spec.model.uri",
        "revision": "use spec.model.revision",
        "served_model_name": "use spec.model.servedName",
        "tensor_parallel_size": "use spec.parallelism.tensor",
        "pipeline_parallel_size": "use spec.parallelism.pipeline",
        "port": "use spec.engine.port",
        "host": "the operator sets it; the port is spec.engine.port",
        "distributed_executor_backend": "the operator runs every engine on Ray",
        "data_parallel_size": _NO_DATA_PARALLELISM,
        "data_parallel_size_local": _NO_DATA_PARALLELISM,
        "data_parallel_rank": _NO_DATA_PARALLELISM,
        "data_parallel_start_rank": _NO_DATA_PARALLELISM,
        "data_parallel_address": _NO_DATA_PARALLELISM,
        "data_parallel_rpc_port": _NO_DATA_PARALLELISM,
        "data_parallel_backend": _NO_DATA_PARALLELISM,
        "data_parallel_hybrid_lb": _NO_DATA_PARALLELISM,
        "data_parallel_external_lb": _NO_DATA_PARALLELISM,
        "data_parallel_multi_port_external_lb": _NO_DATA_PARALLELISM,
        "headless": _ONE_JOB,
        "nnodes": _ONE_JOB,
        "node_rank": _ONE_JOB,
        "master_addr": _ONE_JOB,
        "master_port": _ONE_JOB,
        "ray_workers_use_nsight": _ONE_JOB,
        "middleware": "reserved for the operator's own middleware",
        "uds": _PLAIN_HTTP,
        "grpc": _PLAIN_HTTP,
        "ssl_keyfile": _PLAIN_HTTP,
        "ssl_certfile": _PLAIN_HTTP,
        "ssl_ca_certs": _PLAIN_HTTP,
    }
)
"""Attributes of vLLM's parsed arguments that the user may not set, with what to do instead."""

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
    ]
    if config.revision is not None:
        owned.append(f"--revision={config.revision}")
    return ["serve", config.model, *owned, *config.args]


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
    }


def _refuse(name: str, asked: object) -> EngineFailure:
    flag = "--" + name.replace("_", "-") if name != "model_tag" else "the model argument"
    return EngineFailure(
        reasons.OWNED_ARGUMENT, f"spec.engine.args: {flag} (here {asked!r}) is the operator's: {OWNED[name]}"
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
    for name in OWNED:
        if not hasattr(plain, name):
            continue  # this vLLM has no such argument
        value = getattr(users, name)
        if value != getattr(plain, name) and not (name in ours and value == ours[name]):
            raise _refuse(name, value)
    final = parse(command_line(config))
    for name, value in ours.items():
        if getattr(final, name) != value:
            raise _refuse(name, getattr(final, name))
    return final
