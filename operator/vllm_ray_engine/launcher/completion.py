"""Whether the engine completes what it is asked: an engine can answer /health for ever and complete nothing.

A completion of one token is asked for before the engine counts as ready. After that only when requests are open and
nothing has moved for a while: a busy engine proves itself by its metrics, and an idle one is left alone (a request now
and then would look like traffic to whoever scales by it).
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from vllm_ray_engine import tally
from vllm_ray_engine.config import EngineConfig
from vllm_ray_engine.launcher import health
from vllm_ray_engine.log import say
from vllm_ray_engine.tally import Work

UNPROVEN = "it has not completed a first request yet"
_FIRST_SECONDS = 0.2
"""Between two tries of the first completion."""
_LOOKS = 3
"""So often the metrics are read in the time after which an engine that has not moved is asked."""
_CANNOT_TELL = frozenset({501, 503})
"""Answers that blame the request or the moment, as all below 500 do: a model that completes nothing, an overload."""

# The use of the cache grows with each piece of a long prompt, whose tokens are counted only at its end.
_MOVING = re.compile(
    r"^vllm:(?:generation_tokens_total|prompt_tokens_total|kv_cache_usage_perc|num_requests_running)[{ ].*$",
    re.MULTILINE,
)
_ASLEEP = re.compile(r'^vllm:engine_sleep_state\{[^}]*sleep_state="awake"[^}]*\} 0(?:\.0)?$', re.MULTILINE)


@dataclass(frozen=True)
class Vitals:
    """What the engine's metrics say. signs: something of them changes with every step of the engine.

    in_flight: requests that it knows of. resting: it is asleep, on purpose.
    """

    signs: tuple[str, ...]
    in_flight: int
    resting: bool = False


def parse_vitals(metrics: str) -> Vitals | None:
    """Return the vitals in the text of /metrics, None when they are not there (`--disable-log-stats`)."""
    # In order: with several API servers that of the metrics is by chance.
    signs = tuple(sorted(match.group() for match in _MOVING.finditer(metrics)))
    if not signs:
        return None
    return Vitals(signs, health.in_flight(metrics) or 0, _ASLEEP.search(metrics) is not None)


class Engine:
    """The engine's HTTP side, as far as this module needs it."""

    def __init__(self, config: EngineConfig, key: str) -> None:
        self._config = config
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def complete(self) -> str:
        """Ask for one token; return why that is no answer, an empty string when it is."""
        seconds = self._config.probe_timeout_seconds
        body = json.dumps({"model": self._config.served_name, "prompt": "Hello", "max_tokens": 1, "temperature": 0})
        try:
            status, _ = self._request("POST", "/v1/completions", seconds, body)
        except TimeoutError:
            return f"a completion of one token was not answered within {seconds:g} s"
        except (OSError, http.client.HTTPException) as error:
            return f"a completion of one token broke off: {error}"
        if status < 500 or status in _CANNOT_TELL:
            return ""
        return f"a completion of one token is answered with {status}"

    def vitals(self) -> Vitals | None:
        """Return what the metrics say, None when they cannot be read."""
        return parse_vitals(health.read_metrics(self._config))

    def is_paused(self) -> bool:
        """Return whether somebody paused it by its own API; most engines do not have that."""
        try:
            status, answer = self._request("GET", "/is_paused", health.METRICS_TIMEOUT_SECONDS)
            return status == 200 and json.loads(answer)["is_paused"] is True
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return False

    def work(self) -> Work | None:
        """Return what its API servers were asked, None when they do not count."""
        return tally.work(self._config.engine_id)

    def _request(self, method: str, path: str, seconds: float, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(health.engine_host(self._config), self._config.port, timeout=seconds)
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


class Completions:
    """The verdict, step by step. `error` and `stalled` may be read from any thread."""

    def __init__(self, config: EngineConfig, engine: Engine) -> None:
        self._engine = engine
        self._period = config.probe_period_seconds
        self._threshold = config.probe_failure_threshold
        self._signs: tuple[str, ...] | None = None
        self._work: Work | None = None
        self._moved = 0.0
        self._failures = 0
        self._proven = config.probe_period_seconds is None
        self.error = "" if self._proven else UNPROVEN
        """Why the engine is not ready, empty when it is."""

    @property
    def stalled(self) -> bool:
        """Return whether it has failed so often that it is not waited for any more."""
        return self._proven and self._failures >= self._threshold

    def run(self, answers: Callable[[], bool], stop: threading.Event) -> None:
        """Take steps while the engine `answers` its health checks, until told to stop; in a thread of its own."""
        if self._period is None:
            return
        while not stop.wait(self._period / _LOOKS if self._proven else _FIRST_SECONDS):
            if answers():
                self.step(time.monotonic)

    def step(self, clock: Callable[[], float]) -> None:
        """Look at the engine once, and ask it if there is reason to."""
        if not self._proven:
            error = self._engine.complete()
            self.error = f"{UNPROVEN}: {error}" if error else ""
            self._proven = not error
        elif (vitals := self._engine.vitals()) is not None:  # else nothing is known of its progress
            self._judge(vitals, clock)

    def _judge(self, vitals: Vitals, clock: Callable[[], float]) -> None:
        work = self._engine.work()
        # A request that came and went may have been given up by its client.
        busy = vitals.in_flight > 0 if work is None else work.open > 0 or work != self._work
        moves = vitals.signs != self._signs
        self._signs, self._work = vitals.signs, work
        if moves or vitals.resting or not (busy or self._failures):
            self._well(clock())
        elif self._failures or clock() - self._moved >= (self._period or 0):
            self._ask(clock)

    def _ask(self, clock: Callable[[], float]) -> None:
        error = "" if self._engine.is_paused() else self._engine.complete()
        after = self._engine.vitals() if error else None
        if not error or (after is not None and after.signs != self._signs):
            self._well(clock())
            return
        self._failures += 1
        self.error = f"{error}, and nothing has moved for {clock() - self._moved:.0f} s"
        say(f"{self.error} ({self._failures} of {self._threshold} times)")

    def _well(self, now: float) -> None:
        self._moved, self._failures, self.error = now, 0, ""
