"""Teardown at the wrong time: after Ray, after another Ray job has begun, half of it failing."""

from __future__ import annotations

import weakref
from typing import Any

from device import BROKEN, BrokenWorker, connect, executor, job, manager, names, reconnect, tell, until


def worker_fails_at_start() -> None:
    """A failure in worker initialisation: the finalizer tears the executor down, after Ray's own exit hook."""
    connect()
    executor(BrokenWorker)
    raise RuntimeError(BROKEN)


def engine_fails_with_workers_up() -> None:
    """A failure between the start of the workers and that of the engine, while the executor's monitor watches them."""
    connect()
    executor()
    raise RuntimeError(BROKEN)


def second_engine_after_the_first_died() -> None:
    """The first engine's executor is torn down when a second engine serves in another Ray job of the same process."""
    first = connect()
    old = executor(BrokenWorker)
    second = reconnect()
    new = executor()
    old.shutdown()
    tell(jobs=[first, second, job()], workers=len(names(new.vllm_config.instance_id)))
    new.shutdown()


def executor_when_ray_is_down() -> None:
    import ray

    connect()
    old = executor(BrokenWorker)
    ray.shutdown()
    old.shutdown()
    tell(connected=ray.is_initialized())


def executor_in_its_own_job() -> None:
    connect()
    made = executor()
    own = made.vllm_config.instance_id
    before = len(names(own))
    made.shutdown()
    tell(before=before, gone=until(lambda: not names(own)))


def executor_that_made_nothing() -> None:
    from vllm.v1.executor import ray_executor_v2 as module

    def initialize_ray_cluster(*_arguments: Any, **_options: Any) -> None:
        raise RuntimeError(BROKEN)

    module.initialize_ray_cluster = initialize_ray_cluster
    executor()
    raise RuntimeError(BROKEN)


def worker_dies() -> None:
    """The executor's monitor thread sees it and tears down the rest."""
    import ray

    connect()
    made = executor()
    own = made.vllm_config.instance_id
    ray.kill(made.ray_worker_handles[0].actor)
    tell(gone=until(lambda: not names(own)), failed=until(lambda: made.is_failed))


def classic_executor(reconnected: bool) -> None:
    import ray
    from device import Worker, engine_config
    from vllm.v1.executor.ray_executor import RayDistributedExecutor

    def init_workers(self: Any, _group: Any) -> None:
        self.workers = [ray.remote(Worker).options(name=f"classic_{rank}", num_cpus=0).remote() for rank in range(2)]
        ray.get([worker.create_dist_init_method.remote() for worker in self.workers])

    class Graph:
        def teardown(self) -> None:
            pass

    RayDistributedExecutor._init_workers_ray = init_workers
    first = connect()
    made = RayDistributedExecutor(engine_config())
    made.forward_dag = Graph()
    if reconnected:
        reconnect()
    made.shutdown()
    tell(jobs=[first, job()], gone=until(lambda: not names("classic_")))


# Engine cores of the Ray backend.


def manager_at_exit() -> None:
    """The API server fails: its client's finalizer tears the manager down, after Ray's own exit hook."""
    connect()
    made, _ = manager()
    weakref.finalize(made.__class__, made.shutdown)
    raise RuntimeError(BROKEN)


def manager_of_an_older_job() -> None:
    first = connect()
    made, _ = manager()
    second = reconnect()
    made.shutdown()
    tell(jobs=[first, second, job()])


def manager_when_ray_is_down() -> None:
    import ray

    connect()
    made, _ = manager()
    ray.shutdown()
    try:
        made.shutdown()
    finally:
        tell(connected=ray.is_initialized())


def monitor_when_ray_is_down() -> None:
    """The manager's monitor thread asks Ray for its engine cores when Ray is down."""
    import ray

    connect()
    made, _ = manager()
    ray.shutdown()
    try:
        made.monitor_engine_liveness()
    except Exception as error:
        tell(error=f"{type(error).__name__}: {error}")
    tell(connected=ray.is_initialized())


def scale_down_when_ray_is_down() -> None:
    import ray

    connect()
    made, _ = manager()
    ray.shutdown()
    try:
        made.scale_down_elastic_ep(2, 1)
    except Exception as error:
        tell(error=f"{type(error).__name__}: {error}")
    tell(connected=ray.is_initialized())


def one_kill_fails() -> None:
    import ray

    connect()
    made, _ = manager()
    groups = made.created_placement_groups
    made.local_engine_actors.insert(0, object())
    try:
        made.shutdown()
    except Exception as error:
        tell(error=f"{type(error).__name__}: {error}")

    def removed() -> bool:
        return all(ray.util.placement_group_table(group)["state"] == "REMOVED" for group in groups)

    tell(gone=until(lambda: not names(), 5), removed=until(removed, 5))


def engine_cores_are_dead_already() -> None:
    import ray

    connect()
    made, _ = manager()
    for actor in made.local_engine_actors + made.remote_engine_actors:
        ray.kill(actor)
    dead = until(lambda: not names())
    made.shutdown()
    tell(dead=dead)
