"""The vLLM general plugin: loaded by vLLM in its API server, engine core and workers.

Inert unless the process belongs to a launcher of ours or asked for the plug-in. Every change to vLLM or Ray stands in
one table, is a wrapper around one function, and is applied once; a function that is not there is an UnsupportedVersion,
never skipped. Where vLLM has the fix itself, the patch steps aside.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_ray_engine import config, versions
from vllm_ray_engine.patches import context, device_memory, identity, placement, spawn, teardown
from vllm_ray_engine.patches.context import Context
from vllm_ray_engine.patches.features import mentions
from vllm_ray_engine.processes import debris, process_tree, signals
from vllm_ray_engine.reasons import UnsupportedVersion
from vllm_ray_engine.standby import warm

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


_NO_CLASSIC = (0, 33)
"""The first vLLM without the classic Ray executor."""
_ISSUE_TEARDOWN = "vllm-project/vllm#45318, #45328 (open)"

PATCHES = (
    # Identity.
    Patch(
        "instance id",
        ("vllm.config.vllm:VllmConfig.__post_init__",),
        identity.set_instance_id,
        "every config overwrites instance_id with the time of day when it is constructed",
    ),
    Patch(
        "instance id of ranks in Ray actors",
        ("vllm.v1.engine.utils:_apply_dp_identity_suffix",),
        identity.name_actor_rank,
        "ranks copied from one config share its id, so their Ray actors have the same names",
        upstream="vllm-project/vllm#40398, #41792 (merged: steps aside)",
        fixed=identity.names_actor_ranks,
    ),
    Patch(
        "instance id of ranks in processes",
        ("vllm.v1.engine.core:EngineCoreProc.run_engine_core",),
        identity.RankedEngineCore,
        "the multiprocess backend gives all ranks the config with the same id",
        fixed=mentions("_apply_dp_identity_suffix"),
    ),
    Patch(
        "engine ids of transfers",
        ("vllm.v1.executor.abstract:Executor.__init__",),
        identity.name_transfers,
        "the ids of KV and encoder cache transfers may be the same for two ranks or attempts",
    ),
    Patch(
        "namespace",
        ("ray:init",),
        identity.default_namespace,
        "vLLM connects without a namespace, so names are neither ours nor to be found",
    ),
    # Placement.
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
        "placement group of the classic executor",
        ("vllm.v1.executor.ray_executor:initialize_ray_cluster",),
        placement.use_launcher_group,
        "it imports initialize_ray_cluster by name",
        until=_NO_CLASSIC,
    ),
    Patch(
        "placement groups of ranks",
        ("vllm.v1.engine.utils:CoreEngineActorManager.create_dp_placement_groups",),
        placement.use_rank_groups,
        "vLLM's data-parallel placement does not wait, knows no slots, and gives its groups fixed names",
    ),
    # Teardown.
    Patch(
        "job of the workers",
        ("vllm.v1.executor.ray_executor_v2:RayExecutorV2._init_executor",),
        teardown.remember_job,
        "handles must be known to belong to a Ray job",
        upstream=_ISSUE_TEARDOWN,
    ),
    Patch(
        "exit of the workers",
        ("vllm.v1.executor.ray_executor_v2:RayExecutorV2._init_executor",),
        teardown.end_before_ray,
        "at the interpreter's exit Ray ends under the executor's monitor thread, which crashes the process",
    ),
    Patch(
        "teardown of the workers",
        ("vllm.v1.executor.ray_executor_v2:RayExecutorV2.shutdown",),
        teardown.spare_foreign("ray_worker_handles"),
        "ray.kill on handles of another Ray job buries the engine's error",
        upstream=_ISSUE_TEARDOWN,
        fixed=mentions("is_initialized", "get_job_id"),
    ),
    Patch(
        "job of the classic executor's workers",
        ("vllm.v1.executor.ray_executor:RayDistributedExecutor._init_executor",),
        teardown.remember_job,
        "handles must be known to belong to a Ray job",
        until=_NO_CLASSIC,
    ),
    Patch(
        "each of the classic executor's workers",
        ("vllm.v1.executor.ray_executor:RayDistributedExecutor.shutdown",),
        teardown.release_each(actors=("workers",)),
        "a worker that cannot be killed would save the others",
        until=_NO_CLASSIC,
    ),
    Patch(
        "teardown of the classic executor",
        ("vllm.v1.executor.ray_executor:RayDistributedExecutor.shutdown",),
        teardown.spare_foreign("workers", "forward_dag"),
        "ray.kill on handles of another Ray job raises, and buries the engine's error",
        until=_NO_CLASSIC,
    ),
    Patch(
        "job of the engine cores",
        ("vllm.v1.engine.utils:CoreEngineActorManager.__init__",),
        teardown.remember_job,
        "handles must be known to belong to a Ray job",
    ),
    Patch(
        "exit of the engine cores",
        ("vllm.v1.engine.utils:CoreEngineActorManager.__init__",),
        teardown.end_before_ray,
        "at the interpreter's exit Ray ends under the manager's monitor thread, which crashes the process",
    ),
    Patch(
        "each of the engine cores",
        ("vllm.v1.engine.utils:CoreEngineActorManager.shutdown",),
        teardown.release_each(
            actors=("local_engine_actors", "remote_engine_actors"), groups=("created_placement_groups",)
        ),
        "an engine core that cannot be killed would save the others, and all groups",
    ),
    Patch(
        "teardown of the engine cores",
        ("vllm.v1.engine.utils:CoreEngineActorManager.shutdown",),
        teardown.spare_foreign("local_engine_actors", "remote_engine_actors", "created_placement_groups"),
        "ray.kill on handles of another Ray job raises, and buries the engine's error",
        fixed=mentions("is_initialized", "get_job_id"),
    ),
    Patch(
        "elastic scale-down",
        ("vllm.v1.engine.utils:CoreEngineActorManager.scale_down_elastic_ep",),
        teardown.only_in_own_job,
        "remove_placement_group would open a new Ray job",
    ),
    # Spawn.
    Patch(
        "end on SIGTERM",
        ("ray:init",),
        signals.keep_sigterm,
        "a driver that connects loses its handler for SIGTERM, by which vLLM finishes the requests in flight",
    ),
    Patch(
        "one connection",
        ("ray:init",),
        spawn.connect_once,
        "a spawned process must find this cluster, and a second ray.init is an error",
    ),
    Patch(
        "no silent connection",
        ("ray._private.auto_init_hook:auto_init_ray", "ray.util.placement_group:auto_init_ray"),
        spawn.never_silently,
        "Ray's functions connect by themselves, as a new Ray job and perhaps to another cluster",
    ),
    Patch(
        "spawn",
        ("vllm.utils.system_utils:_maybe_force_spawn",),
        spawn.force_spawn,
        "a process forked from one that is connected to Ray hangs; one spawned without address finds another cluster",
    ),
    Patch(
        "warm API server",
        ("vllm.v1.engine.utils:wait_for_engine_startup",),
        warm.while_it_waits,
        "the API server imports much only when its engine core is ready, at the cost of a standby's hand-over",
    ),
    Patch(
        "device memory",
        # vllm.v1.worker.gpu_worker takes the name from here when it is imported, after the plugin was applied.
        ("vllm.v1.worker.utils:request_memory",),
        device_memory.wait_until_free,
        "Ray gives accelerators away before the worker that had them has left the device, and this check fails",
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


def places(vllm: tuple[int, int]) -> tuple[str, ...]:
    """Return the names of all functions that are changed in this vLLM release, as `module:path`."""
    return tuple(where for patch in PATCHES if patch.concerns(vllm) for where in patch.where)


def resolve(patches: tuple[Patch, ...], vllm: tuple[int, int]) -> list[_Place]:
    """Import what the patches of this vLLM release concern. Raises UnsupportedVersion when a function is not there."""
    return [_resolve(patch, where) for patch in patches if patch.concerns(vllm) for where in patch.where]


def apply(patches: tuple[Patch, ...], owner: Context, vllm: tuple[int, int]) -> None:
    """Apply all patches that concern this vLLM release, or none when one of them has no place.

    Applying them again changes nothing.
    """
    for place in resolve(patches, vllm):
        place.wrap(owner)


def register() -> None:
    """Entry point of vllm.general_plugins. Raises ConfigError or UnsupportedVersion, which ends the process."""
    owner = context.from_environment()
    if owner is None:
        return
    if config.ENVIRONMENT_VARIABLE in os.environ:
        process_tree.die_with_spawner()
        debris.claim(owner.own_id)
        warm.record()
    apply(PATCHES, owner, versions.release("vllm"))
    spawn.hand_on_cluster()


def enable(instance_id: str) -> Context:
    """Use the plug-in in this process and in all that vLLM starts from it, outside of a launcher.

    To be called in the Ray actor that is going to run the engine, before it makes one; for one engine per process.
    instance_id: names this start of the engine and must never be used again, not even by a restart of the actor. The
    engine uses the actor's placement group, if it has one, and its Ray namespace. Returns what it will go by. Raises
    RuntimeError outside of Ray and UnsupportedVersion.
    """
    owner = context.of_actor(instance_id)
    os.environ[context.ENVIRONMENT_VARIABLE] = owner.as_json()
    register()
    return owner
