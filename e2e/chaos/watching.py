"""What is seen while a fault lasts: the status, the endpoints, the requests of clients. All with the Unix time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from e2e.chaos.outcome import Request, Seen, Traffic
from e2e.chaos.scene import CLUSTER, HOME, NAME, Scene
from e2e.environment import ROOT
from e2e.serving import served_name

CLIENT = Path(__file__).with_name("client.py")
AGAIN = 0.5  # seconds until a watch that ended is begun again
END_SECONDS = 10.0


class Watching:
    """Keeps what two watches of the API server and two clients tell, from ``start`` to ``stop``."""

    def __init__(self, scene: Scene) -> None:
        """One client goes through the Service, one straight to the replica that is not hit."""
        self.seen: list[Seen] = []
        self.traffic: list[Traffic] = []
        self.service: list[Request] = []
        self.other: list[Request] = []
        self._scene = scene
        self._ended = threading.Event()
        self._running: set[subprocess.Popen[str]] = set()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to watch."""
        deployment = self._scene.deployment
        endpoint = self._scene.other["attempt"]["endpoint"]
        direct = f"http://{endpoint['address']}:{endpoint['port']}/v1"
        slices = ("endpointslices", "-l", f"kubernetes.io/service-name={NAME}")
        self._run(self._watch, ("vd", NAME), self._take_status)
        self._run(self._watch, slices, self._take_slice)
        self._run(self._ask, deployment["status"]["endpoint"], self.service)
        self._run(self._ask, direct, self.other)

    def stop(self) -> None:
        """End watches and clients."""
        self._ended.set()
        for process in list(self._running):
            process.kill()
        for thread in self._threads:
            thread.join(END_SECONDS)

    def _run(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _watch(self, what: tuple[str, ...], take: Callable[[dict[str, Any]], None]) -> None:
        kubectl = [sys.executable, "-m", "e2e.cluster", "--name", CLUSTER, "kubectl", "--"]
        while not self._ended.is_set():
            command = [*kubectl, "get", *what, "--watch", "--output-watch-events", "-o", "json"]
            with self._process(command) as output:
                for line in output:
                    if (event := told_by(line)) is not None:
                        take(event)
            self._ended.wait(AGAIN)

    def _ask(self, url: str, requests: list[Request]) -> None:
        model = served_name(self._scene.deployment)
        inside = [sys.executable, "-m", "e2e.cluster", "--name", CLUSTER, "exec", "--node", HOME, "--"]
        with self._process([*inside, "python3", str(CLIENT), url, model]) as output:
            for line in output:
                if (told := told_by(line)) is not None:
                    requests.append(Request(told["at"], told["took"], told["error"]))

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

    def _take_status(self, event: dict[str, Any]) -> None:
        self.seen.append(Seen.of(time.time(), event["object"]))

    def _take_slice(self, event: dict[str, Any]) -> None:
        self.traffic.append(Traffic.of(time.time(), event))


def told_by(line: str) -> dict[str, Any] | None:
    """Return what a line of a watch or of a client tells; None for one that was cut off by the end."""
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return event
