"""What the matrix covers: the versions, and the selection of cells. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

OLDEST_RAY = "2.52.0"
NEWEST_RAY = "2.60.0"
RAYS = (OLDEST_RAY, "2.56.1", NEWEST_RAY)

RUN, SOURCE = "run", "source"


@dataclass(frozen=True)
class Release:
    """A vLLM release and how it is checked.

    torch: the PyTorch that its CPU build asks for; None where the package index has no CPU build, so that only its
    source can be checked. rays: the Ray versions that it runs with.
    """

    vllm: str
    torch: str | None
    rays: tuple[str, ...] = (NEWEST_RAY,)


# The newest patch release of every minor version since the oldest that is supported, and that one itself.
RELEASES = (
    Release("0.21.0", "2.11.0", RAYS),
    Release("0.22.1", "2.11.0"),
    Release("0.23.0", "2.11.0"),
    Release("0.24.0", "2.11.0"),
    Release("0.25.1", "2.11.0", RAYS),
    Release("0.26.0", "2.11.0"),
    Release("0.27.1", "2.13.0"),
    Release("0.28.0", "2.13.0", RAYS),
    Release("0.29.0", "2.13.0"),
    Release("0.30.0", "2.13.0", RAYS),
    Release("0.31.0", "2.13.0"),
    Release("0.32.0", "2.13.0", RAYS),
    Release("0.33.0", None),
)

DEPENDENCIES_OF = "0.32.0"
"""A release of which only the source is checked is imported beside the dependencies of this one."""


@dataclass(frozen=True, order=True)
class Cell:
    """One check: a vLLM version with a Ray version, run for real, or its source only."""

    vllm: str
    ray: str
    kind: str = RUN

    @property
    def name(self) -> str:
        """The cell's name in file names and progress."""
        return f"vllm-{self.vllm}-ray-{self.ray}" + ("" if self.kind == RUN else f"-{self.kind}")

    @property
    def environment(self) -> str:
        """The vLLM version of the environment that it runs in."""
        return self.vllm if self.kind == RUN else DEPENDENCIES_OF


class SelectionError(ValueError):
    """A selection that is malformed or selects nothing; the message says why."""


def release(vllm: str) -> Release:
    """Return a release of the matrix by its version; KeyError when it is not part of it."""
    return {known.vllm: known for known in RELEASES}[vllm]


def cells(releases: Iterable[Release] = RELEASES) -> list[Cell]:
    """List all cells, those of one vLLM version together, since they share an environment."""
    return [Cell(found.vllm, ray, SOURCE if found.torch is None else RUN) for found in releases for ray in found.rays]


def select(among: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """Return the cells that match any of the selections, each such as `vllm=0.32.0,ray=2.60.0`; all for none.

    Raises SelectionError.
    """
    wanted = [_parse(text) for text in only]
    for text, fields in zip(only, wanted, strict=True):
        if not any(_matches(cell, fields) for cell in among):
            raise SelectionError(f"{text}: no cell of the matrix is that; there are {', '.join(c.name for c in among)}")
    return [cell for cell in among if not wanted or any(_matches(cell, fields) for fields in wanted)]


def _parse(text: str) -> dict[str, str]:
    fields = dict(part.partition("=")[::2] for part in text.split(","))
    unknown = fields.keys() - {"vllm", "ray"}
    if unknown or not all(fields.values()):
        raise SelectionError(f"{text}: must be vllm=VERSION, ray=VERSION, or both with a comma between them")
    return fields


def _matches(cell: Cell, fields: dict[str, str]) -> bool:
    return all(getattr(cell, key) == value for key, value in fields.items())
