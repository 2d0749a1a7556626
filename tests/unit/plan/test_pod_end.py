"""How worker pods end: their grace, and the hook that is run as it is in a pod."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.plan import build
from vllm_ray_engine.launcher.drain_mark import DrainMark
from vllm_ray_engine.processes import debris
from vllm_ray_operator.api.spec import VLLMDeploymentSpec
from vllm_ray_operator.plan import raycluster

SECONDS = 20.0


def worker(drain: int = 30, template: dict[str, Any] | None = None) -> Any:
    raw = build.spec_with(engine={"drainTimeoutSeconds": drain}, cluster={"workers": {"template": template or {}}})
    return raycluster.render_cluster(build.NAME, VLLMDeploymentSpec.model_validate(raw), "image")


@pytest.mark.parametrize(
    ("drain", "asked", "grace"),
    [(30, None, 90), (0, None, 60), (3600, None, 3660), (30, 600, 600), (30, 10, 90), (30, "soon", 90)],
)
def test_a_pod_gets_time_for_the_drain(drain: int, asked: Any, grace: int) -> None:
    template = {"spec": {"terminationGracePeriodSeconds": asked}} if asked is not None else {}
    resolved = worker(drain, template)
    assert resolved.worker["spec"]["terminationGracePeriodSeconds"] == grace
    assert "terminationGracePeriodSeconds" not in resolved.head["spec"], "no engine runs there"
    assert "lifecycle" not in resolved.head["spec"]["containers"][0]


def test_a_hook_of_the_user_s_takes_the_place_of_ours() -> None:
    theirs = {"httpGet": {"port": 80, "path": "/"}}
    container = {"name": "ray", "lifecycle": {"preStop": theirs}}
    resolved = worker(template={"spec": {"containers": [container]}})
    assert resolved.worker["spec"]["containers"][0]["lifecycle"] == {"preStop": theirs}


def test_a_change_of_the_time_for_drains_makes_no_new_pods() -> None:
    scene = build.serving(build.spec_with(engine={"drainTimeoutSeconds": 10}))
    scene.change(engine={"drainTimeoutSeconds": 1000})
    scene.step()
    assert scene.step() == ()
    assert [r.kind for r in scene.revisions] == ["cluster", "engine"]
    assert scene.phase == "Ready"


# -- the hook ----------------------------------------------------------------------------------------------------------


@contextmanager
def hook(folder: Path, patience: float = 3600) -> Iterator[subprocess.Popen[bytes]]:
    """Run the container's hook, with another folder in the place of /dev/shm."""
    (command,) = [c["lifecycle"]["preStop"]["exec"]["command"] for c in worker().worker["spec"]["containers"]]
    assert command[0] == "python3"
    assert command[3:] == [str(debris.SHARED_MEMORY / debris.NAME), "30"]
    arguments = [command[2], str(folder / debris.NAME), str(patience)]
    process = subprocess.Popen([sys.executable, "-c", TELLING, *arguments], stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# Runs the hook, and says so each time that it waits for its next look.
TELLING = """
import sys, time
slept = time.sleep
def sleep(seconds):
    print("waits", flush=True)
    slept(seconds)
time.sleep = sleep
exec(sys.argv.pop(1))
"""


def waits(process: subprocess.Popen[bytes]) -> bool:
    """Whether it goes on after a look, and after another."""
    assert process.stdout is not None
    return [process.stdout.readline() for _ in range(2)] == [b"waits\n"] * 2


@contextmanager
def held(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def lock(folder: Path, attempt: str = "a") -> Path:
    return folder / f"{debris.NAME}{debris.tag(attempt)}.lock"


def test_without_engines_it_ends_at_once(tmp_path: Path) -> None:
    lock(tmp_path).touch()  # of an attempt that is gone
    (tmp_path / "other.lock").touch()
    with held(tmp_path / "another.lock"), hook(tmp_path) as process:
        assert process.wait(SECONDS) == 0


def test_it_waits_for_the_last_process_of_every_engine(tmp_path: Path) -> None:
    with held(lock(tmp_path, "b")):
        with held(lock(tmp_path)), held(lock(tmp_path)), hook(tmp_path) as process:
            assert waits(process)
        with hook(tmp_path) as process:
            assert waits(process)
    with hook(tmp_path) as process:
        assert process.wait(SECONDS) == 0


def test_it_waits_for_the_launcher_too(tmp_path: Path) -> None:
    mark = DrainMark("a", tmp_path)
    mark.drain()
    with hook(tmp_path) as process:
        assert waits(process)
        mark.close()
        assert process.wait(SECONDS) == 0


def test_an_engine_that_is_not_told_to_drain_is_not_waited_for(tmp_path: Path) -> None:
    """There is no operator, or the whole deployment goes."""
    mark = DrainMark("a", tmp_path)
    began = time.monotonic()
    with held(lock(tmp_path)), hook(tmp_path, patience=1) as process:
        assert process.wait(SECONDS) == 0
        assert time.monotonic() - began >= 1
    mark.close()


def test_one_that_drains_is_waited_for(tmp_path: Path) -> None:
    mark = DrainMark("a", tmp_path)
    mark.drain()
    with held(lock(tmp_path)), hook(tmp_path, patience=0) as process:
        assert waits(process)
    mark.close()


def test_in_a_pod_without_the_launcher_the_engine_s_end_decides(tmp_path: Path) -> None:
    with held(lock(tmp_path)), hook(tmp_path, patience=0) as process:
        assert waits(process)


def test_the_mark_of_a_launcher_that_was_killed_hurries_nobody(tmp_path: Path) -> None:
    (tmp_path / f"{debris.NAME}{debris.tag('killed')}-serving").touch()
    with held(lock(tmp_path)), hook(tmp_path, patience=0) as process:
        assert waits(process)
    with hook(tmp_path) as process:
        assert process.wait(SECONDS) == 0


def test_a_launcher_takes_its_mark_away(tmp_path: Path) -> None:
    mark = DrainMark("a", tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    mark.drain()
    assert len(list(tmp_path.iterdir())) == 1
    mark.close()
    assert list(tmp_path.iterdir()) == []


def test_a_standby_beside_one_that_drains_hurries_nobody(tmp_path: Path) -> None:
    first, second = DrainMark("a", tmp_path), DrainMark("b", tmp_path)
    first.drain()
    with held(lock(tmp_path)), hook(tmp_path, patience=0) as process:
        assert waits(process)
    first.close()
    second.close()


def test_a_mark_that_cannot_be_made_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = DrainMark("a", tmp_path / "gone")
    mark.drain()
    mark.close()
    assert "does not wait for the launcher" in capsys.readouterr().out
