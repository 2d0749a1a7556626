"""The compatibility matrix: what it covers, how cells are selected, how results are kept and shown."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.matrix import environments, plan, render, results, sources
from e2e.matrix.plan import RUN, SOURCE, Cell, Release, SelectionError
from e2e.matrix.results import Result
from vllm_ray_engine.reasons import UnsupportedVersion
from vllm_ray_engine.versions import MINIMUM, check_version

ROOT = Path(__file__).parents[3]
RELEASES = (Release("0.21.0", "2.11.0", plan.RAYS), Release("0.32.0", "2.13.0"), Release("0.33.0", None))
CELLS = plan.cells(RELEASES)
DONE = Result(
    vllm="0.21.0",
    ray=plan.NEWEST_RAY,
    kind=RUN,
    package="_ray_pkg_1.zip",
    commit="abc",
    date="2026-11-30 12:00",
    passed=True,
    seconds=dict.fromkeys(render.MEASURED, 1.25),
    versions={"torch": "2.11.0", "transformers": "5.0", "python": "3.11.7"},
)
CHECKED = replace(DONE, vllm="0.33.0", kind=SOURCE, seconds={}, checks=("a | b", "c"))
FAILED = replace(DONE, ray=plan.OLDEST_RAY, passed=False, failure={"step": "names", "error": "two\nlines | of it"})


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def test_covers_the_supported_range_from_its_oldest_release_without_a_gap() -> None:
    minors = [number(release.vllm) for release in plan.RELEASES]
    assert minors[0] == MINIMUM["vllm"]
    assert plan.RELEASES[0].vllm.endswith(".0"), "the very first of the oldest minor version"
    assert minors == [(0, minor) for minor in range(minors[0][1], minors[-1][1] + 1)]
    assert number(plan.OLDEST_RAY) == MINIMUM["ray"]
    assert plan.OLDEST_RAY.endswith(".0")


@pytest.mark.parametrize(("package", "version"), [("vllm", "0.20.2"), ("ray", "2.51.2")])
def test_what_is_older_is_refused_with_the_versions_found_and_needed(package: str, version: str) -> None:
    with pytest.raises(UnsupportedVersion) as refused:
        check_version(package, version)
    assert version in str(refused.value)
    assert f"{'.'.join(map(str, MINIMUM[package]))} or newer" in str(refused.value)


def test_every_release_of_the_matrix_is_accepted_by_the_launcher() -> None:
    for cell in plan.cells():
        assert check_version("vllm", cell.vllm) == number(cell.vllm)
        assert check_version("ray", cell.ray) == number(cell.ray)


def test_committed_document_states_the_range_of_the_launcher_and_all_releases() -> None:
    document = (ROOT / "docs" / "compatibility.md").read_text()
    assert render.supported() in document
    for cell in plan.cells():
        assert re.search(rf"(\| |vLLM ){re.escape(cell.vllm)} ", document), cell


def test_cells_of_one_environment_are_neighbours() -> None:
    names = [cell.vllm for cell in plan.cells()]
    assert names == sorted(names, key=lambda name: list(dict.fromkeys(names)).index(name))


SELECTIONS = {
    "nothing selects all": ([], CELLS),
    "a vLLM version": (["vllm=0.21.0"], [cell for cell in CELLS if cell.vllm == "0.21.0"]),
    "a Ray version": ([f"ray={plan.OLDEST_RAY}"], [Cell("0.21.0", plan.OLDEST_RAY)]),
    "both": ([f"vllm=0.32.0,ray={plan.NEWEST_RAY}"], [Cell("0.32.0", plan.NEWEST_RAY)]),
    "two, in the matrix's order": (
        ["vllm=0.33.0", "vllm=0.32.0"],
        [Cell("0.32.0", plan.NEWEST_RAY), Cell("0.33.0", plan.NEWEST_RAY, SOURCE)],
    ),
}


@pytest.mark.parametrize(("only", "selected"), SELECTIONS.values(), ids=SELECTIONS)
def test_selection(only: list[str], selected: list[Cell]) -> None:
    assert plan.select(CELLS, only) == selected


@pytest.mark.parametrize("only", ["vllm=0.9.0", "ray=1.0,vllm=0.21.0", "torch=2", "vllm", "vllm=", ""])
def test_selection_that_makes_no_sense_is_refused(only: str) -> None:
    with pytest.raises(SelectionError) as refused:
        plan.select(CELLS, [only])
    assert str(refused.value).startswith(only)


def test_results_are_kept_for_the_package_that_they_were_made_with(tmp_path: Path) -> None:
    results.save(DONE, tmp_path)
    results.save(FAILED, tmp_path)
    results.save(replace(CHECKED, package="_ray_pkg_0.zip"), tmp_path)
    assert results.load(CELLS, tmp_path, DONE.package) == {DONE.cell: DONE, FAILED.cell: FAILED}
    assert results.load(CELLS, tmp_path / "none", DONE.package) == {}


def test_document_shows_what_was_seen() -> None:
    document = render.document({result.cell: result for result in (DONE, CHECKED, FAILED)}, CELLS)
    assert f"| vLLM | Ray {plan.OLDEST_RAY} | Ray 2.56.1 | Ray {plan.NEWEST_RAY} |" in document
    assert "| 0.21.0 | **fails**: names | not run yet | works |" in document
    assert "| 0.32.0 |  |  | not run yet |" in document
    assert f"| 0.21.0 | {plan.NEWEST_RAY} | 2.11.0 | 5.0 | 1.2 | 1.2 | 1.2 | 1.2 | 1.2 |" in document
    assert f"| 0.21.0 | {plan.OLDEST_RAY} | names | two lines \\| of it |" in document
    assert "### vLLM 0.33.0 with Ray 2.60.0: passed\n\n* a \\| b\n* c\n" in document
    assert "2026-11-30 12:00 UTC, Python 3.11.7, commit abc, engine package _ray_pkg_1.zip." in document


def test_document_without_results_claims_nothing() -> None:
    document = render.document({}, CELLS)
    assert "Nothing was run yet." in document
    assert "works" not in document
    assert "passed" not in document
    assert "## What fails" not in document


def test_pinned_version() -> None:
    assert (
        environments.pinned("pytest", "pluggy==1.7.0\npytest==9.2.0 \\\n    --hash=x\npytest-timeout==2.4.0") == "9.2.0"
    )
    with pytest.raises(ValueError, match="pytest"):
        environments.pinned("pytest", "pytest-timeout==2.4.0")


def test_of_a_wheel_only_source_and_metadata_are_kept() -> None:
    names = ["vllm/__init__.py", "vllm/_C.abi3.so", "vllm-0.33.0.dist-info/METADATA", "vllm/configs/a.json"]
    assert [name for name in names if sources.is_source(name)] == [names[0], names[2]]
