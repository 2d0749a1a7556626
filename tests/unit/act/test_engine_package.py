"""The engine package that travels with every job."""

from __future__ import annotations

import configparser
import hashlib
import io
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from vllm_ray_operator.act import engine_package

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "vllm_ray_engine"
    (folder / "inner" / "__pycache__").mkdir(parents=True)
    (folder / "__init__.py").write_text('"""x"""\n')
    (folder / "plugin.py").write_text("def register(): ...\n")
    (folder / "inner" / "data.json").write_text("{}")
    (folder / "inner" / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"x")
    (folder / "stray.pyc").write_bytes(b"x")
    return folder


def names_in(content: bytes) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(content)).namelist()


def test_what_is_in_it(source: Path) -> None:
    package = engine_package.build(source)
    assert names_in(package.content) == [
        "vllm_ray_engine-0.dist-info/METADATA",
        "vllm_ray_engine-0.dist-info/entry_points.txt",
        "vllm_ray_engine/__init__.py",
        "vllm_ray_engine/inner/data.json",
        "vllm_ray_engine/plugin.py",
    ]


def test_its_name_tells_its_content(source: Path) -> None:
    package = engine_package.build(source)
    assert package.name == f"_ray_pkg_{hashlib.sha256(package.content).hexdigest()[:16]}.zip"
    assert package.uri == f"gcs://{package.name}"
    (source / "plugin.py").write_text("def register(): return 1\n")
    assert engine_package.build(source).name != package.name


def test_the_same_sources_make_the_same_bytes(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "vllm_ray_engine"
    copy.mkdir(parents=True)
    for path in sorted(source.rglob("*"), reverse=True):
        target = copy / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            target.write_bytes(path.read_bytes())
            target.chmod(0o700)
            os.utime(target, (1, 1))
    assert engine_package.build(copy) == engine_package.build(source)


def test_vllm_finds_the_plugin_in_it(source: Path, tmp_path: Path) -> None:
    """Unpacked on sys.path, as Ray does it."""
    zipfile.ZipFile(io.BytesIO(engine_package.build(source).content)).extractall(tmp_path / "unpacked")
    code = (
        "import importlib.metadata as m; "
        "(e,) = m.entry_points(group='vllm.general_plugins', name='vllm_ray_engine'); "
        "print(e.load().__module__, m.distribution('vllm-ray-engine').version)"
    )
    command = [sys.executable, "-c", code]
    env = {"PYTHONPATH": str(tmp_path / "unpacked"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["vllm_ray_engine.plugin", "0"], done.stderr


def test_the_entry_point_is_the_one_of_the_wheel() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    ours = configparser.ConfigParser()
    ours.read_string(engine_package.ENTRY_POINTS)
    assert {group: dict(ours[group]) for group in ours.sections()} == declared


def test_the_installed_package_is_read_but_not_imported() -> None:
    package = engine_package.installed()
    assert "vllm_ray_engine/launch.py" in names_in(package.content)
    assert "vllm_ray_engine/plugin.py" in names_in(package.content)
    code = (
        "import sys; from vllm_ray_operator.act import engine_package; engine_package.installed(); "
        "sys.exit('vllm_ray_engine' in sys.modules)"
    )
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, check=False, timeout=60)
    assert done.returncode == 0
