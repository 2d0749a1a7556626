"""Teardown: worker handles are used only inside the Ray job that made them.

RayExecutorV2.shutdown calls ray.kill on its handles whenever it runs, which may be after Ray was shut down (it is a
finalizer). ray.kill then initialises Ray again by itself, as a new Ray job that owns none of the handles, fails, and
buries the error that ended the engine. Actors of a Ray job that is over are dead with it: there is nothing to kill.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_ray_engine.context import Context

_JOB_ATTRIBUTE = "_vllm_ray_engine_job"


def _current_job() -> str | None:
    """Return the id of the Ray job that this process is connected to; never connects."""
    import ray

    return str(ray.get_runtime_context().get_job_id()) if ray.is_initialized() else None


def remember_job(original: Callable[..., Any], _context: Context) -> Callable[..., Any]:
    """Wrap RayExecutorV2._init_executor, which makes the workers, to note the Ray job that they belong to."""

    @functools.wraps(original)
    def init_executor(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            setattr(self, _JOB_ATTRIBUTE, _current_job())

    return init_executor


def forget_foreign_handles(original: Callable[..., Any], _context: Context) -> Callable[..., Any]:
    """Wrap RayExecutorV2.shutdown to drop handles of a Ray job that is not the current one."""

    @functools.wraps(original)
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
        job = _current_job()
        # Not noted yet means that the workers are just being made, by this very job.
        if job is None or job != getattr(self, _JOB_ATTRIBUTE, job):
            self.ray_worker_handles = []
        return original(self, *args, **kwargs)

    return shutdown
