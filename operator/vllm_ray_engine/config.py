"""The engine job's configuration: one JSON value in the job's environment, written by the operator."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

ENVIRONMENT_VARIABLE = "VLLM_RAY_ENGINE_CONFIG"
VERSION = 1
INTERNAL = "Internal"
EXTERNAL = "External"


class ConfigError(ValueError):
    """The configuration is absent or malformed; the message names the field."""


@dataclass(frozen=True)
class EngineConfig:
    """What one attempt runs. Field names are those of the JSON, in Python's spelling.

    instance_id: base id of the attempt; also its Ray namespace and the name of its placement group.
    args: the user's arguments for `vllm serve`, verbatim. startup_timeout_seconds: limits the wait for the placement
    group and, apart from it, the time from the group's creation to the first ready answer. stop_grace_seconds: how long
    the engine may take to end after SIGTERM before it is killed. standby: wait for the placement group without limit.
    data: the number of data-parallel ranks. data_mode: INTERNAL makes all of them in this job, over vLLM's Ray backend;
    with EXTERNAL this job is rank data_rank only, and meets the others at data_address:data_rpc_port.
    probe_period_seconds: after so long without progress under load an engine is asked for a token, which it also has to
    give before it is ready; None asks for none. After probe_failure_threshold failures it is ended.
    """

    instance_id: str
    deployment: str
    replica: int
    attempt: int
    model: str
    served_name: str
    port: int
    control_port: int
    tensor: int
    pipeline: int
    slot_resource: str
    revision: str | None = None
    host: str = "0.0.0.0"  # noqa: S104  the engine serves other pods
    accelerator_key: str = "GPU"
    accelerators_per_node: int = 1
    args: tuple[str, ...] = ()
    startup_timeout_seconds: float = 1800
    stop_grace_seconds: float = 20
    standby: bool = False
    data: int = 1
    data_mode: str = INTERNAL
    data_rank: int | None = None
    data_address: str | None = None
    data_rpc_port: int | None = None
    probe_period_seconds: float | None = None
    probe_timeout_seconds: float = 60
    probe_failure_threshold: int = 2

    @property
    def world_size(self) -> int:
        """Return the number of workers of a rank, each with one accelerator."""
        return self.tensor * self.pipeline

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the data-parallel ranks that this job runs."""
        return tuple(range(self.data)) if self.data_rank is None else (self.data_rank,)

    @property
    def workers(self) -> int:
        """Return the number of workers of this job."""
        return len(self.ranks) * self.world_size

    def rank_id(self, rank: int) -> str:
        """Return the instance id of a rank: the suffix is the one that vLLM itself appends."""
        return self.instance_id if self.data == 1 else f"{self.instance_id}_dp{rank}"

    @property
    def makes_ranks(self) -> bool:
        """Return whether vLLM makes several ranks in this job, over its Ray backend."""
        return len(self.ranks) > 1

    @property
    def group_names(self) -> tuple[str, ...]:
        """Return the names of the job's placement groups, one for each rank.

        Unique on the whole Ray cluster: its State API tells no namespace. Where there are several, which rank uses
        which is decided when they are placed.
        """
        if self.makes_ranks:
            return tuple(f"{self.instance_id}_group{number}" for number in range(self.data))
        return (self.engine_id,)

    @property
    def engine_id(self) -> str:
        """Return the instance id that vLLM is given: where it makes the ranks itself, it derives theirs from it."""
        return self.instance_id if self.data_rank is None else self.rank_id(self.data_rank)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError("must be a string that is not empty")
    return value


def _optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError("must be true or false")
    return value


def _mode(value: Any) -> str:
    if value not in (INTERNAL, EXTERNAL):
        raise ConfigError(f"must be {INTERNAL} or {EXTERNAL}")
    return str(value)


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"must be an integer from {low} to {high}")
        return value

    return check


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError("must be a positive number of seconds")
    return float(value)


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError("must be a list of strings")
    return tuple(value)


_PORT = _integer(1, 65535)
_COUNT = _integer(0, 2**53)
_SIZE = _integer(1, 4096)

_PARSERS: dict[str, Callable[[Any], Any]] = {
    "instance_id": _text,
    "deployment": _text,
    "replica": _COUNT,
    "attempt": _COUNT,
    "model": _text,
    "revision": _optional(_text),
    "served_name": _text,
    "host": _text,
    "port": _PORT,
    "control_port": _PORT,
    "tensor": _SIZE,
    "pipeline": _SIZE,
    "accelerator_key": _text,
    "accelerators_per_node": _SIZE,
    "slot_resource": _text,
    "args": _texts,
    "startup_timeout_seconds": _seconds,
    "stop_grace_seconds": _seconds,
    "standby": _truth,
    "data": _SIZE,
    "data_mode": _mode,
    "data_rank": _optional(_COUNT),
    "data_address": _optional(_text),
    "data_rpc_port": _optional(_PORT),
    "probe_period_seconds": _optional(_seconds),
    "probe_timeout_seconds": _seconds,
    "probe_failure_threshold": _SIZE,
}


def _json_name(field: str) -> str:
    first, *rest = field.split("_")
    return first + "".join(part.capitalize() for part in rest)


def parse(text: str) -> EngineConfig:
    """Parse the JSON text strictly.

    Raises ConfigError, naming the field, for anything missing, unknown or of the wrong type: operator and launcher are
    released together, so a field that one of them does not know is a mistake and not a newer version.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} must be a JSON object")
    if data.pop("version", None) != VERSION:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}: version must be {VERSION}")
    values: dict[str, Any] = {}
    for field in fields(EngineConfig):
        name = _json_name(field.name)
        if name not in data:
            if field.default is MISSING:
                raise ConfigError(f"{ENVIRONMENT_VARIABLE}: {name} is missing")
            continue
        try:
            values[field.name] = _PARSERS[field.name](data.pop(name))
        except ConfigError as error:
            raise ConfigError(f"{ENVIRONMENT_VARIABLE}: {name} {error}") from None
    if data:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}: unknown field {', '.join(sorted(data))}")
    config = EngineConfig(**values)
    if config.port == config.control_port:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}: controlPort must differ from port")
    _check_data(config)
    return config


def _check_data(config: EngineConfig) -> None:
    given = (config.data_rank, config.data_address, config.data_rpc_port)
    if config.data_mode == INTERNAL:
        if given != (None, None, None):
            raise ConfigError(f"{ENVIRONMENT_VARIABLE}: dataRank, dataAddress and dataRpcPort need dataMode {EXTERNAL}")
    elif config.data == 1 or config.data_rank is None or None in given or config.data_rank >= config.data:
        raise ConfigError(
            f"{ENVIRONMENT_VARIABLE}: dataMode {EXTERNAL} needs data above 1, dataRank below it, dataAddress and"
            " dataRpcPort"
        )


def from_environment(environment: Mapping[str, str] = os.environ) -> EngineConfig:
    """Return the configuration of this process's attempt. Raises ConfigError, also when there is none."""
    if ENVIRONMENT_VARIABLE not in environment:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} is not set")
    return parse(environment[ENVIRONMENT_VARIABLE])
