"""What Ray knows of the attempts: their jobs, and what is left of those that have ended."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_ray_operator.api.status import Attempt
from vllm_ray_operator.clients.bundle import Clients
from vllm_ray_operator.clients.protocols import (
    PODS,
    SECRETS,
    ActorRow,
    ApiError,
    Forbidden,
    JobRow,
    Kube,
    NotFound,
    Ray,
    RayEndpoint,
)
from vllm_ray_operator.observe.kube import parse_pod
from vllm_ray_operator.observe.limit import Limit
from vllm_ray_operator.observe.words import MAX_MESSAGE_CHARACTERS, cut
from vllm_ray_operator.plan.world import TERMINAL, AttemptView, Cluster, Job, Leftovers, Pod, Problem, Submission

# Where KubeRay puts the token in its Secret.
TOKEN_KEY = "auth_token"  # noqa: S105 - the name of a key
# The namespace of the actors that the Jobs API makes for itself, one for each submission.
SUPERVISOR_NAMESPACE = "SUPERVISOR_ACTOR_RAY_NAMESPACE"
RESULT_MARKER = "VLLM_RAY_ENGINE_RESULT "
# Where the end of the log begins in the message of a job that failed (Ray 2.60, job_supervisor.py).
LOG_IN_MESSAGE = ", last available logs"
LOG_TAIL_CHARACTERS = 64 * 1024


@dataclass(frozen=True)
class Access:
    """The dashboards that may be asked, by RayCluster; for the others what is in the way.

    ``tokens``: as far as they are known, None where Ray asks for none; launchers are asked whatever the head does.
    """

    endpoints: Mapping[str, RayEndpoint]
    tokens: Mapping[str, str | None]
    errors: Mapping[str, str]
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Seen:
    """The attempts by instance id, and by RayCluster why its Ray could not be read."""

    views: Mapping[str, AttemptView]
    errors: Mapping[str, str]
    clusters: Mapping[str, str]  # instance id to RayCluster
    submissions: Mapping[str, tuple[Submission, ...]]  # by RayCluster, as far as they were asked for and answered


async def find_dashboards(
    clients: Clients, namespace: str, clusters: Sequence[Cluster], token_secrets: Mapping[str, str], limit: Limit
) -> Access:
    """Return how to reach the dashboards of all clusters whose head is ready, and the tokens of all."""
    endpoints: dict[str, RayEndpoint] = {}
    tokens: dict[str, str | None] = {}
    errors: dict[str, str] = {}
    problems: list[Problem] = []

    async def find(cluster: Cluster) -> None:
        endpoint = RayEndpoint(clients.dashboard_url(namespace, cluster.name))
        secret = token_secrets.get(cluster.name)
        try:
            if secret is not None:
                endpoint = await _with_token(clients.kube, namespace, secret, endpoint)
        except Forbidden as error:
            errors[cluster.name] = f"the Ray token cannot be read: {error}"
            problems.append(Problem("Forbidden", errors[cluster.name]))
        except NotFound:
            errors[cluster.name] = f"waiting for KubeRay to make Secret {secret} with the Ray token"
        except LookupError as error:
            errors[cluster.name] = str(error.args[0])
        else:
            tokens[cluster.name] = endpoint.token
            if cluster.head_ready and cluster.head is not None:
                endpoints[cluster.name] = endpoint

    await limit.gather(map(find, clusters))
    return Access(endpoints, tokens, errors, tuple(sorted(problems, key=lambda problem: problem.message)))


async def _with_token(kube: Kube, namespace: str, name: str, endpoint: RayEndpoint) -> RayEndpoint:
    secret = await kube.get(SECRETS, namespace, name)
    encoded = (secret.get("data") or {}).get(TOKEN_KEY)
    try:
        token = base64.b64decode(encoded or "", validate=True).decode().strip()
    except ValueError:
        token = ""
    if not token:
        raise LookupError(f"Secret {name} holds no Ray token under the key {TOKEN_KEY}")
    return replace(endpoint, token=token, token_source=f"Secret {namespace}/{name} (key {TOKEN_KEY})")


async def read_attempts(
    ray: Ray, endpoints: Mapping[str, RayEndpoint], attempts: Sequence[Attempt], limit: Limit, *, lists: bool
) -> Seen:
    """Return what Ray says of every attempt. One on a cluster that cannot be asked has no known job.

    ``lists``: also what other submissions it knows.
    """
    views = {attempt.instance_id: AttemptView(job=None) for attempt in attempts}
    errors: dict[str, str] = {}
    silent: set[str] = set()

    async def read(attempt: Attempt) -> None:
        cluster = attempt.ray_cluster
        # A dashboard that is silent is not asked once more for every replica: each time would cost seconds.
        if cluster in endpoints and cluster not in silent:
            view, error = await _read_attempt(ray, endpoints[cluster], attempt)
            views[attempt.instance_id] = view
            if error is not None:
                errors.setdefault(cluster, str(error))
                if error.status is None:
                    silent.add(cluster)

    submissions: dict[str, tuple[Submission, ...]] = {}

    async def read_list(cluster: str) -> None:
        try:
            rows = await ray.jobs(endpoints[cluster])
            submissions[cluster] = tuple(Submission(row.submission_id, row.status, row.metadata) for row in rows)
        except ApiError as error:
            errors.setdefault(cluster, str(error))

    await limit.gather(read(attempt) for attempt in attempts)
    await limit.gather(read_list(cluster) for cluster in endpoints if lists and cluster not in silent)
    return Seen(views, errors, {attempt.instance_id: attempt.ray_cluster for attempt in attempts}, submissions)


async def distrust_after_restart(
    kube: Kube, namespace: str, clusters: Sequence[Cluster], seen: Seen, limit: Limit
) -> Seen:
    """Forget every absence, and every list, that a head told which is not the one that was seen first.

    The pods were read before Ray was asked. A head that restarted in between knows nothing of older jobs and actors,
    which may still hold accelerators: its "there is none" proves nothing about the attempt of the earlier head.
    """
    doubtful = {seen.clusters[instance] for instance, view in seen.views.items() if _claims_absence(view)}
    doubtful |= seen.submissions.keys()
    heads = [(c.name, c.head) for c in clusters if c.name in doubtful and c.head is not None]
    same = await limit.gather(_lives_on(kube, namespace, head) for _, head in heads)
    changed = {name for (name, _), lives in zip(heads, same, strict=True) if not lives}
    if not changed:
        return seen
    views = {
        instance: AttemptView(job=None) if seen.clusters[instance] in changed and _claims_absence(view) else view
        for instance, view in seen.views.items()
    }
    submissions = {cluster: listed for cluster, listed in seen.submissions.items() if cluster not in changed}
    return replace(seen, views=views, submissions=submissions)


async def _read_attempt(ray: Ray, endpoint: RayEndpoint, attempt: Attempt) -> tuple[AttemptView, ApiError | None]:
    try:
        row = await ray.job(endpoint, attempt.instance_id)
    except ApiError as error:
        return AttemptView(job=None), error
    job = _job(row) if row is not None else None
    ended = job is not None and job.status in TERMINAL
    if row is not None and job is not None and ended:
        job = replace(job, result=await _result(ray, endpoint, attempt.instance_id, row.message))
    view = AttemptView(job=job or "absent")
    if not ended and attempt.end_time is None:
        return view, None
    known = {*attempt.ray_job_ids, *(job.ray_job_ids if job else ())}
    try:
        leftovers, ray_job_ids = await _leftovers(ray, endpoint, attempt.instance_id, known)
    except ApiError as error:
        return view, error
    if job is not None:
        job = replace(job, ray_job_ids=tuple(sorted(ray_job_ids)))
    return AttemptView(job=job or "absent", leftovers=leftovers), None


def _job(row: JobRow) -> Job:
    ray_job_ids = (row.job_id,) if row.job_id else ()
    # Ray puts raw log lines behind its own words: nobody has taken secrets out of those.
    words, _, _ = row.message.partition(LOG_IN_MESSAGE)
    message = cut(words, MAX_MESSAGE_CHARACTERS)
    return Job(status=row.status, message=message, ray_job_ids=ray_job_ids, driver_ip=row.driver_ip)


async def _result(ray: Ray, endpoint: RayEndpoint, submission_id: str, message: str) -> Mapping[str, str] | None:
    """Return the launcher's last words. Ray puts the end of a failed job's log into its message already."""
    found = last_words(message)
    if found is None:
        try:
            found = last_words(await ray.job_log_tail(endpoint, submission_id, LOG_TAIL_CHARACTERS))
        except ApiError:
            return None  # the node that has the log may be gone; that the job has ended is known all the same
    return found


def last_words(log: str) -> Mapping[str, str] | None:
    """Return the result that the launcher printed last, or None. Lines of Ray's own may come after it."""
    for line in reversed(log.splitlines()):
        _, marker, text = line.partition(RESULT_MARKER)
        if not marker:
            continue
        try:
            result = json.loads(text)
        except ValueError:
            continue
        if isinstance(result, dict):
            return {str(k): cut(str(v), MAX_MESSAGE_CHARACTERS) for k, v in result.items() if v is not None}
    return None


async def _leftovers(
    ray: Ray, endpoint: RayEndpoint, instance_id: str, known_job_ids: set[str]
) -> tuple[Leftovers, set[str]]:
    """Return what is alive of an attempt, and every Ray job id found to be its own.

    By its namespace and by every Ray job id known: processes of one submission may have opened several Ray jobs, and
    one opened by accident lands in a namespace without a name.
    """
    in_namespace = await ray.actors(endpoint, {"ray_namespace": instance_id})
    groups = await ray.placement_groups(endpoint, {"name": instance_id})
    job_ids = {
        *known_job_ids,
        *(actor.job_id for actor in in_namespace.rows if actor.job_id),
        *(group.creator_job_id for group in groups.rows if group.creator_job_id),
    }
    complete = in_namespace.complete and groups.complete
    found = {actor.actor_id: actor for actor in in_namespace.rows}
    for job_id in sorted(job_ids):
        of_job = await ray.actors(endpoint, {"job_id": job_id})
        complete = complete and of_job.complete
        found.update((actor.actor_id, actor) for actor in of_job.rows)
    alive = [actor for actor in found.values() if actor.state != "DEAD" and actor.namespace != SUPERVISOR_NAMESPACE]
    return (
        Leftovers(
            complete=complete,
            actors=tuple(sorted(_describe(actor) for actor in alive)),
            placement_groups=tuple(sorted(f"{g.name} ({g.state})" for g in groups.rows if g.state != "REMOVED")),
        ),
        job_ids,
    )


def _describe(actor: ActorRow) -> str:
    where = f" on node {actor.node_id[:8]}, pid {actor.pid}" if actor.node_id else ""
    return f"{actor.name or actor.actor_id} ({actor.state}){where}"


def _claims_absence(view: AttemptView) -> bool:
    return view.job == "absent" or (view.leftovers is not None and view.leftovers.none)


async def _lives_on(kube: Kube, namespace: str, head: Pod) -> bool:
    """Whether the head's Ray container is still the one that was seen, and running."""
    try:
        now = parse_pod(await kube.get(PODS, namespace, head.name))
    except NotFound:
        return False
    return (now.uid, now.restarts) == (head.uid, head.restarts) and not now.deleting
