"""Teardown: actor handles are used only inside the Ray job that made them.

vLLM kills its actors whenever it is shut down, which may be after Ray was (most of it runs as finalizers, and Ray's own
exit hook goes first). ray.kill then initialises Ray again by itself, as a new Ray job that owns none of the handles,
fails, and buries the error that ended the engine. Actors of a Ray job that is over are dead with it: there is nothing
to kill.
"""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

from vllm_ray_engine.patches.context import Context

Function = Callable[..., Any]

log = logging.getLogger("vllm.vllm_ray_engine")
"""Below vLLM's own logger, which has the handler."""

_JOB_ATTRIBUTE = "_vllm_ray_engine_job"


def _current_job() -> tuple[str, str] | None:
    """Return what this process is connected as, None when it is not; never connects.

    The job id alone would not do, since a new cluster counts from one again; the id of the node is random.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    runtime = ray.get_runtime_context()
    return str(runtime.get_job_id()), str(runtime.get_node_id())


def _owned(self: Any) -> bool:
    """Return whether the actors of this executor or manager were made by the present Ray job.

    Not noted yet means that they are just being made, by this very job.
    """
    job = _current_job()
    return job is not None and job == getattr(self, _JOB_ATTRIBUTE, job)


def remember_job(original: Function, _context: Context) -> Function:
    """Wrap a method that makes actors, to note the Ray job that they belong to."""

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            setattr(self, _JOB_ATTRIBUTE, _current_job())

    return make


def end_before_ray(original: Function, _context: Context) -> Function:
    """Wrap a method that makes actors, to have them torn down at the interpreter's exit while Ray is still there.

    Exit hooks run in the reverse of their order: Ray's, from when it was imported, comes before the finalizers of vLLM
    and ends Ray under the thread that watches the actors, which is then a segmentation fault.
    """

    @functools.wraps(original)
    def make(self: Any, *args: Any, **kwargs: Any) -> Any:
        atexit.register(_shut_down, weakref.ref(self))
        return original(self, *args, **kwargs)

    return make


def _shut_down(reference: weakref.ref[Any]) -> None:
    if (owner := reference()) is not None:
        try:
            owner.shutdown()
        except Exception as error:  # it may have failed half made
            log.warning("teardown at exit: %s", error)


def spare_foreign(*attributes: str) -> Callable[[Function, Context], Function]:
    """Return the wrapper of a shutdown that empties these attributes first, unless their actors are of this Ray job."""

    def wrapper(original: Function, _context: Context) -> Function:
        @functools.wraps(original)
        def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not _owned(self):
                for name in attributes:
                    if held := getattr(self, name, None):
                        setattr(self, name, [] if isinstance(held, list) else None)
            return original(self, *args, **kwargs)

        return shutdown

    return wrapper


def release_each(actors: tuple[str, ...], groups: tuple[str, ...] = ()) -> Callable[[Function, Context], Function]:
    """Return the wrapper of a shutdown that lets go of these actors and groups after it, each for itself.

    vLLM's own loops end at the first one that fails. Everything else that the shutdown does stays with it. What is of
    another Ray job is dead with it, and is left alone, whether or not `spare_foreign` has taken it away before.
    """

    def wrapper(original: Function, _context: Context) -> Function:
        @functools.wraps(original)
        def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
            held = {name: getattr(self, name, []) for name in (*actors, *groups)}
            for name in held:
                setattr(self, name, [])
            try:
                return original(self, *args, **kwargs)
            finally:
                if _owned(self):
                    for name, things in held.items():
                        for thing in things:
                            _release(thing, group=name in groups)

        return shutdown

    return wrapper


def _release(thing: Any, *, group: bool) -> None:
    import ray

    try:
        if group:
            ray.util.remove_placement_group(thing)
        else:
            ray.kill(thing)
    except Exception as error:
        # One line: a traceback here would look like the reason for the engine's end.
        log.warning("could not let go of %s: %s", thing, error)


def only_in_own_job(original: Function, _context: Context) -> Function:
    """Wrap a method that gives up some of the actors, to do nothing when their Ray job is over, and they with it."""

    @functools.wraps(original)
    def give_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _owned(self):
            return original(self, *args, **kwargs)
        log.warning("%s: the Ray job that made the engine cores is over", original.__name__)
        return None

    return give_up
