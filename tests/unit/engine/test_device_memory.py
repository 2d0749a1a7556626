"""The wait for device memory, on a stand-in for a device."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_ray_engine import reasons
from vllm_ray_engine.diagnosis import root_cause
from vllm_ray_engine.patches import device_memory

TOTAL = 80 * 2**30
NEEDED = 72 * 2**30


class Snapshot:
    """As vLLM's MemorySnapshot: `free_memory` is what the device had at the last measurement."""

    def __init__(self, free: Iterable[int]) -> None:
        self.device_ = "cuda:0"
        self.measured = 0
        self._free = iter(free)
        self.free_memory = next(self._free)

    def measure(self) -> None:
        self.measured += 1
        self.free_memory = next(self._free, self.free_memory)


class Clock:
    """Time passes only in sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def request_memory(snapshot: Snapshot, cache_config: Any, external: int = 0) -> int:
    """As vLLM 0.32 checks it."""
    if snapshot.free_memory < NEEDED - external:
        raise ValueError(
            f"Free memory on device {snapshot.device_} ({snapshot.free_memory / 2**30:.2f}/80.0 GiB) on startup is less"
            " than desired GPU memory utilization (0.9, 72.0 GiB). Decrease GPU memory utilization or reduce GPU memory"
            " used by other processes."
        )
    return NEEDED - external


@pytest.fixture
def clock() -> Clock:
    return Clock()


def wrapped(clock: Clock) -> Any:
    return device_memory.wait_until_free(request_memory, None, clock, clock.sleep)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SimpleNamespace]]:
    """A stand-in for NVIDIA's management library; returns the list of processes that it shows."""
    running: list[SimpleNamespace] = []
    pynvml = ModuleType("vllm.third_party.pynvml")
    pynvml.__dict__.update(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {b"GPU-1234": "the device"}[uuid],
        nvmlDeviceGetComputeRunningProcesses=lambda handle: running if handle == "the device" else [],
    )
    torch = ModuleType("torch")
    torch.__dict__["cuda"] = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(uuid="1234"))
    for name, module in {
        "torch": torch,
        "vllm": ModuleType("vllm"),
        "vllm.third_party": ModuleType("vllm.third_party"),
        "vllm.third_party.pynvml": pynvml,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["vllm.third_party"].__dict__["pynvml"] = pynvml
    return running


def test_free_memory_is_not_waited_for(clock: Clock) -> None:
    snapshot = Snapshot([TOTAL])
    assert wrapped(clock)(snapshot, "config", external=2**30) == NEEDED - 2**30
    assert (clock.now, snapshot.measured) == (0, 0)


def test_memory_that_the_older_worker_still_holds_is_waited_for(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = Snapshot([4 * 2**30, 4 * 2**30, 20 * 2**30, 79 * 2**30])
    assert wrapped(clock)(snapshot, "config") == NEEDED
    assert snapshot.measured == 3
    assert clock.now == pytest.approx(3 * device_memory.POLL_SECONDS)
    assert snapshot.free_memory == 79 * 2**30, "what vLLM goes on with is the last measurement"
    assert capsys.readouterr().out.count("waiting for device memory") == 1


def test_who_does_not_leave_is_named(clock: Clock, driver: list[SimpleNamespace]) -> None:
    driver.append(SimpleNamespace(pid=2**22 + 1, usedGpuMemory=70 * 2**30))
    driver.append(SimpleNamespace(pid=1, usedGpuMemory=None))
    with pytest.raises(ValueError, match=r"Free memory on device cuda:0 \(4\.00/80\.0 GiB\)") as caught:
        wrapped(clock)(Snapshot([4 * 2**30]), "config")
    assert clock.now == pytest.approx(device_memory.WAIT_SECONDS, abs=2 * device_memory.POLL_SECONDS)
    assert f"held by process {2**22 + 1} (in another container, 70.0 GiB), process 1 (" in str(caught.value)


def test_this_process_does_not_count(driver: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getpid", lambda: 7)
    driver.append(SimpleNamespace(pid=7, usedGpuMemory=1))
    assert device_memory.holders("cuda:0") == []


def test_without_a_driver_the_error_stays_whole(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r"Still so after 60 s, held by a process that cannot be told"):
        wrapped(clock)(Snapshot([0]), "config")


def test_the_cause_of_death_names_the_holder(clock: Clock, driver: list[SimpleNamespace]) -> None:
    driver.append(SimpleNamespace(pid=2**22 + 1, usedGpuMemory=70 * 2**30))
    with pytest.raises(ValueError, match="Free memory") as caught:
        wrapped(clock)(Snapshot([0]), "config")
    cause = root_cause.find([f"(EngineCore pid=5) ERROR 11-30 09:00:00 [core.py:1] ValueError: {caught.value}"])
    assert cause is not None
    assert cause.reason == reasons.OUT_OF_MEMORY
    assert f"held by process {2**22 + 1}" in cause.message


def test_an_actor_goes_without_rays_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"ray::RayWorkerProc.run\0\0")
    assert device_memory._command(1) == "RayWorkerProc.run"
