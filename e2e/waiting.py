"""Waiting with a deadline, saying what for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_START = time.monotonic()


def say(message: str) -> None:
    """Print a line of progress with the time since the start of the process."""
    print(f"[{time.monotonic() - _START:6.1f}s] {message}", file=sys.stderr, flush=True)


def wait_for(
    what: str,
    probe: Callable[[], T | None],
    *,
    seconds: float,
    describe: Callable[[], str] | None = None,
    poll: float = 1.0,
) -> T:
    """Call ``probe`` until it returns something truthy, and return that.

    ``describe`` tells the present state; it is printed whenever it changes.

    Raises:
        TimeoutError: with the last description, when ``seconds`` have passed.
    """
    deadline = time.monotonic() + seconds
    say(f"waiting for {what}")
    last = ""
    while True:
        result = probe()
        if result:
            return result
        if describe is not None:
            now = describe()
            if now != last:
                say(f"  {now}")
                last = now
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s" + (f" (last seen: {last})" if last else ""))
        time.sleep(poll)
