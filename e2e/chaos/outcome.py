"""What a fault did, computed from what was seen. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# They say that something is on its way, or all is well; not what is wrong.
NO_NEWS = frozenset(
    {"AllReplicasReady", "ClusterReady", "Complete", "AsExpected", "Starting", "Stopping", "Fencing", "Draining"}
    | {"RollingUpdate", "WaitingForPods", "CreatingCluster", "Backoff"}
)


@dataclass(frozen=True)
class Seen:
    """The resource at a time."""

    at: float
    generation: int
    status: Mapping[str, Any]

    @classmethod
    def of(cls, at: float, resource: Mapping[str, Any]) -> Seen:
        """Return it from the resource."""
        return cls(at, resource["metadata"]["generation"], resource.get("status", {}))

    @property
    def ready(self) -> bool:
        """Whether it is Ready for the spec as it is."""
        found = self._condition("Ready")
        return found.get("status") == "True" and found.get("observedGeneration") == self.generation

    @property
    def attempts(self) -> dict[int, int]:
        """Number of each replica's attempt, those without one left out."""
        replicas = self.status.get("replicas", [])
        return {r["index"]: r["attempt"]["number"] for r in replicas if r.get("attempt")}

    @property
    def ids(self) -> dict[str, tuple[int, int]]:
        """Whose each instance id is: replica and number of the attempt."""
        return {
            attempt["instanceId"]: (replica["index"], attempt["number"])
            for replica in self.status.get("replicas", [])
            for attempt in (replica.get("attempt"), replica.get("standby"))
            if attempt
        }

    @property
    def failures(self) -> dict[int, str]:
        """Reason of the last failure of each replica, by the attempt that failed."""
        found = (r.get("lastFailure") for r in self.status.get("replicas", []))
        return {f["attempt"]: f["reason"] for f in found if f}

    @property
    def stops(self) -> list[str]:
        """Why attempts are being stopped."""
        found = (r.get("attempt") or {} for r in self.status.get("replicas", []))
        return [attempt["stop"]["reason"] for attempt in found if attempt.get("stop")]

    def reasons(self, known: Collection[int]) -> list[str]:
        """Return what is said to be wrong: failures of attempts, those that are known left out; stops; conditions."""
        named = [reason for attempt, reason in self.failures.items() if attempt not in known]
        named += self.stops
        named += [str(self._condition(kind).get("reason", "")) for kind in ("Ready", "ClusterReady", "Degraded")]
        return [reason for reason in named if reason and reason not in NO_NEWS]

    def _condition(self, kind: str) -> Mapping[str, Any]:
        return next((c for c in self.status.get("conditions", []) if c["type"] == kind), {})


@dataclass(frozen=True)
class Traffic:
    """An EndpointSlice at a time: the addresses that clients are sent to by it."""

    at: float
    slice: str
    addresses: frozenset[str]  # address:port

    @classmethod
    def of(cls, at: float, event: Mapping[str, Any]) -> Traffic:
        """Return it from an event of a watch."""
        found = event["object"]
        addresses: set[str] = set()
        if event["type"] != "DELETED":
            port = found["ports"][0]["port"]
            ready = (e for e in found.get("endpoints") or () if e["conditions"].get("ready"))
            addresses = {f"{address}:{port}" for endpoint in ready for address in endpoint["addresses"]}
        return cls(at, found["metadata"]["name"], frozenset(addresses))


@dataclass(frozen=True)
class Request:
    """A request of a client."""

    at: float
    took: float  # seconds
    error: str


@dataclass(frozen=True)
class Tally:
    """Requests that were under way during the fault."""

    sent: int
    failed: int
    first: float | None  # seconds after the fault until the first one failed, and until the last one did
    last: float | None
    error: str = ""  # the one that was met most


@dataclass(frozen=True)
class Outcome:
    """What came of one fault. Times in seconds after it; None for what did not happen."""

    fault: str
    out: float | None  # the replica that is hit has left the traffic
    named: tuple[tuple[str, float], ...]  # reasons by the time they were first said
    mended: float | None
    ready: float | None  # Ready again, for the last time
    replaced: tuple[int, ...]  # replicas whose attempt is another one now
    engine_gone: float | None  # the engine core that was hit is no more
    service: Tally
    other: Tally | None  # None when the other replica is hit too
    load: float  # average load of the machine over the last minute, at the end
    reused: tuple[str, ...] = ()  # instance ids that more than one attempt had
    notes: tuple[str, ...] = ()


def out_of_traffic(traffic: Sequence[Traffic], address: str, began: float) -> float | None:
    """Return after how many seconds no slice sent clients to an address any more."""
    slices: dict[str, frozenset[str]] = {}
    gone: float | None = None
    for change in sorted(traffic, key=lambda t: t.at):
        slices[change.slice] = change.addresses
        listed = any(address in addresses for addresses in slices.values())
        if listed:
            gone = None if change.at < began else gone
        elif gone is None and change.at >= began:
            gone = change.at - began
    return gone


def named(seen: Sequence[Seen], known: Collection[int], began: float) -> tuple[tuple[str, float], ...]:
    """Return the reasons that were said after the fault, each with the time it was first said.

    ``known``: attempts whose failure was known before.
    """
    first: dict[str, float] = {}
    for look in seen:
        if look.at >= began:
            for reason in look.reasons(known):
                first.setdefault(reason, look.at - began)
    return tuple(first.items())


def ready_again(seen: Sequence[Seen], began: float) -> float | None:
    """Return when it got Ready for the last time: 0 if it never stopped being, None if it is not."""
    since: float | None = None
    for look in seen:
        if not look.ready:
            since = None
        elif since is None:
            since = max(look.at - began, 0.0)
    return since


def tally(requests: Sequence[Request], began: float, ended: float) -> Tally:
    """Count the requests that were under way between two moments."""
    counted = [r for r in requests if r.at + r.took >= began and r.at <= ended]
    failed = [r.at + r.took - began for r in counted if r.error]
    errors = Counter(r.error for r in counted if r.error).most_common(1)
    error = errors[0][0] if errors else ""
    return Tally(len(counted), len(failed), min(failed, default=None), max(failed, default=None), error)


def replaced(before: Mapping[int, int], after: Mapping[int, int]) -> tuple[int, ...]:
    """Return the replicas whose attempt is not the one it was."""
    return tuple(sorted(index for index, number in before.items() if after.get(index) != number))


def reused(seen: Sequence[Seen]) -> tuple[str, ...]:
    """Return the instance ids that were not one attempt's alone."""
    owners: dict[str, set[tuple[int, int]]] = {}
    for look in seen:
        for instance_id, owner in look.ids.items():
            owners.setdefault(instance_id, set()).add(owner)
    return tuple(sorted(instance_id for instance_id, found in owners.items() if len(found) > 1))
