"""What each image is made of, and the tag that follows from it. Reads files; runs nothing."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CPU_TORCH_WHEEL = "torch-2.13.0+cpu-cp311-cp311-*.whl"

# Every staged file gets this time (2020-01-01): builds must not depend on when a file was checked out, and zip files,
# which wheels are, know no time before 1980.
_STAGED_TIME = 1_577_836_800
NAMES = ("operator", "engine-cpu", "redis")

_NOT_INPUT = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}


@dataclass(frozen=True)
class Recipe:
    """An image as the repository defines it.

    `inputs` are files and folders relative to the repository's root: all that the Dockerfile may copy.
    """

    name: str
    inputs: tuple[str, ...]
    build_args: Mapping[str, str] = field(default_factory=dict)
    contexts: Mapping[str, Path] = field(default_factory=dict)
    """Further folders to build from, by name; a lock file names their content by hash, so they are not in the tag."""

    @property
    def dockerfile(self) -> str:
        """The Dockerfile's path in the repository."""
        return f"images/{self.name}/Dockerfile"


def operator_recipe() -> Recipe:
    """Return the operator's recipe."""
    return Recipe(
        name="operator",
        inputs=(
            "LICENSE",
            "README.md",
            "images/build-env.sh",
            "images/build-tools.txt",
            "images/operator",
            "operator",
            "pyproject.toml",
            "requirements/operator.txt",
        ),
    )


def engine_cpu_recipe(wheels: Path | None) -> Recipe:
    """Return the CPU engine's recipe: PyTorch's CPU build from a wheel folder, or else what the package index has."""
    lock = "engine-cpu" if wheels else "engine-cpu-fallback"
    return Recipe(
        name="engine-cpu",
        inputs=("images/build-env.sh", "images/build-tools.txt", "images/engine-cpu", f"requirements/{lock}.txt"),
        build_args={"LOCK": lock},
        contexts={"wheels": wheels} if wheels else {},
    )


def recipe(name: str, environ: Mapping[str, str] = os.environ) -> Recipe:
    """Return the recipe of an image by name, one of NAMES."""
    match name:
        case "operator":
            return operator_recipe()
        case "redis":
            return Recipe(name="redis", inputs=("images/redis",))
        case _:
            return engine_cpu_recipe(find_wheels(environ))


def find_wheels(environ: Mapping[str, str], repository: Path = REPOSITORY) -> Path | None:
    """Find the folder that holds PyTorch's CPU wheel: one of PIP_FIND_LINKS, or `../shared/wheels`."""
    folders = [Path(entry) for entry in shlex.split(environ.get("PIP_FIND_LINKS", "")) if "://" not in entry]
    for folder in (*folders, repository.parent / "shared" / "wheels"):
        if folder.is_dir() and any(folder.glob(CPU_TORCH_WHEEL)):
            return folder
    return None


def input_files(of: Recipe, repository: Path = REPOSITORY) -> list[Path]:
    """List the files of an image relative to the repository, sorted; FileNotFoundError names a missing input."""
    files: set[Path] = set()
    for entry in of.inputs:
        path = repository / entry
        if path.is_dir():
            files.update(found.relative_to(repository) for found in path.rglob("*") if found.is_file())
        elif path.is_file():
            files.add(Path(entry))
        else:
            raise FileNotFoundError(f"image {of.name}: its input {entry} does not exist")
    return sorted(file for file in files if not _NOT_INPUT & set(file.parts) and file.suffix != ".pyc")


def tag(of: Recipe, base: str, repository: Path = REPOSITORY) -> str:
    """Return the image's full name with its content tag, such as `localhost/vllm-ray-operator:0123456789ab`.

    `base` is the base image as asked for (`auto`, `local` or a reference), not what was found behind it: like the
    Debian packages in it, it is an input that is followed, not pinned.
    """
    digest = hashlib.sha256()

    def add(*values: str | bytes) -> None:
        for value in values:
            data = value.encode() if isinstance(value, str) else value
            digest.update(len(data).to_bytes(8, "big") + data)

    add("base", base)
    for key, value in sorted(of.build_args.items()):
        add("arg", key, value)
    for file in input_files(of, repository):
        path = repository / file
        add("file", file.as_posix(), "x" if os.access(path, os.X_OK) else "-", path.read_bytes())
    return f"localhost/vllm-ray-{of.name}:{digest.hexdigest()[:12]}"


def stage(of: Recipe, folder: Path, repository: Path = REPOSITORY) -> None:
    """Copy exactly the image's inputs into a folder, to be the build context: what is not declared cannot get in."""
    for file in input_files(of, repository):
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / file, target)
        os.utime(target, (_STAGED_TIME, _STAGED_TIME))


def public_base(dockerfile: str) -> str:
    """Return the default of `ARG BASE` in a Dockerfile's text; ValueError when it has none."""
    match = re.search(r"^ARG BASE=(\S+)$", dockerfile, re.MULTILINE)
    if not match:
        raise ValueError("the Dockerfile has no `ARG BASE=<image>`")
    return match[1]
