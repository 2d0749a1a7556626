"""Long programs: steps are shown, all output is kept, a failure says why."""

from pathlib import Path

import pytest

from e2e.images import process
from e2e.images.process import CommandError, Progress, run_logged


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def test_steps_are_shown_and_everything_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs" / "build.log"
    run_logged(
        shell("echo STEP 1/2: RUN one; echo detail; echo STEP 2/2: RUN --mount=type=secret,id=x   two >&2"),
        log,
        Progress("image"),
    )
    assert log.read_text() == "STEP 1/2: RUN one\ndetail\nSTEP 2/2: RUN --mount=type=secret,id=x two\n"
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.partition("] ")[2] for line in shown.err.splitlines()] == ["STEP 1/2: RUN one", "STEP 2/2: RUN two"]


def test_a_failure_carries_the_exit_code_and_the_end_of_the_log(tmp_path: Path) -> None:
    script = "seq 1 1000; echo the cause; exit 4"
    with pytest.raises(CommandError, match=r"sh ended with 4(.|\n)*the cause") as failure:
        run_logged(shell(script), tmp_path / "log", Progress("image"))
    assert str(tmp_path / "log") in str(failure.value)
    assert "\n500\n" not in str(failure.value)


def test_a_silent_program_is_seen_to_be_alive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_HEARTBEAT_SECONDS", 0.05)
    fifo = tmp_path / "fifo"  # the program goes on only when its first sign of life has been printed
    say = Progress.say

    def release(progress: Progress, text: str) -> None:
        say(progress, text)
        if text.startswith("still at") and not fifo.exists():
            fifo.touch()

    monkeypatch.setattr(Progress, "say", release)
    script = f"echo STEP 1/1: RUN slow; while [ ! -e {fifo} ]; do sleep 0.01; done"
    run_logged(shell(script), tmp_path / "log", Progress("image"))
    assert "still at: STEP 1/1: RUN slow" in capsys.readouterr().err
