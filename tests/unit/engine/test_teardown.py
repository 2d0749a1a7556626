"""Teardown: the wrappers, on stand-ins for vLLM's executors and its manager of engine cores."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest

from vllm_ray_engine.patches import context, teardown

from .conftest import configure
from .fake_ray import FakeRay

CONTEXT = context.of_launcher(configure())

# Executors.


class Executor:
    """As vLLM's: makes handles in the present Ray job, and kills them whenever it is shut down."""

    def __init__(self, ray: FakeRay, fails: bool = False) -> None:
        self._ray = ray
        self._fails = fails
        self.ray_worker_handles: list[str] = []

    def _init_executor(self) -> None:
        self._ray.init()
        self.ray_worker_handles = ["worker 0", "worker 1"]
        if self._fails:
            raise RuntimeError("initialize_worker failed")

    def shutdown(self) -> None:
        for handle in self.ray_worker_handles:
            self._ray.kill(handle)


@pytest.fixture
def executor(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Executor]:
    monkeypatch.setattr(Executor, "_init_executor", teardown.remember_job(Executor._init_executor, CONTEXT))
    monkeypatch.setattr(Executor, "shutdown", teardown.spare_foreign("ray_worker_handles")(Executor.shutdown, CONTEXT))
    return lambda **options: Executor(ray, **options)


def test_teardown_in_the_same_job_kills(ray: FakeRay, executor: Callable[..., Executor]) -> None:
    made = executor()
    made._init_executor()
    made.shutdown()
    assert ray.killed == ["worker 0", "worker 1"]


def test_teardown_when_ray_is_down_does_nothing(ray: FakeRay, executor: Callable[..., Executor]) -> None:
    made = executor()
    made._init_executor()
    ray.job = None
    made.shutdown()
    assert (ray.killed, len(ray.inits)) == ([], 1)


def test_teardown_in_another_job_does_nothing(ray: FakeRay, executor: Callable[..., Executor]) -> None:
    made = executor()
    made._init_executor()
    ray.init()
    made.shutdown()
    assert ray.killed == []


def test_teardown_after_a_failure_while_workers_are_made(ray: FakeRay, executor: Callable[..., Executor]) -> None:
    made = executor(fails=True)
    with pytest.raises(RuntimeError):
        made._init_executor()
    ray.job = None
    made.shutdown()
    assert (ray.killed, len(ray.inits)) == ([], 1)


def test_teardown_while_workers_are_being_made(ray: FakeRay, executor: Callable[..., Executor]) -> None:
    made = executor()
    ray.init()
    made.ray_worker_handles = ["worker 0"]
    made.shutdown()
    assert ray.killed == ["worker 0"]


def test_teardown_without_handles(ray: FakeRay, executor: Callable[..., Executor]) -> None:
    executor().shutdown()
    assert (ray.killed, ray.inits) == ([], [])


def test_teardown_in_another_cluster_whose_jobs_count_anew(ray: FakeRay, executor: Callable[..., Executor]) -> None:
    made = executor()
    made._init_executor()
    ray.runtime.get_node_id = lambda: "another node"
    made.shutdown()
    assert ray.killed == []


def test_teardown_at_exit(monkeypatch: pytest.MonkeyPatch, ray: FakeRay, executor: Callable[..., Executor]) -> None:
    hooks: list[tuple[Any, ...]] = []
    monkeypatch.setattr("atexit.register", lambda *hook: hooks.append(hook))
    monkeypatch.setattr(Executor, "_init_executor", teardown.end_before_ray(Executor._init_executor, CONTEXT))
    made, gone = executor(), executor()
    made._init_executor()
    gone._init_executor()
    del gone
    gc.collect()
    ray.job = made._vllm_ray_engine_job[0]  # type: ignore[attr-defined]
    for function, *arguments in hooks:
        function(*arguments)
    assert ray.killed == ["worker 0", "worker 1"]


# The manager of engine cores.


class Manager:
    def __init__(self, ray: FakeRay) -> None:
        self._ray = ray
        ray.init()
        self.local_engine_actors = ["core 0"]
        self.remote_engine_actors = ["unkillable", "core 2"]
        self.created_placement_groups = ["group 0", "group 1"]
        self.stopped = False
        self.given_up: list[int] = []

    def shutdown(self, timeout: float | None = None) -> None:
        self.stopped = True
        for actor in self.local_engine_actors + self.remote_engine_actors:
            self._ray.kill(actor)
        for group in self.created_placement_groups:
            self._ray.util.remove_placement_group(group)

    def scale_down_elastic_ep(self, size: int) -> None:
        self.given_up.append(size)


ACTORS, GROUPS = ("local_engine_actors", "remote_engine_actors"), ("created_placement_groups",)


@pytest.fixture
def manager(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Manager:
    monkeypatch.setattr(Manager, "__init__", teardown.remember_job(Manager.__init__, CONTEXT))
    monkeypatch.setattr(Manager, "shutdown", teardown.release_each(ACTORS, GROUPS)(Manager.shutdown, CONTEXT))
    monkeypatch.setattr(Manager, "shutdown", teardown.spare_foreign(*ACTORS, *GROUPS)(Manager.shutdown, CONTEXT))
    give_up = teardown.only_in_own_job(Manager.scale_down_elastic_ep, CONTEXT)
    monkeypatch.setattr(Manager, "scale_down_elastic_ep", give_up)
    return Manager(ray)


def test_one_failing_kill_does_not_stop_the_others(
    ray: FakeRay, manager: Manager, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.vllm_ray_engine"):
        manager.shutdown(timeout=1)
    assert manager.stopped
    assert (ray.killed, ray.removed) == (["core 0", "core 2"], ["group 0", "group 1"])
    assert caplog.messages == ["could not let go of unkillable: no such actor"]
    manager.shutdown()
    assert ray.killed == ["core 0", "core 2"], "a second shutdown has nothing left to do"


def test_actors_are_let_go_of_even_when_the_shutdown_fails(ray: FakeRay, manager: Manager) -> None:
    def shutdown(self: Any) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        teardown.release_each(ACTORS, GROUPS)(shutdown, CONTEXT)(manager)
    assert (ray.killed, ray.removed) == (["core 0", "core 2"], ["group 0", "group 1"])


@pytest.mark.parametrize("again", [False, True], ids=["Ray is down", "another job"])
def test_nothing_is_let_go_of_in_another_job_where_upstream_spares_it(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """As with a vLLM that has the guard itself, so that spare_foreign steps aside."""
    monkeypatch.setattr(Manager, "__init__", teardown.remember_job(Manager.__init__, CONTEXT))
    shutdown = teardown.release_each(ACTORS, GROUPS)(lambda self: None, CONTEXT)
    monkeypatch.setattr(Manager, "shutdown", shutdown)
    manager = Manager(ray)
    ray.job = None
    if again:
        ray.init()
    connections = len(ray.inits)
    manager.shutdown()
    assert (ray.killed, ray.removed, len(ray.inits)) == ([], [], connections)


@pytest.mark.parametrize("again", [False, True], ids=["Ray is down", "another job"])
def test_manager_of_a_job_that_is_over(ray: FakeRay, manager: Manager, again: bool) -> None:
    ray.job = None
    if again:
        ray.init()
    connections = len(ray.inits)
    manager.shutdown()
    manager.scale_down_elastic_ep(1)
    assert (ray.killed, ray.removed, manager.given_up, len(ray.inits)) == ([], [], [], connections)


def test_scale_down_in_the_own_job(manager: Manager) -> None:
    manager.scale_down_elastic_ep(1)
    assert manager.given_up == [1]


# The classic executor, whose teardown also needs its compiled graph.


class Classic:
    forward_dag: Any = "graph"

    def __init__(self, ray: FakeRay) -> None:
        ray.init()
        self.workers = ["worker 0"]
        self.torn_down: list[Any] = []

    def shutdown(self) -> None:
        if self.forward_dag is not None:
            self.torn_down.append(self.forward_dag)


@pytest.mark.parametrize("down", [False, True])
def test_classic_executor(ray: FakeRay, monkeypatch: pytest.MonkeyPatch, down: bool) -> None:
    monkeypatch.setattr(Classic, "shutdown", teardown.release_each(("workers",))(Classic.shutdown, CONTEXT))
    monkeypatch.setattr(
        Classic, "shutdown", teardown.spare_foreign("workers", "forward_dag")(Classic.shutdown, CONTEXT)
    )
    made = Classic(ray)
    if down:
        ray.job = None
    made.shutdown()
    assert (ray.killed, made.torn_down) == (([], []) if down else (["worker 0"], ["graph"]))
