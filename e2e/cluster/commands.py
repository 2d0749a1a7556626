"""Runs commands to their end, and a lock that only one process holds."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from e2e.cluster.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from pathlib import Path

    from e2e.cluster.progress import Progress

LOCK_POLL = 0.2  # seconds


async def run(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    must_finish: bool = False,
) -> str:
    """Run a command and return what it printed; CommandError when its status is not 0.

    When the caller is interrupted the command is ended, unless it ``must_finish`` (a package manager
    that would leave a mess): then it is waited for first. ``on_line`` sees every line at once.
    """
    words = [str(word) for word in argv]
    process = await asyncio.create_subprocess_exec(
        *words,
        cwd=cwd,
        env=dict(env) if env is not None else None,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        # Ctrl-C reaches only us; we decide what happens to the command.
        start_new_session=True,
    )
    reading = asyncio.create_task(_read(process, on_line))
    try:
        output = await asyncio.shield(reading)
    except asyncio.CancelledError:
        if not must_finish:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # its children too: go's compilers, say
        await reading
        raise
    if process.returncode != 0:
        raise CommandError(words, process.returncode or 0, output)
    return output


async def _read(process: asyncio.subprocess.Process, on_line: Callable[[str], None] | None) -> str:
    assert process.stdout is not None  # noqa: S101 - by the PIPE above; tells the type checker
    lines = []
    async for raw in process.stdout:
        line = raw.decode(errors="replace")
        lines.append(line)
        if on_line:
            on_line(line.strip())
    await process.wait()
    return "".join(lines)


@asynccontextmanager
async def exclusive(lock: Path, progress: Progress, what: str) -> AsyncIterator[None]:
    """Hold the lock file for the block; say so when another process has it. The kernel frees it if we die."""
    descriptor = await asyncio.to_thread(_open_lock, lock)
    try:
        if not _try_lock(descriptor):
            async with progress.step(f"waiting for another process that is at work on {what}"):
                while not _try_lock(descriptor):  # noqa: ASYNC110 - a blocking wait could not be interrupted
                    await asyncio.sleep(LOCK_POLL)
        yield
    finally:
        os.close(descriptor)


def _open_lock(lock: Path) -> int:
    lock.parent.mkdir(parents=True, exist_ok=True)
    return os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
