"""What an attempt leaves is found by its names and removed once nobody of the attempt is alive, and not before."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from vllm_ray_engine.processes import debris

from .conftest import OPERATOR, wait_for

OURS = f"test-{os.getpid()}-"
"""Starts the instance ids of this run: several may run on one machine."""

# Claims, makes one of each kind, and prints their names; then lives until it is killed.
OWNER = """
import multiprocessing, os, sys, tempfile, time
from multiprocessing import resource_tracker, shared_memory
from vllm_ray_engine.processes import debris
debris.claim(sys.argv[1])
resource_tracker.register = lambda *_: None  # a tracker would clean up after us
segment = shared_memory.SharedMemory(create=True, size=4096)
semaphore = multiprocessing.get_context("spawn").Semaphore()
file = tempfile.NamedTemporaryFile(delete=False)
if "forked" in sys.argv and os.fork() == 0:
    time.sleep(600)
print(segment.name, file.name, os.environ["TMPDIR"], flush=True)
time.sleep(600)
"""


class Owner:
    """A process with a claim."""

    def __init__(self, base: Path, instance_id: str, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, instance_id, *options], stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(OPERATOR), "TMPDIR": str(base)}, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.segment, self.file, self.folder = self.process.stdout.readline().split()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def base() -> Iterator[Path]:
    """Return a temporary folder with a path short enough for sockets, which pytest's is not."""
    with tempfile.TemporaryDirectory(prefix="base-") as folder:
        yield Path(folder)


@pytest.fixture
def owners(base: Path) -> Iterator[list[Owner]]:
    owners: list[Owner] = []
    yield owners
    for owner in owners:
        owner.end()
    debris.sweep_all(base)


def of(instance_id: str) -> list[str]:
    place = debris.NAME + debris.tag(instance_id)
    return sorted(path.name for path in debris.SHARED_MEMORY.iterdir() if place in path.name)


def wait_swept(instance_id: str, base: Path) -> None:
    # Another test run on this machine may be the one that sweeps, be in the middle of it, and be killed there.
    wait_for(f"{instance_id} to be swept", lambda: debris.sweep_all(base) is not None and not of(instance_id))


def test_killed_process_is_swept(base: Path, owners: list[Owner]) -> None:
    owners.append(owner := Owner(base, OURS + "killed"))
    assert owner.folder == str(base / (debris.NAME + debris.tag(OURS + "killed")))
    assert Path(owner.file).parent == Path(owner.folder)
    kinds = [name.partition("vllm-ray")[0] for name in of(OURS + "killed")]
    assert kinds == ["sem.", "", ""], "the semaphore, the segment and the lock"
    assert not debris.sweep(OURS + "killed", 0, base), "it is alive"
    assert Path(owner.file).exists()
    owner.kill()
    assert debris.sweep(OURS + "killed", 5, base)
    wait_swept(OURS + "killed", base)
    assert list(base.iterdir()) == []


def test_others_are_left_alone(base: Path, owners: list[Owner]) -> None:
    owners += [dead := Owner(base, OURS + "dead"), alive := Owner(base, OURS + "alive")]
    foreign = shared_memory.SharedMemory(create=True, size=64)
    try:
        (base / "vllm-ray-attempt-of-somebody").mkdir()
        dead.kill()
        assert Path(dead.folder).name in debris.sweep_all(base)
        wait_swept(OURS + "dead", base)
        assert len(of(OURS + "alive")) == 3
        assert Path(alive.file).exists()
        assert (base / "vllm-ray-attempt-of-somebody").exists(), "no lock, so none of ours"
        assert (debris.SHARED_MEMORY / foreign.name).exists()
    finally:
        foreign.close()
        foreign.unlink()


def test_one_of_two_processes_keeps_the_place(base: Path, owners: list[Owner]) -> None:
    owners += [first := Owner(base, OURS + "two"), second := Owner(base, OURS + "two")]
    first.kill()
    assert Path(second.folder).name not in debris.sweep_all(base)
    assert Path(first.file).exists()
    second.kill()
    assert debris.sweep(OURS + "two", 5, base)


def test_forked_child_keeps_the_place(base: Path, owners: list[Owner]) -> None:
    owners.append(owner := Owner(base, OURS + "forked", "forked"))
    owner.kill()
    assert not debris.sweep(OURS + "forked", 0, base)
    owner.end()
    assert debris.sweep(OURS + "forked", 5, base)


def test_segment_that_a_process_without_a_claim_uses_stays(base: Path, owners: list[Owner]) -> None:
    owners.append(owner := Owner(base, OURS + "mapped"))
    with (debris.SHARED_MEMORY / owner.segment).open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    owner.kill()
    assert not debris.sweep(OURS + "mapped", 0, base)
    assert owner.segment in of(OURS + "mapped")
    view.close()
    assert debris.sweep(OURS + "mapped", 5, base)
    wait_swept(OURS + "mapped", base)


def test_claim_of_an_attempt_sweeps_an_earlier_one(base: Path, owners: list[Owner]) -> None:
    owners.append(first := Owner(base, OURS + "first"))
    first.kill()
    owners.append(second := Owner(base, OURS + "second"))
    wait_for("the earlier one to be swept", lambda: not of(OURS + "first"))
    assert [path.name for path in base.glob(f"{debris.NAME}*")] == [Path(second.folder).name]


UNTRACKED = """
import sys, types
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
worker = types.SimpleNamespace(mode=1)
sys.modules["ray"] = types.SimpleNamespace(
    is_initialized=lambda: True, WORKER_MODE=int(sys.argv[2]),
    get_runtime_context=lambda: types.SimpleNamespace(worker=worker),
)
from vllm_ray_engine.processes import debris
debris.claim(sys.argv[1])
segment = shared_memory.SharedMemory(create=True, size=64)
print(len(Path("/proc/thread-self/children").read_text().split()))
segment.close()
segment.unlink()
"""


@pytest.mark.parametrize(("mode", "trackers"), [(1, 0), (0, 1)], ids=["a Ray worker", "a Ray driver"])
def test_ray_worker_starts_no_resource_tracker(mode: int, trackers: int, base: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNTRACKED, OURS + "untracked", str(mode)], text=True, capture_output=True, check=True,
        env=os.environ | {"PYTHONPATH": str(OPERATOR), "TMPDIR": str(base)},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (f"{trackers}\n", "")
    wait_swept(OURS + "untracked", base)


def test_claim_that_cannot_be_made_is_said_and_changes_nothing(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (base / "file").write_text("")
    monkeypatch.setattr(debris, "SHARED_MEMORY", base / "file")
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    monkeypatch.setattr(debris, "_held", {})
    before = dict(os.environ)
    debris.claim(OURS + "refused")
    assert "will not be cleaned up: [Errno" in capsys.readouterr().out
    assert dict(os.environ) == before


def test_inherited_folder_is_not_the_base(base: Path, owners: list[Owner]) -> None:
    owners.append(first := Owner(base, OURS + "outer"))
    owners.append(inner := Owner(Path(first.folder), OURS + "inner"))
    assert Path(inner.folder).parent == base


def test_deep_base_leaves_room_for_sockets(base: Path, owners: list[Owner]) -> None:
    deep = base / ("d" * 60)
    deep.mkdir()
    owners.append(owner := Owner(deep, OURS + "deep"))
    assert len(owner.folder) + 37 <= 107
    owner.kill()
    assert debris.sweep(OURS + "deep", 5, Path(owner.folder).parent)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_nothing_is_swept_and_nothing_fails(
    number: int, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base / f"{debris.NAME}earlier").mkdir()
    (base / f"{debris.NAME}earlier" / "lock").touch()

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    assert debris.sweep_all(base, base) == []
    assert (base / f"{debris.NAME}earlier" / "lock").exists(), "nobody knows whether it is in use"


def test_what_cannot_be_removed_keeps_nothing_else(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (base / f"{debris.NAME}{name}.lock").touch()
    unlink = Path.unlink

    def refuse_first(path: Path, missing_ok: bool = False) -> None:
        if path.name == f"{debris.NAME}a.lock":
            raise PermissionError(path)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse_first)
    assert debris.sweep_all(base, base) == [f"{debris.NAME}b"]
