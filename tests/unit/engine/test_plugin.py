"""The patches, on stand-ins for what they wrap."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_ray_engine import context, identity, placement, plugin, teardown
from vllm_ray_engine.config import ENVIRONMENT_VARIABLE, ConfigError
from vllm_ray_engine.context import Context, GroupRef
from vllm_ray_engine.plugin import Patch
from vllm_ray_engine.reasons import UnsupportedVersion

from .conftest import DATA, configure

CONTEXT = context.of_launcher(configure())
BASE = CONTEXT.instance_id


class FakeRay(ModuleType):
    """A Ray that, as the real one, opens a new job when a handle is killed while it is down."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.job: str | None = None
        self.inits: list[dict[str, Any]] = []
        self.killed: list[str] = []
        self.group_state = "CREATED"
        self.util = SimpleNamespace(
            get_placement_group=self._get_placement_group,
            placement_group_table=lambda _: {"state": self.group_state},
        )

    def _get_placement_group(self, name: str) -> str:
        if self.group_state == "not made yet":
            raise ValueError("Failed to look up actor")
        return f"group {name}"

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


# The context.


CONTEXTS = {
    "launched": CONTEXT,
    "launched rank": Context("base", "space", GroupRef(name="base"), rank=3),
    "opted in": Context("mine", "theirs", GroupRef(id="ab" * 18)),
    "without a group": Context("mine", "theirs"),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_context_survives_the_environment(name: str) -> None:
    assert context.from_environment({context.ENVIRONMENT_VARIABLE: CONTEXTS[name].as_json()}) == CONTEXTS[name]


def test_context_of_a_launcher() -> None:
    found = context.from_environment({ENVIRONMENT_VARIABLE: json.dumps(DATA)})
    assert found == Context(BASE, BASE, GroupRef(name=BASE, awaited=True))


def test_context_of_a_launcher_of_one_rank() -> None:
    external = {"data": 3, "dataMode": "External", "dataRank": 2, "dataAddress": "10.0.0.1", "dataRpcPort": 9100}
    found = context.from_environment({ENVIRONMENT_VARIABLE: json.dumps(DATA | external)})
    assert found == Context(BASE, BASE, GroupRef(name=f"{BASE}_dp2", awaited=True), rank=2)


def test_no_context() -> None:
    assert context.from_environment({}) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"group": null}', '{"group": {}, "instance_id": "a"}', '{"group": 1}']
)
def test_malformed_context(text: str) -> None:
    with pytest.raises(ConfigError, match=context.ENVIRONMENT_VARIABLE):
        context.from_environment({context.ENVIRONMENT_VARIABLE: text})


@pytest.mark.parametrize("given", [{}, {"name": "a", "id": "b"}])
def test_group_is_named_in_one_way(given: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="by its name or by its id"):
        GroupRef(**given)


OWNED = {
    "": False, BASE: True, f"{BASE}_dp0": True, f"{BASE}_dp12": True, f"{BASE}_dp": False, f"{BASE}_dp0_dp1": False,
    f"{BASE}2": False, "1796008025453908330": False,
}  # fmt: skip


@pytest.mark.parametrize("instance_id", OWNED)
def test_own_ids(instance_id: str) -> None:
    assert CONTEXT.owns(instance_id) is OWNED[instance_id]


# Identity.


class VllmConfig:
    def __init__(self, instance_id: str = "") -> None:
        self.instance_id = instance_id
        self.__post_init__()

    def __post_init__(self) -> None:
        self.instance_id = "1796008025453908330"


def replaced(config: VllmConfig) -> VllmConfig:
    """As vLLM's `replace`: the constructor, with the old values."""
    return type(config)(**vars(config))


COPIES: dict[str, Callable[[VllmConfig], VllmConfig]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": replaced,
    "pickle": lambda config: pickle.loads(pickle.dumps(config)),  # noqa: S301
}


@pytest.mark.parametrize("kind", COPIES)
def test_instance_id_is_ours_and_a_derived_one_stays(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(VllmConfig, "__post_init__", identity.set_instance_id(VllmConfig.__post_init__, CONTEXT))
    config = VllmConfig()
    assert config.instance_id == BASE
    assert COPIES[kind](config).instance_id == BASE
    config.instance_id += "_dp1"
    assert COPIES[kind](COPIES[kind](config)).instance_id == f"{BASE}_dp1"


def test_a_foreign_id_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmConfig, "__post_init__", identity.set_instance_id(VllmConfig.__post_init__, CONTEXT))
    assert VllmConfig("older-attempt_dp1").instance_id == BASE


def test_instance_id_of_a_rank_that_is_launched_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Context("base", "space", rank=3)
    monkeypatch.setattr(VllmConfig, "__post_init__", identity.set_instance_id(VllmConfig.__post_init__, rank))
    assert VllmConfig().instance_id == "base_dp3"
    assert replaced(VllmConfig()).instance_id == "base_dp3"


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, BASE), ({"namespace": None}, BASE), ({"namespace": "theirs"}, "theirs")],
)
def test_default_namespace(given: dict[str, Any], expected: str) -> None:
    init = identity.default_namespace(lambda **options: options, CONTEXT)
    assert init(address="auto", **given) == {"address": "auto", "namespace": expected}


# Placement.


@pytest.mark.parametrize("connected", [True, False])
def test_engine_uses_the_launchers_group(ray: FakeRay, connected: bool) -> None:
    seen: list[tuple[Any, ...]] = []
    if connected:
        ray.init()
    wrapped = placement.use_launcher_group(lambda config, *rest: seen.append((config.placement_group, *rest)), CONTEXT)
    wrapped(SimpleNamespace(placement_group=None, ray_runtime_env="the environment"), "address")
    assert seen == [(f"group {BASE}", "address")]
    assert ray.inits == ([{}] if connected else [{"address": "auto", "runtime_env": "the environment"}])


def test_engine_waits_for_the_launchers_group_and_says_so(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        ray.group_state = {1: "PENDING", 2: "", 3: "RESCHEDULING", 4: "CREATED"}[len(waits)]

    monkeypatch.setattr("vllm_ray_engine.report.send", sent.append)
    monkeypatch.setattr("time.sleep", sleep)
    ray.group_state = "not made yet"
    assert placement.wait_created(GroupRef(name=BASE, awaited=True)) == f"group {BASE}"
    assert sent == ["waiting"]
    assert waits == [placement.POLL_SECONDS] * 4


def test_group_that_is_not_to_come(ray: FakeRay) -> None:
    ray.group_state = "not made yet"
    with pytest.raises(ValueError, match="Failed to look up"):
        placement.wait_created(GroupRef(name=BASE))


def test_engine_ends_when_the_group_is_taken_back(ray: FakeRay) -> None:
    ray.group_state = "REMOVED"
    with pytest.raises(SystemExit, match=f"{BASE} was removed"):
        placement.wait_created(GroupRef(name=BASE, awaited=True))


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
    monkeypatch.setattr(Executor, "_init_executor", teardown.remember_job(Executor._init_executor, CONTEXT))
    monkeypatch.setattr(Executor, "shutdown", teardown.forget_foreign_handles(Executor.shutdown, CONTEXT))
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
    made.Thing = type("Thing", (), {"method": lambda self: "original", "static": staticmethod(lambda: "original")})
    monkeypatch.setitem(sys.modules, "fake_vllm", made)
    return made


def exclaim(original: Callable[..., Any], _: Any) -> Callable[..., Any]:
    return lambda *arguments: original(*arguments) + "!"


def patch(what: str = "exclaim", where: tuple[str, ...] = ("fake_vllm:function",), **more: Any) -> Patch:
    return Patch(what, where, exclaim, "why", **more)


RELEASE = (0, 32)


def test_patches_are_applied_once(module: Any) -> None:
    patches = (patch(where=("fake_vllm:function", "fake_vllm:Thing.method", "fake_vllm:Thing.static")),)
    plugin.apply(patches, CONTEXT, RELEASE)
    plugin.apply(patches, CONTEXT, RELEASE)
    assert (module.function(), module.Thing().method(), module.Thing().static()) == ("original!",) * 3


def test_two_patches_of_one_function(module: Any) -> None:
    patches = (patch("once"), patch("twice"))
    plugin.apply(patches, CONTEXT, RELEASE)
    plugin.apply(patches, CONTEXT, RELEASE)
    assert module.function() == "original!!"


@pytest.mark.parametrize("where", ["fake_vllm:absent", "fake_vllm:Thing.absent", "fake_absent_vllm:function"])
def test_missing_patch_point_refuses_and_changes_nothing(module: Any, where: str) -> None:
    patches = (patch(), patch("other", (where,)))
    with pytest.raises(UnsupportedVersion, match=rf"no {where} .*\(other\)"):
        plugin.apply(patches, CONTEXT, RELEASE)
    assert module.function() == "original"


@pytest.mark.parametrize(
    ("release", "expected"), [((0, 24), False), ((0, 25), True), ((0, 32), True), ((0, 33), False), ((1, 0), False)]
)
def test_a_point_that_only_some_releases_have(module: Any, release: tuple[int, int], expected: bool) -> None:
    plugin.apply((patch(since=(0, 25), until=(0, 33)),), CONTEXT, release)
    assert (module.function() == "original!") is expected


def test_a_patch_steps_aside_where_upstream_has_the_fix(module: Any) -> None:
    plugin.apply((patch(fixed=lambda original: original() == "original"),), CONTEXT, RELEASE)
    assert module.function() == "original"


def test_the_table_names_every_patch_once() -> None:
    names = [patch.what for patch in plugin.PATCHES]
    assert len(set(names)) == len(names)


def test_plugin_is_inert_outside_an_engine_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENVIRONMENT_VARIABLE, context.ENVIRONMENT_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plugin, "apply", lambda *_: pytest.fail("it patched"))
    plugin.register()
