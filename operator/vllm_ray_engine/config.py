"""The engine job's configuration: one JSON value in the job's environment, written by the operator."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

ENVIRONMENT_VARIABLE = "VLLM_RAY_ENGINE_CONFIG"
VERSION = 1


class ConfigError(ValueError):
    """The configuration is absent or malformed; the message names the field."""


@dataclass(frozen=True)
class EngineConfig:
    """What one attempt runs. Field names are those of the JSON, in Python's spelling.

    instance_id: base id of the attempt; also its Ray namespace and the name of its placement group.
    args: the user's arguments for `vllm serve`, verbatim. startup_timeout_seconds: limits the wait for the placement
    group and, apart from it, the time from the start of vLLM to the first ready answer. stop_grace_seconds: how long
    the engine may take to end after SIGTERM before it is killed.
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

    @property
    def world_size(self) -> int:
        """Return the number of workers, each with one accelerator."""
        return self.tensor * self.pipeline

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Return the placement group's bundles: one accelerator and one unit of the replica's slot per worker."""
        return [{self.accelerator_key: 1.0, self.slot_resource: 1.0} for _ in range(self.world_size)]


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError("must be a string that is not empty")
    return value


def _optional_text(value: Any) -> str | None:
    return None if value is None else _text(value)


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
    "revision": _optional_text,
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
    return config


def from_environment(environment: Mapping[str, str] = os.environ) -> EngineConfig:
    """Return the configuration of this process's attempt. Raises ConfigError, also when there is none."""
    if ENVIRONMENT_VARIABLE not in environment:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} is not set")
    return parse(environment[ENVIRONMENT_VARIABLE])
