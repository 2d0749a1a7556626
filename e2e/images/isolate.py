"""Runs a command in process and mount namespaces of its own, so that it cannot leave anything behind.

Started as a program: `python isolate.py COMMAND ...`. Whatever the command mounts or starts, daemons included, is gone
when it ends, when it is signalled, and when its caller is killed: the command's namespace has this program as its
init process, which dies with its parent, and the kernel kills everything with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType

_CLONE_NEWNS = 0x00020000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWPID = 0x20000000
_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit at once when that has happened already."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def exit_code(status: int) -> int:
    """Turn a wait status into a shell's exit code: 128 and the signal's number for a process that a signal ended."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def accept_signals() -> None:
    """Let the forwarded signals in."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)


def init(command: list[str]) -> int:
    """Be the namespace's first process: mount, start the command, reap orphans, return the command's exit code."""
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "proc", "-o", "nosuid,nodev,noexec", "proc", "/proc"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nosuid,nodev,mode=1777", "tmpfs", "/dev/shm"], check=True)  # noqa: S108

    def forward(number: int, _frame: FrameType | None) -> None:
        try:
            os.kill(-1, number)  # every process of this namespace but this one
        except ProcessLookupError:  # it came before the command was started
            os._exit(128 + number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    accept_signals()
    child = subprocess.Popen(command)
    while True:
        pid, status = os.wait()
        if pid == child.pid:
            return exit_code(status)


def main(command: list[str]) -> int:
    """Run the command isolated and return its exit code; needs root."""
    die_with_parent(os.getppid())
    if _libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWIPC):
        raise OSError(ctypes.get_errno(), "unshare: a process and mount namespace of its own needs root")
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # one that comes early waits until its handler is there
    pid = os.fork()
    if pid == 0:
        die_with_parent(0)  # seen from inside its namespace, the parent has no number
        code = 1
        try:
            code = init(command)
        finally:
            os._exit(code)

    for number in _FORWARDED:
        signal.signal(number, lambda received, _frame: os.kill(pid, received))
    accept_signals()
    return exit_code(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
