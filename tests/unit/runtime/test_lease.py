"""Leader election."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from tests.unit.runtime.doubles import StoredKube
from tests.unit.runtime.virtual import EPOCH, VirtualClock, in_virtual_time
from vllm_ray_operator.clients.protocols import LEASES, ApiError, Object
from vllm_ray_operator.runtime.lease import LeaderLease, LeaseLost

NAMESPACE, NAME = "ops", "vllm-ray-operator"


def make(kube: StoredKube, identity: str, wall_offset: float = 0.0) -> LeaderLease:
    def wall() -> datetime:
        return datetime.fromtimestamp(VirtualClock().now() + wall_offset, UTC)

    return LeaderLease(kube, NAMESPACE, NAME, identity, VirtualClock(), wall)


def stored(kube: StoredKube) -> Object:
    spec: Object = kube.objects[LEASES.plural, NAMESPACE, NAME]["spec"]
    return spec


def elapsed() -> float:
    return round(VirtualClock().now() - EPOCH, 3)


@in_virtual_time
async def test_the_first_comer_leads_at_once_and_renews() -> None:
    kube = StoredKube()
    lease = make(kube, "a")
    await lease.acquire()
    assert elapsed() == 0
    assert stored(kube) == {
        "holderIdentity": "a",
        "leaseDurationSeconds": 15,
        "acquireTime": "2027-01-15T08:00:00.000000Z",
        "renewTime": "2027-01-15T08:00:00.000000Z",
        "leaseTransitions": 0,
    }
    keeper = asyncio.create_task(lease.keep())
    await asyncio.sleep(60.5)
    assert not keeper.done()
    assert lease.leads()
    assert stored(kube)["renewTime"] == "2027-01-15T08:01:00.000000Z"
    assert stored(kube)["acquireTime"] == "2027-01-15T08:00:00.000000Z"
    keeper.cancel()


@in_virtual_time
@pytest.mark.parametrize("offset", [0.0, -86400.0, 86400.0], ids=["same clock", "a day behind", "a day ahead"])
async def test_a_dead_leader_is_replaced_after_the_lease_as_seen_by_our_own_clock(offset: float) -> None:
    kube = StoredKube()
    await make(kube, "dead", wall_offset=offset).acquire()
    await asyncio.sleep(100)
    successor = make(kube, "b")
    await successor.acquire()
    assert 115 <= elapsed() <= 118
    assert stored(kube)["holderIdentity"] == "b"
    assert stored(kube)["leaseTransitions"] == 1


@in_virtual_time
async def test_a_living_leader_is_not_replaced() -> None:
    kube = StoredKube()
    leader, follower = make(kube, "a", wall_offset=-3600), make(kube, "b")
    await leader.acquire()
    keeper = asyncio.create_task(leader.keep())
    waiting = asyncio.create_task(follower.acquire())
    await asyncio.sleep(600)
    assert not waiting.done()
    assert follower.reachable
    keeper.cancel()
    waiting.cancel()


@in_virtual_time
async def test_a_released_lease_is_taken_over_within_a_retry() -> None:
    kube = StoredKube()
    leader, follower = make(kube, "a"), make(kube, "b")
    await leader.acquire()
    waiting = asyncio.create_task(follower.acquire())
    await asyncio.sleep(7)
    await leader.release()
    assert not leader.leads()
    await waiting
    assert elapsed() <= 9
    assert stored(kube)["leaseTransitions"] == 1, "a release is not a transition, the new holder is"


@in_virtual_time
async def test_a_restarted_container_takes_its_own_lease_over_at_once() -> None:
    kube = StoredKube()
    await make(kube, "pod_uid").acquire()
    await asyncio.sleep(1)
    await make(kube, "pod_uid").acquire()
    assert elapsed() == 1
    assert stored(kube)["leaseTransitions"] == 0


@in_virtual_time
@pytest.mark.parametrize("fault", ["errors", "silence"])
async def test_a_leader_that_cannot_renew_ends_before_anyone_can_take_over(fault: str) -> None:
    kube = StoredKube()
    leader, follower = make(kube, "a"), make(kube, "b")
    await leader.acquire()
    await asyncio.sleep(0.5)
    cut_off = _CutOff(kube)
    leader._kube = cut_off
    waiting = asyncio.create_task(follower.acquire())
    cut_off.silent = fault == "silence"
    with pytest.raises(LeaseLost):
        await leader.keep()
    lost_at = elapsed()
    assert not leader.leads()
    await waiting
    assert lost_at <= 12
    assert elapsed() >= 15


class _CutOff(StoredKube):
    """An API server that does not answer, or only with errors."""

    silent = False

    async def get(self, *_: object) -> Object:
        if self.silent:
            await asyncio.sleep(3600)
        raise ApiError("unreachable")

    def __init__(self, _: StoredKube) -> None:
        super().__init__()


@in_virtual_time
async def test_a_short_outage_is_survived() -> None:
    kube = StoredKube()
    lease = make(kube, "a")
    await lease.acquire()
    keeper = asyncio.create_task(lease.keep())
    await asyncio.sleep(4)
    kube.fault, kube.fault_count = ApiError("unreachable"), 4
    await asyncio.sleep(2)
    assert lease.leads()
    assert not lease.reachable
    await asyncio.sleep(30)
    assert lease.leads()
    assert lease.reachable
    keeper.cancel()


@in_virtual_time
async def test_a_lost_reply_to_the_renewal_does_no_harm() -> None:
    kube = StoredKube()
    lease = make(kube, "a")
    await lease.acquire()
    keeper = asyncio.create_task(lease.keep())
    kube.lose_replies = True
    await asyncio.sleep(5.5)
    kube.lose_replies = False
    await asyncio.sleep(30)
    assert lease.leads()
    keeper.cancel()


@in_virtual_time
async def test_a_lease_that_was_taken_away_is_noticed_at_the_next_renewal() -> None:
    kube = StoredKube()
    lease = make(kube, "a")
    await lease.acquire()
    usurped = kube.objects[LEASES.plural, NAMESPACE, NAME]
    kube.put(LEASES, NAMESPACE, {**usurped, "spec": {**usurped["spec"], "holderIdentity": "c"}})
    with pytest.raises(LeaseLost, match="held by c"):
        await lease.keep()
    assert elapsed() == 5
    await lease.release()
    assert stored(kube)["holderIdentity"] == "c"


@in_virtual_time
async def test_two_that_come_at_once_do_not_both_lead() -> None:
    kube = StoredKube()
    kube.delay = 0.1
    both = [make(kube, "a"), make(kube, "b")]
    tasks = [asyncio.create_task(lease.acquire()) for lease in both]
    await asyncio.sleep(10)
    assert sum(lease.leads() for lease in both) == 1
    for task in tasks:
        task.cancel()


@in_virtual_time
async def test_a_process_that_was_held_up_knows_that_it_may_lead_no_more() -> None:
    kube = StoredKube()
    lease = make(kube, "a")
    await lease.acquire()
    await asyncio.sleep(11.9)
    assert lease.leads()
    await asyncio.sleep(0.2)
    assert not lease.leads()
