"""The folder where images, bases and archives are kept, and the locks that keep two builds apart."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.images.process import Progress


def cache_folder() -> Path:
    """Return the user's cache folder for images (XDG_CACHE_HOME is honoured)."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "vllm-ray-operator" / "images"


@contextmanager
def locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel frees it when we end, however we end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say(f"waiting for another process that holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def made_whole(target: Path) -> Iterator[Path]:
    """Give a path to write to that becomes `target` only on success, so that what exists is always whole.

    Leftovers of a killed writer are removed first; hold a lock.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")
    remove(partial)
    try:
        yield partial
        partial.rename(target)
    finally:
        remove(partial)


def remove(path: Path) -> None:
    """Remove a file or a whole folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
