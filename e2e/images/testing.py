"""What the engine tests need beside the engine image: the repository and a test runner, mounted, never baked in."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from e2e.images.cache import cache_folder, locked, made_whole
from e2e.images.process import CommandError, Progress, run_logged
from e2e.images.spec import REPOSITORY

LOCK = REPOSITORY / "requirements" / "engine-test.txt"
SOURCE_MOUNT = "/src"
PACKAGES_MOUNT = "/test-packages"


@dataclass(frozen=True)
class TestSetting:
    """Options of a run in which `pytest` can be imported and the repository lies at /src, both read-only."""

    volumes: tuple[str, ...]
    env: dict[str, str]
    workdir: str = SOURCE_MOUNT


def test_setting() -> TestSetting:
    """Install the test packages into the cache, once per lock file, and return the options."""
    packages = cache_folder() / "test-packages" / hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]
    progress = Progress("test packages")
    with locked(packages.with_suffix(".lock"), progress):
        if not packages.exists():
            progress.say(f"installing {LOCK.name}")
            _install(packages, progress)
    return TestSetting(
        volumes=(f"{REPOSITORY}:{SOURCE_MOUNT}:ro", f"{packages}:{PACKAGES_MOUNT}:ro"),
        env={"PYTHONPATH": PACKAGES_MOUNT, "PYTHONDONTWRITEBYTECODE": "1"},
    )


def _install(packages: Path, progress: Progress) -> None:
    if not shutil.which("uv"):
        raise CommandError("uv is needed to install the test packages: pip install uv")
    options = ["--python-version=3.11", "--no-deps", "--only-binary=:all:", "--require-hashes", "--link-mode=copy"]
    with made_whole(packages) as partial:
        command = ["uv", "pip", "install", *options, f"--target={partial}", f"--requirements={LOCK}"]
        run_logged(command, packages.with_suffix(".log"), progress)
