"""Runs cells, each in namespaces of its own, and turns what they wrote into results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from e2e.images.process import ISOLATE, CommandError, Progress
from e2e.images.spec import REPOSITORY
from e2e.matrix import environments, sources
from e2e.matrix.plan import RUN, Cell
from e2e.matrix.results import Result
from e2e.run_tests import ALONE
from vllm_ray_operator.act import engine_package

TIMEOUT_SECONDS = 900
"""A cell takes two to three minutes on two idle cores."""
TINY_MODEL = REPOSITORY / "images" / "engine-cpu" / "tiny_model.py"


def package_name() -> str:
    """Return the name of the engine package of this checkout, which stands for its content."""
    return engine_package.build(REPOSITORY / "operator" / "vllm_ray_engine").name


def commit() -> str:
    """Return the commit of this checkout, marked when what the matrix runs has changes that are not committed."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", "operator/vllm_ray_engine", "tests/engine", "e2e")
    return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")


def run(cell: Cell, progress: Progress, logs: Path) -> Result:
    """Run one cell and return its result, whatever it is; the whole output goes to a file in `logs`."""
    # Before the run: the checkout may change during it.
    package, at, seen = package_name(), commit(), dict[str, Any]()
    try:
        python = str(environments.prepare(cell.environment, cell.ray, progress))
        if cell.kind == RUN:
            seen = _execute(cell, [python, "-m", "e2e.matrix.cell"], [], logs, progress)
        else:
            first = [sources.source(cell.vllm, progress)]
            seen = _execute(cell, [python, "-m", "e2e.matrix.source_check"], first, logs, progress)
    except CommandError as error:
        seen = {"passed": False, "failure": {"step": "installation", "error": str(error)}}
    return Result(cell.vllm, cell.ray, cell.kind, package, at, date=f"{datetime.now(UTC):%Y-%m-%d %H:%M}", **seen)


def _execute(
    cell: Cell, program: Sequence[str], path: Sequence[Path], logs: Path, progress: Progress
) -> dict[str, Any]:
    """Run a program of a cell, alone on the machine as far as it can tell, and return what it wrote."""
    out, log = logs / f"{cell.name}.out", logs / f"{cell.name}.log"
    logs.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "VLLM_"))} | {
        "PYTHONPATH": os.pathsep.join(map(str, (*path, REPOSITORY, REPOSITORY / "operator"))),
        "PYTHONDONTWRITEBYTECODE": "",
        "VLLM_RAY_TEST_MODEL": str(_tiny_model()),
    }
    started = time.monotonic()
    try:
        with log.open("wb") as file:
            subprocess.run(
                [*ALONE, *ISOLATE, *program, str(out)], env=env, cwd=REPOSITORY, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, timeout=TIMEOUT_SECONDS, check=False,
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"passed": False, "failure": {"step": "cell", "error": f"not done after {TIMEOUT_SECONDS} s"}}
    progress.say(f"{cell.name} took {time.monotonic() - started:.0f} s; its output: {log}")
    if not out.exists():
        ending = log.read_text(errors="replace").splitlines()[-1:]
        return {"passed": False, "failure": {"step": "cell", "error": f"it wrote no result: {' '.join(ending)}"}}
    seen: dict[str, Any] = json.loads(out.read_text())
    return seen | {"checks": tuple(seen.get("checks", ()))}


def _tiny_model() -> Path:
    target = environments.folder() / "tiny"
    subprocess.run([sys.executable, str(TINY_MODEL), str(target)], check=True, stdout=subprocess.DEVNULL)
    return target
