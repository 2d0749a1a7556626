"""Small pure parts: manifests, kubeconfigs, the command line, the remains of a stopped cluster."""

import base64
import json
import socket
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster import teardown
from e2e.cluster.cli import parser
from e2e.cluster.cluster import Intent, Mode, free_port, is_free
from e2e.cluster.errors import CommandError
from e2e.cluster.files import write_file
from e2e.cluster.manifests import KUBERAY_NAMESPACE, kuberay_rbac
from e2e.cluster.pki import KUBERAY, User, kubeconfig


def test_kuberay_rbac_is_placed_and_names_the_user_that_its_process_has() -> None:
    documents: list[dict[str, Any]] = [
        {"kind": "ServiceAccount", "metadata": {"name": "kuberay-operator"}},
        {"kind": "ClusterRole", "metadata": {"name": "kuberay-operator"}},
        {"kind": "ClusterRoleBinding", "subjects": [{"kind": "ServiceAccount", "name": "kuberay-operator"}]},
    ]
    namespace, account, role, binding = kuberay_rbac(documents)
    assert namespace["kind"] == "Namespace"
    assert account["metadata"]["namespace"] == KUBERAY_NAMESPACE
    assert "namespace" not in role["metadata"]
    subject = binding["subjects"][0]
    assert KUBERAY.name == f"system:serviceaccount:{subject['namespace']}:{subject['name']}"


def test_a_kubeconfig_carries_all_it_needs() -> None:
    text = kubeconfig("https://127.0.0.1:1", b"authority", User("admin", "admin"), "secret")
    config = yaml.safe_load(text)
    assert config == json.loads(text)
    assert base64.b64decode(config["clusters"][0]["cluster"]["certificate-authority-data"]) == b"authority"
    assert config["users"][0]["user"] == {"token": "secret"}
    assert config["current-context"] == config["contexts"][0]["name"]


def test_the_mode_follows_from_the_nodes() -> None:
    assert Intent(nodes=0, port=1).mode is Mode.CONTROL_PLANE
    assert Intent(nodes=2, port=1).mode is Mode.NODE


def test_the_command_line_takes_foreign_flags_after_the_dashes() -> None:
    arguments = parser().parse_args(["--name", "x", "exec", "--", "kubectl", "get", "pods", "-A"])
    assert arguments.words == ["kubectl", "get", "pods", "-A"]
    assert parser().parse_args(["kubectl", "--", "get", "-o", "yaml"]).words == ["get", "-o", "yaml"]
    assert parser().parse_args(["up", "--mode", "node"]).mode is Mode.NODE


@pytest.mark.parametrize("line", [["up", "--mode", "half"], ["load"], ["exec"], []])
def test_a_wrong_command_line_is_refused(line: list[str]) -> None:
    with pytest.raises((SystemExit, ArgumentTypeError)):
        parser().parse_args(line)


def test_a_port_is_free_until_somebody_listens() -> None:
    port = free_port()
    assert is_free(port)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)


def test_a_file_that_holds_the_text_already_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "a" / "file"
    write_file(path, "one")
    before = path.stat()
    write_file(path, "one")
    assert path.stat().st_ino == before.st_ino
    write_file(path, "two")
    assert path.read_text() == "two"
    assert list(path.parent.iterdir()) == [path]


def test_only_the_kept_paths_are_left(tmp_path: Path) -> None:
    kept, lock = tmp_path / "nodes" / "one" / "lib" / "containerd", tmp_path / "lock"
    for file in (kept / "blob", lock, tmp_path / "nodes" / "one" / "run" / "x", tmp_path / "pki" / "ca.key"):
        write_file(file, "x")
    (tmp_path / "nodes" / "one" / "link").symlink_to(kept)
    teardown._remove_except(tmp_path, {kept, lock})
    assert sorted(path for path in tmp_path.rglob("*") if not path.is_dir()) == [lock, kept / "blob"]
    assert not (tmp_path / "pki").exists()


def test_a_failed_command_shows_the_end_of_its_output() -> None:
    error = CommandError(["tool", "arg"], 3, "".join(f"line {number}\n" for number in range(100)))
    assert str(error).startswith("tool arg: exit 3\n")
    assert "line 99" in str(error)
    assert "line 1\n" not in str(error)
