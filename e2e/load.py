"""A steady load on a deployment through its Service, and what came of each request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.serving import served_name
from e2e.streams import Streams

CLIENT = Path(__file__).with_name("load_client.py")


@dataclass(frozen=True)
class Request:
    """A request of a client. Times in seconds; ``at`` is the Unix time at which it began."""

    kind: str
    at: float
    first: float | None  # until the answer began
    took: float
    moved: bool  # the server ended a connection that the client would have kept
    error: str

    @property
    def ended(self) -> float:
        """When it ended."""
        return self.at + self.took


class Load:
    """Clients on a node. ``requests`` grows until ``stop``."""

    def __init__(
        self, cluster: str, node: str, deployment: Mapping[str, Any], *, count: int, period: float, url: str = ""
    ) -> None:
        """``count`` clients of each of four kinds (see load_client), each with a request every ``period`` seconds.

        They ask through the Service, or straight at ``url``.
        """
        self.requests: list[Request] = []
        self._streams = Streams(cluster)
        where, model = url or deployment["status"]["endpoint"], served_name(deployment)
        command = ["python3", str(CLIENT), where, model, str(count), str(period)]
        self._streams.on_node(node, command, lambda told: self.requests.append(Request(**told)))

    def stop(self) -> None:
        """End the clients; requests that are under way are not told."""
        self._streams.stop()


@dataclass(frozen=True)
class Tally:
    """What came of requests. Latencies in milliseconds, of those that did not fail."""

    sent: int
    failed: int
    moved: int
    errors: Mapping[str, int]
    latency: Mapping[str, float]  # of whole answers in one piece, by percentile
    first: Mapping[str, float]  # until streams began, by percentile
    stream: Mapping[str, float]  # until streams ended, by percentile


PERCENTILES = (50, 90, 99, 100)


def tally(requests: Sequence[Request], began: float, ended: float) -> Tally:
    """Count the requests that were under way between two moments."""
    counted = [r for r in requests if r.ended >= began and r.at <= ended]
    well = [r for r in counted if not r.error]
    streams = [r for r in well if r.kind.endswith("stream")]
    return Tally(
        sent=len(counted),
        failed=len(counted) - len(well),
        moved=sum(r.moved for r in counted),
        errors=dict(Counter(r.error[:120] for r in counted if r.error).most_common(5)),
        latency=percentiles(r.took for r in well if r.kind.endswith("plain")),
        first=percentiles(r.first for r in streams if r.first is not None),
        stream=percentiles(r.took for r in streams),
    )


def percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """Return percentiles in milliseconds, by nearest rank; none of nothing."""
    ranked = sorted(seconds)
    if not ranked:
        return {}
    return {f"p{p}": round(1000 * ranked[max(0, math.ceil(len(ranked) * p / 100) - 1)], 1) for p in PERCENTILES}
