"""Identity: the engine and its Ray names carry the attempt's instance id, in the attempt's own Ray namespace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_ray_engine.config import EngineConfig


def set_instance_id(original: Callable[..., None], config: EngineConfig) -> Callable[..., None]:
    """Wrap VllmConfig.__post_init__, which gives every config the time of day as its id.

    Copies do not run the hook, so a suffix that vLLM itself appends to a copy for a data-parallel rank stays.
    """

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.instance_id = config.instance_id

    return post_init


def default_namespace(original: Callable[..., Any], config: EngineConfig) -> Callable[..., Any]:
    """Wrap ray.init: without a namespace every driver would get an anonymous one, and names could not be found."""

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("namespace") is None:
            kwargs["namespace"] = config.instance_id
        return original(*args, **kwargs)

    return init
