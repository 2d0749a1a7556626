"""Commands end with whoever ran them, unless they must finish; a lock has one holder."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.cluster import packages
from e2e.cluster.commands import exclusive, run
from e2e.cluster.errors import CommandError
from e2e.cluster.processes import find_process
from e2e.cluster.progress import Progress

DEADLINE = 10.0  # seconds


async def until(what: str, condition: Callable[[], bool]) -> None:
    try:
        async with asyncio.timeout(DEADLINE):
            while not condition():  # noqa: ASYNC110 - the condition is another process's doing
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"waited for {what}") from None


async def test_output_is_returned_and_lines_are_seen_as_they_come() -> None:
    lines: list[str] = []
    assert await run(["sh", "-c", "echo one; echo two >&2"], on_line=lines.append) == "one\ntwo\n"
    assert lines == ["one", "two"]


async def test_a_failure_is_an_error_with_its_output() -> None:
    with pytest.raises(CommandError, match="the cause") as raised:
        await run(["sh", "-c", "echo the cause; exit 7"])
    assert raised.value.status == 7


async def test_an_interrupted_command_ends_with_its_children() -> None:
    nap = ["sleep", f"1001.{os.getpid()}"]
    task = asyncio.create_task(run(["sh", "-c", f"{' '.join(nap)}; true"]))
    await until("the child to run", lambda: find_process(nap, set()) is not None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until("the child to end", lambda: find_process(nap, set()) is None)


async def test_a_command_that_must_finish_is_waited_for(tmp_path: Path) -> None:
    started, allowed, finished = (tmp_path / name for name in ("started", "allowed", "finished"))
    script = f"touch {started}; while [ ! -e {allowed} ]; do sleep 0.02; done; touch {finished}"
    task = asyncio.create_task(run(["sh", "-c", script], must_finish=True))
    await until("the command to run", started.exists)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    allowed.touch()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert finished.exists()


async def test_a_lock_has_one_holder_at_a_time(tmp_path: Path) -> None:
    lock, order = tmp_path / "folder" / "lock", []
    held, release = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with exclusive(lock, Progress(), "x"):
            held.set()
            await release.wait()
            order.append("first")

    async def second() -> None:
        await held.wait()
        async with exclusive(lock, Progress(), "x"):
            order.append("second")

    async with asyncio.TaskGroup() as group:
        group.create_task(first())
        waiting = group.create_task(second())
        await held.wait()
        await asyncio.sleep(0)
        assert not waiting.done()
        release.set()
    assert order == ["first", "second"]


async def test_a_lock_is_free_again_when_its_holder_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    take = f"import fcntl; file = open({str(lock)!r}, 'w'); fcntl.flock(file, fcntl.LOCK_EX)"
    code = f"{take}; print('held', flush=True); import time; time.sleep(1000)"
    holder = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"held\n"
    holder.kill()
    await holder.wait()
    async with asyncio.timeout(DEADLINE), exclusive(lock, Progress(), "x"):
        pass


def test_services_stay_off_only_while_packages_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "policy-rc.d"
    monkeypatch.setattr(packages, "POLICY", policy)
    with pytest.raises(RuntimeError), packages.services_not_started():
        assert "exit 101" in policy.read_text()
        assert policy.stat().st_mode & 0o111
        raise RuntimeError
    assert not policy.exists()


def test_a_machines_own_policy_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "policy-rc.d"
    policy.write_text("its own")
    monkeypatch.setattr(packages, "POLICY", policy)
    with packages.services_not_started():
        assert policy.read_text() == "its own"
    assert policy.read_text() == "its own"


def test_missing_programs_are_named_by_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "NEEDED", {"sh": "dash", "no-such-program": "its-package", "/no/such/file": "other"})
    assert packages.missing_packages() == ["its-package", "other"]
