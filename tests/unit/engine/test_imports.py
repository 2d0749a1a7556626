"""Import lists: what is kept, what is believed, and what an import may do."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_ray_engine.standby import imports
from vllm_ray_engine.standby.imports import Imports


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The private folder, and no second choice."""
    path = tmp_path / "cache" / "vllm-ray-engine"
    monkeypatch.setattr(imports, "folders", lambda: (path,))
    return path


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules that count as installed; whatever is imported from it is forgotten again."""
    path = tmp_path / "site-packages"
    path.mkdir()
    monkeypatch.syspath_prepend(str(path))
    monkeypatch.setattr(imports.sysconfig, "get_path", lambda _: str(path))
    before = set(sys.modules)
    yield path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def keep(*modules: str, banned: tuple[str, ...] = ()) -> None:
    imports._keep("worker", Imports(modules, frozenset(banned)))


def test_what_is_kept_is_read_again(folder: Path) -> None:
    keep("a", "b.c", banned=("d",))
    assert imports.load("worker") == Imports(("a", "b.c"), frozenset({"d"}))
    assert imports.load("EngineCore") == Imports(), "each kind of process has its own"
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


def test_other_versions_or_sources_have_other_lists(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep("a")
    monkeypatch.setattr("vllm_ray_engine.versions.installed", {"vllm": "0.33.0", "ray": "2.60.0"}.get)
    assert imports.load("worker") == Imports()


def test_any_source_of_the_package_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {path.name for path in imports._sources()}
    assert {"launch.py", "packing.py", "warm.py", "teardown.py"} <= names
    keep("a")
    monkeypatch.setattr(imports, "_sources", lambda: iter([Path(__file__)]))
    assert imports.load("worker") == Imports()


def _foreign_folder(folder: Path) -> None:
    folder.chmod(0o770)


def _foreign_file(folder: Path) -> None:
    next(folder.iterdir()).chmod(0o602)


def _link_to_a_file(folder: Path) -> None:
    file = next(folder.iterdir())
    file.rename(folder.parent / "elsewhere")
    file.symlink_to(folder.parent / "elsewhere")


def _link_to_a_folder(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


def _pipe(folder: Path) -> None:
    file = next(folder.iterdir())
    file.unlink()
    os.mkfifo(file, 0o600)


def _no_json(folder: Path) -> None:
    next(folder.iterdir()).write_text("{")


def _other_json(folder: Path) -> None:
    next(folder.iterdir()).write_text('{"modules": [1], "banned": []}')


@pytest.mark.parametrize(
    "spoil", [_foreign_folder, _foreign_file, _link_to_a_file, _link_to_a_folder, _pipe, _no_json, _other_json]
)
def test_what_others_could_have_written_is_not_believed(spoil: Any, folder: Path) -> None:
    keep("a")
    spoil(folder)
    assert imports.load("worker") == Imports()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_another_user_owns_is_not_believed(folder: Path) -> None:
    keep("a")
    os.chown(next(folder.iterdir()), 1234, -1)
    assert imports.load("worker") == Imports()
    os.chown(folder, 1234, -1)
    with pytest.raises(OSError, match="no folder that only this user can write"):
        keep("a")


def test_a_second_folder_serves_where_the_first_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(imports, "folders", lambda: (tmp_path / "file" / "x", tmp_path / "second", tmp_path / "third"))
    assert imports.load("worker") == Imports()
    keep("a")
    assert imports.load("worker").modules == ("a",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "second"]


def test_only_installed_code_is_listed(packages: Path) -> None:
    (packages / "good.py").touch()
    (packages.parent / "jobs_own.py").touch()
    good = __import__("good")
    sys.path.append(str(packages.parent))
    try:
        own = __import__("jobs_own")
    finally:
        sys.path.remove(str(packages.parent))
    made = ModuleType("made_at_run_time")
    alias = good
    listed = [("good", good), ("jobs_own", own), ("made_at_run_time", made), ("alias", alias), ("sys", sys)]
    assert imports.installed([*listed, ("__main__", sys.modules["__main__"])]) == ["good", "sys"]


def test_recording_adds_and_keeps_the_order(folder: Path, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second", "third"):
        (packages / f"{name}.py").touch()
    keep("first", banned=("third",))
    found = {name: __import__(name) for name in ("second", "first", "third")}
    monkeypatch.setattr(sys, "modules", found)
    imports.record("worker")
    assert imports.load("worker") == Imports(("first", "second"), frozenset({"third"}))
    (file,) = folder.iterdir()
    written = file.stat().st_mtime_ns
    imports.record("worker")
    assert file.stat().st_mtime_ns == written, "written only when there is something new"


def test_replay_imports_and_failures_are_harmless(folder: Path, packages: Path) -> None:
    (packages / "good.py").touch()
    (packages / "banned.py").touch()
    (packages / "broken.py").write_text("raise RuntimeError")
    (packages / "leaving.py").write_text("raise SystemExit")
    keep("broken", "sys", "absent", "leaving", "banned", "good", banned=("banned",))
    assert imports.replay("worker") == (1, 3)
    assert "good" in sys.modules
    assert "banned" not in sys.modules


def test_nothing_is_known_yet(folder: Path) -> None:
    assert imports.replay("worker") == (0, 0)


def test_a_module_that_touches_the_device_is_banned(
    folder: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[bool] = []
    torch = ModuleType("torch")
    torch.__dict__["cuda"] = SimpleNamespace(is_initialized=lambda: bool(touched), touched=touched)
    monkeypatch.setitem(sys.modules, "torch", torch)
    (packages / "harmful.py").write_text("import torch; torch.cuda.touched.append(True)")
    (packages / "good.py").touch()
    keep("harmful", "good")
    with pytest.raises(imports.DeviceTouched, match="harmful"):
        imports.replay("worker")
    assert "good" not in sys.modules
    touched.clear()
    assert imports.replay("worker") == (1, 0)
    assert imports.load("worker").banned == {"harmful"}


def _others_can_change(folder: Path) -> bool:
    with imports._private_folder() as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.parametrize("change", [imports.record, lambda kind: imports.ban(kind, "b")], ids=["record", "ban"])
def test_a_list_is_changed_by_one_at_a_time(change: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From reading to writing: a list that is recorded must not overwrite a ban that came in between."""
    others: list[bool] = []
    load, kept = imports.load, imports._keep
    monkeypatch.setattr(imports, "load", lambda kind: (others.append(_others_can_change(folder)), load(kind))[1])
    monkeypatch.setattr(
        imports, "_keep", lambda kind, new: (others.append(_others_can_change(folder)), kept(kind, new))[1]
    )
    change("worker")
    assert others == [False, False]
    assert _others_can_change(folder)


def test_a_file_system_without_locks_will_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(imports.fcntl, "flock", flock)
    imports.ban("worker", "b")
    assert imports.load("worker").banned == {"b"}


def test_a_replay_ends_in_time(folder: Path, packages: Path) -> None:
    (packages / "good.py").touch()
    keep("good")
    assert imports.replay("worker", -1.0) == (0, 0)
