"""What Ray's lists of submissions say of a deployment's attempts: also what its status does not know.

That is so after a lost status, or one from a backup. Every submission says in its metadata whose it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm_ray_operator.api.status import Attempt
from vllm_ray_operator.plan import fence, identity, names
from vllm_ray_operator.plan.world import TERMINAL, Cluster, Deployment, Pod, Submission, World

UID = "vllm-ray.dev/uid"
ATTEMPT = "vllm-ray.dev/attempt"
NONCE = "vllm-ray.dev/nonce"
TURN = "vllm-ray.dev/turn"
REVISION = "vllm-ray.dev/engine-revision"

_DIGITS = re.compile("[0-9]{1,9}")

# No other attempts of a replica than its newest two (one and its standby) can be there: the others were fenced before.
NEWEST = 2


@dataclass(frozen=True)
class Found:
    """An attempt of ours that Ray knows."""

    replica: int
    number: int
    ended: bool
    cluster: Cluster
    head: Pod
    submission: Submission


@dataclass(frozen=True)
class Census:
    """What Ray's lists say. ``unknown``: attempts that may be there and are not in the status, oldest first.

    ``highest``: the highest number that was ever submitted; 0 when none is known.
    """

    unknown: tuple[Found, ...]
    highest: int


def metadata(deployment: Deployment, replica: int, attempt: Attempt) -> dict[str, str]:
    """Return what the submission of an attempt says of it: all that is needed to know it again."""
    return {
        names.DEPLOYMENT: f"{deployment.namespace}/{deployment.name}",
        UID: deployment.uid,
        names.REPLICA: str(replica),
        ATTEMPT: str(attempt.number),
        NONCE: attempt.nonce,
        TURN: str(attempt.turn),
        REVISION: attempt.engine_revision,
    }


def are_needed(deployment: Deployment, clusters: Iterable[Cluster]) -> bool:
    """Whether Ray's lists of submissions have to be read: an attempt may be about to begin, or a RayCluster to go.

    A list holds all submissions since the head started, with their environments: it is not read while all that there is
    has an attempt that was seen in Ray.
    """
    status = deployment.status
    idle = any(r.attempt is None or not fence.was_seen(r.attempt) for r in status.replicas)
    empty = {cluster.name for cluster in clusters} - {a.ray_cluster for r in status.replicas for a in r.attempts}
    return idle or bool(empty) or len(status.replicas) < deployment.spec.replicas or status.rollout is not None


def count(world: World) -> Census:
    """Compare Ray's lists with the status."""
    status = world.deployment.status
    known = {attempt.instance_id for r in status.replicas for attempt in r.attempts}
    found = sorted(_ours(world), key=lambda f: -f.number)
    unknown, newer = list[Found](), dict[int, int]()
    for one in found:
        newer[one.replica] = newer.get(one.replica, 0) + 1
        may_be_left = one.number > status.last_attempt and newer[one.replica] <= NEWEST
        if one.submission.id not in known and (may_be_left or not one.ended):
            unknown.append(one)
    return Census(tuple(reversed(unknown)), max((f.number for f in found), default=0))


def _ours(world: World) -> Iterable[Found]:
    for cluster in world.clusters:
        if (head := cluster.head) is None:
            continue
        for submission in cluster.submissions or ():
            data = submission.metadata
            if not _is_whole(data) or submission.id != _id(world.deployment, data):
                continue
            ended = submission.status in TERMINAL
            yield Found(int(data[names.REPLICA]), int(data[ATTEMPT]), ended, cluster, head, submission)


def _is_whole(data: Mapping[str, str]) -> bool:
    """Whether the metadata of a submission has all that we write."""
    numbers = all(_DIGITS.fullmatch(data.get(key, "")) for key in (names.REPLICA, ATTEMPT, TURN))
    return numbers and {UID, NONCE, REVISION} <= data.keys()


def _id(deployment: Deployment, data: Mapping[str, str]) -> str | None:
    """Return the only id under which a submission with this metadata can be ours."""
    if data[UID] != deployment.uid:
        return None
    return identity.instance_id(deployment.name, deployment.uid, int(data[ATTEMPT]), data[NONCE])
