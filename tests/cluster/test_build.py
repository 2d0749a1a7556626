"""Builds are cached by what goes into them."""

import shutil
from pathlib import Path

import pytest

from e2e.cluster.build import build_flags, content_hash, kubernetes_version
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import GO_MODULE

FLAGS = ["-trimpath"]


@pytest.fixture
def module(tmp_path: Path) -> Path:
    copy = tmp_path / "module"
    shutil.copytree(GO_MODULE, copy)
    return copy


def test_the_same_content_elsewhere_is_the_same_build(module: Path) -> None:
    assert content_hash(module, FLAGS, "go1.26.8") == content_hash(GO_MODULE, FLAGS, "go1.26.8")


@pytest.mark.parametrize("changed", ["go.mod", "go.sum", "kubernetes/main.go", "coredns/main.go", "pause/main.go"])
def test_a_change_of_any_source_is_another_build(module: Path, changed: str) -> None:
    before = content_hash(module, FLAGS, "go1.26.8")
    with (module / changed).open("a") as file:
        file.write("\n")
    assert content_hash(module, FLAGS, "go1.26.8") != before


def test_another_go_or_other_flags_are_another_build() -> None:
    hashes = {
        content_hash(GO_MODULE, FLAGS, "go1.26.8"),
        content_hash(GO_MODULE, FLAGS, "go1.26.9"),
        content_hash(GO_MODULE, [], "go1.26.8"),
    }
    assert len(hashes) == 3


def test_the_version_comes_from_the_go_module_and_is_stamped_into_the_binaries() -> None:
    version = kubernetes_version((GO_MODULE / "go.mod").read_text())
    assert version.startswith("v1.34.")
    linker = build_flags("v1.34.2")[-1]
    assert "version.gitVersion=v1.34.2" in linker
    assert "version.gitMajor=1 " in linker
    assert "version.gitMinor=34 " in linker


def test_a_module_without_kubernetes_is_refused() -> None:
    with pytest.raises(ClusterError, match="does not require"):
        kubernetes_version("module x\n")
