"""Plays a deployment: what is planned happens, engines load and end in known time, and each line says how all are.

A replica that does not stand at the place of its index is written with it: ``2:Ready3``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from tests.unit.plan import build
from tests.unit.plan.build import NOTHING_LEFT, Scene
from vllm_ray_operator.api.status import ReplicaStatus
from vllm_ray_operator.plan.actions import Create, Delete, PatchCluster, StopJob, SubmitJob
from vllm_ray_operator.plan.world import AttemptView

STEP_SECONDS = 5.0


class Play:
    """A deployment whose replicas serve. ``log`` has a line for every change: phase and attempt of each replica.

    ``breaks``: which engines fail as they start, by submission.
    """

    def __init__(self, raw: Mapping[str, Any], breaks: Callable[[SubmitJob], bool] = lambda _: False) -> None:
        self.scene: Scene = build.serving(raw)
        self.breaks = breaks
        self.stopping: set[str] = set()
        self.deleted: list[str] = []  # RayClusters
        self.log: list[str] = []
        self.note()

    def note(self) -> None:
        line = "  ".join(self._word(r) for r in self.scene.status.replicas)
        if not self.log or self.log[-1] != line:
            self.log.append(line)

    def _word(self, replica: ReplicaStatus) -> str:
        index = "" if replica.index == self.scene.status.replicas.index(replica) else f"{replica.index}:"
        waiting = f"+{replica.standby.number}" if replica.standby else ""
        return f"{index}{replica.phase}{replica.attempt.number if replica.attempt else ''}{waiting}"

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
            if isinstance(action, SubmitJob):
                self._submit(action)
            elif isinstance(action, StopJob):
                self.stopping.add(action.submission_id)
            elif isinstance(action, PatchCluster) or (isinstance(action, Create) and _is_ray_cluster(action)):
                scene.make_cluster([r.index for r in scene.status.replicas if r.phase != "Stopped"])
            elif isinstance(action, Delete) and action.kind == "RayCluster":
                del scene.clusters[action.name]
                self.deleted.append(action.name)
        for replica in scene.status.replicas:
            for attempt in replica.attempts:
                scene.views.setdefault(attempt.instance_id, AttemptView(job="absent"))
        return actions

    def _waiting(self) -> set[str]:
        return {r.standby.instance_id for r in self.scene.status.replicas if r.standby is not None}

    def _submit(self, action: SubmitJob) -> None:
        (resource,) = action.resources
        job = build.job(driver_ip=f"10.0.{1 + int(resource.rpartition('-')[2])}.1")
        if self.breaks(action):
            job = build.job("FAILED", result={"reason": "OutOfMemory", "message": "out of memory"})
            self.scene.views[action.submission_id] = AttemptView(job=job, leftovers=NOTHING_LEFT)
        else:
            self.scene.views[action.submission_id] = AttemptView(job=job, engine=build.engine(ready=False))

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
