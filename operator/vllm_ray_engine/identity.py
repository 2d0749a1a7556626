"""Identity: the engine and its Ray names carry the attempt's instance id, in the attempt's own Ray namespace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_ray_engine.context import Context


def set_instance_id(original: Callable[..., None], context: Context) -> Callable[..., None]:
    """Wrap VllmConfig.__post_init__, which gives every config the time of day as its id.

    The id of a rank stays: copies do not run the hook, and `replace`, which does, hands the old id to it.
    """

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        before = self.instance_id
        original(self, *args, **kwargs)
        self.instance_id = before if context.owns(before) else context.own_id

    return post_init


def default_namespace(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrap ray.init: without a namespace every driver would get an anonymous one, and names could not be found."""

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("namespace") is None:
            kwargs["namespace"] = context.namespace
        return original(*args, **kwargs)

    return init
