"""The modules that a process of an earlier attempt had imported, kept to be imported again ahead of need.

A list is kept for each kind of process, on each node, in a folder that nobody else can write, and counts only for the
very versions that wrote it. Only installed code is listed. Importing a listed module again is harmless: the same
process would do it later. What fails is left to fail where it is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import platform
import stat
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import vllm_ray_engine
from vllm_ray_engine import versions
from vllm_ray_engine.processes import debris

RECORD_SECONDS = 10.0
"""Between two looks at what has been imported since."""

REPLAY_SECONDS = 60.0
"""A replay ends after this at the latest, however much of the list is left."""

_MAX_BYTES = 2_000_000


class DeviceTouched(Exception):
    """An import initialised the accelerator, which a process that has none yet must not; it is never repeated."""


@dataclass(frozen=True)
class Imports:
    """What is kept: modules in the order of their first import, and those of them that must not be imported ahead."""

    modules: tuple[str, ...] = ()
    banned: frozenset[str] = frozenset()


def folders() -> tuple[Path, Path]:
    """Return the folders to keep lists in, the better first: a cache that lives as long as the container, then /tmp."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(cache) / "vllm-ray-engine", debris.temporary_base() / f"vllm-ray-engine-{os.geteuid()}"


def _ours_alone(descriptor: int) -> bool:
    found = os.fstat(descriptor)
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@contextlib.contextmanager
def _private_folder() -> Iterator[int]:
    """Open the first folder that is ours alone to write. Raises OSError when there is none."""
    folder = next(filter(None, map(_open_private, folders())), None)
    if folder is None:
        raise OSError("there is no folder that only this user can write")
    try:
        yield folder
    finally:
        os.close(folder)


def _open_private(path: Path) -> int | None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    if _ours_alone(folder):
        return folder
    os.close(folder)
    return None


def _sources() -> Iterator[Path]:
    """Yield the sources of the engine package."""
    return Path(str(vllm_ray_engine.__file__)).parent.rglob("*.py")


def _file_name(kind: str) -> str:
    """Return the name of a list: it tells the versions, and the sources of this package, by their digest."""
    digest = hashlib.sha256()
    for package in ("vllm", "ray"):
        digest.update(f"{package} {versions.installed(package)}\n".encode())
    digest.update(f"{platform.python_version()} {sys.prefix}\n".encode())
    for source in sorted(_sources()):
        digest.update(source.read_bytes())
    return f"{kind}-{digest.hexdigest()[:16]}.json"


def load(kind: str) -> Imports:
    """Return what is kept for this kind of process; nothing when it cannot be read, or others could have written it."""
    try:
        with _private_folder() as folder:
            file = os.open(_file_name(kind), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
            with os.fdopen(file, encoding="utf-8") as stream:
                if not stat.S_ISREG(os.fstat(file).st_mode) or not _ours_alone(file):
                    return Imports()
                data = json.loads(stream.read(_MAX_BYTES))
        modules, banned = data["modules"], data["banned"]
        if all(isinstance(name, str) for name in (*modules, *banned)):
            return Imports(tuple(modules), frozenset(banned))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return Imports()


def _keep(kind: str, imports: Imports) -> None:
    """Write a list, at once and whole. Raises OSError."""
    data = json.dumps({"modules": imports.modules, "banned": sorted(imports.banned)})
    with _private_folder() as folder:
        name = _file_name(kind)
        new = f".{name}.{os.getpid()}"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(data)
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Let no other process or thread change a list meanwhile, if the file system has locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder = stack.enter_context(_private_folder())
            fcntl.flock(folder, fcntl.LOCK_EX)
            # Not left to the closing: a process forked meanwhile would keep the lock.
            stack.callback(fcntl.flock, folder, fcntl.LOCK_UN)
        yield


def installed(modules: Iterable[tuple[str, ModuleType]]) -> list[str]:
    """Return the names that an import would find in the interpreter's own folders, in the same order.

    Left out are what only this process has: its main module, a job's own code, what was made at run time.
    """
    roots = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    found = []
    for name, module in modules:
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if (
            spec is not None
            and spec.name == name
            and (origin in {"built-in", "frozen"} or str(origin).startswith(roots))
        ):
            found.append(name)
    return found


def record(kind: str) -> None:
    """Add what this process has imported to the list of its kind; nothing is written when all is there already."""
    now = installed(list(sys.modules.items()))
    with _alone():
        kept = load(kind)
        new = set(now) - set(kept.modules) - kept.banned
        if new:
            _keep(kind, Imports((*kept.modules, *(name for name in now if name in new)), kept.banned))


def record_from_now_on(kind: str) -> None:
    """Record in a thread of its own, again and again: much is imported only at the first request of its sort."""

    def run() -> None:
        seen = 0
        while True:
            time.sleep(RECORD_SECONDS)
            if len(sys.modules) != seen:
                seen = len(sys.modules)
                with contextlib.suppress(OSError):
                    record(kind)

    threading.Thread(target=run, name="imports", daemon=True).start()


def device_touched() -> bool:
    """Return whether this process has initialised CUDA (or ROCm, which goes by the same name)."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "cuda") and bool(torch.cuda.is_initialized())


def replay(kind: str, seconds: float = REPLAY_SECONDS) -> tuple[int, int]:
    """Import what is kept for this kind of process; return how many modules were imported and how many failed.

    Ends after `seconds`, when the import that it is at is done. Raises DeviceTouched when an import initialised the
    accelerator; the module is banned then.
    """
    kept = load(kind)
    deadline = time.monotonic() + seconds
    done = failed = 0
    touched_before = device_touched()  # by no import of ours
    for name in kept.modules:
        if name in sys.modules or name in kept.banned:
            continue
        if time.monotonic() > deadline:
            break
        try:
            importlib.import_module(name)
            done += 1
        except (Exception, SystemExit):  # it is imported ahead of need: whoever needs it will see the error
            failed += 1
        if device_touched() and not touched_before:
            ban(kind, name)
            raise DeviceTouched(f"importing {name} initialises the accelerator")
    return done, failed


def ban(kind: str, name: str) -> None:
    """Have a name never imported ahead again on this node."""
    with contextlib.suppress(OSError), _alone():
        kept = load(kind)
        _keep(kind, Imports(kept.modules, kept.banned | {name}))
