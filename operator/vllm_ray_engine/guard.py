"""The engine job's entrypoint: `python3 -m vllm_ray_engine.guard`. Runs the launcher and outlives it.

The launcher can be killed like any process (it is the kernel's choice when memory ends), and then nobody would end its
children, collect them, clean up after them, or say what happened. The guard does, and is as small as can be, so that
it is the last to be chosen. If it is the guard that is killed, the launcher sees it and ends the attempt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import NoReturn

from vllm_ray_engine import config as engine_config
from vllm_ray_engine import reasons
from vllm_ray_engine.config import ConfigError
from vllm_ray_engine.launcher import memory
from vllm_ray_engine.processes import debris, process_tree
from vllm_ray_engine.reasons import Cause

LAUNCHER = [sys.executable, "-m", "vllm_ray_engine.launch"]
_LISTEN = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_SUPERVISOR_SECONDS = 0.2
"""Between two looks at the Ray job supervisor."""
_WORKERS_SECONDS = 5.0
"""How long Ray is given to end the worker processes on this node before what they leave is left to the next attempt."""


def _ready_child() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LISTEN)


def watch(command: list[str], supervisor: int) -> int:
    """Run the command until it ends, with everything below it; return its exit code, negative for a signal.

    SIGTERM and SIGINT are passed on. When the supervisor dies, nobody can stop this job any more: this process ends,
    and with it the command, which is told by its parent-death signal.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _LISTEN)
    environment = os.environ | {process_tree.PARENT_VARIABLE: str(os.getpid())}
    # A session of its own: when Ray kills this process group, which it does when the supervisor died, somebody must be
    # left who cleans up.
    child = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=_ready_child)  # noqa: PLW1509
    while True:
        received = signal.sigtimedwait(_LISTEN, _SUPERVISOR_SECONDS)
        ended = process_tree.reap()
        if child.pid in ended:
            child.returncode = ended[child.pid]
            break
        if os.getppid() != supervisor:
            # Within a second Ray kills this process group, in the middle of whatever we would do.
            os._exit(1)
        if received is not None and received.si_signo != signal.SIGCHLD:
            process_tree.send([child.pid], signal.SIGTERM)
    process_tree.end_descendants(0)
    return child.returncode


def _tell(number: signal.Signals, *, out_of_memory: bool) -> None:
    """Write the result line, which a launcher that was killed could not."""
    from vllm_ray_engine.launch import print_result
    from vllm_ray_engine.launcher.engine import POD_OUT_OF_MEMORY  # only now: a guard that waits stays small

    if out_of_memory and number == signal.SIGKILL:
        print_result(Cause(reasons.OUT_OF_MEMORY, f"the launcher process was killed: {POD_OUT_OF_MEMORY}"))
    else:
        print_result(Cause(reasons.ENGINE_EXITED, f"the launcher process was killed by {number.name}"))


def main() -> NoReturn:
    """Run the attempt that the environment describes, and exit with the launcher's code."""
    supervisor = os.getppid()
    process_tree.become_subreaper()
    oom_kills = memory.oom_kills()
    with contextlib.suppress(OSError):  # what cannot be cleaned up is no reason not to run
        debris.sweep_all()
    code = watch(LAUNCHER, supervisor)
    if code < 0:
        _tell(signal.Signals(-code), out_of_memory=memory.oom_kills() > oom_kills)
    # Without a configuration nothing was started, and the launcher has said so.
    with contextlib.suppress(ConfigError, OSError):
        debris.sweep(engine_config.from_environment().engine_id, _WORKERS_SECONDS)
    sys.exit(code if code >= 0 else 1)


if __name__ == "__main__":
    main()
