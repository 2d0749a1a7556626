"""The launcher: `python3 -m vllm_ray_engine.launch`, started by the guard, which is the engine job's entrypoint.

One attempt from start to end: it checks what can be checked cheaply, makes the placement group and starts vLLM as its
child, which waits for the group once it is imported, watches it deeply, shows all of this on the control endpoint, and
leaves nothing behind. The last line that it prints is the result.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from vllm_ray_engine import config as engine_config
from vllm_ray_engine import doctor, reasons, report
from vllm_ray_engine.config import ConfigError, EngineConfig
from vllm_ray_engine.diagnosis import root_cause
from vllm_ray_engine.launcher import completion, health, lost_worker, state, traffic
from vllm_ray_engine.launcher.cluster import CREATED, Cluster
from vllm_ray_engine.launcher.control import ControlServer, ray_token
from vllm_ray_engine.launcher.drain_mark import DrainMark
from vllm_ray_engine.launcher.engine import EngineProcess
from vllm_ray_engine.log import say
from vllm_ray_engine.processes import debris, process_tree
from vllm_ray_engine.reasons import Cause, EngineFailure

RESULT_MARK = "VLLM_RAY_ENGINE_RESULT "

HEALTH_SECONDS = 1.0
"""Between two deep health checks."""
STARTING_SECONDS = 0.2
"""The same before the engine was ready for the first time, which ends a hand-over."""
LOST_SECONDS = 30.0
"""How long a serving engine may be dead or lack workers before the attempt is ended; vLLM normally ends itself."""
DOOMED_SECONDS = 3.0
"""The same for what is certain: long enough for vLLM to say what it saw."""
CRASH_GRACE_SECONDS = 3.0
"""What is left of an engine that has nothing to finish gets this long between SIGTERM and SIGKILL."""
BEFORE_DEATH_SECONDS = 15.0
"""The cause of a serving engine's end is looked for in the output since this long before its last healthy answer."""
IN_FLIGHT_SECONDS = 0.2
"""Between two looks at the requests in flight of an engine that is to end."""
RELEASE_SECONDS = 5.0
"""How long the launcher waits for Ray to confirm that the placement group is gone."""


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
        self._cluster = Cluster(config, self._on_view)
        self._control: ControlServer | None = None
        self._engine = EngineProcess()
        self._engine_waits = False
        self._probe_key = secrets.token_hex(16)
        self._health = health.Health(False, "the engine is not started", (), config.workers, 0)
        self._patience = health.Patience()
        self._completions = completion.Completions(config, completion.Engine(config, self._probe_key))
        self._answers = False
        self._judging = threading.Lock()
        self._drain: traffic.Drain | None = None
        self._drain_mark: DrainMark | None = None
        self._last_ready: float | None = None
        self._monitoring = threading.Event()
        self._guard = process_tree.guarding_parent()

    def run(self) -> int:
        """Run the attempt to its end and return the exit code."""
        self._catch_signals()
        cause: Cause | None = None
        try:
            self._check()
            self._start()
            self._place()
            self._load()
            self._serve()
        except StopAsked:
            self.state.stop()
        except EngineFailure as failure:
            view = self._cluster.view
            # Its words name a worker by its place in its rank.
            nodes = view.node_names[0] if len(view.node_names) == 1 else ()
            cause = lost_worker.name_nodes(failure.cause, self._engine.lines(self._since()), nodes, view.dead_nodes)
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
            self._control = ControlServer(self.config, self.state, ray_token(), self._begin_drain)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise EngineFailure(
                    reasons.PORT_IN_USE,
                    f"port {self.config.control_port} of the control endpoint is in use in this pod: by an engine that"
                    " has not ended, or another container",
                ) from None
            raise
        self._drain_mark = DrainMark(self.config.engine_id)
        self._control.start()
        for warning in doctor.check_start(self.config):
            say(f"warning: {warning.message}: {warning.remedy}")

    def _start(self) -> None:
        """Begin placement and the engine's start side by side: the engine needs the group when it is imported."""
        self.state.enter(state.PLACING, "waiting for accelerators")
        self._cluster.start()
        self._engine.start(self._probe_key, report.Listener(self._on_report).name)

    def _on_report(self, told: dict[str, Any]) -> None:
        if told.get("event") == report.WAITING:
            self._engine_waits = True
            self._wakeup.notify()

    def _place(self) -> None:
        limit = self.config.startup_timeout_seconds
        if not self.config.standby:
            if not self._wait(self._placed, limit):
                explanation = self._cluster.view.explanation
                raise EngineFailure(reasons.PLACEMENT_PENDING, f"no accelerators in time: {explanation}")
            return
        if not self._wait(lambda: self._placed() or self._engine_waits, limit):
            raise EngineFailure(
                reasons.STARTUP_TIMEOUT, f"vLLM is not ready to wait for accelerators after {limit:g} s"
            )
        self._wait(self._placed, float("inf"))

    def _placed(self) -> bool:
        self._catch_signals()  # again, because Ray puts handlers of its own in their place when it connects
        view = self._cluster.view
        self.state.update(placement={"state": view.placement, "explanation": view.explanation})
        if view.placement != CREATED:
            if self.config.standby and self._engine_waits:
                self.state.enter(state.STANDBY, f"ready to take over accelerators: {view.explanation}")
            else:
                self.state.enter(state.PLACING, f"waiting for accelerators: {view.explanation}")
            return False
        if view.explanation:
            say(f"placement is worse than it could be: {view.explanation}")
        self.state.place(view.node_ips)
        return True

    def _load(self) -> None:
        self.state.enter(state.LOADING, "vLLM is starting and loading the model")
        threading.Thread(target=self._monitor, name="health", daemon=True).start()
        complete = (lambda: self._answers, self._monitoring)
        threading.Thread(target=self._completions.run, args=complete, name="completions", daemon=True).start()
        if not self._wait(lambda: self._health.ready or self._doomed(), self.config.startup_timeout_seconds):
            raise EngineFailure(
                reasons.STARTUP_TIMEOUT,
                f"not ready after {self.config.startup_timeout_seconds:g} s ({self._health.reason}): raise"
                " spec.engine.startupTimeoutSeconds if the model needs longer to load",
            )
        if not self._health.ready:
            self._watch_it_die()

    def _serve(self) -> None:
        self.state.enter(state.SERVING, f"serving {self.config.served_name} on port {self.config.port}")
        while True:
            self._wait(self._ends, float("inf"))
            if self._completions.stalled:
                raise EngineFailure(
                    reasons.ENGINE_STALLED,
                    f"the engine answers health checks, but completes nothing: {self._completions.error}",
                )
            if self._hung():
                raise EngineFailure(
                    reasons.ENGINE_HUNG,
                    f"the engine runs but has not answered /health for {health.HUNG_SECONDS:g} s",
                )
            # vLLM sees the same and ends by itself, with the cause in its output, if it is given the time.
            if not self._wait(lambda: self._doomed() or not self._lost(), LOST_SECONDS):
                raise self._lost_engine()
            if self._doomed():
                self._watch_it_die()

    def _ends(self) -> bool:
        """Return whether the engine may have to be ended."""
        return self._lost() or self._doomed() or self._hung() or self._completions.stalled

    def _lost(self) -> bool:
        """Return whether the engine cannot come back: it said that it is dead, or workers are."""
        seen = self._health
        return seen.workers_alive < seen.workers_expected or self._patience.dead

    def _doomed(self) -> bool:
        """Return whether it is certain that the engine cannot come back: a node died, or a worker before it served.

        A serving engine without a worker gets more time: after a restart Ray's control store may have yet to learn of
        workers that live.
        """
        view = self._cluster.view
        return bool(view.dead_nodes) or (self._last_ready is None and view.workers_alive < view.workers_most)

    def _watch_it_die(self) -> NoReturn:
        """Give a doomed engine the time to end by itself. Raises what ended it."""
        self._wait(lambda: False, DOOMED_SECONDS)
        raise self._lost_engine()

    def _hung(self) -> bool:
        return self._patience.silent_seconds(time.monotonic()) > health.HUNG_SECONDS

    def _lost_engine(self) -> EngineFailure:
        stated = self._engine.stated_cause(self._since())
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
                raise EngineFailure(reasons.ENGINE_EXITED, "the guard process or the Ray job supervisor was killed")
            if self._stop_asked:
                raise StopAsked
            self._engine.reap()
            if self._engine.exit_code is not None:
                raise self._engine.failure(self._since())
            if self._cluster.failure is not None:
                raise EngineFailure(root_cause.reason_of(self._cluster.failure), self._cluster.failure)
            if condition():
                return True
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self._wakeup.wait(min(left, 1.0))

    def _since(self) -> float:
        """Return from when on the engine's output is about its present state."""
        return 0.0 if self._last_ready is None else self._last_ready - BEFORE_DEATH_SECONDS

    def _monitor(self) -> None:
        """Check the engine's health again and again; runs in a thread of its own."""
        while not self._monitoring.wait(STARTING_SECONDS if self._last_ready is None else HEALTH_SECONDS):
            if self._drain is not None:
                # Before the probe, whose own connection would count.
                seen_traffic, drained = self._drain.look(time.monotonic())
                self.state.observe_drain(seen_traffic.connections, seen_traffic.requests, drained=drained)
            probed = health.probe(self.config, self._probe_key)
            with self._judging:
                self._judge(probed)

    def _judge(self, probed: health.Probe) -> None:
        view = self._cluster.view
        self._answers = health.judge(self.config, probed, view.workers_alive).ready
        seen = health.judge(self.config, probed, view.workers_alive, self._unfit())
        self._show(self._patience.judge(self._health, probed, seen, time.monotonic()))

    def _unfit(self) -> str:
        if dead := self._cluster.view.dead_nodes:
            return f"Ray died on {', '.join(dead)}"
        return self._completions.error

    def _show(self, seen: health.Health) -> None:
        if seen.ready:
            self._last_ready = time.monotonic()
        if seen != self._health:
            self._health = seen
            self.state.update(health=seen.as_dict())
            self._wakeup.notify()

    def _on_view(self) -> None:
        """Take note of what Ray says: what is lost does not wait for the end of a health check."""
        with self._judging:
            if self._health.ready:
                probed = health.Probe(200, self._health.models)
                alive = self._cluster.view.workers_alive
                self._show(health.judge(self.config, probed, alive, self._unfit()))
        self._wakeup.notify()

    def _begin_drain(self) -> None:
        """Take note that the engine has left the traffic, from when on clients are to go; called by the endpoint."""
        if self._drain is None:
            if self._drain_mark is not None:
                self._drain_mark.drain()
            self._drain = traffic.Drain(self.config, time.monotonic())
            self.state.update(drained=False)
            say("the engine has left the traffic and drains")

    # The end.

    def _end(self, *, crashed: bool) -> None:
        """End the process tree, give the accelerators back, leave Ray."""
        self._monitoring.set()
        if not crashed and self._last_ready is not None:
            self._finish_requests(self.config.stop_grace_seconds)
        # Nothing is left that is worth finishing: the accelerators are freed at once, while the processes end.
        self._cluster.release(0)
        left = process_tree.end_descendants(min(CRASH_GRACE_SECONDS, self.config.stop_grace_seconds))
        if left:
            say(f"processes that not even SIGKILL ended: {left}")
        if not self._cluster.release(RELEASE_SECONDS):
            say("Ray did not confirm in time that the placement group is gone; it goes with this process")
        self._cluster.close(RELEASE_SECONDS)
        self._engine.finish(2)
        if self._drain_mark is not None:
            self._drain_mark.close()
        if self._orphaned():  # nobody will do it after us
            debris.sweep(self.config.engine_id, RELEASE_SECONDS)

    def _orphaned(self) -> bool:
        return self._guard is not None and os.getppid() != self._guard

    def _finish_requests(self, grace: float) -> None:
        """Let a serving engine finish its requests, in at most `grace` seconds; it is told to end, if it has any."""
        deadline, told = time.monotonic() + grace, False
        # It is not waited for its end: vLLM may need long for that, with all accelerators in its hands.
        while self._engine.exit_code is None and health.requests_in_flight(self.config) != 0:
            if self._orphaned() or (left := deadline - time.monotonic()) <= 0:
                return
            if not told:
                self._engine.ask_to_end()
                told = True
            self._wakeup.wait(min(left, IN_FLIGHT_SECONDS))
            self._engine.reap()

    def _catch_signals(self) -> None:
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(signal.SIGCHLD, self._wakeup.notify)

    def _on_stop(self, *_: object) -> None:
        self._stop_asked = True
        self._wakeup.notify()


def print_result(cause: Cause | None) -> None:
    """Write the last line of the job's log, which tells the outcome when this process is gone."""
    if cause is None:
        result = {"outcome": "Stopped", "reason": "Stopped", "message": "asked to stop", "line": ""}
    else:
        result = {"outcome": "Failed", **cause.as_dict()}
    with contextlib.suppress(OSError):  # a full disk
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
