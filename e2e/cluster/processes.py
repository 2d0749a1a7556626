"""Starts, recognises and ends the cluster's processes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import select
import signal
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from e2e.cluster.errors import ComponentError
from e2e.cluster.files import write_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from e2e.cluster.layout import Layout
    from e2e.cluster.namespaces import Namespaces
    from e2e.cluster.progress import Progress

READY_POLL = 0.1  # seconds
READY_DEADLINE = 180.0  # seconds; generous: a busy machine is slow, and a death is noticed at once
KILL_PATIENCE = 10.0  # seconds after SIGKILL; the kernel may be busy freeing memory
STOP_PATIENCE = 5.0  # seconds until SIGKILL


@dataclass(frozen=True)
class ProcessId:
    """A process, told apart from a later one with the same number."""

    pid: int
    start_ticks: int  # clock ticks after boot
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the identity of a living process; None for one that is gone or a zombie."""
        try:
            # The command's name in brackets may hold spaces; fields after it are counted from the state.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        if fields[0] in "ZX":
            return None
        return cls(pid, int(fields[19]), Path("/proc/sys/kernel/random/boot_id").read_text().strip())

    def alive(self) -> bool:
        """Tell whether this very process still runs."""
        return ProcessId.of(self.pid) == self

    def resident_bytes(self) -> int:
        """Return its memory (RSS) in bytes; 0 when it is gone."""
        with suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    return int(line.split()[1]) * 1024
        return 0

    def end(self, patience: float) -> None:
        """Ask it to end, insist after ``patience`` seconds, and return when it is gone."""
        try:
            handle = os.pidfd_open(self.pid)  # holds on to this very process: no race with a reused number
        except ProcessLookupError:
            return
        try:
            if not self.alive():
                return
            gone = select.poll()
            gone.register(handle, select.POLLIN)
            for request, time_left in ((signal.SIGTERM, patience), (signal.SIGKILL, KILL_PATIENCE)):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, request)
                if gone.poll(time_left * 1000):
                    return
        finally:
            os.close(handle)


@dataclass(frozen=True)
class Component:
    """A process of the cluster that is kept running."""

    name: str
    argv: list[str]
    missing: Callable[[], str | None]  # what is not ready yet, in words; None once it is ready
    namespaces: Namespaces | None = None  # None: the machine's own
    configuration: str = ""  # text of the files it reads; another text means it has to start again
    environment: dict[str, str] = field(default_factory=dict)

    def fingerprint(self) -> str:
        """Return a hash of all that needs a new start when it changes."""
        text = json.dumps([self.argv, self.configuration, sorted(self.environment.items())])
        return hashlib.sha256(text.encode()).hexdigest()


class Supervisor:
    """Keeps records of the processes it started, so that nothing is started twice and nothing else is ended."""

    def __init__(self, layout: Layout, progress: Progress) -> None:
        """Records live in the state folder: any later run finds them."""
        self._records = layout.processes
        self._logs = layout.logs
        self._progress = progress
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def log_of(self, name: str) -> Path:
        """Return the path of a component's log."""
        return self._logs / f"{name}.log"

    def running(self, name: str) -> ProcessId | None:
        """Return the component's process if it runs."""
        self._reap()
        process = self._recorded(name)[0]
        return process if process is not None and process.alive() else None

    def all_running(self) -> dict[str, ProcessId]:
        """Return every component that runs, by name."""
        names = sorted(path.stem for path in self._records.glob("*.json"))
        return {name: process for name in names if (process := self.running(name)) is not None}

    async def ensure(self, component: Component) -> bool:
        """Have the component running as described; tell whether it had to be started."""
        process, fingerprint = self._recorded(component.name)
        if process is not None and process.alive():
            if fingerprint == component.fingerprint():
                return False
            self._progress.say(f"{component.name}: its configuration has changed, starting it again")
            await self.stop(component.name)
        elif process is not None:
            self._progress.say(f"{component.name}: it has died, starting it again")
        return await asyncio.to_thread(self._adopt_or_start, component)

    def _adopt_or_start(self, component: Component) -> bool:
        # An earlier run may have been killed between starting the process and recording it.
        adopted = find_process(component.argv, component.namespaces.inodes() if component.namespaces else set())
        self._record(component, adopted or self._start(component))
        return adopted is None

    async def ensure_ready(self, component: Component, deadline: float = READY_DEADLINE) -> None:
        """Have the component running and wait for it to be ready; ComponentError shows its log if it is not in time."""
        if not await self.ensure(component) and await asyncio.to_thread(component.missing) is None:
            return
        async with self._progress.step(component.name, lambda: "waiting for it to be ready"):
            await self._until_ready(component, deadline)

    async def _until_ready(self, component: Component, deadline: float) -> None:
        log = self.log_of(component.name)
        missing: str | None = "not asked yet"
        try:
            async with asyncio.timeout(deadline):
                while (missing := await asyncio.to_thread(component.missing)) is not None:
                    if self.running(component.name) is None:
                        raise ComponentError(component.name, "it ended right after its start", log)
                    await asyncio.sleep(READY_POLL)
        except TimeoutError:
            raise ComponentError(component.name, f"not ready after {deadline:.0f} s ({missing})", log) from None

    async def stop(self, *names: str, patience: float = STOP_PATIENCE) -> None:
        """End the components of these names, all at once, and forget them; SIGKILL after ``patience`` seconds."""
        await asyncio.gather(*(asyncio.to_thread(self._stop, name, patience) for name in names))

    def _stop(self, name: str, patience: float) -> None:
        process = self.running(name)
        if process is not None:
            process.end(patience)
            self._reap()
        (self._records / f"{name}.json").unlink(missing_ok=True)

    def _start(self, component: Component) -> ProcessId:
        self._logs.mkdir(parents=True, exist_ok=True)
        argv = component.namespaces.enter(*component.argv) if component.namespaces else component.argv
        with self.log_of(component.name).open("ab") as log:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **component.environment},
                cwd="/",
                start_new_session=True,
            )
        self._children[process.pid] = process
        identity = ProcessId.of(process.pid)
        if identity is None:
            raise ComponentError(component.name, "it ended right after its start", self.log_of(component.name))
        return identity

    def _reap(self) -> None:
        """Ask for the end of those that we started ourselves: until then they stay as zombies."""
        for pid, child in list(self._children.items()):
            if child.poll() is not None:
                self._children.pop(pid, None)

    def _recorded(self, name: str) -> tuple[ProcessId | None, str]:
        try:
            record = json.loads((self._records / f"{name}.json").read_text())
            return ProcessId(**record["process"]), record["fingerprint"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None, ""

    def _record(self, component: Component, process: ProcessId) -> None:
        record = {"process": asdict(process), "fingerprint": component.fingerprint()}
        write_file(self._records / f"{component.name}.json", json.dumps(record))


def processes() -> Iterator[int]:
    """Yield the number of every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def find_process(argv: list[str], namespaces: set[int]) -> ProcessId | None:
    """Return a process with exactly this command line that runs in (at least) these namespaces."""
    line = "\0".join(argv).encode() + b"\0"
    for pid in processes():
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes() == line and namespaces <= _namespaces_of(pid):
                return ProcessId.of(pid)
    return None


def processes_in(namespaces: set[int]) -> list[ProcessId]:
    """Return all processes, other than this one, that run in any of these namespaces."""
    found = []
    for pid in processes():
        with suppress(OSError):
            if pid != os.getpid() and namespaces & _namespaces_of(pid) and (process := ProcessId.of(pid)):
                found.append(process)
    return found


def _namespaces_of(pid: int) -> set[int]:
    return {Path(f"/proc/{pid}/ns/{kind}").stat().st_ino for kind in ("net", "mnt")}
