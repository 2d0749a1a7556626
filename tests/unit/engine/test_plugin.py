"""The patches, on stand-ins for what they wrap."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_ray_engine import identity, placement, plugin, teardown
from vllm_ray_engine.config import ENVIRONMENT_VARIABLE
from vllm_ray_engine.plugin import Patch
from vllm_ray_engine.reasons import UnsupportedVersion

from .conftest import configure

CONFIG = configure()


class FakeRay(ModuleType):
    """A Ray that, as the real one, opens a new job when a handle is killed while it is down."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.job: str | None = None
        self.inits: list[dict[str, Any]] = []
        self.killed: list[str] = []
        self.util = SimpleNamespace(get_placement_group=lambda name: f"group {name}")

    def is_initialized(self) -> bool:
        return self.job is not None

    def init(self, **options: Any) -> None:
        self.inits.append(options)
        self.job = f"0{len(self.inits)}000000"

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(get_job_id=lambda: self.job)

    def kill(self, handle: str) -> None:
        if self.job is None:
            self.init()
        self.killed.append(handle)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


# Identity.


class VllmConfig:
    def __init__(self) -> None:
        self.__post_init__()

    def __post_init__(self) -> None:
        self.instance_id = "1796008025453908330"


def test_instance_id_is_ours_and_a_derived_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmConfig, "__post_init__", identity.set_instance_id(VllmConfig.__post_init__, CONFIG))
    config = VllmConfig()
    assert config.instance_id == CONFIG.instance_id
    rank = copy.deepcopy(config)
    rank.instance_id += "_dp1"
    assert copy.deepcopy(rank).instance_id == f"{CONFIG.instance_id}_dp1"


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, CONFIG.instance_id), ({"namespace": None}, CONFIG.instance_id), ({"namespace": "theirs"}, "theirs")],
)
def test_default_namespace(given: dict[str, Any], expected: str) -> None:
    init = identity.default_namespace(lambda **options: options, CONFIG)
    assert init(address="auto", **given) == {"address": "auto", "namespace": expected}


# Placement.


@pytest.mark.parametrize("connected", [True, False])
def test_engine_uses_the_launchers_group(ray: FakeRay, connected: bool) -> None:
    seen: list[tuple[Any, ...]] = []
    if connected:
        ray.init()
    wrapped = placement.use_launcher_group(lambda config, *rest: seen.append((config.placement_group, *rest)), CONFIG)
    wrapped(SimpleNamespace(placement_group=None, ray_runtime_env="the environment"), "address")
    assert seen == [(f"group {CONFIG.instance_id}", "address")]
    assert ray.inits == ([{}] if connected else [{"address": "auto", "runtime_env": "the environment"}])


# Teardown.


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
    monkeypatch.setattr(Executor, "_init_executor", teardown.remember_job(Executor._init_executor, CONFIG))
    monkeypatch.setattr(Executor, "shutdown", teardown.forget_foreign_handles(Executor.shutdown, CONFIG))
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


# The table and its application.


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = ModuleType("fake_vllm")
    made.function = lambda: "original"
    made.Thing = type("Thing", (), {"method": lambda self: "original"})
    monkeypatch.setitem(sys.modules, "fake_vllm", made)
    return made


def exclaim(original: Callable[..., Any], _: Any) -> Callable[..., Any]:
    return lambda *arguments: original(*arguments) + "!"


def test_patches_are_applied_once(module: Any) -> None:
    patches = (Patch(("fake_vllm:function", "fake_vllm:Thing.method"), exclaim, "why"),)
    plugin.apply(patches, CONFIG)
    plugin.apply(patches, CONFIG)
    assert (module.function(), module.Thing().method()) == ("original!", "original!")


@pytest.mark.parametrize("where", ["fake_vllm:absent", "fake_vllm:Thing.absent", "fake_absent_vllm:function"])
def test_missing_patch_point_refuses_and_changes_nothing(module: Any, where: str) -> None:
    patches = (Patch(("fake_vllm:function",), exclaim, "why"), Patch((where,), exclaim, "why"))
    with pytest.raises(UnsupportedVersion, match=f"no {where}"):
        plugin.apply(patches, CONFIG)
    assert module.function() == "original"


def test_plugin_is_inert_outside_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(plugin, "apply", lambda *_: pytest.fail("it patched"))
    plugin.register()
