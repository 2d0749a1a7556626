"""The table of patches and its application, on stand-ins for what they wrap."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_ray_engine import plugin
from vllm_ray_engine.config import ENVIRONMENT_VARIABLE
from vllm_ray_engine.patches import context, placement, spawn
from vllm_ray_engine.patches.context import GroupRef
from vllm_ray_engine.patches.features import mentions
from vllm_ray_engine.plugin import Patch
from vllm_ray_engine.reasons import UnsupportedVersion
from vllm_ray_engine.standby.warm import Warming

from .conftest import configure
from .fake_ray import FakeRay

CONTEXT = context.of_launcher(configure())
BASE = CONTEXT.instance_id

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


def test_a_group_that_the_config_holds_stays(ray: FakeRay) -> None:
    """As that of a rank which the Ray backend made, or that of the actor in which the engine was made."""
    ray.init()
    config = SimpleNamespace(placement_group="group of rank 1")
    placement.use_launcher_group(lambda _: None, CONTEXT)(config)
    assert config.placement_group == "group of rank 1"


def test_engine_waits_for_the_launchers_group_and_says_so(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        ray.group_state = {1: "PENDING", 2: "", 3: "RESCHEDULING", 4: "CREATED"}[len(waits)]

    monkeypatch.setattr("vllm_ray_engine.report.send", sent.append)
    monkeypatch.setattr("time.sleep", sleep)
    ray.group_state = "not made yet"
    assert placement.wait_created(GroupRef(name=BASE, awaited=True), Warming(None)) == f"group {BASE}"
    assert sent == ["waiting"]
    assert waits == [placement.POLL_SECONDS] * 4


def test_engine_warms_up_while_it_waits_and_says_so_when_it_is_warm(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Slow(Warming):
        def begin(self) -> None:
            events.append("begin")

        def ready(self) -> bool:
            return events.count("begin") == 2

        def end(self) -> None:
            events.append("end")

    def sleep(_: float) -> None:
        events.append("sleep")
        ray.group_state = "CREATED" if events.count("sleep") == 4 else "PENDING"

    monkeypatch.setattr("vllm_ray_engine.report.send", events.append)
    monkeypatch.setattr("time.sleep", sleep)
    ray.group_state = "not made yet"
    placement.wait_created(GroupRef(name=BASE, awaited=True), Slow(None))
    assert events == ["sleep", "begin", "sleep", "begin", "waiting", "sleep", "sleep", "end"]


def test_group_that_is_not_to_come(ray: FakeRay) -> None:
    ray.group_state = "not made yet"
    with pytest.raises(ValueError, match="Failed to look up"):
        placement.wait_created(GroupRef(name=BASE), Warming(None))


def test_engine_ends_when_the_group_is_taken_back(ray: FakeRay) -> None:
    ray.group_state = "REMOVED"
    with pytest.raises(SystemExit, match=f"{BASE} was removed"):
        placement.wait_created(GroupRef(name=BASE, awaited=True), Warming(None))


def test_ranks_get_the_launchers_groups_by_node(ray: FakeRay) -> None:
    owner = context.of_launcher(configure(data=4))
    for number, node in enumerate(["b", "node", "b", "a"]):
        ray.bundle_nodes[f"group {BASE}_group{number}"] = {0: "a", 1: "node", 2: node}
    wrapped = placement.use_rank_groups(lambda _: pytest.fail("vLLM made its own"), owner)
    groups, local = wrapped("the config")
    assert groups == [f"group {BASE}_group{number}" for number in (1, 3, 0, 2)]
    assert local == [0, 0, 0, 1]


def test_ranks_outside_a_launcher_get_vllms_groups() -> None:
    assert placement.use_rank_groups(lambda config: ([config], [0]), CONTEXT)("config") == (["config"], [0])


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


def learned(handle: Any) -> Any:
    """As a shutdown that upstream has fixed."""
    return [one for one in handle.actors if one.is_initialized() and one.get_job_id()]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (learned, True),
        (lambda handle: handle.is_initialized(), False),
        (lambda handle: (lambda: handle.get_job_id(1)) if handle.is_initialized() else None, True),
        (len, False),
    ],
    ids=["in a comprehension", "half of it", "in an inner function", "not written in Python"],
)
def test_mentions(function: Callable[..., Any], expected: bool) -> None:
    assert mentions("is_initialized", "get_job_id")(function) is expected


def test_enable(monkeypatch: pytest.MonkeyPatch, ray: FakeRay) -> None:
    applied: list[Any] = []
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setenv(context.ENVIRONMENT_VARIABLE, "")
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setattr(plugin, "apply", lambda _patches, owner, _release: applied.append(owner))
    monkeypatch.setattr(plugin.versions, "release", lambda _: RELEASE)
    monkeypatch.setattr(plugin.process_tree, "die_with_parent", lambda _: pytest.fail("it is no process of ours"))
    ray.init()
    ray.runtime.namespace, ray.runtime.get_placement_group_id = "space", lambda: None
    owner = plugin.enable("mine-1")
    assert applied == [owner] == [context.from_environment()]
    assert spawn.os.environ["RAY_ADDRESS"] == "10.0.0.1:6379"
