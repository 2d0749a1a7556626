"""A Ray cluster with nodes like pods, the processes of an attempt to kill, and what may be left of it: nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_ray_engine.processes import debris

from .conftest import Attempt, Attempts
from .ray_cluster import HEAD, RayCluster, free_port, get, kill, processes, wait_for

LAUNCHER_NODE, WORKER_NODE = "127.0.1.2", "127.0.1.3"
GONE_SECONDS = 10.0
START_SECONDS = 300.0

NODES: dict[str, dict[str, float]] = {
    HEAD: {"vd-slot-1": 1, "vd-driver-1": 1},
    LAUNCHER_NODE: {"vd-slot-0": 1, "vd-driver-0": 1},
    WORKER_NODE: {"vd-slot-0": 1},
}

# Stands in for process 1 of a Ray pod (`ray start --block`): orphans come to it, and it collects none of them.
POD = """
import ctypes, subprocess, sys
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0
subprocess.Popen(sys.argv[1:]).wait()
"""


class PodCluster(RayCluster):
    """Three nodes: one for a bystander in slot 1, two of slot 0, whose launcher runs on the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self._pods: dict[str, subprocess.Popen[bytes]] = {}
        self._temporary: dict[str, str] = {}

    def start(self) -> None:
        for address in NODES:
            self.start_node(address)
        wait_for("the Jobs API", lambda: self._api("/api/jobs/")[0] == 200, 60)

    def start_node(self, address: str) -> None:
        """Start a node, or start it again after it died."""
        index, before = list(NODES).index(address), self._node_ids(address)
        self._temporary.setdefault(address, tempfile.mkdtemp(prefix="pod-"))
        role = [f"--address={HEAD}:{self.gcs_port}"]
        if address == HEAD:
            role = [
                "--head", f"--port={self.gcs_port}", f"--ray-client-server-port={free_port()}",
                f"--dashboard-host={HEAD}", f"--temp-dir={self.folder}",
                f"--dashboard-port={self.dashboard.rpartition(':')[2]}",
            ]  # fmt: skip
        if dead := self._pods.pop(address, None):
            dead.wait(60)
        self._pods[address] = subprocess.Popen(
            [
                sys.executable, "-c", POD, sys.executable, "-m", "ray.scripts.scripts", "start", "--block",
                f"--node-ip-address={address}", f"--dashboard-agent-listen-port={free_port()}",
                f"--min-worker-port={20000 + 1000 * index}", f"--max-worker-port={20999 + 1000 * index}",
                "--num-cpus=4", "--num-gpus=1", "--object-store-memory=200000000",
                f"--resources={json.dumps(NODES[address])}", *role,
            ],
            env=self._environment(address) | {"TMPDIR": self._temporary[address]},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for(f"the Ray node {address}", lambda: self._node_ids(address) - before, 120)

    def _node_ids(self, address: str) -> set[str]:
        """Return the nodes that Ray believes alive at the address; one that died may be among them for a while."""
        return {row["node_id"] for row in self.alive_nodes() if row["node_ip"] == address}

    def raylet(self, address: str) -> int:
        (pid,) = processes(self.mark, "raylet/raylet", f"--node_ip_address={address}")
        return pid

    def stop(self) -> None:
        super().stop()
        for pod in self._pods.values():
            pod.wait()
        for folder in self._temporary.values():
            shutil.rmtree(folder, ignore_errors=True)

    def zombies(self) -> list[tuple[int, str]]:
        """Return the dead that a pod's process 1 would have to collect: their process ids and commands."""
        pods = {pod.pid for pod in self._pods.values()}
        found = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, rest = entry.read_text(errors="replace").rpartition(")")
            except OSError:
                continue
            state, parent = rest.split()[:2]
            if state == "Z" and int(parent) in pods:
                found.append((int(entry.parent.name), name.partition("(")[2]))
        return found

    def places(self, instance_id: str, *nodes: str) -> list[str]:
        """Return shared memory of the attempt, and its temporary files on these nodes."""
        place = debris.NAME + debris.tag(instance_id)
        folders = [debris.SHARED_MEMORY, *(Path(self._temporary[node]) for node in nodes)]
        return [str(path) for folder in folders for path in folder.iterdir() if place in path.name]

    def folders(self, node: str) -> list[str]:
        """Return the attempts that have a temporary folder on the node."""
        return [path.name for path in Path(self._temporary[node]).glob(f"{debris.NAME}*")]

    def unclaimed(self) -> set[str]:
        """Return shared memory and temporary files that bear no attempt's name."""
        folders = [debris.SHARED_MEMORY, *map(Path, self._temporary.values())]
        return {str(path) for folder in folders for path in folder.iterdir() if debris.NAME not in path.name}


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def parts(attempt: Attempt) -> dict[str, list[int]]:
    """Return the processes of an attempt by what they are; the workers in the order of their nodes."""
    own = {pid: title(pid) for pid in attempt.processes()}
    api = [pid for pid, text in own.items() if "vllm_ray_engine.serve" in text]
    return {
        "supervisor": [pid for pid, text in own.items() if text.startswith("ray::JobSupervisor")],
        "guard": [pid for pid, text in own.items() if "vllm_ray_engine.guard" in text],
        "launcher": [pid for pid, text in own.items() if "vllm_ray_engine.launch" in text],
        "API server": api,
        "engine core": [
            pid for pid, text in own.items()
            if parent(pid) in api and ("EngineCore" in text or "spawn_main" in text)
        ],
        "worker": sorted(pid for pid, text in own.items() if "RayWorkerProc" in text),
    }  # fmt: skip


def imports(pid: int) -> bool:
    """Return whether the process is in the middle of importing vLLM: PyTorch is loaded."""
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def importing(attempt: Attempt) -> bool:
    return any(imports(pid) for pid in parts(attempt)["API server"])


def spawning(attempt: Attempt) -> bool:
    return bool(parts(attempt)["engine core"])


def loading(attempt: Attempt) -> bool:
    return len(parts(attempt)["worker"]) == 2


def in_phase(name: str) -> Callable[[Attempt], bool]:
    return lambda attempt: attempt.state().get("phase") == name


def nothing(_: Attempt) -> None:
    pass


def stop(attempt: Attempt) -> None:
    """Ask it to stop, and wait until it does so."""
    attempt.stop()
    wait_for("the launcher to be asked", lambda: attempt.state().get("phase") != "Serving", 10, 0.01)


@dataclass(frozen=True)
class Phase:
    """A moment of an attempt: how it is recognised, how the attempt is started for it, and who lives by then.

    then: what happens to it between the choice of a victim and its death.
    """

    reached: Callable[[Attempt], bool]
    victims: tuple[str, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    then: Callable[[Attempt], None] = nothing


_ABOVE = ("supervisor", "guard", "launcher", "API server")
_ENGINE = (*_ABOVE, "engine core")
_ALL = (*_ENGINE, "worker", "raylet of a worker's node", "raylet of the launcher's node")
PHASES = {
    "importing": Phase(importing, _ABOVE),
    "spawning": Phase(spawning, _ENGINE),
    "waiting": Phase(in_phase("Standby"), _ENGINE, {"tensor": 4, "standby": True}),
    "loading": Phase(loading, _ALL),
    "serving": Phase(in_phase("Serving"), _ALL),
    "stopping": Phase(in_phase("Serving"), _ALL, then=stop),
}


@dataclass(frozen=True)
class Cell:
    """What happened when one process was killed at one moment.

    reached: seconds from the submission to that moment. gone: seconds from the kill until nothing was left, None if
    something stayed. outcome: what the job said last. zombies: what its pod's process 1 would have to collect. fault:
    what is wrong, empty when all is well. remark: what is not ours, and worth to know.
    """

    phase: str
    victim: str
    reached: float
    gone: float | None
    outcome: str
    zombies: tuple[str, ...]
    fault: str
    remark: str


class Bystander:
    """Another attempt, of another slot, that must not notice anything."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempt = attempts.start(driver="vd-driver-1", slotResource="vd-slot-1", tensor=1)
        self._attempt.wait_phase("Serving", START_SECONDS)
        self._before = self._seen()

    def _seen(self) -> Any:
        cluster = self._attempt.cluster
        assert isinstance(cluster, PodCluster)
        return parts(self._attempt), sorted(cluster.places(self._attempt.instance_id, HEAD))

    def fault(self) -> str:
        now = self._seen()
        if now != self._before:
            return f"the bystander changed: {self._before} became {now}"
        status = get(f"http://{HEAD}:{self._attempt.port}/health")[0]
        return "" if status == 200 else f"the bystander's /health answers {status}"


class Campaign:
    """Kills one process after another, each in an attempt of its own, and looks what is left."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        assert isinstance(attempts.cluster, PodCluster)
        self._cluster = attempts.cluster
        self._bystander = Bystander(attempts)

    def kill(self, phase: str, victim: str) -> Cell:
        """Start an attempt, kill the process at that moment, and watch."""
        attempt, started = self._attempts.start(**PHASES[phase].changes), time.monotonic()
        wait_for(f"{attempt.instance_id} to be {phase}", lambda: PHASES[phase].reached(attempt), START_SECONDS, 0.05)
        reached = time.monotonic() - started
        faults = self._swept(phase)
        zombies, unclaimed = set(self._cluster.zombies()), self._cluster.unclaimed()
        print(f"== {phase}: SIGKILL of {victim}", flush=True)
        known = {pid: name for name, pids in parts(attempt).items() for pid in pids}
        known |= dict.fromkeys(attempt.processes("multiprocessing.resource_tracker"), "resource tracker")
        node = None
        if victim.startswith("raylet"):
            node = LAUNCHER_NODE if "launcher" in victim else WORKER_NODE
        pid = parts(attempt)[victim][-1] if node is None else self._cluster.raylet(node)
        PHASES[phase].then(attempt)
        kill(pid)
        gone, more = self._watch(attempt)
        faults += more
        remark = self._watch_ray(attempt)
        try:
            result = attempt.wait_ended(30)
            outcome = f"{result['reason']}: {result['message']}"
            print(attempt.logs()[-1500:], flush=True)
        except (AssertionError, IndexError, ValueError, TypeError) as error:
            outcome = f"no result ({str(error)[:80]})"
        # What the killed process's own parent has yet to collect is no zombie.
        time.sleep(1)
        dead = sorted(known.get(pid, name) for pid, name in set(self._cluster.zombies()) - zombies)
        if node is not None:
            self._cluster.start_node(node)
        left = self._cluster.unclaimed() - unclaimed
        faults += [f"left without a name: {', '.join(sorted(left))}"] if left else []
        faults += [fault] if (fault := self._bystander.fault()) else []
        return Cell(phase, victim, reached, gone, outcome, tuple(dead), "; ".join(faults), remark)

    def _swept(self, phase: str) -> list[str]:
        """Return what is wrong on the node without a launcher, where the next worker sweeps what the last one left."""
        if phase != "serving":
            return []

        # A worker claims, and sweeps, when it loads the plug-in.
        def swept() -> bool:
            return len(self._cluster.folders(WORKER_NODE)) <= 1

        try:
            wait_for("the worker's node to be swept", swept, 30)
        except AssertionError as error:
            return [str(error)]
        return []

    def _watch(self, attempt: Attempt) -> tuple[float | None, list[str]]:
        """Wait until nothing is left; return after how long, and what is wrong."""
        started, late = time.monotonic(), ""
        while left := self._left(attempt):
            passed = time.monotonic() - started
            if passed > GONE_SECONDS and not late:
                late = ", ".join(map(named, left))
            if passed > 60:
                for pid in attempt.processes():
                    kill(pid)
                return None, [f"left after 60 s: {', '.join(map(named, left))}"]
            time.sleep(0.1)
        seconds = time.monotonic() - started
        return seconds, [
            f"took {seconds:.1f} s, for: {late or 'the last look itself'}"
        ] if seconds > GONE_SECONDS else []

    def _left(self, attempt: Attempt) -> list[str]:
        own = [item for item in attempt.left() if not named(item).partition("(")[2].startswith(RAYS_OWN)]
        return [*own, *self._cluster.places(attempt.instance_id, LAUNCHER_NODE)]

    def _watch_ray(self, attempt: Attempt) -> str:
        """Wait for the end of what Ray itself runs for the job; return a remark if that was long in coming."""
        started = time.monotonic()
        wait_for("Ray to end the job", lambda: not attempt.processes(), 60)
        seconds = time.monotonic() - started
        return f"Ray's supervisor of the job ended {seconds:.0f} s later" if seconds > GONE_SECONDS else ""


RAYS_OWN = ("ray::JobSupervisor", "/bin/sh -c while kill -s 0 ", "sleep 1 ")
"""A job's supervisor, and the shell that watches it. The supervisor waits, RAY_JOB_STOP_WAIT_TIME_S at most, until each
process that it told to stop is gone, also where process 1 has yet to collect it. It holds no accelerator."""


def named(item: str) -> str:
    """Say what process it is that was left."""
    return f"{item} ({title(int(item.split()[1]))[:60]})" if item.startswith("process") else item
