"""Makes real failures: imports vLLM once, then forks a process for each, whose output goes to a file.

Run as a script with a JSON list of cases on standard input: `log` the file, `argv` for vLLM's command line or `code` to
run instead, `environment` on top of this process's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback

import ray  # noqa: F401  what is imported here costs its time once
import vllm.entrypoints.cli.main
import vllm.entrypoints.cli.serve
import vllm.entrypoints.openai.api_server
import vllm.v1.engine.core

AT_ONCE = 2
CASE_SECONDS = 150.0


def start(case: dict[str, object]) -> int:
    """Fork the process of a case; returns its id."""
    if pid := os.fork():
        return pid
    try:
        os.setsid()
        file = os.open(str(case["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(case.get("environment", {}))  # type: ignore[call-overload]
        if "argv" in case:
            sys.argv = ["vllm", *case["argv"]]  # type: ignore[misc]
            vllm.entrypoints.cli.main.main()
        else:
            exec(str(case["code"]), {"__name__": "__main__"})  # noqa: S102
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(1)


def main() -> None:
    """Run all cases, some at once, and leave none of their processes."""
    waiting = json.load(sys.stdin)
    running: dict[int, float] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running[start(waiting.pop(0))] = time.monotonic() + CASE_SECONDS
        ended, _ = os.waitpid(-1, os.WNOHANG)
        over = [pid for pid, deadline in running.items() if pid == ended or time.monotonic() > deadline]
        for pid in over:
            del running[pid]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        if not over:
            time.sleep(0.05)


if __name__ == "__main__":
    main()
