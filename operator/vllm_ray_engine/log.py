"""Our own lines in the job's log."""

from __future__ import annotations

import contextlib


def say(text: str) -> None:
    """Write a line of ours into the job's log, if it can be written."""
    with contextlib.suppress(OSError):  # a full disk
        print(f"[vllm_ray_engine] {text}", flush=True)
