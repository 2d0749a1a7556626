"""The vLLM general plugin: loaded by vLLM in its API server, engine core and workers.

Inert unless the process belongs to a launcher of ours. Every change to vLLM or Ray stands in one table, is a wrapper
around one function, and is applied once; a function that is not there is an UnsupportedVersion, never skipped.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_ray_engine import identity, placement, process_tree, teardown
from vllm_ray_engine.config import ENVIRONMENT_VARIABLE, EngineConfig, from_environment
from vllm_ray_engine.reasons import UnsupportedVersion

Wrapper = Callable[[Callable[..., Any], EngineConfig], Callable[..., Any]]


@dataclass(frozen=True)
class Patch:
    """One wrapped function: where it is found (all names under which it is called), its wrapper, and why."""

    where: tuple[str, ...]
    wrapper: Wrapper
    why: str


PATCHES = (
    Patch(
        ("vllm.config.vllm:VllmConfig.__post_init__",),
        identity.set_instance_id,
        "every config overwrites instance_id with the time of day when it is constructed",
    ),
    Patch(
        ("ray:init",),
        identity.default_namespace,
        "vLLM connects without a namespace, so names are neither ours nor to be found",
    ),
    Patch(
        (
            "vllm.v1.executor.ray_utils:initialize_ray_cluster",
            "vllm.v1.executor.ray_executor_v2:initialize_ray_cluster",
        ),
        placement.use_launcher_group,
        "vLLM never looks a placement group up by name and would make one of its own",
    ),
    Patch(
        ("vllm.v1.executor.ray_executor_v2:RayExecutorV2._init_executor",),
        teardown.remember_job,
        "handles must be known to belong to a Ray job (vLLM issue 45318)",
    ),
    Patch(
        ("vllm.v1.executor.ray_executor_v2:RayExecutorV2.shutdown",),
        teardown.forget_foreign_handles,
        "ray.kill on handles of another Ray job buries the engine's error (vLLM issue 45318)",
    ),
)

_MARK = "__vllm_ray_engine_patch__"


def _resolve(where: str) -> tuple[Any, str]:
    """Return the object that holds the function, and the attribute. Raises UnsupportedVersion when it is not there."""
    module_name, _, path = where.partition(":")
    *parents, attribute = path.split(".")
    try:
        holder: Any = importlib.import_module(module_name)
        for name in parents:
            holder = getattr(holder, name)
        getattr(holder, attribute)
    except (ImportError, AttributeError) as error:
        raise UnsupportedVersion(
            f"this image's vLLM has no {where} ({error}), which the engine plugin needs: "
            "use a vLLM version that this operator release supports (0.21 and newer)"
        ) from error
    return holder, attribute


def apply(patches: tuple[Patch, ...], config: EngineConfig) -> None:
    """Apply all patches, or none when one of them has no place. Applying them again changes nothing."""
    places = [(patch, _resolve(where)) for patch in patches for where in patch.where]
    for patch, (holder, attribute) in places:
        original = getattr(holder, attribute)
        if getattr(original, _MARK, False):
            continue
        wrapped = patch.wrapper(original, config)
        setattr(wrapped, _MARK, True)
        setattr(holder, attribute, wrapped)


def register() -> None:
    """Entry point of vllm.general_plugins. Raises ConfigError or UnsupportedVersion, which ends the process."""
    if ENVIRONMENT_VARIABLE not in os.environ:
        return
    config = from_environment()
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        process_tree.die_with_parent(parent.pid)
    apply(PATCHES, config)
