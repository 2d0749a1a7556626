"""Warm standbys: a standby attempt does all imports while it waits for its accelerators.

Three kinds of processes take part. The API server and the engine core import what those of an earlier attempt had
imported in the end, and so do the workers, which are prestarted for it and do it in Ray's set-up hook. Each then
freezes its objects: the collections that vLLM makes while it loads a model would go through all of them each time.

Only a standby is warmed, so nothing of this is in the way of an attempt that has its accelerators. All of it is an
optimisation: what fails is logged, and the start is a cold one. Only a process in which an import initialised the
accelerator ends: it would hold memory of a device that another attempt uses, for as long as it lives.
"""

from __future__ import annotations

import functools
import gc
import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from vllm_ray_engine import config
from vllm_ray_engine.config import EngineConfig
from vllm_ray_engine.log import say
from vllm_ray_engine.processes import debris
from vllm_ray_engine.standby import imports, prestart

HOOK = "vllm_ray_engine.standby.warm.worker"
"""The set-up hook's name, as Ray imports it."""

SWITCH = "VLLM_RAY_WARM_STANDBY"
"""Environment variable: with 0 nothing is warmed, which saves the memory of the waiting workers."""

READY_SECONDS = 120.0
"""How long workers that were asked for are waited for before the standby counts as ready without them, at most."""

_SHARE = 0.25
"""Of an attempt's start-up time-out that each part of warming may take at most: it must not be why the time is over."""

WORKER = "worker"
_WORKER_IMPORTS = "vllm.v1.executor.ray_executor_v2"
"""What every worker imports first, to know its actor's class."""

_ALL = "*"
"""Banned for workers when not even that can be imported without touching the device."""


def wanted() -> EngineConfig | None:
    """Return the configuration of this process's attempt if it is to be warmed, else None."""
    if config.ENVIRONMENT_VARIABLE not in os.environ or os.environ.get(SWITCH) == "0":
        return None
    launched = config.from_environment()
    return launched if launched.standby else None


def _limit(seconds: float) -> float:
    """Return how much of these seconds a standby can spare."""
    launched = wanted()
    return seconds if launched is None else min(seconds, launched.startup_timeout_seconds * _SHARE)


def kind() -> str:
    """Return the kind of this process: a worker, or what vLLM calls it, without its number."""
    if debris.in_ray_worker():
        return WORKER
    return multiprocessing.current_process().name.partition("_")[0]


def record() -> None:
    """Begin to note what this process imports, for the standbys to come; called in every process of an attempt."""
    if os.environ.get(SWITCH) != "0":
        imports.record_from_now_on(kind())


def warm_up(process: str) -> None:
    """Import what is known of this kind of process, and freeze. Raises imports.DeviceTouched."""
    started = time.monotonic()
    done, failed = imports.replay(process, _limit(imports.REPLAY_SECONDS))
    gc.collect()
    gc.freeze()
    say(f"warmed {process}: {done} modules imported, {failed} failed, {time.monotonic() - started:.1f} s")


def while_it_waits(original: Callable[..., Any], _context: Any) -> Callable[..., Any]:
    """Wrap wait_for_engine_startup, in which the API server waits until the engine core is ready: warm up first.

    It raises imports.DeviceTouched, which ends the process.
    """

    @functools.wraps(original)
    def wait_for_engine_startup(*args: Any, **kwargs: Any) -> Any:
        if wanted():
            try:
                warm_up(kind())
            except imports.DeviceTouched as error:
                say(f"the API server ends: {error}")
                raise
            except Exception as error:  # an optimisation must not end an engine
                say(f"the API server is not warmed: {error}")
        return original(*args, **kwargs)

    return wait_for_engine_startup


def hooked(runtime_env: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a Ray job's runtime environment with the set-up hook for its workers, unchanged if there is to be none.

    The engine core opens its own Ray job with it. In the submission's runtime environment it would also be that of the
    launcher's Ray job.
    """
    return {"worker_process_setup_hook": HOOK, **(runtime_env or {})} if wanted() else runtime_env


class Warming:
    """Warms an engine core and the workers that it will have, while its placement group is pending."""

    def __init__(self, parallel_config: Any) -> None:
        self._parallel_config = parallel_config
        self._started: float | None = None
        self._workers = 0

    def begin(self) -> None:
        """Ask for the workers, which get ready on their nodes, then warm up this process. Once.

        Raises imports.DeviceTouched, which ends the process, and nothing else.
        """
        launched = wanted()
        if self._started is not None or launched is None:
            return
        self._started = time.monotonic()
        try:
            if _hooked_job():
                resources = {launched.accelerator_key: 1.0, launched.slot_resource: 1.0}
                runtime_env = _actor_environment(self._parallel_config)
                self._workers = prestart.prestart(resources, launched.world_size, runtime_env)
            warm_up(kind())
        except imports.DeviceTouched as error:
            say(f"the engine core ends: {error}")
            raise
        except Exception as error:
            say(f"the engine core is not warmed: {error}")

    def ready(self) -> bool:
        """Return whether everything that will be warm is warm; True also when nothing is to be."""
        if self._started is None or self._workers == 0:
            return True
        if time.monotonic() - self._started > _limit(READY_SECONDS):
            say(f"{self._workers} workers were prestarted, but not all got ready in time: some may start cold")
            return True
        try:
            return _ready_workers() >= self._workers
        except Exception:  # Ray's control store may be restarting
            return False

    def end(self) -> None:
        """Remove what the workers told; never raises."""
        if self._workers == 0:
            return
        try:
            from ray.experimental.internal_kv import _internal_kv_del

            _internal_kv_del(_ready_key(), del_by_prefix=True)
        except Exception as error:
            say(f"keys of prestarted workers are left in Ray's control store: {error}")


def _hooked_job() -> bool:
    """Return whether this process's Ray job has our hook: it may have been opened by another process, or before us."""
    import ray

    return HOOK in ray.get_runtime_context().get_runtime_env_string()


def _actor_environment(parallel_config: Any) -> dict[str, Any]:
    """Return the runtime environment that vLLM will give to its workers. Raises AttributeError when it has moved."""
    from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

    class Executor:  # what the method needs of an executor, which there is none of yet
        def __init__(self) -> None:
            self.parallel_config = parallel_config

    environment: dict[str, Any] = RayExecutorV2._build_runtime_env(Executor())
    return environment


# A worker tells that it is ready in Ray's control store, under a key that holds its Ray job's id.


def _ready_key(worker: str = "") -> str:
    import ray

    return f"vllm_ray_engine/warm/{ray.get_runtime_context().get_job_id()}/{worker}"


def _ready_workers() -> int:
    from ray.experimental.internal_kv import _internal_kv_list

    return len(_internal_kv_list(_ready_key()))


def _tell_ready() -> None:
    """Tell that this worker is as warm as it will get. Never raises."""
    try:
        import ray
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(_ready_key(ray.get_runtime_context().get_worker_id()), b"")
    except Exception as error:
        say(f"worker cannot tell that it is ready: {error}")


def worker() -> None:
    """Warm a worker: Ray's set-up hook, run in every worker process of a standby's Ray job. Never raises.

    The process has no accelerator yet and must not touch one, for the older attempt still uses them all.
    """
    try:
        _warm_worker()
    except imports.DeviceTouched as error:
        # It holds memory of a device that another attempt uses, and cannot give it back but by its end.
        say(f"worker process ends: {error}")
        _tell_ready()
        os._exit(1)
    except BaseException as error:
        say(f"worker is not warmed: {error!r}")
    _tell_ready()


def _warm_worker() -> None:
    if _ALL in imports.load(WORKER).banned:
        return
    # Ray's own value for an actor without CPUs; it sets it too late for what is imported here.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    importlib.import_module(_WORKER_IMPORTS)
    # The patches, ours too, come before the modules that hold on to what they patch.
    importlib.import_module("vllm.plugins").load_general_plugins()
    if imports.device_touched():
        imports.ban(WORKER, _ALL)
        raise imports.DeviceTouched(f"importing {_WORKER_IMPORTS} initialises the accelerator")
    warm_up(WORKER)
