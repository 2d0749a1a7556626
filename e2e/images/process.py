"""Runs the programs that build images: progress with elapsed time on stderr, full output in a log file."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

ISOLATE = (sys.executable, str(Path(__file__).with_name("isolate.py")))

_HEARTBEAT_SECONDS = 20.0
_TAIL_LINES = 30
_LINE_LENGTH = 110


class CommandError(RuntimeError):
    """A program failed; the message names it, its exit code and the end of its output."""


class Progress:
    """Prints what is being done, each line with the seconds since the start."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        """Print one line to stderr, shortened to fit."""
        line = " ".join(text.split())
        line = line if len(line) <= _LINE_LENGTH else line[: _LINE_LENGTH - 1] + "…"
        print(f"[{self._name} {self.elapsed:4.0f} s] {line}", file=sys.stderr, flush=True)


def output_of(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Run a short program and return its stdout; CommandError carries its stderr."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def run_logged(command: Sequence[str], log: Path, progress: Progress, env: Mapping[str, str] | None = None) -> None:
    """Run a long program: everything it prints goes to `log`, its steps and a sign of life to stderr.

    Raises CommandError with the end of the log when the program fails. The program is ended when we are interrupted.
    """
    step, unfinished = command[0], b""

    def say_alive() -> None:
        progress.say(f"still at: {step}")

    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("wb") as file,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process,
    ):
        try:
            for data in _chunks(process, say_alive):
                file.write(data)
                file.flush()
                *lines, unfinished = (unfinished + data).split(b"\n")
                for line in lines:
                    text = line.decode(errors="replace")
                    if "STEP " in text or text.startswith("#"):
                        step = re.sub(r"--mount=\S+ +", "", text)
                        progress.say(step)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        raise CommandError(f"{command[0]} ended with {code}; the whole log is {log}, its end:\n{tail}")


def _chunks(process: subprocess.Popen[bytes], when_silent: Callable[[], None]) -> Iterator[bytes]:
    """Yield what a program prints as it comes; call back each time it has printed nothing for a while."""
    assert process.stdout is not None  # noqa: S101  # by PIPE
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(_HEARTBEAT_SECONDS):
                when_silent()
            elif data := os.read(process.stdout.fileno(), 65536):
                yield data
            else:
                return
