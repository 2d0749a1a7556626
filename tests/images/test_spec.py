"""An image's tag follows from its inputs: from all of them, and from nothing else."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.images.spec import (
    NAMES,
    REPOSITORY,
    Recipe,
    engine_cpu_recipe,
    find_wheels,
    input_files,
    public_base,
    recipe,
    stage,
    tag,
)

RECIPE = Recipe("operator", inputs=("requirements.txt", "images/operator", "source"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in (
        "requirements.txt",
        "images/operator/Dockerfile",
        "source/main.py",
        "source/deep/more.py",
        "other.txt",
    ):
        path = tmp_path / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"content of {name}\n")
    return tmp_path / "repository"


def rename(repository: Path) -> None:
    (repository / "source/main.py").rename(repository / "source/start.py")


def move_text_between_files(repository: Path) -> None:
    (repository / "source/main.py").write_text("content of source/main.py\ncontent of ")
    (repository / "source/deep/more.py").write_text("source/deep/more.py\n")


def touch(repository: Path) -> None:
    os.utime(repository / "source/main.py", (1, 1))


def compile_bytecode(repository: Path) -> None:
    cached = repository / "source/__pycache__/main.pyc"
    cached.parent.mkdir()
    cached.write_bytes(b"bytecode")


@pytest.mark.parametrize(
    ("change", "changes_tag"),
    [
        pytest.param(lambda repo: (repo / "source/deep/more.py").write_text("new"), True, id="a file's content"),
        pytest.param(lambda repo: (repo / "images/operator/Dockerfile").write_text("new"), True, id="the Dockerfile"),
        pytest.param(lambda repo: (repo / "source/new.py").touch(), True, id="a new, empty file"),
        pytest.param(lambda repo: (repo / "source/main.py").chmod(0o755), True, id="the executable bit"),
        pytest.param(rename, True, id="a file's name"),
        pytest.param(move_text_between_files, True, id="text that moves from one file to the next"),
        pytest.param(lambda repo: (repo / "other.txt").write_text("new"), False, id="a file that is no input"),
        pytest.param(touch, False, id="a file's time"),
        pytest.param(compile_bytecode, False, id="bytecode"),
    ],
)
def test_tag_follows_the_input_files(repository: Path, change: Callable[[Path], object], changes_tag: bool) -> None:
    before = tag(RECIPE, "auto", repository)
    change(repository)
    assert (tag(RECIPE, "auto", repository) != before) is changes_tag


def test_tag_follows_base_and_build_arguments(repository: Path) -> None:
    with_argument = Recipe(RECIPE.name, RECIPE.inputs, build_args={"LOCK": "engine-cpu"})
    tags = {tag(RECIPE, "auto", repository), tag(RECIPE, "local", repository), tag(with_argument, "auto", repository)}
    assert len(tags) == 3


def test_tag_is_an_image_name_that_needs_no_registry(repository: Path) -> None:
    assert re.fullmatch(r"localhost/vllm-ray-operator:[0-9a-f]{12}", tag(RECIPE, "auto", repository))


def test_a_missing_input_is_named(repository: Path) -> None:
    (repository / "requirements.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"image operator: its input requirements\.txt"):
        tag(RECIPE, "auto", repository)


def test_stage_copies_exactly_the_inputs(repository: Path, tmp_path: Path) -> None:
    (repository / "source/main.py").chmod(0o755)
    context = tmp_path / "context"
    stage(RECIPE, context, repository)
    staged = sorted(path.relative_to(context) for path in context.rglob("*") if path.is_file())
    assert staged == input_files(RECIPE, repository)
    assert not (context / "other.txt").exists()
    assert tag(RECIPE, "auto", context) == tag(RECIPE, "auto", repository)


def test_staged_files_have_one_time_whenever_they_were_checked_out(repository: Path, tmp_path: Path) -> None:
    times = set()
    for name, when in (("first", 1_600_000_000), ("second", 1_700_000_000)):
        os.utime(repository / "source/main.py", (when, when))
        stage(RECIPE, tmp_path / name, repository)
        times.add((tmp_path / name / "source/main.py").stat().st_mtime)
    assert len(times) == 1


OF_FILES = [name for name in NAMES if name != "redis"]  # which is of Debian packages alone


@pytest.mark.parametrize("name", OF_FILES)
def test_what_a_dockerfile_copies_is_among_the_inputs(name: str) -> None:
    made_of = recipe(name)
    text = (REPOSITORY / made_of.dockerfile).read_text()
    for argument, value in made_of.build_args.items():
        text = text.replace(f"${{{argument}}}", value)
    copies = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ") and "--from" not in line]
    assert copies
    files = input_files(made_of)
    for source in (source for sources in copies for source in sources):
        assert any(file.is_relative_to(source) for file in files), f"{source} is copied, but is no input"


@pytest.mark.parametrize("name", OF_FILES)
def test_a_step_mounts_nothing_that_decides_its_result(name: str) -> None:
    """buildah takes a RUN step from its cache without looking at its mounts, and mounts a cached stage wrongly.

    The wheels may be mounted, because a lock file that is copied names them by hash.
    """
    text = (REPOSITORY / recipe(name).dockerfile).read_text()
    mounts = re.findall(r"--mount=type=(\S+)", text)
    assert mounts
    for mount in mounts:
        kind, *options = mount.split(",")
        assert kind == "secret" or "from=wheels" in options, mount


@pytest.mark.parametrize("name", NAMES)
def test_every_image_has_a_public_base(name: str) -> None:
    assert public_base((REPOSITORY / recipe(name).dockerfile).read_text()).startswith("docker.io/")


def test_a_dockerfile_without_a_base_argument_is_refused() -> None:
    with pytest.raises(ValueError, match="ARG BASE"):
        public_base("FROM debian\n")


def test_the_engine_takes_the_cpu_build_of_torch_only_from_a_wheel_folder(tmp_path: Path) -> None:
    with_wheels, without = engine_cpu_recipe(tmp_path), engine_cpu_recipe(None)
    assert (with_wheels.build_args, with_wheels.contexts) == ({"LOCK": "engine-cpu"}, {"wheels": tmp_path})
    assert (without.build_args, without.contexts) == ({"LOCK": "engine-cpu-fallback"}, {})
    assert tag(with_wheels, "auto") != tag(without, "auto")


def test_wheels_are_found_beside_the_repository_or_where_pip_looks(tmp_path: Path) -> None:
    repository, linked = tmp_path / "main", tmp_path / "linked wheels"
    shared = tmp_path / "shared/wheels"
    for folder in (repository, linked, shared):
        folder.mkdir(parents=True)
    environ = {"PIP_FIND_LINKS": f"https://example.invalid/wheels '{linked}'"}
    assert find_wheels(environ, repository) is None  # folders without the wheel do not count
    wheel = "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    (shared / wheel).touch()
    assert find_wheels(environ, repository) == shared
    (linked / wheel).touch()
    assert find_wheels(environ, repository) == linked


@pytest.mark.parametrize(
    "lock",
    ["images/build-tools.txt", *(f"requirements/engine-{name}.txt" for name in ("cpu", "cpu-fallback", "test"))],
)
def test_locks_pin_everything_by_hash_and_name_no_index(lock: str) -> None:
    text = (REPOSITORY / lock).read_text()
    assert "://" not in text
    assert "index-url" not in text
    requirements = [entry for entry in text.replace("\\\n", " ").splitlines() if not entry.startswith("#")]
    assert requirements
    for requirement in requirements:
        assert re.match(r"\S+==\S+\s+--hash=sha256:[0-9a-f]{64}", requirement), requirement


def test_test_packages_are_those_of_the_engine_where_both_have_them() -> None:
    """They come first on the engine's path in a test: another version of a shared package would falsify the test."""

    def pins(lock: str) -> dict[str, str]:
        text = (REPOSITORY / "requirements" / lock).read_text()
        return dict(re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)", text, re.MULTILINE))

    engine = pins("engine-cpu.txt")
    shared = {name: version for name, version in pins("engine-test.txt").items() if name in engine}
    assert shared
    assert shared == {name: engine[name] for name in shared}
