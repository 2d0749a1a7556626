"""Processes started where Ray is connected: forked, without the cluster's address, without their group."""

from __future__ import annotations

import os
from typing import Any

from device import connect, tell


def _driver(name: str) -> None:
    """As an engine core: connects to Ray the way vLLM does, and tells to what."""
    import ray

    if not ray.is_initialized():
        ray.init()
    tell(**{name: ray.get_runtime_context().gcs_address})
    assert ray.get(ray.remote(lambda: True).remote(), timeout=60)
    tell(**{f"{name}_works": True})
    ray.shutdown()


def _start(context: Any, target: Any, *arguments: Any) -> bool:
    """Run it in a process of its own; return whether it ended by itself."""
    process = context.Process(target=target, args=arguments)
    process.start()
    process.join(120 if context.get_start_method() == "spawn" else 20)
    ended = process.exitcode is not None
    process.kill()
    process.join()
    return ended


def forked_from_a_driver() -> None:
    """The user set fork, and Ray is connected."""
    import ray
    from vllm.utils.system_utils import get_mp_context

    connect()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    context = get_mp_context()
    tell(method=context.get_start_method(), parent=ray.get_runtime_context().gcs_address)
    tell(ended=_start(context, _driver, "child"))


def spawned_without_address() -> None:
    """The user set spawn: vLLM then leaves it to the environment where the child finds Ray."""
    import ray
    from vllm.utils.system_utils import get_mp_context

    connect()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    del os.environ["RAY_ADDRESS"]
    context = get_mp_context()
    tell(parent=ray.get_runtime_context().gcs_address)
    tell(ended=_start(context, _driver, "child"))


def connected_twice() -> None:
    import ray

    first = connect()
    ray.init(address=os.environ["RAY_ADDRESS"])
    tell(jobs=[first, ray.get_runtime_context().get_job_id()])


def _use_group(name: str, group_id: str, namespace: str) -> None:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from vllm_ray_engine.patches.context import GroupRef

    ray.init(namespace=namespace, log_to_driver=False)

    @ray.remote(num_cpus=0, num_gpus=1)
    class Where:
        def group(self) -> str | None:
            found: str | None = ray.get_runtime_context().get_placement_group_id()
            return found

    for kind, ref in (("name", name and GroupRef(name=name)), ("id", GroupRef(id=group_id))):
        if not ref:
            continue
        try:
            found = ref.find()
            strategy = PlacementGroupSchedulingStrategy(found, placement_group_bundle_index=0)
            actor = Where.options(scheduling_strategy=strategy).remote()
            tell(**{f"by_{kind}": [len(found.bundle_specs), ray.get(actor.group.remote(), timeout=20)]})
            ray.kill(actor)
        except Exception as error:
            tell(**{f"by_{kind}": f"{type(error).__name__}: {error}"})


def group_from_another_job(name: str, namespace: str) -> None:
    """A group that this Ray job made is used by the Ray job of a spawned process."""
    import multiprocessing

    import ray

    connect(namespace="the parent's")
    group = ray.util.placement_group([{"GPU": 1}], name=name)
    ray.get(group.ready(), timeout=20)
    tell(group=group.id.hex())
    _start(multiprocessing.get_context("spawn"), _use_group, name, group.id.hex(), namespace)
