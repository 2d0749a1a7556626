"""What an API server tells the launcher of its requests, and is told by it: a page of shared memory for each process.

A page is a file among the attempt's own shared memory, named by the process's id: it needs no word between the two,
however the process was started, and is removed with what else the attempt leaves. Reading and writing it is a matter
of nanoseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

from vllm_ray_engine.log import say
from vllm_ray_engine.processes import debris


class Page(ctypes.Structure):
    """Each field has one writer, and is one store.

    draining: the launcher's word that the engine has left the traffic. opened: requests whose last byte is not out yet.
    moved: when one last began or ended, on the monotonic clock, which all processes of a machine share; 0 for never.
    """

    _fields_ = (("draining", ctypes.c_bool), ("opened", ctypes.c_int64), ("moved", ctypes.c_double))
    draining: bool
    opened: int
    moved: float

    def begin(self) -> None:
        """Count a request that came."""
        self.opened += 1
        self.moved = time.monotonic()

    def end(self) -> None:
        """Count a request that is over."""
        self.opened -= 1
        self.moved = time.monotonic()


def make(instance_id: str, folder: Path = debris.SHARED_MEMORY) -> Page:
    """Return this process's page. Where there can be none, it counts for nobody, which is said."""
    path = folder / f"{_start(instance_id)}{os.getpid()}"
    try:
        # Of its full size under its name at once: the launcher may look at any moment.
        new = path.with_name(f"{path.name}.new")
        new.write_bytes(bytes(ctypes.sizeof(Page)))
        new.replace(path)
        with path.open("r+b") as file:
            return Page.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(Page)))
    except (OSError, ValueError) as error:
        say(f"requests are not counted, a drain goes by connections only: {error}")
        return Page()


def read(instance_id: str, folder: Path = debris.SHARED_MEMORY) -> list[Page]:
    """Return copies of the pages of all API servers of an attempt on this node, as they are now."""
    pages = []
    for path in _paths(instance_id, folder):
        with contextlib.suppress(OSError, ValueError):
            pages.append(Page.from_buffer_copy(path.read_bytes()))
    return pages


@dataclass(frozen=True)
class Work:
    """What clients ask of an attempt: requests that are `open`, and when one last began or ended (monotonic clock)."""

    open: int
    moved: float


def work(instance_id: str) -> Work | None:
    """Return what all API servers of an attempt on this node were asked, None when they do not count."""
    pages = read(instance_id)
    return Work(sum(page.opened for page in pages), max(page.moved for page in pages)) if pages else None


def tell_draining(instance_id: str, folder: Path = debris.SHARED_MEMORY) -> None:
    """Tell all API servers of an attempt that it drains."""
    for path in _paths(instance_id, folder):
        with contextlib.suppress(OSError), path.open("r+b") as file:
            file.write(b"\x01")  # `draining` comes first


def _paths(instance_id: str, folder: Path) -> list[Path]:
    # Not mapped here: what a living process has mapped is not cleaned up.
    return list(folder.glob(f"{_start(instance_id)}*[0-9]"))


def _start(instance_id: str) -> str:
    return f"{debris.NAME}{debris.tag(instance_id)}-requests-"
