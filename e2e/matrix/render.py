"""The document, from the results. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from e2e.matrix.plan import RAYS, RUN, SOURCE, Cell
from e2e.matrix.results import Result
from vllm_ray_engine.versions import MINIMUM

MEASURED = {
    "serving": "start until serving",
    "standby": "standby ready",
    "gone after kill": "gone after SIGKILL",
    "takeover": "take-over",
    "gone after stop": "gone after stop",
}
"""Steps of a cell whose duration says something, with their heads in the table."""

INTRODUCTION = """\
# Compatibility

<!-- Written by `make matrix`. Do not edit. -->
"""

RUN_FOR_REAL = """\
## Run for real

Each cell is an engine job as the operator submits it, with vLLM's CPU build and a tiny model, on two Ray nodes of one
machine. An attempt with two tensor-parallel ranks serves over both nodes and answers; its actors and its placement
group carry its instance id, in its own Ray namespace; a second attempt is its standby. SIGKILL of the first one's API
server: everything of it is gone within 10 s, and the standby serves. A stop leaves nothing. Then the patched functions
are called one by one, as under "Source checked". No log of the Ray session has an `ActorHandleNotFoundError`, the abort
that is its form in older Ray versions, or an `ActorAlreadyExistsError`.
"""

SOURCE_CHECKED = """\
## Source checked

No build of these releases runs without an accelerator. Their real source was imported beside the dependencies of one
that does, the patches were applied, and the patched functions called as vLLM calls them, with actors and placement
groups of a real two-node Ray. No model was run.
"""

REFUSED = """\
## Refused

The launcher and the doctor refuse what is older, with the versions found and needed. vLLM before 0.21: data-parallel
ranks in Ray actors share their instance id, and up to 0.19 worker actors have no names at all; the executor that needs
no accelerator beside the API server is not the default. Ray before 2.52: no token authentication, without which the
Jobs API runs anybody's code.
"""


def document(results: Mapping[Cell, Result], cells: Sequence[Cell]) -> str:
    """Return the whole document."""
    run = [cell for cell in cells if cell.kind == RUN]
    source = [cell for cell in cells if cell.kind == SOURCE]
    parts = [
        INTRODUCTION,
        supported() + "\n",
        _provenance(list(results.values())),
        RUN_FOR_REAL,
        _overview(results, run),
        _measured([results[cell] for cell in run if cell in results]),
        SOURCE_CHECKED,
        *(_checks(cell, results.get(cell)) for cell in source),
        _failures([results[cell] for cell in cells if cell in results and not results[cell].passed]),
        REFUSED,
    ]
    return "\n".join(part for part in parts if part)


def supported() -> str:
    """Return the sentence on the supported range."""
    oldest = {package: ".".join(map(str, number)) for package, number in MINIMUM.items()}
    return f"Supported: vLLM {oldest['vllm']} and newer with Ray {oldest['ray']} and newer."


def _provenance(results: Sequence[Result]) -> str:
    if not results:
        return "Nothing was run yet.\n"
    dates = sorted(result.date for result in results)
    commits = sorted({result.commit for result in results})
    pythons = sorted({result.versions["python"] for result in results if "python" in result.versions})
    period = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return (
        f"Run by `make matrix`, {period} UTC, Python {', '.join(pythons)}, commit {', '.join(commits)},"
        f" engine package {', '.join(sorted({result.package for result in results}))}.\n"
    )


def _overview(results: Mapping[Cell, Result], cells: Sequence[Cell]) -> str:
    releases = dict.fromkeys(cell.vllm for cell in cells)
    rows = [[vllm, *(_word(results, cells, Cell(vllm, ray)) for ray in RAYS)] for vllm in releases]
    return _table(["vLLM", *(f"Ray {ray}" for ray in RAYS)], rows)


def _word(results: Mapping[Cell, Result], cells: Sequence[Cell], cell: Cell) -> str:
    if cell not in cells:
        return ""
    if cell not in results:
        return "not run yet"
    return "works" if results[cell].passed else f"**fails**: {_escaped((results[cell].failure or {})['step'])}"


def _measured(results: Sequence[Result]) -> str:
    passed = [result for result in results if result.passed]
    if not passed:
        return ""
    rows = [
        [
            result.vllm,
            result.ray,
            *(result.versions.get(name, "") for name in ("torch", "transformers")),
            *(f"{result.seconds[step]:.1f}" for step in MEASURED),
        ]
        for result in passed
    ]
    head = ["vLLM", "Ray", "PyTorch", "Transformers", *MEASURED.values()]
    return "Durations in seconds, on a shared machine with two cores:\n\n" + _table(head, rows)


def _checks(cell: Cell, result: Result | None) -> str:
    title = f"### vLLM {cell.vllm} with Ray {cell.ray}: "
    if result is None:
        return f"{title}not checked yet\n"
    items = [f"* {_escaped(check)}" for check in result.checks]
    if result.failure:
        items.append(f"* **fails**: {_escaped(result.failure['step'])}")
    return "\n".join([f"{title}{'passed' if result.passed else 'fails'}", "", *items, ""])


def _failures(results: Sequence[Result]) -> str:
    if not results:
        return ""
    rows = [
        [result.vllm, result.ray, *(_escaped((result.failure or {}).get(key, "")) for key in ("step", "error"))]
        for result in results
    ]
    return "## What fails\n\n" + _table(["vLLM", "Ray", "step", "why"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _escaped(text: str) -> str:
    """Return a text as one line that ends no cell of a table, and not longer than one reads."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= 300 else f"{line[:299]}…"
