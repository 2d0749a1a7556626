"""Identity: every process of a rank carries one instance id, ours, in the attempt's own Ray namespace.

vLLM makes ids in four ways, and each needs its own place: a config gets the time of day when it is constructed; ranks
that Ray actors run get a suffix from a helper; ranks that processes run get none; and the engine ids of KV and encoder
cache transfers are made apart from it, by rules that differ between releases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm_ray_engine.patches.context import Context


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


def name_actor_rank(original: Callable[..., None], context: Context) -> Callable[..., None]:
    """Wrap _apply_dp_identity_suffix(config, rank), by which the Ray backend names a rank, also a scaled-up one."""

    @functools.wraps(original)
    def apply_suffix(dp_vllm_config: Any, dp_rank: int) -> None:
        original(dp_vllm_config, dp_rank)
        dp_vllm_config.instance_id = context.of_rank(dp_rank)

    return apply_suffix


def names_actor_ranks(original: Callable[..., None]) -> bool:
    """Return whether _apply_dp_identity_suffix makes the id of a rank as we do."""
    probe = SimpleNamespace(instance_id="a", kv_transfer_config=None)
    original(probe, 3)
    return bool(probe.instance_id == "a_dp3")


class RankedEngineCore:
    """Wraps EngineCoreProc.run_engine_core, the target of the processes that the multiprocess backend starts.

    A spawned process unpickles its target before it loads any plug-in, and would find vLLM's own function by its name;
    so this is pickled as a call that wraps it again over there.
    """

    def __init__(self, original: Callable[..., None], context: Context) -> None:
        self._original = original
        self._context = context

    def __reduce__(self) -> tuple[Callable[[Context], RankedEngineCore], tuple[Context]]:
        return _in_spawned_process, (self._context,)

    def __call__(self, *args: Any, dp_rank: int = 0, **kwargs: Any) -> None:
        """Name the config of a rank, in this process of its own, and run the engine core."""
        config = kwargs["vllm_config"]
        if config.parallel_config.data_parallel_size > 1 or dp_rank > 0:
            config.instance_id = self._context.of_rank(dp_rank)
        self._original(*args, dp_rank=dp_rank, **kwargs)


def _in_spawned_process(context: Context) -> RankedEngineCore:
    from vllm.v1.engine.core import EngineCoreProc

    return RankedEngineCore(EngineCoreProc.run_engine_core, context)


def name_transfers(original: Callable[..., None], _context: Context) -> Callable[..., None]:
    """Wrap Executor.__init__: the engine ids of KV and encoder cache transfers are the instance id.

    Here the rank is known in every layout and nobody has used the ids yet. vLLM's own are random or the user's, so the
    same for all ranks and attempts, and get a suffix only in places (0.21: the node-local rank in processes).
    """

    @functools.wraps(original)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("kv_transfer_config", "ec_transfer_config"):
            if (transfer := getattr(vllm_config, name, None)) is not None:
                transfer.engine_id = vllm_config.instance_id
        original(self, vllm_config, *args, **kwargs)

    return init


def default_namespace(original: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """Wrap ray.init: without a namespace every driver would get an anonymous one, and names could not be found."""

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("namespace") is None:
            kwargs["namespace"] = context.namespace
        return original(*args, **kwargs)

    return init
