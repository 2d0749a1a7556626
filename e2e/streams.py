"""Commands that tell one JSON object a line for as long as they run: watches of the API server, clients."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from e2e.environment import ROOT

AGAIN = 0.5  # seconds until a watch that ended is begun again
END_SECONDS = 10.0

Take = Callable[[dict[str, Any]], None]


class Streams:
    """Threads that each read one command on a cluster, until ``stop``."""

    def __init__(self, cluster: str) -> None:
        """``cluster``: its name, as its tool knows it."""
        self._tool = [sys.executable, "-m", "e2e.cluster", "--name", cluster]
        self._ended = threading.Event()
        self._running: set[subprocess.Popen[str]] = set()
        self._threads: list[threading.Thread] = []

    def watch(self, what: tuple[str, ...], take: Take) -> None:
        """Give every event of a watch to ``take``; one that ends is begun again, with all there is."""
        flags = ("--watch", "--output-watch-events", "-o", "json")
        self._run([*self._tool, "kubectl", "--", "get", *what, *flags], take, again=True)

    def on_node(self, node: str, command: list[str], take: Take) -> None:
        """Run a command in a node's network, where cluster names and Services work as in a pod."""
        self._run([*self._tool, "exec", "--node", node, "--", *command], take, again=False)

    def stop(self) -> None:
        """End all commands."""
        self._ended.set()
        for process in list(self._running):
            process.kill()
        for thread in self._threads:
            thread.join(END_SECONDS)

    def _run(self, command: list[str], take: Take, *, again: bool) -> None:
        thread = threading.Thread(target=self._read, args=(command, take, again), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _read(self, command: list[str], take: Take, again: bool) -> None:
        while not self._ended.is_set():
            with self._process(command) as output:
                for line in output:
                    if (told := told_by(line)) is not None:
                        take(told)
            if not again:
                return
            self._ended.wait(AGAIN)

    @contextmanager
    def _process(self, command: list[str]) -> Iterator[IO[str]]:
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=quiet, text=True) as process:
            self._running.add(process)
            if self._ended.is_set():
                process.kill()
            try:
                assert process.stdout is not None  # noqa: S101 - for the type checker
                yield process.stdout
            finally:
                process.kill()
                self._running.discard(process)


def told_by(line: str) -> dict[str, Any] | None:
    """Return what a line of a watch or of a client tells; None for one that was cut off by the end."""
    try:
        told: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return told
