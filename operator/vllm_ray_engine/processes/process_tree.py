"""Ownership of a process tree on Linux: nothing that an engine job started outlives it.

Three means, each for a case that the others do not cover: the guard and the launcher are child subreapers, so that
orphans come to them and not to process 1, which in a Ray pod (`ray start --block`) collects no strangers; each kills
what is left below it before it leaves; and every process of ours asks the kernel for a signal at its parent's death,
for the case that both are killed at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

PARENT_VARIABLE = "VLLM_RAY_ENGINE_PARENT"
"""Names the process id that the started process must have as its parent."""


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def become_subreaper() -> None:
    """Make orphaned descendants children of this process. Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have this process killed when `parent`, whose main thread started it, dies; exit at once if it is dead."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def die_with_spawner() -> None:
    """Have this process killed when the process dies for which multiprocessing started it; nothing for any other.

    The kernel sends its signal when the *thread* that started this process ends, which may be long before the process
    does, and knows only the fork server where that made this process. Unless the process was started by the main
    thread, a thread of this one waits for the other end of multiprocessing's own pipe to be closed.
    """
    spawner = multiprocessing.parent_process()
    if spawner is None:
        return
    if spawner.pid is not None and _started_by_main_thread(spawner.pid):
        die_with_parent(spawner.pid)
    else:
        threading.Thread(target=_die_after, args=(spawner.join,), name="spawner", daemon=True).start()


def _started_by_main_thread(parent: int) -> bool:
    """Return whether it is known that the parent's main thread started this process."""
    try:
        # The kernel keeps children by thread; a kernel without CONFIG_PROC_CHILDREN does not show them.
        return str(os.getpid()) in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:
        return False


def _die_after(wait: Callable[[], object]) -> None:
    wait()
    os.kill(os.getpid(), signal.SIGKILL)


def guarding_parent() -> int | None:
    """Return the guard's process id if this process was started by one, having its death signalled as SIGTERM."""
    value = os.environ.pop(PARENT_VARIABLE, None)
    if value is None:
        return None
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return int(value)


def descendants(root: int | None = None) -> list[int]:
    """Return the ids of all processes below `root` (default: this one), zombies included, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent_of(int(entry.name))) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    frontier = [os.getpid() if root is None else root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def _parent_of(pid: int) -> int | None:
    try:
        # The command name stands in parentheses and may itself hold spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]) if len(fields) > 1 else None


def reap() -> dict[int, int]:
    """Collect every dead child, adopted ones too; return exit codes by process id, negative for a signal."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal the processes; those that are gone are skipped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_descendants(grace: float, kill_timeout: float = 5.0) -> list[int]:
    """End everything below this process: SIGTERM, `grace` seconds, then SIGKILL.

    Processes that appear meanwhile are ended as well. Returns the ids of those that even SIGKILL did not end within
    `kill_timeout` seconds (stuck in the kernel), normally none.
    """
    asked: set[int] = set()
    deadline = time.monotonic() + grace
    while (left := _living()) and time.monotonic() < deadline:
        send(set(left) - asked, signal.SIGTERM)
        asked.update(left)
        time.sleep(0.05)
    deadline = time.monotonic() + kill_timeout
    while (left := _living()) and time.monotonic() < deadline:
        send(left, signal.SIGKILL)
        time.sleep(0.02)
    return left


def _living() -> list[int]:
    reap()
    return descendants()
