"""The vLLM general plugin: loaded by vLLM in its API server, engine core and workers.

Inert unless the process belongs to a launcher of ours or asked for the plug-in. Every change to vLLM or Ray stands in
one table, is a wrapper around one function, and is applied once; a function that is not there is an UnsupportedVersion,
never skipped. Where vLLM has the fix itself, the patch steps aside.
"""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_ray_engine import config, context, debris, identity, placement, process_tree, teardown, versions
from vllm_ray_engine.context import Context
from vllm_ray_engine.reasons import UnsupportedVersion

Function = Callable[..., Any]
Wrapper = Callable[[Function, Context], Function]


def _never(_original: Function) -> bool:
    return False


@dataclass(frozen=True)
class Patch:
    """One change: one function of vLLM or Ray, wrapped.

    what: its name, once in the table. where: all names under which the function is called, `module:path`. wrapper: gets
    the original and the context. why: the fault. upstream: issue or pull request, empty when there is none. since,
    until: the vLLM releases that have the function, `until` being the first without it. fixed: tells from the original
    function that vLLM does it by itself.
    """

    what: str
    where: tuple[str, ...]
    wrapper: Wrapper
    why: str
    upstream: str = ""
    since: tuple[int, int] = versions.MINIMUM["vllm"]
    until: tuple[int, int] | None = None
    fixed: Callable[[Function], bool] = _never

    def concerns(self, vllm: tuple[int, int]) -> bool:
        """Return whether this vLLM release has the function."""
        return self.since <= vllm and (self.until is None or vllm < self.until)


PATCHES = (
    Patch(
        "instance id",
        ("vllm.config.vllm:VllmConfig.__post_init__",),
        identity.set_instance_id,
        "every config overwrites instance_id with the time of day when it is constructed",
    ),
    Patch(
        "namespace",
        ("ray:init",),
        identity.default_namespace,
        "vLLM connects without a namespace, so names are neither ours nor to be found",
    ),
    Patch(
        "placement group",
        (
            "vllm.v1.executor.ray_utils:initialize_ray_cluster",
            "vllm.v1.executor.ray_executor_v2:initialize_ray_cluster",
        ),
        placement.use_launcher_group,
        "vLLM never looks a placement group up by name and would make one of its own",
    ),
    Patch(
        "job of the workers",
        ("vllm.v1.executor.ray_executor_v2:RayExecutorV2._init_executor",),
        teardown.remember_job,
        "handles must be known to belong to a Ray job",
        upstream="vllm-project/vllm#45318",
    ),
    Patch(
        "teardown of the workers",
        ("vllm.v1.executor.ray_executor_v2:RayExecutorV2.shutdown",),
        teardown.forget_foreign_handles,
        "ray.kill on handles of another Ray job buries the engine's error",
        upstream="vllm-project/vllm#45318",
    ),
)

_APPLIED = "__vllm_ray_engine_patches__"
"""Attribute of a wrapped function: the names of the patches in it."""


@dataclass(frozen=True)
class _Place:
    """One name of a function, resolved."""

    patch: Patch
    holder: Any
    attribute: str

    @property
    def function(self) -> Function:
        function: Function = getattr(self.holder, self.attribute)
        return function

    def wrap(self, owner: Context) -> None:
        applied: frozenset[str] = getattr(self.function, _APPLIED, frozenset())
        if self.patch.what in applied or self.patch.fixed(self.function):
            return
        wrapped = self.patch.wrapper(self.function, owner)
        setattr(wrapped, _APPLIED, applied | {self.patch.what})
        static = isinstance(inspect.getattr_static(self.holder, self.attribute), staticmethod)
        setattr(self.holder, self.attribute, staticmethod(wrapped) if static else wrapped)


def _resolve(patch: Patch, where: str) -> _Place:
    """Find the object that holds the function. Raises UnsupportedVersion when it is not there."""
    module_name, _, path = where.partition(":")
    *parents, attribute = path.split(".")
    try:
        holder: Any = importlib.import_module(module_name)
        for name in parents:
            holder = getattr(holder, name)
        getattr(holder, attribute)
    except (ImportError, AttributeError) as error:
        raise UnsupportedVersion(
            f"this image's vLLM has no {where} ({error}), which the engine plugin needs ({patch.what}): "
            "use a vLLM version that this operator release supports (0.21 and newer)"
        ) from error
    return _Place(patch, holder, attribute)


def apply(patches: tuple[Patch, ...], owner: Context, vllm: tuple[int, int]) -> None:
    """Apply all patches that concern this vLLM release, or none when one of them has no place.

    Applying them again changes nothing.
    """
    places = [_resolve(patch, where) for patch in patches if patch.concerns(vllm) for where in patch.where]
    for place in places:
        place.wrap(owner)


def register() -> None:
    """Entry point of vllm.general_plugins. Raises ConfigError or UnsupportedVersion, which ends the process."""
    owner = context.from_environment()
    if owner is None:
        return
    if config.ENVIRONMENT_VARIABLE in os.environ:
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            process_tree.die_with_parent(parent.pid)
        debris.claim(owner.instance_id)
    apply(PATCHES, owner, versions.release("vllm"))
