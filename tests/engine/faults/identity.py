"""Ids that two ranks, attempts or copies share."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from typing import Any

import device
from device import connect, engine_config, ids, manager, names, tell, until
from vllm.v1.executor.abstract import Executor


def engine_arguments(**options: Any) -> Any:
    """Return engine arguments for a real model."""
    from vllm.engine.arg_utils import EngineArgs

    model = os.environ.get("VLLM_RAY_TEST_MODEL", "/models/tiny")
    return EngineArgs(model=model, dtype="float32", max_model_len=256, enforce_eager=True, **options)


def config_copies() -> None:
    from vllm.config.utils import replace

    config = engine_arguments().create_engine_config()
    made = {
        "copy": copy.copy(config),
        "deepcopy": copy.deepcopy(config),
        "replace": replace(config),
        "pickle": pickle.loads(pickle.dumps(config)),  # noqa: S301
    }
    config.instance_id += "_dp1"
    tell(
        base={kind: one.instance_id for kind, one in made.items()},
        rank={"replace": replace(config).instance_id, "twice": replace(replace(copy.deepcopy(config))).instance_id},
    )


def namespace() -> None:
    """What vLLM connects as, by its own initialize_ray_cluster."""
    import ray
    from vllm.v1.executor import ray_executor_v2

    ray_executor_v2.initialize_ray_cluster(engine_config().parallel_config, require_gpu_on_driver=False)
    tell(namespace=ray.get_runtime_context().namespace)


def ranks_in_actors() -> None:
    connect(namespace="shared")
    made, _ = manager()
    tell(ids=ids(made))


def elastic_scale() -> None:
    connect(namespace="shared")
    made, config = manager(size=1)
    made.scale_up_elastic_ep(config, 2, 0)
    tell(ids=ids(made))
    made.scale_down_elastic_ep(2, 1)
    tell(left_after_scale_down=until(lambda: len(names()) == 1))
    made.shutdown()


def two_services(nodes: dict[str, str]) -> None:
    """Attempts at once on one cluster, by instance id the node of their first rank.

    vLLM gives the groups of their ranks the same names, such as dp_rank_0.
    """
    context = multiprocessing.get_context("spawn")
    all_up = context.Barrier(len(nodes))
    services = [context.Process(target=_service, args=(*item, all_up)) for item in nodes.items()]
    for service in services:
        service.start()
    for service in services:
        service.join()


def _service(instance_id: str, node: str, all_up: Any) -> None:
    import ray
    from vllm.plugins import load_general_plugins

    from vllm_ray_engine.patches.context import ENVIRONMENT_VARIABLE, Context

    os.environ[ENVIRONMENT_VARIABLE] = Context(instance_id, instance_id).as_json()
    os.environ["VLLM_HOST_IP"] = node
    load_general_plugins()
    ray.cloudpickle.register_pickle_by_value(device)
    connect()
    made, _ = manager(size=1)
    all_up.wait(120)
    group = ray.util.get_placement_group("dp_rank_0")
    tell(**{instance_id: [group.id.hex(), ray.util.placement_group_table(group)["state"], len(ids(made))]})
    made.shutdown()


class Probe(Executor):
    """A real executor that tells the ids that it was made with, instead of making workers."""

    def _init_executor(self) -> None:
        config = self.vllm_config
        rank = str(config.parallel_config.data_parallel_index)
        transfers = (config.kv_transfer_config, config.ec_transfer_config)
        tell(**{rank: [config.instance_id, *(one and one.engine_id for one in transfers)]})
        raise RuntimeError("told")

    def collective_rpc(self, *_arguments: Any, **_options: Any) -> Any:
        raise NotImplementedError

    def check_health(self) -> None:
        raise NotImplementedError


def ranks_in_processes(method: str, size: int) -> None:
    """vLLM's own launch of engine core processes, handshake included, up to the executor."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method
    from vllm.config import KVTransferConfig
    from vllm.v1.engine.utils import EngineZmqAddresses, launch_core_engines

    transfer = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both", engine_id="fixed")
    config = engine_arguments(data_parallel_size=size, kv_transfer_config=transfer).create_engine_config()
    addresses = EngineZmqAddresses(inputs=["ipc:///tmp/faults-in"], outputs=["ipc:///tmp/faults-out"])
    try:
        with launch_core_engines(config, Probe, False, addresses):
            pass
    except Exception as error:
        tell(ended=str(error)[:60])


def rank_launched_by_itself(rank: int) -> None:
    """vLLM's run_engine_core of a mixture-of-experts model, on a node where it has the local rank 0."""
    from vllm.v1.engine import core

    class EngineCore:
        def __init__(self, *, vllm_config: Any, **_options: Any) -> None:
            Probe(vllm_config)

    core.DPEngineCoreProc = EngineCore
    config = engine_config(data_parallel_size=4, data_parallel_rank=rank, distributed_executor_backend="mp")
    config.model_config.is_moe = True
    tell(api_server=config.instance_id)
    try:
        core.EngineCoreProc.run_engine_core(vllm_config=config, dp_rank=rank, local_dp_rank=0)
    except RuntimeError as error:
        assert str(error) == "told", error
