"""Signals: the engine core keeps its own way to end on SIGTERM.

When a driver connects, Ray puts its handlers for SIGTERM in place of those that are there, in Python (sys.exit) and in
C++. vLLM's engine core, which installed its own before it connects, so loses it: where it would finish the requests in
flight (`--shutdown-timeout`), it exits at once and they end in errors.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any

from vllm_ray_engine.patches.context import Context


def keep_sigterm(original: Callable[..., Any], _context: Context) -> Callable[..., Any]:
    """Wrap ray.init to put a handler for SIGTERM that was there before back in its place."""

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        before = signal.getsignal(signal.SIGTERM)
        connection = original(*args, **kwargs)
        # Only the main thread may set handlers, and only then has Ray set its own.
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
        return connection

    return init
