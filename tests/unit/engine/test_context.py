"""What a process knows of its engine, and the placement group as another process finds it."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_ray_engine.config import ENVIRONMENT_VARIABLE, ConfigError
from vllm_ray_engine.patches import context
from vllm_ray_engine.patches.context import Context, GroupRef

from .conftest import DATA, configure
from .fake_ray import FakeRay

CONTEXT = context.of_launcher(configure())
BASE = CONTEXT.instance_id

CONTEXTS = {
    "launched": CONTEXT,
    "launched rank": Context("base", "space", GroupRef(name="base"), rank=3),
    "opted in": Context("mine", "theirs", GroupRef(id="ab" * 18)),
    "without a group": Context("mine", "theirs"),
    "ranks": context.of_launcher(configure(data=2)),
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


def test_context_of_a_launcher_of_ranks() -> None:
    found = context.from_environment({ENVIRONMENT_VARIABLE: json.dumps(DATA | {"data": 2})})
    groups = tuple(GroupRef(name=f"{BASE}_group{number}", awaited=True) for number in (0, 1))
    assert found == Context(BASE, BASE, rank_groups=groups)


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


def test_group_by_name(ray: FakeRay) -> None:
    assert GroupRef(name="mine").find() == "group mine"


def test_group_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("ray.util.placement_group")
    module.PlacementGroupID = lambda binary: ("id", binary)
    module.PlacementGroup = lambda group_id: ("group", group_id)
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", module)
    assert GroupRef(id="0aff").find() == ("group", ("id", b"\x0a\xff"))


@pytest.mark.parametrize("group", [None, "ab12"])
def test_context_of_an_actor(ray: FakeRay, group: str | None) -> None:
    ray.init()
    ray.runtime = SimpleNamespace(namespace="space", get_placement_group_id=lambda: group)
    expected = None if group is None else GroupRef(id=group)
    assert context.of_actor("mine-1") == Context("mine-1", "space", expected)


def test_context_outside_of_ray(ray: FakeRay) -> None:
    with pytest.raises(RuntimeError, match="not connected"):
        context.of_actor("mine-1")
    assert ray.inits == []
