"""What the machine must have is said in one line, before any work."""

from dataclasses import replace

import pytest

from e2e.cluster.preflight import Machine, problem

FIT = Machine(
    system="Linux",
    user_id=0,
    go_version="go1.25.0",
    memory_bytes=12e9,
    free_disk_bytes=15e9,
    disk="/home/someone",
)


@pytest.mark.parametrize("go", ["go1.25.0", "go1.26.8", "go2.0", "go1.25rc1"])
def test_a_fit_machine_has_no_problem(go: str) -> None:
    assert problem(replace(FIT, go_version=go)) is None


@pytest.mark.parametrize(
    ("lacking", "said", "remedy"),
    [
        ({"system": "Darwin"}, "needs Linux (this is Darwin)", "virtual machine"),
        ({"user_id": 1000}, "needs root", "sudo"),
        ({"go_version": None}, "needs Go 1.25 or newer to build Kubernetes (found none)", "PATH"),
        ({"go_version": "go1.24.9"}, "(found go1.24.9)", "PATH"),
        ({"go_version": "go1.9"}, "(found go1.9)", "PATH"),
        ({"memory_bytes": 11.4e9}, "needs 12 GB of memory (this machine has 11 GB)", "larger machine"),
        ({"free_disk_bytes": 14e9}, "needs 15 GB of free disk (/home/someone has 14 GB)", "XDG_CACHE_HOME"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(lacking: dict[str, object], said: str, remedy: str) -> None:
    found = problem(replace(FIT, **lacking))  # type: ignore[arg-type]
    assert found is not None
    assert said in found
    assert remedy in found
    assert "\n" not in found


def test_the_first_problem_is_the_one_that_makes_the_others_moot() -> None:
    found = problem(Machine("Windows", 1000, None, 1e9, 1e9, "C:"))
    assert found is not None
    assert found.startswith("needs Linux")
