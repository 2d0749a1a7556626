"""Plays a deployment: what is planned happens, engines load and end in known time, and each line says how all are.

Where there may be several RayClusters, a line also names those that there are: `A` is that of the first cluster
revision, `A0` that of replica 0. A replica that does not stand at the place of its index is written with it:
``2:Ready3``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from tests.unit.plan import build
from tests.unit.plan.build import NOTHING_LEFT, Scene
from tests.unit.plan.model import patch
from vllm_ray_operator.api.status import Attempt, ReplicaStatus
from vllm_ray_operator.plan import names
from vllm_ray_operator.plan.actions import Action, Create, Delete, PatchCluster, StopJob, SubmitJob
from vllm_ray_operator.plan.world import AttemptView, Job, Pod

STEP_SECONDS = 5.0


class Play:
    """A deployment whose replicas serve. ``log`` has a line for every change: phase and attempt of each replica.

    ``breaks``: which engines fail as they start, by submission. ``lame``: which RayClusters get no pods, by manifest.
    ``full``: no node has room for another pod.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        breaks: Callable[[SubmitJob], bool] = lambda _: False,
        lame: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        self.scene: Scene = build.serving(raw)
        self.breaks, self.lame, self.full = breaks, lame, False
        upgrade = raw.get("rollout", {}).get("clusterUpgrade")
        self.names_clusters = raw.get("cluster", {}).get("policy") == "PerReplica" or upgrade == "BlueGreen"
        self.stopping: set[str] = set()
        self.deleted: list[str] = []  # RayClusters
        self.log: list[str] = []
        self.letters: dict[str, str] = {}  # of cluster revisions, by digest
        self.note()

    def note(self) -> None:
        line = "  ".join(self._word(r) for r in self.scene.status.replicas)
        if self.names_clusters:
            line += f" | {' '.join(sorted(map(self._cluster, self.scene.clusters)))}"
        if not self.log or self.log[-1] != line:
            self.log.append(line)

    def _word(self, replica: ReplicaStatus) -> str:
        index = "" if replica.index == self.scene.status.replicas.index(replica) else f"{replica.index}:"
        waiting = f"+{replica.standby.number}" if replica.standby else ""
        return f"{index}{replica.phase}{replica.attempt.number if replica.attempt else ''}{waiting}"

    def _cluster(self, name: str) -> str:
        digest, *replica = name.removeprefix(f"{build.NAME}-").split("-")
        return self.letters.setdefault(digest, "ABCDE"[len(self.letters)]) + "".join(replica)

    def run(self, passes: int) -> list[str]:
        """Let the operator make so many passes, and return the log from there on."""
        start = len(self.log)
        for _ in range(passes):
            self.step()
        return self.log[start:]

    def until(self, line: str, limit: int = 50) -> None:
        """Go on until all are like this."""
        for _ in range(limit):
            if self.log[-1] == line:
                return
            self.step()
        raise AssertionError("\n".join([f"never: {line}", *self.log]))

    def until_rest(self, limit: int = 200) -> list[str]:
        """Go on until there is nothing left to do."""
        start = len(self.log)
        for _ in range(limit):
            before = self.scene.status
            if not self.step() and self.scene.status == before and self.scene.last.wake_after is None:
                return self.log[start:]
        raise AssertionError("\n".join(["no rest", *self.log[-10:]]))

    def step(self) -> tuple[Any, ...]:
        scene = self.scene
        actions = scene.step()
        self.note()
        scene.now += timedelta(seconds=STEP_SECONDS)
        for instance, view in list(scene.views.items()):
            if instance in self.stopping:
                scene.views[instance] = AttemptView(job=build.job("STOPPED"), leftovers=NOTHING_LEFT)
            elif view.engine is not None and view.engine.phase == "Loading" and instance in self._waiting():
                scene.views[instance] = AttemptView(job=view.job, engine=build.engine(ready=False, phase="Standby"))
            elif view.engine is not None and view.engine.phase in ("Loading", "Standby"):
                if instance in self._waiting():
                    continue
                scene.views[instance] = AttemptView(job=view.job, engine=build.engine())
        for action in actions:
            self._carry_out(action)
        self._end_pods()
        for replica in scene.status.replicas:
            for attempt in replica.attempts:
                scene.views.setdefault(attempt.instance_id, AttemptView(job="absent"))
        return actions

    def _carry_out(self, action: Action) -> None:
        scene = self.scene
        if isinstance(action, SubmitJob):
            self._submit(action)
        elif isinstance(action, StopJob):
            self.stopping.add(action.submission_id)
        elif isinstance(action, Create) and _is_ray_cluster(action):
            self._make(action.manifest)
        elif isinstance(action, Delete) and action.kind == "RayCluster":
            del scene.clusters[action.name]
            self.deleted.append(action.name)
        elif isinstance(action, PatchCluster):
            self._patch(action)
        elif isinstance(action, Delete) and action.kind == "Pod":
            self._change_pods(lambda pod: pod.uid == action.uid, deleting=True)

    def cordon(self, *indices: int, back: bool = False) -> None:
        """The nodes of these replicas are cordoned, or no more."""
        slots = [names.slot(index) for index in indices]
        self._change_pods(lambda pod: pod.group in slots, cordoned=not back)

    def cordon_head(self) -> None:
        """The nodes of all heads are cordoned."""
        self._change_pods(lambda pod: pod.is_head, cordoned=True)

    def evict(self, index: int, number: int = 0, grace: float = 3600) -> None:
        """A pod of a replica is deleted; it lives on as long as an engine does in its slot, and it may."""
        ends = self.scene.now + timedelta(seconds=grace)
        pods = [pod for cluster in self.scene.clusters.values() for pod in cluster.slot(names.slot(index))]
        self._change_pods(lambda pod: pod == pods[number], deleting=True, ends=ends)

    def _change_pods(self, which: Callable[[Pod], bool], **changes: Any) -> None:
        for name, cluster in self.scene.clusters.items():
            pods = tuple(replace(pod, **changes) if which(pod) else pod for pod in cluster.pods)
            self.scene.clusters[name] = replace(cluster, pods=pods)

    def _end_pods(self) -> None:
        """Deleted pods end with the engine in their slot, and KubeRay makes others."""
        alive = {names.slot(r.index) for r in self.scene.status.replicas for a in r.attempts if self._runs(a)}
        for name, cluster in self.scene.clusters.items():
            pods = tuple(self._next(pod) if pod.deleting and pod.group not in alive else pod for pod in cluster.pods)
            self.scene.clusters[name] = replace(cluster, pods=pods)

    def _runs(self, attempt: Attempt) -> bool:
        job = self.scene.views[attempt.instance_id].job if attempt.instance_id in self.scene.views else None
        return isinstance(job, Job) and job.status == "RUNNING"

    def _next(self, pod: Pod) -> Pod:
        new = replace(pod, uid=f"{pod.uid}+", deleting=False, ends=None, cordoned=False)
        if self.full:
            trouble = {"problem": "no node can take it", "problem_reason": "Unschedulable"}
            return replace(new, ready=False, node=None, **trouble)
        return new

    def _make(self, manifest: Mapping[str, Any]) -> None:
        made = self.scene.add_cluster(manifest)
        if self.lame(manifest):
            trouble = {"ready": False, "problem": "no such image", "problem_reason": "ErrImagePull"}
            pods = tuple(replace(pod, **trouble) for pod in made.pods)
            self.scene.clusters[made.name] = replace(made, head_ready=False, pods=pods)

    def _waiting(self) -> set[str]:
        return {r.standby.instance_id for r in self.scene.status.replicas if r.standby is not None}

    def _submit(self, action: SubmitJob) -> None:
        (resource,) = action.resources
        job = build.job(driver_ip=build.worker_ip(resource))
        if self.breaks(action):
            job = build.job("FAILED", result={"reason": "OutOfMemory", "message": "out of memory"})
            self.scene.views[action.submission_id] = AttemptView(job=job, leftovers=NOTHING_LEFT)
        else:
            self.scene.views[action.submission_id] = AttemptView(job=job, engine=build.engine(ready=False))

    def _patch(self, action: PatchCluster) -> None:
        """Slots of a RayCluster come and go, with their pods."""
        before = self.scene.clusters[action.name]
        groups = [{"groupName": group, "replicas": size} for group, size in before.groups]
        manifest: dict[str, Any] = {"spec": {"workerGroupSpecs": groups}, "metadata": {"name": action.name}}
        for operation in action.operations[1:]:
            patch(manifest, operation)
        after = self.scene.add_cluster(manifest)
        there = {group for group, size in before.groups if size}
        kept = [pod for pod in before.pods if pod.is_head or dict(after.groups).get(pod.group)]
        new = [pod for pod in after.pods if not pod.is_head and pod.group not in there]
        self.scene.clusters[action.name] = replace(before, groups=after.groups, pods=(*kept, *new))

    def hang(self, index: int) -> None:
        """The engine of a replica runs on, but does not serve."""
        (attempt,) = (r.attempt for r in self.scene.status.replicas if r.index == index)
        assert attempt is not None
        job = self.scene.views[attempt.instance_id].job
        self.scene.views[attempt.instance_id] = AttemptView(job=job, engine=build.engine(ready=False, phase="Serving"))

    def crash(self, index: int) -> None:
        """The engine of a replica dies."""
        (attempt,) = (r.attempt for r in self.scene.status.replicas if r.index == index)
        assert attempt is not None
        job = build.job("FAILED", result={"reason": "WorkerDied", "message": "killed"})
        self.scene.views[attempt.instance_id] = AttemptView(job=job, leftovers=NOTHING_LEFT)


def _is_ray_cluster(action: Create) -> bool:
    return bool(action.manifest["kind"] == "RayCluster")
