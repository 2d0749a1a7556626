"""The engine process: its start, its output, and what its end says about the cause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from vllm_ray_engine import reasons, report, serve, versions
from vllm_ray_engine.diagnosis import root_cause
from vllm_ray_engine.launcher import memory
from vllm_ray_engine.launcher.output import EngineOutput
from vllm_ray_engine.log import say
from vllm_ray_engine.processes import process_tree
from vllm_ray_engine.reasons import Cause, EngineFailure

LAST_OUTPUT_SECONDS = 0.5
"""How long the last lines of a dead engine are waited for; its children may hold the pipe open."""

POD_OUT_OF_MEMORY = "the pod reached its memory limit: raise it"

NEEDED = (
    ("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1", "the older executor needs an accelerator beside the API server"),
    ("VLLM_WORKER_MULTIPROC_METHOD", "spawn", "a forked engine core inherits the state of its parent's threads"),
    ("VLLM_ENGINE_READY_TIMEOUT_S", "2000000", "the launcher limits the start, and a standby may wait for days"),
    ("VLLM_RAY_BUNDLE_INDICES", "", "vLLM itself keeps the ranks of a node together"),
)
"""Environment variables of vLLM that must have one value, and why."""


def environment(inherited: dict[str, str]) -> dict[str, str]:
    """Return the environment of the engine process: the launcher's, with what vLLM must be told by that way."""
    ours = {}
    if allowed := inherited.get("VLLM_PLUGINS"):
        ours["VLLM_PLUGINS"] = f"{allowed},{versions.PLUGIN_NAME}"
    for name, needed, why in NEEDED:
        if inherited.get(name, needed) != needed:
            say(f"{name}={inherited[name]} is set to {needed}: {why}")
        ours[name] = needed
    return inherited | ours


class EngineProcess:
    """`vllm serve` as a child of this process, from its start to its end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output: EngineOutput | None = None
        self._oom_kills = memory.oom_kills()
        self.exit_code: int | None = None
        """Of the ended process, negative for a signal; None before."""

    def start(self, probe_key: str, report_name: str) -> None:
        """Start it. From the main thread: the parent-death signal follows the thread that starts the process."""
        ours = {
            process_tree.PARENT_VARIABLE: str(os.getpid()),
            serve.PROBE_KEY_VARIABLE: probe_key,
            report.VARIABLE: report_name,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm_ray_engine.serve"],
            env=environment(dict(os.environ)) | ours,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )
        assert self._process.stdout is not None  # noqa: S101  for the type checker
        self._output = EngineOutput(self._process.stdout, sys.stdout.buffer)

    def reap(self) -> None:
        """Collect every dead child of this process, and note whether the engine was among them."""
        ended = process_tree.reap()
        if self._process is not None and self._process.pid in ended:
            self.exit_code = self._process.returncode = ended[self._process.pid]

    def ask_to_end(self) -> None:
        """Send SIGTERM to the API server, which ends the rest in order."""
        assert self._process is not None  # noqa: S101  for the type checker
        process_tree.send([self._process.pid], signal.SIGTERM)

    def finish(self, timeout: float) -> None:
        """Pass on the output that is left, at most `timeout` seconds long, and nothing after."""
        if self._output is not None:
            self._output.finish(timeout)

    def failure(self, since: float) -> EngineFailure:
        """Return why the process, which has ended, ended by itself. `since` as for `stated_cause`."""
        code = self.exit_code
        assert code is not None  # noqa: S101  for the type checker
        if self._output is not None:
            self._output.wait_end(LAST_OUTPUT_SECONDS)
        killed = code == -signal.SIGKILL
        # A process that was killed had no say in it: an exception that it logged before was not the cause.
        stated = self.stated_cause(since, known_only=killed)
        if stated is not None:
            return EngineFailure(stated.reason, stated.message, stated.line)
        if killed and memory.oom_kills() > self._oom_kills:
            return EngineFailure(reasons.OUT_OF_MEMORY, f"the API server process was killed: {POD_OUT_OF_MEMORY}")
        if code < 0:
            return EngineFailure(
                reasons.ENGINE_EXITED, f"the API server process was killed by {signal.Signals(-code).name}"
            )
        return EngineFailure(reasons.ENGINE_EXITED, f"vLLM exited with code {code} and said no reason")

    def lines(self, since: float) -> list[str]:
        """Return the output that came at or after `since` (monotonic clock)."""
        return [] if self._output is None else self._output.lines(since)

    def stated_cause(self, since: float, *, known_only: bool = False) -> Cause | None:
        """Return the cause that the output states, in what came at or after `since` (monotonic clock)."""
        if self._output is None:
            return None
        lines = self._output.lines(since)
        for line in lines:
            if line.startswith(serve.REFUSAL_MARK):
                return Cause(**json.loads(line[len(serve.REFUSAL_MARK) :]))
        cause = root_cause.find(lines, known_only=known_only)
        if cause is not None and cause.reason == reasons.WORKER_DIED and memory.oom_kills() > self._oom_kills:
            return Cause(reasons.OUT_OF_MEMORY, f"a process of the engine was killed: {POD_OUT_OF_MEMORY}", cause.line)
        return cause
