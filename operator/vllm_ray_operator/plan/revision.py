"""Revisions: what the user wrote, resolved once and kept.

A revision is rendered anew only when the part of the spec that it comes from was changed by the user, never because
the operator or its defaults changed. So an operator upgrade rolls nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from vllm_ray_operator.api.base import ApiModel
from vllm_ray_operator.api.spec import EnvVar, Probe, VLLMDeploymentSpec
from vllm_ray_operator.plan import model_uri, names
from vllm_ray_operator.plan.raycluster import ResolvedCluster, Unresolvable, accelerators_per_node, render_cluster
from vllm_ray_operator.plan.world import Deployment, Manifest, Revision, World

DEFAULT_PORT = 8000
DEFAULT_STARTUP_TIMEOUT_SECONDS = 1800


DEFAULT_PROBE_PERIOD_SECONDS = 30
DEFAULT_PROBE_TIMEOUT_SECONDS = 60
DEFAULT_PROBE_FAILURE_THRESHOLD = 2


@dataclass(frozen=True)
class Defaults:
    """What the installation provides for fields that the user left out."""

    engine_image: str | None = None


class ResolvedProbe(ApiModel):
    """How an engine is asked for a token, written out."""

    period_seconds: int
    timeout_seconds: int
    failure_threshold: int


class ResolvedEngine(ApiModel):
    """An engine revision, written out: all that an engine job is made from."""

    model: str
    model_revision: str | None = None
    served_name: str
    port: int
    tensor: int
    pipeline: int
    accelerators_per_node: int
    args: list[str]
    env: list[EnvVar]
    startup_timeout_seconds: int
    probe: ResolvedProbe | None = None
    restarted_at: datetime | None = None


ResolvedT = TypeVar("ResolvedT", ResolvedCluster, ResolvedEngine)


@dataclass(frozen=True)
class Chosen(Generic[ResolvedT]):
    """A revision to be realised. ``digest`` names what it was resolved to, however that was written.

    ``create`` is its ControllerRevision when it is not stored yet.
    """

    name: str
    digest: str
    resolved: ResolvedT
    create: Manifest | None


def cluster_input(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the written spec that decides how the RayCluster looks."""
    engine = raw.get("engine") or {}
    uri = str((raw.get("model") or {}).get("uri", ""))
    return _present(
        cluster=raw.get("cluster"),
        parallelism=raw.get("parallelism"),
        image=engine.get("image"),
        shmSize=engine.get("shmSize"),
        claim=model_uri.parse(uri).claim,
    )


# Of spec.engine: what decides how pods look, and what only the operator goes by.
_NOT_ENGINE = ("image", "shmSize", "drainTimeoutSeconds")


def engine_input(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the written spec that decides how the engine is run in a given cluster."""
    engine = {k: v for k, v in (raw.get("engine") or {}).items() if k not in _NOT_ENGINE}
    workers = (raw.get("cluster") or {}).get("workers") or {}
    return _present(
        model=raw.get("model"),
        engine=engine,
        parallelism=raw.get("parallelism"),
        acceleratorsPerNode=workers.get("acceleratorsPerNode"),
        restartedAt=raw.get("restartedAt"),
    )


def _present(**parts: Any) -> dict[str, Any]:
    """Leave out what is empty: ``engine: {}`` asks for nothing that leaving it out does not."""
    return {key: value for key, value in parts.items() if value not in (None, "", {}, [])}


def choose_cluster(world: World, defaults: Defaults) -> Chosen[ResolvedCluster]:
    """Return the cluster revision of the spec: what it describes, or the kept one that it names.

    Raises:
        Unresolvable: something the user must give is missing, or the revision that it names is not kept any more.
    """
    deployment = world.deployment
    if deployment.spec.rollout.to_cluster_revision is not None:
        return _kept(_named(world, "cluster", deployment.spec.rollout.to_cluster_revision), ResolvedCluster)
    written = cluster_input(deployment.raw_spec)
    stored = _stored(world, "cluster", written)
    if stored is not None:
        return _kept(stored, ResolvedCluster)
    resolved = render_cluster(deployment.name, deployment.spec, defaults.engine_image)
    return _new(world, "cluster", written, resolved)


def choose_engine(world: World, cluster: Chosen[ResolvedCluster]) -> Chosen[ResolvedEngine]:
    """Return the engine revision of the spec: what it describes, or the kept one that it names.

    Raises:
        Unresolvable: the revision that it names is not kept any more, or engine and pods do not fit.
    """
    chosen = _choose_engine(world)
    engine, pods = chosen.resolved, cluster.resolved
    count = math.ceil(engine.tensor * engine.pipeline / engine.accelerators_per_node)
    if (count, engine.accelerators_per_node) != (pods.pods_per_slot, pods.accelerators_per_pod):
        policy = world.deployment.spec.rollout
        undone = "toRevision" if policy.to_revision is not None else "toClusterRevision"
        other = "toClusterRevision" if policy.to_revision is not None else "toRevision"
        raise Unresolvable(
            "RevisionDoesNotFit",
            f"spec.rollout.{undone}: the engine of {chosen.name} needs {count} pods of {engine.accelerators_per_node} "
            f"accelerators for a replica, {cluster.name} has {pods.pods_per_slot} of {pods.accelerators_per_pod} "
            f"(the engine has tensor {engine.tensor}, pipeline {engine.pipeline}): set spec.rollout.{other} to a "
            "revision of the same time, or spec.parallelism and spec.cluster.workers back",
        )
    return chosen


def _choose_engine(world: World) -> Chosen[ResolvedEngine]:
    deployment = world.deployment
    if deployment.spec.rollout.to_revision is not None:
        return _kept(_named(world, "engine", deployment.spec.rollout.to_revision), ResolvedEngine)
    written = engine_input(deployment.raw_spec)
    stored = _stored(world, "engine", written)
    if stored is not None:
        return _kept(stored, ResolvedEngine)
    return _new(world, "engine", written, render_engine(deployment.spec))


def _named(world: World, kind: Literal["cluster", "engine"], name: str) -> Revision:
    kept = {r.name: r for r in world.revisions if r.kind == kind}
    if name not in kept:
        field = "toRevision" if kind == "engine" else "toClusterRevision"
        newest = sorted(kept.values(), key=lambda r: -r.number)[:5]
        raise Unresolvable(
            "RevisionNotFound",
            f"spec.rollout.{field}: there is no {kind} revision {name}. Kept are, newest first: "
            f"{', '.join(r.name for r in newest) or 'none'}. Remove the field to run what the spec describes",
        )
    return kept[name]


def current(world: World) -> tuple[Chosen[ResolvedCluster], Chosen[ResolvedEngine]] | None:
    """Return the revisions that the stored status was made from, if both are still there."""
    status = world.deployment.status
    stored = {revision.name: revision for revision in world.revisions}
    cluster, engine = stored.get(status.cluster_revision or ""), stored.get(status.engine_revision or "")
    if cluster is None or engine is None:
        return None
    return _kept(cluster, ResolvedCluster), _kept(engine, ResolvedEngine)


def ray_cluster(deployment: str, cluster: Chosen[ResolvedCluster], replica: int) -> str:
    """Return the name of the RayCluster that carries a replica at a cluster revision."""
    own = cluster.resolved.policy == "PerReplica"
    return names.ray_cluster(deployment, cluster.digest, replica if own else None)


def clusters(world: World) -> dict[str, Chosen[ResolvedCluster]]:
    """Return the stored cluster revisions that replicas are on, by name."""
    used = {r.cluster_revision for r in world.deployment.status.replicas}
    return {r.name: _kept(r, ResolvedCluster) for r in world.revisions if r.kind == "cluster" and r.name in used}


def engines(world: World) -> dict[str, ResolvedEngine]:
    """Return the stored engine revisions that replicas run or ran last, written out, by name."""
    replicas = world.deployment.status.replicas
    attempts = (attempt for replica in replicas for attempt in replica.attempts)
    used = {r.revision for r in replicas} | {a.engine_revision for a in attempts}
    return {r.name: ResolvedEngine.model_validate(r.resolved) for r in world.revisions if r.name in used}


def render_engine(spec: VLLMDeploymentSpec) -> ResolvedEngine:
    """Write the defaults of today into an engine revision."""
    source = model_uri.parse(spec.model.uri)
    tensor, pipeline = spec.parallelism.tensor or 1, spec.parallelism.pipeline or 1
    return ResolvedEngine(
        model=source.argument,
        model_revision=spec.model.revision,
        served_name=spec.model.served_name or source.name,
        port=spec.engine.port or DEFAULT_PORT,
        tensor=tensor,
        pipeline=pipeline,
        accelerators_per_node=accelerators_per_node(spec),
        args=list(spec.engine.args),
        env=list(spec.engine.env),
        startup_timeout_seconds=spec.engine.startup_timeout_seconds or DEFAULT_STARTUP_TIMEOUT_SECONDS,
        probe=_probe(spec.engine.probe or Probe()),
        restarted_at=spec.restarted_at,
    )


def _probe(written: Probe) -> ResolvedProbe | None:
    if written.enabled is False:
        return None
    return ResolvedProbe(
        period_seconds=written.period_seconds or DEFAULT_PROBE_PERIOD_SECONDS,
        timeout_seconds=written.timeout_seconds or DEFAULT_PROBE_TIMEOUT_SECONDS,
        failure_threshold=written.failure_threshold or DEFAULT_PROBE_FAILURE_THRESHOLD,
    )


def surplus(world: World, in_use: Sequence[str]) -> list[Revision]:
    """Return the stored revisions of each kind beyond the history limit, oldest first; those in use always stay."""
    limit, result = world.deployment.spec.revision_history_limit, list[Revision]()
    for kind in ("cluster", "engine"):
        unused = [r for r in world.revisions if r.kind == kind and r.name not in in_use]
        result += sorted(unused, key=lambda r: r.number)[: max(0, len(unused) - limit)]
    return result


def _stored(world: World, kind: Literal["cluster", "engine"], written: Mapping[str, Any]) -> Revision | None:
    same = [r for r in world.revisions if r.kind == kind and r.written == written]
    return max(same, key=lambda r: r.number, default=None)


def _kept(stored: Revision, kind: type[ResolvedT]) -> Chosen[ResolvedT]:
    return Chosen(stored.name, names.short_hash(stored.resolved), kind.model_validate(stored.resolved), None)


def _new(
    world: World, kind: Literal["cluster", "engine"], written: Mapping[str, Any], resolved: ResolvedT
) -> Chosen[ResolvedT]:
    deployment = world.deployment
    content = resolved.to_wire()
    # Named after both: what is written otherwise but means the same is a revision of its own, though nothing rolls.
    name = names.revision(deployment.name, kind, names.short_hash({"written": written, "resolved": content}))
    number = 1 + max((r.number for r in world.revisions), default=0)
    return Chosen(
        name,
        names.short_hash(content),
        resolved,
        _controller_revision(deployment, name, kind, number, written, content),
    )


def _controller_revision(
    deployment: Deployment,
    name: str,
    kind: str,
    number: int,
    written: Mapping[str, Any],
    resolved: Mapping[str, Any],
) -> Manifest:
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": {
            "name": name,
            "namespace": deployment.namespace,
            "labels": {**names.selector(deployment.name), names.REVISION_KIND: kind},
            "ownerReferences": [names.owner_reference(deployment.name, deployment.uid)],
        },
        "revision": number,
        "data": {"written": dict(written), "resolved": dict(resolved)},
    }


__all__ = [
    "Chosen",
    "Defaults",
    "ResolvedEngine",
    "Unresolvable",
    "choose_cluster",
    "choose_engine",
    "clusters",
    "current",
    "engines",
    "ray_cluster",
    "surplus",
]
