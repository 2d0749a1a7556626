"""What stands in for the device, and vLLM's real classes made on top of it.

Workers and engine cores are small actors that import no vLLM, so a start takes a second. What makes them, names them,
places them and tears them down is vLLM's own.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

BROKEN = "the worker's model is broken"


def tell(**found: Any) -> None:
    """Hand findings to the test; in one write, for others tell too."""
    os.write(1, f"\nFOUND {json.dumps(found)}\n".encode())


def until(condition: Callable[[], Any], seconds: float = 15) -> bool:
    """Wait until the condition holds; return whether it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def connect(**options: Any) -> str:
    """Connect to Ray as a driver and return the Ray job's id. A config reaches actors as its ids only."""
    import ray
    from vllm.config import VllmConfig

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, **options)
    ray.util.register_serializer(
        VllmConfig,
        serializer=lambda config: {
            "instance_id": config.instance_id,
            "engine_id": config.kv_transfer_config and config.kv_transfer_config.engine_id,
        },
        deserializer=lambda ids: ids,
    )
    return job()


def job() -> str:
    """Return the id of the present Ray job."""
    import ray

    return str(ray.get_runtime_context().get_job_id())


def reconnect() -> str:
    """End the Ray job, as its driver, and begin another one."""
    import ray

    ray.shutdown()
    return connect()


def names(part: str = "vllm_Worker_") -> list[str]:
    """Return the names of the living actors of the whole cluster."""
    import ray

    return sorted(row["name"] for row in ray.util.list_named_actors(all_namespaces=True) if part in row["name"])


# Workers, and the executor that makes them.


class Worker:
    """What the executors ask of a worker."""

    READY_STR = "READY"

    def __init__(self, **_options: Any) -> None:
        pass

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        import ray

        return ray.get_runtime_context().get_node_id(), [0]

    def create_dist_init_method(self) -> str:
        return "tcp://127.0.0.1:1"

    def initialize_worker(self, *_arguments: Any, **_options: Any) -> None:
        pass

    def wait_for_init(self) -> dict[str, Any]:
        return {"status": "READY", "handle": None}

    def run(self) -> None:
        while True:
            time.sleep(3600)


class BrokenWorker(Worker):
    def initialize_worker(self, *_arguments: Any, **_options: Any) -> None:
        raise RuntimeError(BROKEN)


class Queue:
    """A message queue that is always ready."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        pass

    @staticmethod
    def create_from_handle(*_arguments: Any) -> Queue:
        return Queue()

    def export_handle(self) -> None:
        pass

    def wait_until_ready(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def engine_config(**parallel: Any) -> Any:
    """Return a real VllmConfig with a KV transfer whose engine id the user has fixed."""
    from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig

    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"} | parallel
    config = VllmConfig(parallel_config=ParallelConfig(**options))
    config.kv_transfer_config = KVTransferConfig(kv_connector="Connector", kv_role="kv_both", engine_id="fixed")
    config.model_config = SimpleNamespace(is_moe=False, runner_type="generate")
    config.parallel_config.data_parallel_master_ip = os.environ["VLLM_HOST_IP"]
    return config


def executor(worker: type = Worker) -> Any:
    """Return a real RayExecutorV2 over two workers, made by the present Ray job; also one that failed to start."""
    from vllm.v1.executor import ray_executor_v2 as module

    made: list[Any] = []

    class Executor(module.RayExecutorV2):  # type: ignore[misc, name-defined]
        def _init_executor(self) -> None:
            made.append(self)
            super()._init_executor()

    module.RayWorkerProc, module.MessageQueue = worker, Queue
    try:
        Executor(engine_config())
    except RuntimeError as error:
        assert BROKEN in str(error), error
    return made[0]


# Engine cores, and the manager that makes them.


class EngineCore:
    """What the manager asks of an engine core; names a worker as RayExecutorV2 would."""

    def __init__(self, vllm_config: dict[str, str], **_options: Any) -> None:
        import ray

        self._ids = vllm_config
        self._worker = ray.remote(Worker).options(name=f"vllm_Worker_{vllm_config['instance_id']}", num_cpus=0).remote()
        ray.get(self._worker.create_dist_init_method.remote())

    async def wait_for_init(self) -> None:
        pass

    async def run(self) -> None:
        await asyncio.sleep(3600)

    async def ids(self) -> dict[str, str]:
        return self._ids


def manager(size: int = 2) -> tuple[Any, Any]:
    """Return a real CoreEngineActorManager over that many engine cores, one on each node, and its config."""
    from vllm.v1.engine import core
    from vllm.v1.engine.utils import CoreEngineActorManager

    core.EngineCoreActor = EngineCore
    config = engine_config(tensor_parallel_size=1, data_parallel_size=size, data_parallel_size_local=1)
    return CoreEngineActorManager(config, addresses=None, executor_class=object, log_stats=False), config


def ids(made: Any) -> list[dict[str, str]]:
    """Return the ids that the engine cores of a manager got, in rank order."""
    import ray

    actors = made.local_engine_actors + made.remote_engine_actors
    found: list[dict[str, str]] = ray.get([actor.ids.remote() for actor in actors])
    return found
