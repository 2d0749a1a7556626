"""The Python source of a vLLM release that has no build that runs here: from its wheel, without its libraries."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path

from e2e.images.cache import made_whole
from e2e.images.process import CommandError, Progress, run_logged
from e2e.matrix.environments import folder


def source(vllm: str, progress: Progress) -> Path:
    """Return a folder to put on Python's path, made once: the release's modules and its distribution metadata.

    Raises CommandError when the package index does not give the release.
    """
    target = folder() / "sources" / vllm
    if target.exists():
        return target
    if not shutil.which("uv"):
        raise CommandError("uv is needed to download the release: pip install uv")
    progress.say(f"downloading vLLM {vllm}, of which the source is kept")
    folder().mkdir(parents=True, exist_ok=True)
    with made_whole(target) as partial, tempfile.TemporaryDirectory(dir=folder()) as download:
        # pip, since uv has no command that downloads without installing.
        command = ["uvx", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", f"--dest={download}"]
        run_logged([*command, f"vllm=={vllm}"], folder() / "download.log", progress)
        (wheel,) = Path(download).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial, [name for name in archive.namelist() if is_source(name)])
    return target


def is_source(name: str) -> bool:
    """Return whether a file of a wheel is Python source or metadata."""
    return name.endswith(".py") or ".dist-info/" in name
