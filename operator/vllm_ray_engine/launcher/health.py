"""Deep health: the engine answers, serves the model under its name, and every worker actor is alive.

/health alone is not enough: it can answer 200 when workers are dead.
"""

from __future__ import annotations

import http.client
import json
import re
from dataclasses import dataclass
from typing import Any

from vllm_ray_engine.config import EngineConfig

PROBE_TIMEOUT_SECONDS = 10.0
METRICS_TIMEOUT_SECONDS = 2.0
MISSED_PROBES = 3
"""So many probes in a row have to go without an answer before a ready engine is judged by it."""
HUNG_SECONDS = 120.0
"""After so long without an answer a serving engine is taken for hung."""


@dataclass(frozen=True)
class Probe:
    """What the engine's HTTP side answered.

    status: of /health, None without an answer. error: what is wrong, empty when nothing is. silent: the engine listens
    but gave no answer, which says nothing for certain: it may be hung, or just busy.
    """

    status: int | None
    models: tuple[str, ...] = ()
    error: str = ""
    silent: bool = False


@dataclass(frozen=True)
class Health:
    """The verdict: `reason` says in plain words why it is not ready."""

    ready: bool
    reason: str
    models: tuple[str, ...]
    workers_expected: int
    workers_alive: int

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as the control endpoint carries it."""
        return {
            "ready": self.ready,
            "reason": self.reason,
            "models": list(self.models),
            "workersExpected": self.workers_expected,
            "workersAlive": self.workers_alive,
        }


_IN_FLIGHT = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def read_metrics(config: EngineConfig) -> str:
    """Return the text of the engine's /metrics, an empty one when it does not answer with them."""
    connection = http.client.HTTPConnection(engine_host(config), config.port, timeout=METRICS_TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
    return text if response.status == 200 else ""


def in_flight(metrics: str) -> int | None:
    """Return how many requests an engine's metrics have running or waiting, None when they do not tell."""
    try:
        counts = [float(count) for count in _IN_FLIGHT.findall(metrics)]
        return int(sum(counts)) if counts else None
    except ValueError:
        return None


def requests_in_flight(config: EngineConfig) -> int | None:
    """Return how many requests the engine has running or waiting, by its own metrics; None when it does not tell."""
    return in_flight(read_metrics(config))


def engine_host(config: EngineConfig) -> str:
    """Return the address at which the engine answers from its own pod."""
    return "127.0.0.1" if config.host == "0.0.0.0" else config.host  # noqa: S104


def probe(config: EngineConfig, key: str) -> Probe:  # noqa: PLR0911  one return for each way it can fail
    """Ask the engine for its health and its models. Never raises for what the network or the engine does."""
    connection = http.client.HTTPConnection(engine_host(config), config.port, timeout=PROBE_TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            return Probe(response.status, error=f"/health answers {response.status}")
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            return Probe(200, error=f"/v1/models answers {response.status}")
        return Probe(200, tuple(str(model["id"]) for model in json.loads(body)["data"]))
    except TimeoutError:
        return Probe(None, error=f"the engine did not answer within {PROBE_TIMEOUT_SECONDS:g} s", silent=True)
    except ConnectionRefusedError:
        return Probe(None, error="the engine does not listen")
    except (OSError, http.client.HTTPException) as error:
        return Probe(None, error=f"the engine's answer broke off: {error}", silent=True)
    except (ValueError, KeyError, TypeError):
        return Probe(200, error="/v1/models answers something that is not a list of models")
    finally:
        connection.close()


def judge(config: EngineConfig, probed: Probe, workers_alive: int, unfit: str = "") -> Health:
    """Combine the engine's answer with the number of living workers, as Ray said it last.

    That may be long ago: while Ray's control store is away engines serve on, and the silence says nothing of them.
    `unfit`: what else is known against it.
    """
    if probed.error:
        reason = probed.error
    elif config.served_name not in probed.models:
        reason = f"/v1/models does not list {config.served_name}"
    elif workers_alive != config.workers:
        reason = f"{workers_alive} of {config.workers} workers are alive"
    else:
        reason = unfit
    return Health(not reason, reason, probed.models, config.workers, workers_alive)


class Patience:
    """Keeps a ready engine ready while it only misses a few probes, and measures for how long it has been silent.

    Used from the thread that probes; `silent_seconds` and `dead` from any.
    """

    def __init__(self) -> None:
        self._missed = 0
        self._answered: float | None = None
        self.dead = False
        """Whether the engine said so (/health answered 503) in its last answer, however long ago that was."""

    def judge(self, before: Health, probed: Probe, seen: Health, now: float) -> Health:
        """Return the verdict to act on: `seen`, judged from `probed` at `now` (monotonic), or the one `before` it."""
        if probed.status is not None:
            self._answered, self.dead = now, probed.status == 503
        if not probed.silent:
            self._missed = 0
            return seen
        self._missed += 1
        workers_lost = seen.workers_alive < seen.workers_expected
        return before if before.ready and self._missed < MISSED_PROBES and not workers_lost else seen

    def silent_seconds(self, now: float) -> float:
        """Return how long ago the engine answered last, 0 if it never has."""
        return 0.0 if self._answered is None else now - self._answered
