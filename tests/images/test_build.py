"""An image is built once, whatever interrupts it; a stand-in takes the place of Docker and buildah."""

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.images import build as builder
from e2e.images.build import KEPT_ARCHIVES, Built, archive_name, build, build_settings
from e2e.images.process import CommandError, Progress
from e2e.images.spec import operator_recipe, public_base, stage
from e2e.images.tools import BuildRequest, RunRequest

DOCKERFILE = "ARG BASE=registry.invalid/python:3\nFROM ${BASE}\n"
PUBLIC_BASE = public_base(DOCKERFILE)


class FakeTool:
    """Remembers images; `reachable` are those that a registry would give."""

    def __init__(self) -> None:
        self.images: set[str] = set()
        self.reachable: set[str] = set()
        self.pulls: list[str] = []
        self.builds: list[BuildRequest] = []
        self.build_env = ""
        self.staged: dict[str, str] = {}
        self.during_export: Callable[[], None] = lambda: None

    def has(self, image: str) -> bool:
        return image in self.images

    def pull(self, image: str) -> bool:
        self.pulls.append(image)
        if image in self.reachable:
            self.images.add(image)
        return image in self.reachable

    def load_base(self, tarball: Path, image: str) -> None:
        assert tarball.read_text() == "root file system"
        self.images.add(image)

    def build(self, request: BuildRequest, progress: Progress) -> None:
        assert request.build_args["BASE"] in self.images
        self.builds.append(request)
        self.build_env = request.secrets["build-env"].read_text()
        files = [path for path in request.context.rglob("*") if path.is_file()]
        self.staged = {path.relative_to(request.context).as_posix(): path.read_text() for path in files}
        self.images.add(request.image)

    def export(self, image: str, archive: Path) -> None:
        archive.write_text("half of ")
        self.during_export()
        archive.write_text(f"archive of {image}")

    def load(self, archive: Path) -> None:
        self.images.add(archive.read_text().removeprefix("archive of "))

    def run(self, request: RunRequest) -> int:
        raise NotImplementedError

    def forget(self, image: str) -> None:
        self.images.discard(image)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTool:
    fake = FakeTool()
    monkeypatch.setattr(builder, "find_tool", lambda _state: fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tarball = tmp_path / "base.tar"
    tarball.write_text("root file system")
    monkeypatch.setattr(builder, "_local_base_tarball", lambda _progress: tarball)
    return fake


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    for entry in operator_recipe().inputs:
        path = root / entry
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry in {"operator", "images/operator"}:
            path.mkdir()
        else:
            path.write_text(entry)
    (root / "images/operator/Dockerfile").write_text(DOCKERFILE)
    (root / "operator/main.py").write_text("one")
    return root


def test_an_image_is_built_once(tool: FakeTool, repository: Path) -> None:
    first = build("operator", repository=repository)
    second = build("operator", repository=repository)
    assert (first.built, second.built) == (True, False)
    assert first.archive == second.archive
    assert first.archive.read_text() == f"archive of {first.image}"
    assert len(tool.builds) == 1
    assert tool.staged["operator/main.py"] == "one"


def test_a_change_is_built_under_another_name(tool: FakeTool, repository: Path) -> None:
    first = build("operator", repository=repository)
    (repository / "operator/main.py").write_text("two")
    second = build("operator", repository=repository)
    assert second.image != first.image
    assert [request.image for request in tool.builds] == [first.image, second.image]


def test_an_interrupted_export_leaves_no_archive_and_is_made_up_for(tool: FakeTool, repository: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    tool.during_export = interrupt
    with pytest.raises(KeyboardInterrupt):
        build("operator", repository=repository)
    archives = builder._archives()
    assert list(archives.iterdir()) == []
    (archives / "left-by-a-killed-writer.partial").touch()

    tool.during_export = lambda: None
    built = build("operator", repository=repository)
    assert built.archive.read_text() == f"archive of {built.image}"
    assert len(tool.builds) == 1, "the image was there already"


def test_files_changed_before_the_lock_was_had_are_built_under_their_own_tag(
    tool: FakeTool, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit_then_stage(*arguments: object) -> None:
        (repository / "operator/main.py").write_text("edited while waiting")
        stage(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(builder, "stage", edit_then_stage)
    built = build("operator", repository=repository)
    assert tool.staged["operator/main.py"] == "edited while waiting"
    monkeypatch.setattr(builder, "stage", stage)
    assert not build("operator", repository=repository).built
    assert built.image == tool.builds[0].image


def test_only_the_newest_archives_are_kept(tool: FakeTool, repository: Path) -> None:
    built: list[Built] = []
    for number in range(KEPT_ARCHIVES + 2):
        (repository / "operator/main.py").write_text(str(number))
        built.append(build("operator", repository=repository))
    kept = built[-KEPT_ARCHIVES:]
    assert {one.archive for one in built if one.archive.exists()} == {one.archive for one in kept}
    assert {one.image for one in built if tool.has(one.image)} == {one.image for one in kept}


def test_an_archive_elsewhere_is_written_there_and_others_there_are_left_alone(
    tool: FakeTool, repository: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for number in range(KEPT_ARCHIVES + 1):
        (repository / "operator/main.py").write_text(str(number))
        built = build("operator", out=out, repository=repository)
    assert built.archive == out / archive_name(built.image)
    assert len(list(out.glob("*.tar"))) == KEPT_ARCHIVES + 1


@pytest.mark.parametrize(
    ("asked", "reachable", "expected", "pulls"),
    [
        pytest.param("auto", True, PUBLIC_BASE, [PUBLIC_BASE], id="auto: the public base where it can be pulled"),
        pytest.param("auto", False, builder._LOCAL_BASE, [PUBLIC_BASE], id="auto: else a local one"),
        pytest.param("local", True, builder._LOCAL_BASE, [], id="local: nothing public is tried"),
        pytest.param(PUBLIC_BASE, True, PUBLIC_BASE, [PUBLIC_BASE], id="a reference: that one"),
    ],
)
def test_base(tool: FakeTool, repository: Path, asked: str, reachable: bool, expected: str, pulls: list[str]) -> None:
    tool.reachable = {PUBLIC_BASE} if reachable else set()
    build("operator", asked, repository=repository)
    assert tool.builds[0].build_args["BASE"] == expected
    assert tool.pulls == pulls


def test_the_base_is_looked_for_once(tool: FakeTool, repository: Path) -> None:
    build("operator", repository=repository)
    (repository / "operator/main.py").write_text("two")
    build("operator", repository=repository)
    assert tool.pulls == [PUBLIC_BASE]


def test_a_base_that_cannot_be_pulled_is_named(tool: FakeTool, repository: Path) -> None:
    with pytest.raises(CommandError, match=r"registry\.invalid/mine:1 cannot be pulled"):
        build("operator", "registry.invalid/mine:1", repository=repository)


def test_installer_settings_are_handed_over_as_a_secret_and_never_as_an_argument(
    tool: FakeTool, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:secret@example.invalid/simple")
    build("operator", repository=repository)
    assert "secret" in tool.build_env
    assert "secret" not in str(tool.builds[0].build_args)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({"PATH": "/bin", "PIP_TARGET": "/here", "UV_CACHE_DIR": "/c"}, "", id="what is this machine's"),
        pytest.param({"HTTP_PROXY": "http://p:1"}, "HTTP_PROXY=http://p:1\n", id="a proxy"),
        pytest.param({"UV_INDEX": "a b'c"}, "UV_INDEX='a b'\"'\"'c'\n", id="quoting"),
        pytest.param(
            {"PIP_INDEX_URL": "http://i"},
            "PIP_INDEX_URL=http://i\nUV_DEFAULT_INDEX=http://i\n",
            id="uv is told of pip's index",
        ),
        pytest.param(
            {"PIP_INDEX_URL": "http://i", "UV_INDEX_URL": "http://u"},
            "PIP_INDEX_URL=http://i\nUV_INDEX_URL=http://u\n",
            id="unless it has its own",
        ),
    ],
)
def test_build_settings(environ: dict[str, str], expected: str) -> None:
    assert build_settings(environ) == expected
