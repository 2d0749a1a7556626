"""A command run in isolation leaves no process and no mount behind, however it ends."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2e.images.process import ISOLATE

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
DEADLINE_SECONDS = 20.0

# A process that leaves its session and ignores SIGTERM, and one in the foreground: both sleep for a time that is ours.
DAEMON = "trap '' TERM; setsid sleep {mark} & echo up; exec sleep {mark}"


def processes(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = entry.read_bytes().split(b"\0")
        except OSError:  # it ended while we looked
            continue
        if arguments[:2] == [b"sleep", mark.encode()]:
            found.append(int(entry.parent.name))
    return found


def wait_until_gone(mark: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while left := processes(mark):
        assert time.monotonic() < deadline, f"waited {DEADLINE_SECONDS} s for the end of processes {left}"
        time.sleep(0.02)


def wait_until_started(mark: str) -> None:
    """Wait for both sleeps: the shell says that it is up before they are."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(found := processes(mark)) < 2:
        assert time.monotonic() < deadline, f"waited {DEADLINE_SECONDS} s for two processes, there are {found}"
        time.sleep(0.02)


@contextmanager
def running(mark: str) -> Iterator[subprocess.Popen[str]]:
    command = [*ISOLATE, "sh", "-c", DAEMON.format(mark=mark)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            wait_until_started(mark)
            yield process
        finally:
            process.kill()


@pytest.fixture
def mark() -> str:
    return f"86400.{os.getpid()}{time.monotonic_ns()}"


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 128 + signal.SIGKILL)],
)
def test_the_exit_code_is_the_commands(script: str, code: int) -> None:
    assert subprocess.run([*ISOLATE, "sh", "-c", script], check=False).returncode == code


def test_input_and_output_pass_through() -> None:
    done = subprocess.run([*ISOLATE, "cat"], input="text", capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("text", "")


def test_a_daemon_ends_with_the_command(mark: str) -> None:
    script = f"setsid sleep {mark} & exit 3"
    assert subprocess.run([*ISOLATE, "sh", "-c", script], check=False).returncode == 3
    wait_until_gone(mark)


def test_a_daemon_that_ignores_sigterm_ends_when_the_command_is_terminated(mark: str) -> None:
    script = f"(trap '' TERM; setsid sleep {mark} &) ; echo up; exec sleep {mark}"
    with subprocess.Popen([*ISOLATE, "sh", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM
    wait_until_gone(mark)


def test_everything_ends_when_the_caller_kills_it(mark: str) -> None:
    with running(mark) as process:
        process.kill()
        process.wait(DEADLINE_SECONDS)
        wait_until_gone(mark)


def test_everything_ends_when_the_caller_itself_is_killed(mark: str) -> None:
    """The caller is a shell here, which starts the isolated command and is then killed without a chance to tell it."""
    inner = DAEMON.format(mark=mark)
    caller = ["sh", "-c", '"$@"; :', "caller", *ISOLATE, "sh", "-c", inner]
    with subprocess.Popen(caller, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.kill()
        process.wait(DEADLINE_SECONDS)
        wait_until_gone(mark)


def test_its_mounts_and_shared_memory_are_its_own(tmp_path: Path) -> None:
    mounts = Path("/proc/self/mounts").read_text()
    shared = Path("/dev/shm", f"isolated-{os.getpid()}")
    script = f"mount -t tmpfs tmpfs {tmp_path} && touch {tmp_path}/inside {shared} && ls {tmp_path}"
    done = subprocess.run([*ISOLATE, "sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "inside\n"
    assert list(tmp_path.iterdir()) == []
    assert not shared.exists()
    assert Path("/proc/self/mounts").read_text() == mounts


def test_orphans_are_reaped() -> None:
    """A process that no one waits for would stay a zombie for ever, and tests that wait for its end with it."""
    script = "sh -c '(exit 0) & echo $!' > /dev/shm/pid; while [ -e /proc/$(cat /dev/shm/pid) ]; do sleep 0.01; done"
    subprocess.run([*ISOLATE, "sh", "-c", script], check=True, timeout=DEADLINE_SECONDS)
