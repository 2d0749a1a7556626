"""The launcher: `python3 -m vllm_ray_engine.launch`, started by the guard, which is the engine job's entrypoint.

One attempt from start to end: it checks what can be checked cheaply, makes the placement group and waits for it, runs
vLLM as its child, watches it deeply, shows all of this on the control endpoint, and leaves nothing behind. The last
line that it prints is the result.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from vllm_ray_engine import config as engine_config
from vllm_ray_engine import debris, health, memory, process_tree, reasons, root_cause, serve, state, versions
from vllm_ray_engine.cluster import CREATED, Cluster
from vllm_ray_engine.config import ConfigError, EngineConfig
from vllm_ray_engine.control import ControlServer, ray_token
from vllm_ray_engine.output import EngineOutput
from vllm_ray_engine.reasons import Cause, EngineFailure

RESULT_MARK = "VLLM_RAY_ENGINE_RESULT "

HEALTH_SECONDS = 1.0
"""Between two deep health checks."""
LOST_SECONDS = 30.0
"""How long a serving engine may be dead or lack workers before the attempt is ended; vLLM normally ends itself."""
RAY_SILENT_SECONDS = 30.0
"""After this, what Ray said last about the workers no longer counts."""
CRASH_GRACE_SECONDS = 3.0
"""What is left of an engine that has nothing to finish gets this long between SIGTERM and SIGKILL."""
BEFORE_DEATH_SECONDS = 15.0
"""The cause of a serving engine's end is looked for in the output since this long before its last healthy answer."""
LAST_OUTPUT_SECONDS = 0.5
"""How long the last lines of a dead engine are waited for; its children may hold the pipe open."""
RELEASE_SECONDS = 5.0
"""How long the launcher waits for Ray to confirm that the placement group is gone."""

POD_OUT_OF_MEMORY = "the pod reached its memory limit: raise it"


class StopAsked(Exception):
    """Somebody asked the attempt to stop: SIGTERM or SIGINT."""


class Wakeup:
    """Wakes the main thread from signal handlers and other threads."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def notify(self, *_: object) -> None:
        """Wake the main thread now, or at its next wait."""
        with contextlib.suppress(BlockingIOError):  # full of wake-ups already
            os.write(self._write, b"x")

    def wait(self, timeout: float) -> None:
        """Return at the next wake-up or after `timeout` seconds."""
        if select.select([self._read], [], [], timeout)[0]:
            os.read(self._read, 4096)


class Launcher:
    """Runs one attempt."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.state = state.State(config)
        self._wakeup = Wakeup()
        self._stop_asked = False
        self._cluster = Cluster(config, self._wakeup.notify)
        self._control: ControlServer | None = None
        self._engine: subprocess.Popen[bytes] | None = None
        self._output: EngineOutput | None = None
        self._exit_code: int | None = None
        self._oom_kills = memory.oom_kills()
        self._probe_key = secrets.token_hex(16)
        self._health = health.Health(False, "the engine is not started", (), config.world_size, 0)
        self._patience = health.Patience()
        self._last_ready: float | None = None
        self._monitoring = threading.Event()
        self._guard = process_tree.guarding_parent()

    def run(self) -> int:
        """Run the attempt to its end and return the exit code."""
        self._catch_signals()
        cause: Cause | None = None
        try:
            self._check()
            self._place()
            self._load()
            self._serve()
        except StopAsked:
            self.state.enter(state.STOPPING, "asked to stop")
        except EngineFailure as failure:
            cause = failure.cause
        except Exception as error:
            cause = Cause(reasons.ENGINE_EXITED, f"the launcher failed with {type(error).__name__}: {error}")
        if cause is not None:
            self.state.fail(cause)
            say(f"failed: {cause.reason}: {cause.message}")
        self._end(crashed=cause is not None)
        print_result(cause)
        return 0 if cause is None else 1

    # Phases, in their order. Each returns when the next may begin and raises StopAsked or EngineFailure.

    def _check(self) -> None:
        process_tree.become_subreaper()
        try:
            self._control = ControlServer(self.config, self.state, ray_token())
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise port_in_use(self.config.control_port, "control endpoint") from None
            raise
        self._control.start()
        versions.check_installed()
        if address_in_use(self.config.host, self.config.port):
            raise port_in_use(self.config.port, "engine (spec.engine.port)")
        if self.config.model.startswith("/") and not Path(self.config.model).exists():
            raise EngineFailure(
                reasons.MODEL_NOT_FOUND,
                f"there is no {self.config.model} in this pod: check spec.model.uri and the volume that should hold it",
            )

    def _place(self) -> None:
        self.state.enter(state.PLACING, "waiting for accelerators")
        self._cluster.start()
        if not self._wait(self._placed, self.config.startup_timeout_seconds):
            raise EngineFailure(reasons.PLACEMENT_PENDING, f"no accelerators in time: {self._cluster.view.explanation}")

    def _placed(self) -> bool:
        self._catch_signals()  # again, because Ray puts handlers of its own in their place when it connects
        view = self._cluster.view
        self.state.update(placement={"state": view.placement, "explanation": view.explanation})
        if view.placement != CREATED:
            self.state.enter(state.PLACING, f"waiting for accelerators: {view.explanation}")
            return False
        ranks = [{"rank": 0, "instanceId": self.config.instance_id, "nodeIps": list(view.node_ips)}]
        self.state.update(ranks=ranks)
        return True

    def _load(self) -> None:
        self.state.enter(state.LOADING, "vLLM is starting and loading the model")
        self._start_engine()
        threading.Thread(target=self._monitor, name="health", daemon=True).start()
        if not self._wait(lambda: self._health.ready, self.config.startup_timeout_seconds):
            raise EngineFailure(
                reasons.STARTUP_TIMEOUT,
                f"not ready after {self.config.startup_timeout_seconds:g} s ({self._health.reason}): raise"
                " spec.engine.startupTimeoutSeconds if the model needs longer to load",
            )

    def _serve(self) -> None:
        self.state.enter(state.SERVING, f"serving {self.config.served_name} on port {self.config.port}")
        while True:
            self._wait(lambda: self._lost() or self._hung(), float("inf"))
            if self._hung():
                raise EngineFailure(
                    reasons.ENGINE_HUNG,
                    f"the engine runs but has not answered /health for {health.HUNG_SECONDS:g} s",
                )
            # vLLM sees the same and ends by itself, with the cause in its output, if it is given the time.
            if not self._wait(lambda: not self._lost(), LOST_SECONDS):
                raise self._lost_engine()

    def _lost(self) -> bool:
        """Return whether the engine cannot come back: it says that it is dead, or workers are."""
        seen = self._health
        return seen.workers_alive < seen.workers_expected or seen.reason == "/health answers 503"

    def _hung(self) -> bool:
        return self._patience.silent_seconds(time.monotonic()) > health.HUNG_SECONDS

    def _lost_engine(self) -> EngineFailure:
        stated = self._stated_cause()
        if stated is not None:
            return EngineFailure(stated.reason, stated.message, stated.line)
        return EngineFailure(reasons.WORKER_DIED, f"the engine cannot go on: {self._health.reason}")

    def _wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until the condition holds, at most `timeout` seconds; returns whether it does.

        Raises what ends the attempt meanwhile.
        """
        deadline = time.monotonic() + timeout
        while True:
            if self._orphaned():
                raise EngineFailure(reasons.ENGINE_EXITED, "the guard process of this job was killed")
            if self._stop_asked:
                raise StopAsked
            self._reap()
            if self._exit_code is not None:
                raise self._exited(self._exit_code)
            if self._cluster.failure is not None:
                raise EngineFailure(reasons.ENGINE_EXITED, self._cluster.failure)
            if condition():
                return True
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self._wakeup.wait(min(left, 1.0))

    # The engine process.

    def _start_engine(self) -> None:
        environment = engine_environment(self.config, self._cluster.view.rank_bundles, dict(os.environ))
        environment[process_tree.PARENT_VARIABLE] = str(os.getpid())
        environment[serve.PROBE_KEY_VARIABLE] = self._probe_key
        # From the main thread: the parent-death signal follows the thread that starts the process.
        self._engine = subprocess.Popen(
            [sys.executable, "-m", "vllm_ray_engine.serve"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )
        assert self._engine.stdout is not None  # noqa: S101  for the type checker
        self._output = EngineOutput(self._engine.stdout, sys.stdout.buffer)

    def _reap(self) -> None:
        ended = process_tree.reap()
        if self._engine is not None and self._engine.pid in ended:
            self._exit_code = self._engine.returncode = ended[self._engine.pid]

    def _exited(self, code: int) -> EngineFailure:
        """Return why the engine process ended by itself."""
        if self._output is not None:
            self._output.wait_end(LAST_OUTPUT_SECONDS)
        killed = code == -signal.SIGKILL
        # A process that was killed had no say in it: an exception that it logged before was not the cause.
        stated = self._stated_cause(known_only=killed)
        if stated is not None:
            return EngineFailure(stated.reason, stated.message, stated.line)
        if killed and memory.oom_kills() > self._oom_kills:
            return EngineFailure(reasons.OUT_OF_MEMORY, f"the API server process was killed: {POD_OUT_OF_MEMORY}")
        if code < 0:
            return EngineFailure(
                reasons.ENGINE_EXITED, f"the API server process was killed by {signal.Signals(-code).name}"
            )
        return EngineFailure(reasons.ENGINE_EXITED, f"vLLM exited with code {code} and said no reason")

    def _stated_cause(self, *, known_only: bool = False) -> Cause | None:
        """Return the cause that the engine's output states."""
        if self._output is None:
            return None
        since = 0.0 if self._last_ready is None else self._last_ready - BEFORE_DEATH_SECONDS
        lines = self._output.lines(since)
        for line in lines:
            if line.startswith(serve.REFUSAL_MARK):
                return Cause(**json.loads(line[len(serve.REFUSAL_MARK) :]))
        cause = root_cause.find(lines, known_only=known_only)
        if cause is not None and cause.reason == reasons.WORKER_DIED and memory.oom_kills() > self._oom_kills:
            return Cause(reasons.OUT_OF_MEMORY, f"a process of the engine was killed: {POD_OUT_OF_MEMORY}", cause.line)
        return cause

    def _monitor(self) -> None:
        """Check the engine's health again and again; runs in a thread of its own."""
        while not self._monitoring.wait(HEALTH_SECONDS):
            probed = health.probe(self.config, self._probe_key)
            view = self._cluster.view
            silent = time.monotonic() - view.seen > RAY_SILENT_SECONDS
            seen = health.judge(self.config, probed, view.workers_alive, ray_silent=silent)
            seen = self._patience.judge(self._health, probed, seen, time.monotonic())
            if seen.ready:
                self._last_ready = time.monotonic()
            if seen != self._health:
                self._health = seen
                self.state.update(health=seen.as_dict())
                self._wakeup.notify()

    # The end.

    def _end(self, *, crashed: bool) -> None:
        """End the process tree, give the accelerators back, leave Ray."""
        self._monitoring.set()
        if crashed:
            # Nothing is worth finishing, so the accelerators are freed at once, while the processes end.
            self._cluster.release(0)
        elif self._last_ready is not None:
            self._let_finish(self.config.stop_grace_seconds)
        left = process_tree.end_descendants(min(CRASH_GRACE_SECONDS, self.config.stop_grace_seconds))
        if left:
            say(f"processes that not even SIGKILL ended: {left}")
        if not self._cluster.release(RELEASE_SECONDS):
            say("Ray did not confirm in time that the placement group is gone; it goes with this process")
        self._cluster.close(RELEASE_SECONDS)
        if self._output is not None:
            self._output.finish(2)
        if self._orphaned():  # nobody will do it after us
            debris.sweep(self.config.instance_id, RELEASE_SECONDS)

    def _orphaned(self) -> bool:
        return self._guard is not None and os.getppid() != self._guard

    def _let_finish(self, grace: float) -> None:
        """Ask a serving engine to end and wait for it, at most `grace` seconds."""
        assert self._engine is not None  # noqa: S101  for the type checker
        process_tree.send([self._engine.pid], signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self._exit_code is None and not self._orphaned() and (left := deadline - time.monotonic()) > 0:
            self._wakeup.wait(left)
            self._reap()

    def _catch_signals(self) -> None:
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(signal.SIGCHLD, self._wakeup.notify)

    def _on_stop(self, *_: object) -> None:
        self._stop_asked = True
        self._wakeup.notify()


def engine_environment(
    config: EngineConfig, rank_bundles: tuple[int, ...], environment: dict[str, str]
) -> dict[str, str]:
    """Return the environment of the engine process: this one's, with what vLLM must be told by that way."""
    ours = {"VLLM_RAY_BUNDLE_INDICES": ",".join(map(str, rank_bundles))}
    if allowed := environment.get("VLLM_PLUGINS"):
        ours["VLLM_PLUGINS"] = f"{allowed},{versions.PLUGIN_NAME}"
    for name, needed, why in (
        ("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1", "the older executor needs an accelerator beside the API server"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "spawn", "a forked engine core inherits the state of its parent's threads"),
    ):
        if environment.get(name, needed) != needed:
            say(f"{name}={environment[name]} is set to {needed}: {why}")
            ours[name] = needed
    return environment | ours


def port_in_use(port: int, what: str) -> EngineFailure:
    """Return the failure that says so."""
    return EngineFailure(
        reasons.PORT_IN_USE,
        f"port {port} of the {what} is in use in this pod: by an engine that has not ended, or another container",
    )


def address_in_use(host: str, port: int) -> bool:
    """Return whether something listens on the port already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def say(text: str) -> None:
    """Write a line of ours into the job's log."""
    print(f"[vllm_ray_engine] {text}", flush=True)


def print_result(cause: Cause | None) -> None:
    """Write the last line of the job's log, which tells the outcome when this process is gone."""
    if cause is None:
        result = {"outcome": "Stopped", "reason": "Stopped", "message": "asked to stop", "line": ""}
    else:
        result = {"outcome": "Failed", **cause.as_dict()}
    # The engine's own last line may have no end.
    print(f"\n{RESULT_MARK}{json.dumps(result)}", flush=True)


def main() -> NoReturn:
    """Run the attempt that the environment describes, and exit."""
    try:
        config = engine_config.from_environment()
    except ConfigError as error:
        print_result(Cause(reasons.INVALID_ARGUMENTS, str(error)))
        sys.exit(1)
    code = Launcher(config).run()
    # Not sys.exit: the result stays the last line whatever Ray or a hung thread would do at the interpreter's end.
    os._exit(code)


if __name__ == "__main__":
    main()
