"""The patched functions of a vLLM release, called as vLLM calls them, on real Ray: no model is run.

`python -m e2e.matrix.function_checks [--unpatched] ADDRESS OUT` with the Ray cluster's token in the environment. Actors
and placement groups are real; the objects that hold them are vLLM's, with nothing in them but what the functions use.
With --unpatched, vLLM as it is: that the fault shows is what the other checks are worth.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray

from tests.engine.ray_cluster import HEAD, wait_for
from vllm_ray_engine import plugin, versions
from vllm_ray_engine.patches.context import Context, GroupRef

BASE = "matrix-a1"
CONTEXT = Context(BASE, BASE, GroupRef(name=BASE))
STALE = "ActorHandleNotFoundError"


class CheckError(AssertionError):
    """A patched function does not do what it must."""


def same(found: Any, wanted: Any, what: str) -> None:
    """Raise CheckError unless the two are equal."""
    if found != wanted:
        raise CheckError(f"{what}: {found!r} and not {wanted!r}")


class Session:
    """A driver of the test's Ray cluster, connected anew as often as asked: each time as another Ray job."""

    def __init__(self, address: str) -> None:
        self._address = address

    def connect(self) -> None:
        """Leave the present Ray job, and be a new one."""
        ray.shutdown()
        ray.init(address=self._address, _node_ip_address=HEAD, log_to_driver=False)

    def actors(self, count: int) -> list[Any]:
        """Make actors and wait until they answer."""

        class Worker:
            def answer(self) -> int:
                return 1

        made = [ray.remote(Worker).options(num_cpus=0.1).remote() for _ in range(count)]
        ray.get([actor.answer.remote() for actor in made], timeout=120)
        return made


def ended(actor: Any) -> bool:
    """Return whether an actor no longer answers."""
    try:
        ray.get(actor.answer.remote(), timeout=20)
    except ray.exceptions.RayActorError:
        return True
    return False


def engine_config() -> Any:
    """Return the config of an engine."""
    config = import_module("vllm.config")
    model = config.ModelConfig(model=os.environ["VLLM_RAY_TEST_MODEL"], dtype="float32")
    return config.VllmConfig(model_config=model)


@contextlib.contextmanager
def logged() -> Iterator[io.StringIO]:
    """Collect what vLLM warns of."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    try:
        yield text
    finally:
        logger.removeHandler(handler)


# What vLLM tears down, with nothing in it but what its shutdown uses.


def fill_executor(made: Any, actors: list[Any]) -> None:
    """Give RayExecutorV2 these workers."""
    made.shutdown_lock = threading.Lock()
    made.shutting_down = False
    made._monitor_thread = None
    made.ray_worker_handles = [SimpleNamespace(actor=actor, rank=rank) for rank, actor in enumerate(actors)]


def fill_classic_executor(made: Any, actors: list[Any]) -> None:
    """Give the classic Ray executor these workers."""
    made.workers = list(actors)
    made.forward_dag = SimpleNamespace(teardown=lambda: None)


def fill_core_manager(made: Any, actors: list[Any]) -> None:
    """Give the manager of engine cores these Ray actors."""
    made.manager_stopped = threading.Event()
    made.local_engine_actors, made.remote_engine_actors = actors[:1], actors[1:]
    made.created_placement_groups = []


@dataclass(frozen=True)
class TornDown:
    """A class whose shutdown kills actors: where it is, the method that makes them, and how one is filled."""

    module: str
    name: str
    maker: str
    fill: Callable[[Any, list[Any]], None]

    def present(self) -> bool:
        """Return whether the release has it."""
        try:
            return hasattr(import_module(self.module), self.name)
        except ImportError:
            return False

    def with_actors(self, actors: list[Any]) -> Any:
        """Return one that made these actors in the present Ray job."""
        kind = getattr(import_module(self.module), self.name)
        made = object.__new__(kind)
        # Without anything that it needs the maker fails; a patched one has noted the job all the same.
        with contextlib.suppress(Exception):
            getattr(kind, self.maker)(made)
        self.fill(made, actors)
        return made


TORN_DOWN = (
    TornDown("vllm.v1.executor.ray_executor_v2", "RayExecutorV2", "_init_executor", fill_executor),
    TornDown("vllm.v1.executor.ray_executor", "RayDistributedExecutor", "_init_executor", fill_classic_executor),
    TornDown("vllm.v1.engine.utils", "CoreEngineActorManager", "__init__", fill_core_manager),
)


def present() -> list[TornDown]:
    """Return what of it the release has."""
    return [kind for kind in TORN_DOWN if kind.present()]


def teardown_noise(made: Any) -> str:
    """Tear down and return what was logged and raised."""
    with logged() as text:
        try:
            made.shutdown()
        except Exception as error:
            text.write(f"{type(error).__name__}: {error}")
    return text.getvalue()


class Checks:
    """Runs the checks in their order and keeps the names of those that passed."""

    def __init__(self, session: Session) -> None:
        self.passed: list[str] = []
        self.failure: dict[str, str] | None = None
        self._session = session

    def run(self, steps: list[tuple[str, Callable[[], None]]]) -> None:
        """Run these checks; stops at the first that fails."""
        for name, step in steps:
            print(f"== {name}", flush=True)
            try:
                step()
            except Exception as error:
                traceback.print_exc()
                self.failure = {"step": name, "error": f"{type(error).__name__}: {error}"}
                return
            self.passed.append(name)

    def unpatched(self) -> list[tuple[str, Callable[[], None]]]:
        """List the checks of vLLM as it is."""
        return [
            (f"without us, {kind.name} in another Ray job: {STALE}", partial(self._stale, kind)) for kind in present()
        ]

    def patched(self) -> list[tuple[str, Callable[[], None]]]:
        """List the checks of the patched functions."""
        release = versions.release("vllm")
        steps: list[tuple[str, Callable[[], None]]] = [
            (f"{self._places(release)} patch points found, all patches applied", partial(self._apply, release)),
            ("the instance id of a config: constructed, copied, replaced, pickled", self._config_ids),
            ("the instance id of a rank in a Ray actor", self._actor_rank),
            ("the instance id of a rank in a process", self._process_rank),
            ("the engine ids of transfers", self._transfers),
            ("the Ray namespace", self._namespace),
            ("the placement group of the launcher is used", self._placement),
        ]
        for kind in present():
            steps += [
                (f"{kind.name} in its own Ray job ends its actors", partial(self._own, kind)),
                (f"{kind.name} in another Ray job: nothing", partial(self._foreign, kind)),
                (f"{kind.name} without Ray: nothing, and no connection", partial(self._without_ray, kind)),
            ]
        return [*steps, ("processes are spawned", self._spawn)]

    def _places(self, release: tuple[int, int]) -> int:
        return len({where for patch in plugin.PATCHES if patch.concerns(release) for where in patch.where})

    def _apply(self, release: tuple[int, int]) -> None:
        plugin.apply(plugin.PATCHES, CONTEXT, release)

    def _stale(self, kind: TornDown) -> None:
        self._session.connect()
        made = kind.with_actors(self._session.actors(2))
        self._session.connect()
        noise = teardown_noise(made)
        if STALE not in noise:
            raise CheckError(f"the fault does not show: {noise!r}")

    def _config_ids(self) -> None:
        config = engine_config()
        same(config.instance_id, BASE, "constructed")
        same(copy.copy(config).instance_id, BASE, "copied")
        same(copy.deepcopy(config).instance_id, BASE, "copied deeply")
        same(pickle.loads(pickle.dumps(config)).instance_id, BASE, "pickled")  # noqa: S301  our own
        config.instance_id = CONTEXT.of_rank(2)
        same(replace(config).instance_id, CONTEXT.of_rank(2), "a rank's config, replaced")

    def _actor_rank(self) -> None:
        config = copy.deepcopy(engine_config())
        import_module("vllm.v1.engine.utils")._apply_dp_identity_suffix(config, 3)
        same(config.instance_id, CONTEXT.of_rank(3), "rank 3")

    def _process_rank(self) -> None:
        core = import_module("vllm.v1.engine.core")
        config = engine_config()
        config.parallel_config.data_parallel_size = 2
        seen = []

        class Reached(Exception):
            pass

        def started(_self: Any, vllm_config: Any, *_args: Any, **_kwargs: Any) -> None:
            seen.append(vllm_config.instance_id)
            raise Reached

        original = core.EngineCoreProc.__init__
        core.EngineCoreProc.__init__ = started
        try:
            target = pickle.loads(pickle.dumps(core.EngineCoreProc.run_engine_core))  # noqa: S301  as spawn does
            with contextlib.suppress(Reached):
                target(dp_rank=1, local_dp_rank=0, vllm_config=config)
        finally:
            core.EngineCoreProc.__init__ = original
        same(seen, [CONTEXT.of_rank(1)], "what the engine core of rank 1 was given")

    def _transfers(self) -> None:
        config = engine_config()
        config.kv_transfer_config = SimpleNamespace(engine_id="the user's")
        config.instance_id = CONTEXT.of_rank(1)
        executor = import_module("vllm.v1.executor.ray_executor_v2").RayExecutorV2
        type("Idle", (executor,), {"_init_executor": lambda _self: None})(config)
        same(config.kv_transfer_config.engine_id, CONTEXT.of_rank(1), "engine id")

    def _namespace(self) -> None:
        self._session.connect()
        same(ray.get_runtime_context().namespace, BASE, "namespace")

    def _placement(self) -> None:
        slot = {"GPU": 1.0}
        group = ray.util.placement_group([slot, slot], name=BASE)
        ray.get(group.ready(), timeout=60)
        config = import_module("vllm.config").ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="ray")
        before = len(ray.util.placement_group_table())
        for module in ("ray_executor_v2", "ray_utils"):
            config.placement_group = None
            import_module(f"vllm.v1.executor.{module}").initialize_ray_cluster(config)
            same(config.placement_group.id, group.id, f"the group by {module}")
        same(len(ray.util.placement_group_table()), before, "number of groups")
        ray.util.remove_placement_group(group)

    def _own(self, kind: TornDown) -> None:
        self._session.connect()
        actors = self._session.actors(2)
        same(teardown_noise(kind.with_actors(actors)), "", "noise")
        # Ray kills without waiting for it.
        wait_for("the actors to end", lambda: all(map(ended, actors)), 30)

    def _foreign(self, kind: TornDown) -> None:
        self._session.connect()
        made = kind.with_actors(self._session.actors(2))
        self._session.connect()
        same(teardown_noise(made), "", "noise")

    def _without_ray(self, kind: TornDown) -> None:
        self._session.connect()
        made = kind.with_actors(self._session.actors(2))
        ray.shutdown()
        same(teardown_noise(made), "", "noise")
        same(ray.is_initialized(), False, "connected")

    def _spawn(self) -> None:
        self._session.connect()
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        method = import_module("vllm.utils.system_utils").get_mp_context().get_start_method()
        same(method, "spawn", "start method")


def main() -> int:
    """Check, write what was found, and return 0 when all checks passed."""
    parser = argparse.ArgumentParser(prog="python -m e2e.matrix.function_checks", description=__doc__)
    parser.add_argument("--unpatched", action="store_true")
    parser.add_argument("address")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    checks = Checks(Session(options.address))
    checks.run(checks.unpatched() if options.unpatched else checks.patched())
    options.out.write_text(json.dumps({"checks": checks.passed, "failure": checks.failure}))
    return 0 if checks.failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
