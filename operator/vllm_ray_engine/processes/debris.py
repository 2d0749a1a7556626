"""What an attempt keeps outside its processes: shared memory segments and temporary files, found again by their names.

A process of an attempt *claims* a place on its node: a temporary folder of the attempt's own, and a prefix for the
shared memory that it makes. It holds a shared lock on both for as long as it lives, which the kernel releases however
it dies. Nobody holding the lock proves that nobody is left, also where the folders are shared by several pods, whose
processes do not see each other; then a *sweep* removes the place with all that is in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import multiprocessing
import multiprocessing.shared_memory
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from vllm_ray_engine.log import say

NAME = "vllm-ray-attempt-"
"""Starts the name of everything that this module makes or removes."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  where Linux has POSIX shared memory and semaphores
_LOCK = "lock"
_SOCKET_PATH_BYTES = 107
"""The longest path of a unix socket (sun_path); vLLM puts sockets named by a UUID into the temporary folder."""

_held: dict[Path, int] = {}
"""The locks that this process holds until it ends: file descriptors by path."""


def tag(instance_id: str) -> str:
    """Return the name of the attempt's place as this process sees the node.

    Two pods that share the folders are two places: the attempt may be over in one and not yet in the other.
    """
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return hashlib.sha256(f"{instance_id} {socket.gethostname()} {namespace}".encode()).hexdigest()[:12]


def temporary_base() -> Path:
    """Return the folder that holds the attempts' temporary folders: TMPDIR as the user or the image set it."""
    base = Path(tempfile.gettempdir())
    # A child of a process with a claim, or a worker that was given the driver's environment.
    return base.parent if base.name.startswith(NAME) else base


def claim(instance_id: str) -> None:
    """Have this process, and what it starts, put temporary files and shared memory into the attempt's place.

    May be called again. What earlier attempts left on this node is removed on the way. Where it cannot be done (a full
    or read-only file system), it is said, and things keep their usual places: that is no reason not to run.

    In a Ray worker Python's resource tracker is not needed then, and is kept from starting: it outlives its parent, and
    in a Ray pod nobody collects it, so that every engine that ends would leave a zombie.
    """
    place, base = NAME + tag(instance_id), temporary_base()
    if len(os.fsencode(str(base / place))) + len("/") + 36 > _SOCKET_PATH_BYTES:
        base = Path("/tmp")  # noqa: S108  the one folder whose path is always short enough
    folder = base / place
    try:
        sweep_all(base)
        _hold(SHARED_MEMORY / f"{place}.{_LOCK}")
        _hold(folder / _LOCK)
    except OSError as error:
        say(f"what this engine leaves when it is killed will not be cleaned up: {error}")
        return
    # Compiled kernels are worth keeping from attempt to attempt; by default they lie in the temporary folder.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(base / f"torchinductor_{_user()}"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    _name_shared_memory(place)
    if in_ray_worker():
        resource_tracker.register = resource_tracker.unregister = lambda *_: None


def in_ray_worker() -> bool:
    """Return whether this process is one that Ray started for tasks and actors; never imports Ray."""
    ray = sys.modules.get("ray")
    return bool(ray and ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        return str(os.getuid())


def _name_shared_memory(place: str) -> None:
    """Name the shared memory and the semaphores that Python makes, here and in processes that it spawns."""
    process_config: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    process_config["semprefix"] = f"/{place}"
    # Python has no public way to choose the names: where these two are called otherwise, names stay as they are.
    if hasattr(multiprocessing.shared_memory, "_make_filename"):
        multiprocessing.shared_memory._make_filename = lambda: f"/{place}-{secrets.token_hex(4)}"


def _hold(path: Path) -> None:
    """Take a shared lock on the file, made with its folder if need be, and keep it until this process ends."""
    if path in _held:
        return
    while True:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # swept in between
            continue
        fcntl.flock(file, fcntl.LOCK_SH)
        if _is(path, file):
            _held[path] = file
            return
        os.close(file)


def _is(path: Path, file: int) -> bool:
    """Return whether the path still names the open file: it may have been swept before it was locked."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file))
    return False


@contextlib.contextmanager
def _deserted(path: Path) -> Iterator[bool]:
    """Tell whether it is certain that no process holds the lock; meanwhile none can take it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # gone, or another user's
        yield False
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            deserted = _is(path, file)
        except OSError:  # held, or a file system without locks
            deserted = False
        yield deserted
    finally:
        os.close(file)


def sweep_all(base: Path | None = None, shared_memory: Path = SHARED_MEMORY) -> list[str]:
    """Remove the places on this node that no living process holds, of whatever attempt; return their names."""
    found = {lock.name.rpartition(".")[0] for lock in shared_memory.glob(f"{NAME}*.{_LOCK}")}
    found |= {lock.parent.name for lock in (base or temporary_base()).glob(f"{NAME}*/{_LOCK}")}
    return [place for place in sorted(found) if _sweep(place, base or temporary_base(), shared_memory)]


def sweep(instance_id: str, timeout: float, base: Path | None = None, shared_memory: Path = SHARED_MEMORY) -> bool:
    """Remove the attempt's place on this node as soon as its last process is gone, at most `timeout` seconds later.

    Returns whether nothing is left.
    """
    place, deadline = NAME + tag(instance_id), time.monotonic() + timeout
    folder = (base or temporary_base()) / place
    while True:
        _sweep(place, folder.parent, shared_memory)
        if not folder.exists() and not (shared_memory / f"{place}.{_LOCK}").exists():
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)


def _sweep(place: str, base: Path, shared_memory: Path) -> bool:
    """Remove what is deserted of a place, as far as it can be; returns whether anything was removed."""
    removed = False
    lock = shared_memory / f"{place}.{_LOCK}"
    with contextlib.suppress(OSError), _deserted(lock) as deserted:
        if deserted:
            segments = [*shared_memory.glob(f"{place}-*"), *shared_memory.glob(f"sem.{place}-*")]
            # A process that the attempt started, but that holds no claim, may still use one.
            used = mapped(shared_memory)
            for segment in segments:
                if str(segment) not in used:
                    segment.unlink(missing_ok=True)
            if not used.intersection(map(str, segments)):
                lock.unlink(missing_ok=True)
                removed = True
    with contextlib.suppress(OSError), _deserted(base / place / _LOCK) as deserted:
        if deserted:
            shutil.rmtree(base / place, ignore_errors=True)
            removed = True
    return removed


def mapped(folder: Path) -> set[str]:
    """Return the paths of the folder's files that processes which this one sees have mapped."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError), maps.open(errors="replace") as lines:
            for line in lines:
                path = line.partition("/")[1:]
                if "".join(path).startswith(f"{folder}/"):
                    found.add("".join(path).rstrip("\n"))
    return found
