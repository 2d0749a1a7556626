"""The guard above the launcher: whichever of the two is killed, the other ends and collects everything."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from .conftest import Launch, wait_for
from .test_process_tree import alive


def family(launch: Launch) -> tuple[int, int, int]:
    """Return the process ids of guard, launcher and engine."""
    guard = launch.process.pid

    def child(pid: int) -> int:
        (only,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(only)

    return guard, child(guard), child(child(guard))


def test_serves_and_stops_under_the_guard(launch: Launch) -> None:
    launch.start(guarded=True)
    launch.wait_phase("Serving")
    launch.send(signal.SIGTERM)
    code, result = launch.end()
    assert (code, result["outcome"]) == (0, "Stopped")
    assert launch.left() == []
    assert launch.places() == []


def test_killed_launcher_is_told_and_cleaned_up_after(launch: Launch) -> None:
    launch.start(guarded=True)
    launch.wait_phase("Serving")
    assert len(launch.places()) == 1
    _, launcher, _ = family(launch)
    os.kill(launcher, signal.SIGKILL)
    code, result = launch.end()
    assert (code, result["outcome"], result["reason"]) == (1, "Failed", "EngineExited")
    assert result["message"] == "the launcher process was killed by SIGKILL"
    assert launch.left() == []
    assert launch.places() == []


def test_killed_guard_ends_the_attempt(launch: Launch) -> None:
    launch.start(guarded=True)
    launch.wait_phase("Serving")
    guard, launcher, engine = family(launch)
    os.kill(guard, signal.SIGKILL)
    wait_for("the launcher and the engine to end", lambda: not alive(launcher) and not alive(engine))
    assert launch.ray_log()[-2:] == ["remove_placement_group", "shutdown"]
    assert launch.left() == []
    assert launch.places() == []
    assert launch.end()[1]["message"] == "the guard process or the Ray job supervisor was killed"


def test_killed_supervisor_ends_the_attempt(launch: Launch) -> None:
    launch.start(guarded=True, supervised=True)
    launch.wait_phase("Serving")
    launch.send(signal.SIGKILL)  # the supervisor stands where the guard does otherwise
    wait_for("everything to end", lambda: not launch.left())
    assert launch.places() == []
    assert launch.end()[1]["message"] == "the guard process or the Ray job supervisor was killed"
