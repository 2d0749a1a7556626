"""Spawn: the wrappers, on a stand-in for Ray."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import pytest

from vllm_ray_engine.patches import context, spawn

from .conftest import configure
from .fake_ray import FakeRay

CONTEXT = context.of_launcher(configure())
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", METHOD):
        monkeypatch.setenv(name, "")


def test_connecting_hands_the_cluster_on(ray: FakeRay) -> None:
    spawn.connect_once(ray.init, CONTEXT)(address="auto")
    assert ray.inits == [{"address": "auto", "ignore_reinit_error": True}]
    assert os.environ["RAY_ADDRESS"] == "10.0.0.1:6379"


def test_a_process_that_is_not_connected_hands_nothing_on(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not spawn.hand_on_cluster()
    monkeypatch.delitem(sys.modules, "ray")
    assert not spawn.hand_on_cluster()
    assert os.environ["RAY_ADDRESS"] == ""


def test_nothing_connects_silently(ray: FakeRay) -> None:
    spawn.never_silently(ray.init, CONTEXT)()
    assert ray.inits == []


@pytest.mark.parametrize("given", ["fork", "spawn", ""])
@pytest.mark.parametrize("connected", [True, False])
def test_spawn_where_ray_is_connected(
    ray: FakeRay, caplog: pytest.LogCaptureFixture, given: str, connected: bool
) -> None:
    os.environ[METHOD] = given
    if connected:
        ray.init()
    seen: list[Any] = []
    with caplog.at_level(logging.WARNING, "vllm.vllm_ray_engine"):
        spawn.force_spawn(lambda: seen.append(os.environ[METHOD]), CONTEXT)()
    assert seen == (["spawn"] if connected else [given])
    assert os.environ["RAY_ADDRESS"] == ("10.0.0.1:6379" if connected else "")
    assert len(caplog.messages) == (connected and given == "fork")
