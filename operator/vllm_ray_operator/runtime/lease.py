"""Leader election by a Lease.

A foreign clock is never believed: another's Lease counts as expired once *we* have seen it unchanged for as long as it
lasts. Our own counts from before the request that renewed it, so that we give up before anyone can take over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from vllm_ray_operator.clients.protocols import LEASES, ApiError, Clock, Conflict, Kube, NotFound, Object
from vllm_ray_operator.runtime.clock import within
from vllm_ray_operator.runtime.logging import fields

log = logging.getLogger(__name__)


class LeaseLost(Exception):
    """We can no longer be sure that nobody else leads."""


@dataclass(frozen=True)
class Timing:
    """Seconds. A follower may take over ``duration`` after the last renewal; the leader ends ``margin`` before that."""

    duration: int = 15
    renew: float = 5.0
    retry: float = 2.0
    request: float = 4.0
    release: float = 1.5
    margin: float = 3.0


class LeaderLease:
    """Our hold on the Lease ``namespace/name``.

    ``identity`` must belong to this process alone, or to processes of which the older are surely dead: a Lease that
    bears it is taken over at once. ``steady`` measures durations, ``wall`` writes the times that others read.
    """

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        identity: str,
        steady: Clock,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        timing: Timing = Timing(),
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._steady = steady
        self._wall = wall
        self._timing = timing
        self._seen: tuple[object, object] | None = None  # holder and time of renewal as last read
        self._seen_at = 0.0
        self._renewed_at = 0.0
        self.held = False
        self.reachable = False
        """Whether the last request for the Lease was answered."""

    def leads(self) -> bool:
        """Whether it is sure at this moment that nobody else leads, even if this process was held up for a while."""
        return self.held and self._steady.now() < self._deadline()

    async def acquire(self) -> None:
        """Return once the Lease is ours."""
        while True:
            asked_at = self._steady.now()
            try:
                holder = await within(self._steady, self._timing.request, self._try_to_acquire())
                self.reachable = True
            except (ApiError, TimeoutError) as error:
                holder = None
                self.reachable = isinstance(error, Conflict)
                log.warning("the leader lease could not be read or written: %s", error)
            if holder == self._identity:
                self._renewed_at = asked_at
                self.held = True
                log.info("leading", extra=fields(lease=self._name, identity=self._identity))
                return
            await self._steady.sleep(self._timing.retry)

    async def keep(self) -> None:
        """Renew for ever. LeaseLost when another holds the Lease, or in time before our hold runs out."""
        wait = self._timing.renew
        while True:
            deadline = self._deadline()
            await self._steady.sleep(min(wait, max(0.0, deadline - self._steady.now())))
            asked_at = self._steady.now()
            if asked_at >= deadline:
                self.held = False
                raise LeaseLost("the leader lease could not be renewed in time")
            try:
                await within(self._steady, min(self._timing.request, deadline - asked_at), self._renew())
            except (ApiError, TimeoutError) as error:
                self.reachable = False
                log.warning("the leader lease could not be renewed, trying again: %s", error)
                wait = 1.0
            else:
                self.reachable = True
                self._renewed_at = asked_at
                wait = self._timing.renew

    async def release(self) -> None:
        """Let go of the Lease, if it is ours, so that a successor need not wait. ApiError, TimeoutError on failure."""
        if not self.held:
            return
        self.held = False
        await within(self._steady, self._timing.release, self._release())

    def _deadline(self) -> float:
        return self._renewed_at + self._timing.duration - self._timing.margin

    async def _try_to_acquire(self) -> str | None:
        """Take the Lease if it is free. Return who holds it now."""
        try:
            lease = await self._kube.get(LEASES, self._namespace, self._name)
        except NotFound:
            manifest = {
                "apiVersion": LEASES.api_version,
                "kind": LEASES.kind,
                "metadata": {"namespace": self._namespace, "name": self._name},
                "spec": self._spec(transitions=0, acquired=self._time()),
            }
            await self._kube.create(LEASES, self._namespace, manifest)
            return self._identity
        spec = _spec_of(lease)
        holder = spec.get("holderIdentity")
        seen = (holder, spec.get("renewTime"))
        if seen != self._seen:
            if holder and holder != self._identity and (self._seen is None or self._seen[0] != holder):
                log.info("standing by", extra=fields(lease=self._name, leader=holder))
            self._seen, self._seen_at = seen, self._steady.now()
        lasts = spec.get("leaseDurationSeconds") or self._timing.duration
        if holder and holder != self._identity and self._steady.now() - self._seen_at < lasts:
            return str(holder)
        transitions = int(spec.get("leaseTransitions") or 0)
        lease["spec"] = self._spec(transitions=transitions + (holder != self._identity), acquired=self._time())
        await self._kube.replace(LEASES, self._namespace, lease)
        return self._identity

    async def _renew(self) -> None:
        lease = await self._kube.get(LEASES, self._namespace, self._name)
        spec = _spec_of(lease)
        if spec.get("holderIdentity") != self._identity:
            self.held = False
            raise LeaseLost(f"the leader lease is held by {spec.get('holderIdentity') or 'nobody'}")
        lease["spec"] = spec | {"renewTime": self._time(), "leaseDurationSeconds": self._timing.duration}
        await self._kube.replace(LEASES, self._namespace, lease)

    async def _release(self) -> None:
        lease = await self._kube.get(LEASES, self._namespace, self._name)
        spec = _spec_of(lease)
        if spec.get("holderIdentity") != self._identity:
            return
        del spec["holderIdentity"]
        lease["spec"] = spec | {"renewTime": self._time(), "leaseDurationSeconds": 1}
        await self._kube.replace(LEASES, self._namespace, lease)

    def _spec(self, transitions: int, acquired: str) -> dict[str, Any]:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._timing.duration,
            "acquireTime": acquired,
            "renewTime": acquired,
            "leaseTransitions": transitions,
        }

    def _time(self) -> str:
        return self._wall().strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _spec_of(lease: Object) -> dict[str, Any]:
    return dict(lease.get("spec") or {})
