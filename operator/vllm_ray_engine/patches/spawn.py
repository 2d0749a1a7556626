"""Spawn: processes are spawned where Ray is connected, and connect to the same Ray cluster, once.

A forked process inherits Ray's client without its threads and hangs at its first call. A spawned one connects anew: it
must know which cluster, and it is a Ray job of its own, which finds the group by name or id (`context.GroupRef`).
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from vllm_ray_engine.patches.context import Context

log = logging.getLogger("vllm.vllm_ray_engine")

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def hand_on_cluster() -> bool:
    """Have the processes that are started from now on connect to this process's cluster, if it is connected at all.

    Ray takes this variable before any other way to find a cluster; without it, a process connects to the cluster that
    was started last on its machine, or starts one of its own. Returns whether this process is connected.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    return True


def connect_once(original: Callable[..., Any], _context: Context) -> Callable[..., Any]:
    """Wrap ray.init: a second call keeps the connection, and the processes started from here learn the cluster."""

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("ignore_reinit_error", True)
        connection = original(*args, **kwargs)
        hand_on_cluster()
        return connection

    return init


def never_silently(_original: Callable[[], None], _context: Context) -> Callable[[], None]:
    """Replace Ray's auto_init_ray, by which most of its functions connect unasked: here only ray.init connects."""

    def auto_init_ray() -> None:
        """Leave Ray as it is."""

    return auto_init_ray


def force_spawn(original: Callable[[], None], _context: Context) -> Callable[[], None]:
    """Wrap _maybe_force_spawn, which lets Ray drivers fork, and gives no address where the user chose spawn."""

    @functools.wraps(original)
    def maybe_force_spawn() -> None:
        if hand_on_cluster():
            if os.environ.get(_METHOD) == "fork":
                log.warning("%s=fork is set to spawn: this process is connected to Ray, which does not fork", _METHOD)
            os.environ[_METHOD] = "spawn"
        original()

    return maybe_force_spawn
