"""What is brought up, in which order, and what is not begun on a machine that will not do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e import environment
from e2e.cluster import cli

ANSWERS = {
    "tools": "/tools\n",
    "kubeconfig": "/kubeconfig\n",
    "build": json.dumps(
        {name: {"image": f"{name}:1", "archive": f"/{name}.tar"} for name in ("operator", "engine-cpu", "redis")}
    ),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The modules that are called, on a machine where all of them work."""
    made: list[tuple[str, ...]] = []

    def module(*args: str) -> str:
        made.append(args)
        return next((text for word, text in ANSWERS.items() if word in args), "")

    monkeypatch.setattr(environment, "module", module)
    return made


def test_the_machine_is_prepared_before_anything_else(calls: list[tuple[str, ...]]) -> None:
    found = environment.bring_up("mine")
    assert calls[0] == ("e2e.cluster", "prepare")
    assert calls[-1] == ("e2e.cluster", "--name", "mine", "load", "/operator.tar", "/engine-cpu.tar")
    assert (found.operator_image, found.engine_image) == ("operator:1", "engine-cpu:1")
    assert found.kube.kubeconfig == Path("/kubeconfig")


def test_further_images_are_built_and_loaded_too(calls: list[tuple[str, ...]]) -> None:
    assert environment.bring_up(more=["redis"]).more == {"redis": "redis:1"}
    assert ("e2e.images", "build", "operator", "engine-cpu", "redis") in calls
    assert "/redis.tar" in calls[-1]


def test_nothing_is_begun_on_a_machine_that_will_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []

    def module(*args: str) -> str:
        calls.append(args)
        raise SystemExit(2)

    monkeypatch.setattr(environment, "module", module)
    with pytest.raises(SystemExit):
        environment.bring_up()
    assert calls == [("e2e.cluster", "prepare")]


@pytest.mark.parametrize("command", ["prepare", "up"])
def test_what_the_machine_lacks_is_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "problem", lambda _: "needs Go 1.25 or newer: put it first on PATH")
    assert cli.main([command]) == cli.UNFIT
    assert capsys.readouterr().err == "error: needs Go 1.25 or newer: put it first on PATH\n"


def test_a_machine_that_does_gets_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = []

    async def ensure_packages(progress: object) -> None:
        installed.append(progress)

    monkeypatch.setattr(cli, "problem", lambda _: None)
    monkeypatch.setattr(cli, "ensure_packages", ensure_packages)
    assert cli.main(["prepare"]) == 0
    assert len(installed) == 1
