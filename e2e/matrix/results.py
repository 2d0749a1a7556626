"""Results of cells, one JSON file each, valid for the engine package that they were made with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from e2e.images.spec import REPOSITORY
from e2e.matrix.plan import Cell


@dataclass(frozen=True)
class Result:
    """What one cell gave.

    package: the engine package's file name, by its content; date: UTC, to the minute; seconds: of each step, or checks
    of the source with 0; failure: the step that failed and why; versions: what was installed.
    """

    vllm: str
    ray: str
    kind: str
    package: str
    commit: str
    date: str
    passed: bool
    seconds: dict[str, float] = field(default_factory=dict)
    checks: tuple[str, ...] = ()
    failure: dict[str, str] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    logs: dict[str, list[str]] = field(default_factory=dict)

    @property
    def cell(self) -> Cell:
        """The cell that it is of."""
        return Cell(self.vllm, self.ray, self.kind)


def folder() -> Path:
    """Return where results are kept: with the checkout that they are about."""
    return REPOSITORY / "build" / "matrix"


def path(cell: Cell, base: Path) -> Path:
    """Return the file of a cell's result."""
    return base / f"{cell.name}.json"


def save(result: Result, base: Path) -> None:
    """Write a result, whole or not at all."""
    target = path(result.cell, base)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(result), indent=1) + "\n")
    partial.rename(target)


def load(cells: Iterable[Cell], base: Path, package: str) -> dict[Cell, Result]:
    """Return the kept results of these cells that were made with this engine package."""
    found: dict[Cell, Result] = {}
    for cell in cells:
        file = path(cell, base)
        if not file.exists():
            continue
        data = json.loads(file.read_text())
        result = Result(**data | {"checks": tuple(data["checks"])})
        if result.package == package:
            found[cell] = result
    return found
