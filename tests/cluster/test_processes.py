"""Nothing is started twice, and nothing that is not ours is ever ended."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from e2e.cluster.errors import ComponentError
from e2e.cluster.layout import Layout
from e2e.cluster.processes import Component, ProcessId, Supervisor, find_process, processes_in
from e2e.cluster.progress import Progress

DEADLINE = 10.0  # seconds


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout.of("unit", state=tmp_path / "state", cache=tmp_path / "cache")


@pytest.fixture
def supervisor(layout: Layout) -> Iterator[Supervisor]:
    made = Supervisor(layout, Progress())
    yield made
    asyncio.run(made.stop(*made.all_running()))


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def sleeper(seconds: int = 1000, name: str = "sleeper") -> Component:
    # The pid in the argument keeps other test runs of this machine apart.
    return Component(name, ["sleep", f"{seconds}.{os.getpid()}"], missing=lambda: None)


def pid_of(supervisor: Supervisor, name: str = "sleeper") -> int:
    process = supervisor.running(name)
    assert process is not None
    return process.pid


async def test_a_running_component_is_not_started_again_even_by_a_later_run(
    supervisor: Supervisor, layout: Layout
) -> None:
    assert await supervisor.ensure(sleeper())
    later = Supervisor(layout, Progress())
    assert not await later.ensure(sleeper())
    assert pid_of(later) == pid_of(supervisor)


async def test_a_component_that_died_is_started_again(supervisor: Supervisor) -> None:
    await supervisor.ensure(sleeper())
    first = supervisor.running("sleeper")
    assert first is not None
    first.end(patience=DEADLINE)
    assert supervisor.running("sleeper") is None
    assert await supervisor.ensure(sleeper())
    assert pid_of(supervisor) != first.pid


async def test_a_changed_component_replaces_the_old_one(supervisor: Supervisor) -> None:
    await supervisor.ensure(sleeper())
    old = supervisor.running("sleeper")
    assert old is not None
    assert await supervisor.ensure(replace(sleeper(), configuration="other"))
    assert not old.alive()


async def test_a_process_whose_record_was_never_written_is_adopted(supervisor: Supervisor, layout: Layout) -> None:
    await supervisor.ensure(sleeper())
    pid = pid_of(supervisor)
    (layout.processes / "sleeper.json").unlink()
    assert not await supervisor.ensure(sleeper())
    assert pid_of(supervisor) == pid


async def test_a_reused_pid_is_neither_taken_for_ours_nor_ended(
    supervisor: Supervisor, layout: Layout, bystander: subprocess.Popen[bytes]
) -> None:
    actual = ProcessId.of(bystander.pid)
    assert actual is not None
    for stale in (replace(actual, start_ticks=actual.start_ticks - 1), replace(actual, boot="an earlier boot")):
        layout.processes.mkdir(parents=True, exist_ok=True)
        record = {"process": asdict(stale), "fingerprint": ""}
        (layout.processes / "sleeper.json").write_text(json.dumps(record))
        assert supervisor.running("sleeper") is None
        await supervisor.stop("sleeper")
        stale.end(patience=0.1)
        assert bystander.poll() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"process": {"pid": 1}}'])
async def test_a_damaged_record_is_like_none(supervisor: Supervisor, layout: Layout, text: str) -> None:
    layout.processes.mkdir(parents=True)
    (layout.processes / "sleeper.json").write_text(text)
    assert supervisor.running("sleeper") is None
    assert await supervisor.ensure(sleeper())


async def test_a_component_that_ends_at_once_is_reported_with_its_log(supervisor: Supervisor, layout: Layout) -> None:
    component = Component(
        "broken",
        [sys.executable, "-c", "import sys, time; print('the cause', flush=True); sys.exit(1)"],
        missing=lambda: "still waiting",
    )
    with pytest.raises(ComponentError, match="the cause") as raised:
        await supervisor.ensure_ready(component, DEADLINE)
    assert "ended right after its start" in str(raised.value)
    assert str(layout.logs / "broken.log") in str(raised.value)


async def test_a_component_that_is_never_ready_is_reported_with_what_is_missing(supervisor: Supervisor) -> None:
    component = replace(sleeper(), missing=lambda: "the door is closed")
    with pytest.raises(ComponentError, match=r"not ready after 0 s \(the door is closed\)"):
        await supervisor.ensure_ready(component, deadline=0.3)


async def test_a_process_that_ignores_the_request_is_killed(supervisor: Supervisor, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = (
        "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"pathlib.Path({str(ready)!r}).touch(); time.sleep(1000)"
    )
    stubborn = Component(
        "stubborn",
        [sys.executable, "-c", code],
        missing=lambda: None if ready.exists() else "ignoring SIGTERM",
    )
    await supervisor.ensure_ready(stubborn, DEADLINE)
    process = supervisor.running("stubborn")
    assert process is not None
    began = time.monotonic()
    await supervisor.stop("stubborn", patience=0.2)
    assert not process.alive()
    assert time.monotonic() - began < DEADLINE


def test_a_zombie_counts_as_gone() -> None:
    with subprocess.Popen(["true"]) as process:
        end = time.monotonic() + DEADLINE
        while ProcessId.of(process.pid) is not None:  # it ends, and is not waited for yet
            assert time.monotonic() < end, "waited for `true` to end"
        assert process.returncode is None


def test_processes_are_found_by_their_whole_command_line_and_namespaces(bystander: subprocess.Popen[bytes]) -> None:
    del bystander
    unique = f"1000.{os.getpid()}"
    with subprocess.Popen(["sleep", unique]) as process:
        try:
            end = time.monotonic() + DEADLINE
            while (found := find_process(["sleep", unique], set())) is None:
                assert time.monotonic() < end, "waited for the process to become sleep"
            assert found.pid == process.pid
            assert find_process(["sleep"], set()) is None
            assert find_process(["sleep", unique], {1}) is None
        finally:
            process.kill()


def test_a_namespace_nobody_is_in_holds_no_process() -> None:
    assert processes_in({1}) == []
    assert processes_in(set()) == []
