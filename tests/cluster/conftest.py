"""A cluster of the tests' own, and a picture of the machine to compare before and after."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.cluster.cgroups import hierarchies
from e2e.cluster.layout import REPOSITORY

COMMAND_DEADLINE = 600  # seconds; a busy machine is slow
NAME = "vro-test"


@dataclass(frozen=True)
class Cli:
    """The command line of one cluster, run as a user runs it."""

    state: Path

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "e2e.cluster", "--name", NAME, "--state-dir", str(self.state), *words]

    def run(self, *words: str, status: int | None = 0) -> str:
        done = subprocess.run(
            self.argv(*words), cwd=REPOSITORY, capture_output=True, text=True, timeout=COMMAND_DEADLINE, check=False
        )
        print(f"$ {' '.join(words)}\n{done.stdout}{done.stderr}")
        if status is not None:
            assert done.returncode == status, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, *words: str) -> subprocess.Popen[str]:
        # A shell has its background jobs ignore SIGINT, and everything that they start.
        argv = ["env", "--default-signal=INT", *self.argv(*words)]
        return subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def kubectl(self, *words: str) -> str:
        return self.run("kubectl", "--", *words)

    def namespaces(self) -> set[int]:
        """Return the identities of its network and mount namespaces; a process in one holds it open."""
        return {file.stat().st_ino for file in (self.state / "namespaces").iterdir()}

    def pids(self) -> dict[str, int]:
        """Return the numbers of its running components by name."""
        rows = [line.split() for line in self.run("status", status=None).splitlines() if " running " in line]
        return {row[0]: int(row[3]) for row in rows}


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    made = Cli(tmp_path / "state")
    yield made
    made.run("down", "--purge")


def until(what: str, condition: Callable[[], bool], deadline: float = 60.0) -> None:
    """Wait for a condition, say for which, and fail at the deadline."""
    print(f"waiting for {what}")
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"waited {deadline:.0f} s for {what}"
        time.sleep(0.1)


def machine(state: Path, namespaces: Set[int] = frozenset()) -> dict[str, set[str]]:
    """Return what a cluster could leave behind on the machine.

    Seen from outside, by other means than the code under test. Other programs run meanwhile, so processes
    and mounts count when they have something of the cluster's: its folder, its name, or its namespaces.
    """
    mountinfo = Path("/proc/self/mountinfo").read_text()
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    return {
        "processes": set(_processes(state, namespaces)),
        "mounts": {line.split()[4] for line in mountinfo.splitlines() if str(state) in line or NAME in line},
        "iptables": set(_rules()),
        "links": {line.split()[0] for line in links.splitlines()},
        "control groups": {str(path) for tree in hierarchies(mountinfo) for path in tree.glob(f"*{NAME}*")},
        "folders": {str(path) for path in map(Path, FOLDERS) if path.exists()},
    }


# Where kubelet, containerd and the network plug-ins write unless they are kept from it.
FOLDERS = (
    "/run/containerd",
    "/run/netns",
    "/var/lib/kubelet",
    "/var/lib/containerd",
    "/var/lib/cni",
    "/var/log/containers",
    "/var/log/pods",
    "/etc/cni/net.d",
    "/opt/containerd",
    "/usr/libexec/kubernetes",
)


def _processes(state: Path, namespaces: Set[int]) -> Iterator[str]:
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            inside = {(entry / "ns" / kind).stat().st_ino for kind in ("net", "mnt")} & namespaces
            words = command + (entry / "cgroup").read_text()
            if int(entry.name) != os.getpid() and (inside or str(state) in words or NAME in words):
                yield f"{entry.name} {command}"


def _rules() -> Iterator[str]:
    saved = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
    yield from (line for line in saved.splitlines() if not line.startswith(("#", ":")))
