"""Warming: only for standbys, never in the way, and without a touch of the device; on stand-ins for Ray and vLLM."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_ray_engine import config
from vllm_ray_engine.standby import imports, prestart, warm
from vllm_ray_engine.standby.warm import Warming

from .conftest import DATA

WORKER_MODE = 1


class Store:
    """Ray's control store, as ray.experimental.internal_kv shows it."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def list(self, prefix: str) -> list[bytes]:
        return [key.encode() for key in self.keys if key.startswith(prefix)]

    def delete(self, prefix: str, del_by_prefix: bool) -> None:
        assert del_by_prefix
        self.keys = {key for key in self.keys if not key.startswith(prefix)}


class World:
    """What the warmed process finds: Ray, vLLM, PyTorch, and its own cache folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.monkeypatch = monkeypatch
        self.store = Store()
        self.mode = WORKER_MODE
        self.touched = False
        self.plugins_loaded = 0
        self.asked: list[tuple[Any, ...]] = []
        self.exits: list[int] = []
        self.job_environment = json.dumps({"worker_process_setup_hook": warm.HOOK})
        context = SimpleNamespace(
            worker=SimpleNamespace(mode=self.mode),
            get_job_id=lambda: "02000000",
            get_worker_id=lambda: "w1",
            get_runtime_env_string=lambda: self.job_environment,
        )
        self.context = context
        self.module("ray", is_initialized=lambda: True, get_runtime_context=lambda: context, WORKER_MODE=WORKER_MODE)
        self.module("ray.experimental")
        self.module(
            "ray.experimental.internal_kv",
            _internal_kv_put=lambda key, value: self.store.keys.add(key),
            _internal_kv_list=self.store.list,
            _internal_kv_del=self.store.delete,
        )
        self.module("torch", cuda=SimpleNamespace(is_initialized=lambda: self.touched))
        for name in ("vllm", "vllm.v1", "vllm.v1.executor"):
            self.module(name)
        self.module("vllm.plugins", load_general_plugins=self._load_plugins)
        self.module("vllm.v1.executor.ray_executor_v2", RayExecutorV2=Executor)
        monkeypatch.setattr(imports, "folders", lambda: (tmp_path / "cache",))
        monkeypatch.setattr(prestart, "prestart", self._prestart)
        monkeypatch.setattr("os._exit", self.exits.append)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def module(self, name: str, **content: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(content)
        self.monkeypatch.setitem(sys.modules, name, made)

    def _load_plugins(self) -> None:
        self.plugins_loaded += 1

    def _prestart(self, *arguments: Any) -> int:
        self.asked.append(arguments)
        return 2

    def attempt(self, **changes: Any) -> None:
        self.monkeypatch.setenv(config.ENVIRONMENT_VARIABLE, json.dumps(DATA | changes))


class Executor:
    """What prestarting takes from vLLM's executor."""

    def _build_runtime_env(self: Any) -> dict[str, Any]:
        return {"env_vars": {"NOSET": self.parallel_config.noset}}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    yield World(monkeypatch, tmp_path)
    gc.unfreeze()


def warming() -> Warming:
    return Warming(SimpleNamespace(noset="1"))


def keep(*modules: str, banned: tuple[str, ...] = (), kind: str = warm.WORKER) -> None:
    imports._keep(kind, imports.Imports(modules, frozenset(banned)))


# Who is warmed.


def test_only_a_standby_is_warmed(world: World) -> None:
    assert warm.wanted() is None
    world.attempt()
    assert warm.wanted() is None
    assert warm.hooked({"a": 1}) == {"a": 1}
    world.attempt(standby=True)
    assert warm.wanted() is not None
    assert warm.hooked(None) == {"worker_process_setup_hook": "vllm_ray_engine.standby.warm.worker"}
    assert warm.hooked({"worker_process_setup_hook": "theirs"}) == {"worker_process_setup_hook": "theirs"}
    world.monkeypatch.setenv(warm.SWITCH, "0")
    assert warm.wanted() is None


def test_the_hook_is_where_ray_looks_for_it() -> None:
    module, _, name = warm.HOOK.rpartition(".")
    assert getattr(sys.modules[module], name) is warm.worker


def test_kinds_of_processes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert warm.kind() == "worker"
    world.context.worker.mode = 0
    assert warm.kind() == "MainProcess"
    monkeypatch.setattr("multiprocessing.current_process", lambda: SimpleNamespace(name="EngineCore_DP3"))
    assert warm.kind() == "EngineCore"


# The engine core.


def test_core_asks_for_workers_and_is_ready_when_they_are(world: World) -> None:
    world.attempt(standby=True)
    world.context.worker.mode = 0
    keep("colorsys", kind="MainProcess")
    sys.modules.pop("colorsys", None)
    core = warming()
    core.begin()
    core.begin()
    assert world.asked == [({"GPU": 1.0, "vd-slot-0": 1.0}, 2, {"env_vars": {"NOSET": "1"}})]
    assert "colorsys" in sys.modules
    assert gc.get_freeze_count() > 0
    assert not core.ready()
    world.store.keys |= {"vllm_ray_engine/warm/02000000/a", "vllm_ray_engine/warm/03000000/of another job"}
    assert not core.ready()
    world.store.keys.add("vllm_ray_engine/warm/02000000/b")
    assert core.ready()
    core.end()
    assert world.store.keys == {"vllm_ray_engine/warm/03000000/of another job"}


def test_core_in_a_job_without_the_hook_asks_for_no_workers(world: World) -> None:
    world.attempt(standby=True)
    world.job_environment = "{}"
    core = warming()
    core.begin()
    assert world.asked == []
    assert core.ready()


def test_core_does_not_wait_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.attempt(standby=True)
    core = warming()
    core.begin()
    now = warm.time.monotonic()
    monkeypatch.setattr(warm.time, "monotonic", lambda: now + warm.READY_SECONDS + 1)
    assert core.ready()


@pytest.mark.parametrize("standby", [False, True])
def test_core_without_workers_to_wait_for_is_ready(world: World, standby: bool) -> None:
    world.attempt(standby=standby)
    world.monkeypatch.setattr(prestart, "prestart", lambda *_: 0)
    core = warming()
    assert core.ready()
    core.begin()
    assert core.ready()
    core.end()


def test_core_of_another_vllm_starts_cold(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.attempt(standby=True)
    world.module("vllm.v1.executor.ray_executor_v2")
    core = warming()
    core.begin()
    assert "the engine core is not warmed" in capsys.readouterr().out
    assert core.ready()


def touching(world: World) -> str:
    """Keep a module whose import initialises the accelerator, for API servers and engine cores."""
    world.context.worker.mode = 0
    world.attempt(standby=True)
    keep("harmful", kind="MainProcess")
    world.monkeypatch.setattr(warm.imports.importlib, "import_module", lambda _: setattr(world, "touched", True))
    return "importing harmful initialises the accelerator"


def test_core_that_touched_the_device_ends_and_it_happens_once(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(imports.DeviceTouched, match=touching(world)):
        warming().begin()
    assert "the engine core ends: importing harmful" in capsys.readouterr().out
    assert imports.load("MainProcess").banned == {"harmful"}
    world.touched = False
    warming().begin()
    assert not world.touched


def test_core_that_had_a_device_before_is_not_ended_for_it(world: World) -> None:
    touching(world)
    world.touched = True
    warming().begin()
    assert imports.load("MainProcess").banned == frozenset()


@pytest.mark.parametrize(("timeout", "expected"), [(40, 10.0), (1800, 60.0)])
def test_warming_takes_but_a_share_of_the_startup_timeout(
    world: World, monkeypatch: pytest.MonkeyPatch, timeout: int, expected: float
) -> None:
    world.attempt(standby=True, startupTimeoutSeconds=timeout)
    limits: list[float] = []
    monkeypatch.setattr(imports, "replay", lambda _kind, *limit: (limits.extend(limit), (0, 0))[1])
    core = warming()
    core.begin()
    assert limits == [expected]
    now = warm.time.monotonic()
    ready = min(120, timeout / 4)
    monkeypatch.setattr(warm.time, "monotonic", lambda: now + ready - 8)
    assert not core.ready()
    monkeypatch.setattr(warm.time, "monotonic", lambda: now + ready + 1)
    assert core.ready()


# The API server.


def test_api_server_warms_up_before_it_waits(world: World) -> None:
    world.context.worker.mode = 0
    keep("colorsys", kind="MainProcess")
    sys.modules.pop("colorsys", None)
    seen: list[bool] = []
    wait = warm.while_it_waits(lambda: seen.append("colorsys" in sys.modules), None)
    wait()
    world.attempt(standby=True)
    wait()
    assert seen == [False, True]


def test_api_server_waits_whatever_happens(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.attempt(standby=True)
    monkeypatch.setattr(imports, "replay", lambda *_: 1 / 0)
    assert warm.while_it_waits(lambda: "waited", None)() == "waited"


def test_api_server_that_touched_the_device_ends(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(imports.DeviceTouched, match=touching(world)):
        warm.while_it_waits(lambda: "waited", None)()
    assert "the API server ends: importing harmful" in capsys.readouterr().out
    assert imports.load("MainProcess").banned == {"harmful"}


# The worker.


def test_worker_imports_and_tells_that_it_is_ready(world: World) -> None:
    keep("colorsys")
    sys.modules.pop("colorsys", None)
    warm.worker()
    assert "colorsys" in sys.modules
    assert world.plugins_loaded == 1
    assert world.store.keys == {"vllm_ray_engine/warm/02000000/w1"}
    assert warm.os.environ["OMP_NUM_THREADS"] == "1"
    assert world.exits == []


@pytest.mark.parametrize("error", [RuntimeError("no vLLM"), SystemExit(3), KeyboardInterrupt()])
def test_worker_is_never_broken(
    error: BaseException, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: str) -> None:
        raise error

    monkeypatch.setattr(warm.importlib, "import_module", fail)
    warm.worker()
    assert "worker is not warmed" in capsys.readouterr().out
    assert world.exits == []
    assert len(world.store.keys) == 1, "the standby does not wait for it"


def test_worker_that_cannot_tell_is_not_broken_either(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.module("ray.experimental.internal_kv")
    warm.worker()
    assert "cannot tell" in capsys.readouterr().out


def test_worker_that_touched_the_device_ends_and_it_happens_once(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    keep("colorsys")
    sys.modules.pop("colorsys", None)
    world.touched = True
    warm.worker()
    assert world.exits == [1]
    assert "initialises the accelerator" in capsys.readouterr().out
    world.touched = False
    warm.worker()
    assert world.exits == [1]
    assert "colorsys" not in sys.modules, "workers of these versions are no longer warmed"
