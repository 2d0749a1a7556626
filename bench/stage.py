"""A deployment on the one-machine Kubernetes, as benches use it: brought up, watched, loaded, and told of.

Times in the operator's status and those noted here are of one clock, the machine's.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from e2e import environment
from e2e.chaos.outcome import Seen, Traffic
from e2e.chaos.scene import processes
from e2e.demo import EXAMPLE
from e2e.install import install_operator
from e2e.kube import Kube
from e2e.load import Load, Request, tally
from e2e.serving import describe, head_pod, is_ready, wait_ready
from e2e.streams import Streams
from e2e.waiting import say, wait_for

CLUSTER = "vro-bench-roll"  # one for all benches of a served deployment: its node keeps the images
NODE = f"{CLUSTER}-node1"
NAME = "bench"
CLIENTS_OF_A_KIND = 1
PERIOD_SECONDS = 3.0  # below the 5 s that vLLM keeps an idle connection
START_SECONDS = 600.0
_VERSIONS = "import json, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in ('vllm', 'ray')}))"

Result = dict[str, Any]


def manifest(replicas: int) -> Result:
    """Return a deployment whose replicas need little: one process for the model each, with one thread."""
    document: Result = yaml.safe_load(EXAMPLE.read_text())
    document["metadata"]["name"] = NAME
    spec = document["spec"]
    spec["replicas"] = replicas
    spec["parallelism"] = {"tensor": 1}
    spec["engine"]["args"] = [arg.replace("=64M", "=16M") for arg in spec["engine"]["args"]]
    spec["engine"]["env"] = environment_of_engines()
    spec["restart"] = {"maxBackoffSeconds": 10, "crashLoopAfter": 1000}
    return document


def environment_of_engines(**more: str) -> list[dict[str, str]]:
    """Return the engines' environment; what is added is a change that rolls them."""
    values = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **more}
    return [{"name": name, "value": value} for name, value in values.items()]


@dataclass
class Stage:
    """The cluster with the operator, and what was seen since ``watch``."""

    kube: Kube
    seen: list[Seen] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)

    @property
    def deployment(self) -> Result:
        """The resource as it is now."""
        return self.kube.get("vllmdeployment", NAME)

    @property
    def replicas(self) -> list[Result]:
        """What its status says of the replicas."""
        replicas: list[Result] = self.deployment["status"]["replicas"]
        return replicas

    def start_one_by_one(self, replicas: int) -> list[float]:
        """Have replicas start cold, one after another; return what each took from its number to Ready, in seconds."""
        for count in range(1, replicas + 1):
            self.kube.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest(count)))
            wait_ready(self.kube, NAME, "default", START_SECONDS)
        return [between(r["attempt"], "startTime", "readyTime") for r in self.replicas]

    def change(self, spec: Mapping[str, Any]) -> float:
        """Change the spec; return the Unix time right before."""
        now = time.time()
        self.kube.kubectl("patch", "vd", NAME, "--type=merge", "-p", json.dumps({"spec": spec}))
        return now

    def wait_ready(self, what: str, older_than: Mapping[int, int]) -> float:
        """Wait until replicas have newer attempts than the numbers given and all is Ready; return the Unix time."""
        latest: Result = {}

        def done() -> bool:
            latest.clear()
            latest.update(self.deployment)
            numbers = Seen.of(0.0, latest).attempts
            newer = all(numbers.get(index, 0) > number for index, number in older_than.items())
            return newer and is_ready(latest)

        wait_for(what, done, seconds=START_SECONDS * 2, describe=lambda: describe(latest))
        return time.time()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note every change of the resource and of its EndpointSlices."""
        streams = Streams(CLUSTER)
        slices = ("endpointslices", "-l", f"kubernetes.io/service-name={NAME}")
        streams.watch(("vd", NAME), lambda event: self.seen.append(Seen.of(time.time(), event["object"])))
        streams.watch(slices, lambda event: self.traffic.append(Traffic.of(time.time(), event)))
        try:
            wait_for("the watches to begin", lambda: self.seen and self.traffic, seconds=60, poll=0.2)
            yield
        finally:
            streams.stop()

    @contextmanager
    def load(self) -> Iterator[list[Request]]:
        """Send requests all the time; clients of all kinds are served when this begins."""
        clients = Load(CLUSTER, NODE, self.deployment, count=CLIENTS_OF_A_KIND, period=PERIOD_SECONDS)
        try:
            kinds = lambda: len({r.kind for r in clients.requests if not r.error}) == 4  # noqa: E731
            wait_for("clients of all kinds to be served", kinds, seconds=60)
            yield clients.requests
        finally:
            clients.stop()

    def memory_mib(self) -> list[float]:
        """Return the memory of each replica's pod, what processes share counted once (proportional set size)."""
        pods = [self.kube.get("pod", r["attempt"]["endpoint"]["pod"]) for r in self.replicas]
        return [round(sum(map(_pss_mib, processes(pod["metadata"]["uid"]))), 0) for pod in pods]

    def conditions(self) -> Result:
        """Return under which a bench runs."""
        versions = json.loads(
            self.kube.kubectl(
                "exec", head_pod(self.kube, self.deployment), "-c", "ray", "--", "python3", "-c", _VERSIONS
            )
        )
        kubernetes = json.loads(self.kube.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"]
        return {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "commit": environment.commit(),
            "memory_mib": self.memory_mib(),
            "python": platform.python_version(),
            "kubernetes": kubernetes,
            **versions,
            "processors": os.cpu_count() or 0,
            "clients": 4 * CLIENTS_OF_A_KIND,
            "requests_per_second": round(4 * CLIENTS_OF_A_KIND / PERIOD_SECONDS, 2),
        }


@contextmanager
def stage() -> Iterator[Stage]:
    """Bring up a cluster with the operator, and take it down at the end."""
    try:
        env = environment.bring_up(CLUSTER)
        install_operator(env.kube, env.operator_image, env.engine_image)
        yield Stage(env.kube)
    finally:
        environment.module("e2e.cluster", "--name", CLUSTER, "down")


class Window:
    """A part of a bench: from its making to ``end``."""

    def __init__(self) -> None:
        self.began = time.time()
        self._busy = _busy_seconds()

    def end(self, requests: Sequence[Request]) -> Result:
        """Return what was asked meanwhile and what came of it, and how busy the machine was."""
        ended = time.time()
        busy = (_busy_seconds() - self._busy) / (ended - self.began) / (os.cpu_count() or 1)
        return {
            "seconds": round(ended - self.began, 1),
            "load": round(os.getloadavg()[0], 1),
            "busy": round(busy, 2),
            **asdict(tally(list(requests), self.began, ended)),
        }


def absences(traffic: Sequence[Traffic], name: str, began: float, ended: float) -> list[tuple[float, float]]:
    """Return from when to when an EndpointSlice sent clients nowhere; an absence that does not end is left out."""
    found, gone = list[tuple[float, float]](), None
    for change in sorted((t for t in traffic if t.slice == name and began <= t.at <= ended), key=lambda t: t.at):
        if not change.addresses:
            gone = change.at if gone is None else gone
        elif gone is not None:
            found.append((gone, change.at))
            gone = None
    return found


def slice_of(index: int) -> str:
    """Return the name of a replica's EndpointSlice."""
    return f"{NAME}-{index}"


def first_seen(seen: Sequence[Seen], since: float, phase: str) -> float | None:
    """Return when a replica was first seen in a phase after a moment."""
    moments = (s.at for s in seen if s.at >= since and any(r["phase"] == phase for r in s.status.get("replicas", [])))
    return min(moments, default=None)


def between(attempt: Mapping[str, Any], first: str, second: str) -> float:
    """Return the seconds between two times of an attempt."""
    return round(unix(attempt[second]) - unix(attempt[first]), 2)


def unix(text: str) -> float:
    """Return the Unix time of a time in a status."""
    return datetime.fromisoformat(text).timestamp()


def pause(seconds: float, why: str) -> None:
    """Let the load go on."""
    say(f"{why}: {seconds:g} s")
    time.sleep(seconds)


def _pss_mib(pid: int) -> float:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0) / 1024
    return 0.0


def _busy_seconds() -> float:
    """Return the processor time that the machine has spent on anything, all processors together (proc(5))."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
