"""Settings from the environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vllm_ray_operator.runtime import settings
from vllm_ray_operator.runtime.settings import SettingsError, load


def test_defaults() -> None:
    loaded = load({})
    assert (loaded.engine_image, loaded.namespaces, loaded.workers) == (None, (), 8)
    assert (loaded.log_level, loaded.log_format) == ("info", "json")
    assert (loaded.health_port, loaded.metrics_port) == (8081, 8080)
    assert loaded.pod_namespace == "default"
    assert load({}).identity != loaded.identity, "two processes of one machine are two"


def test_all_set() -> None:
    loaded = load(
        {
            "VLLM_RAY_OPERATOR_ENGINE_IMAGE": "example/engine:1",
            "VLLM_RAY_OPERATOR_NAMESPACES": " team-a, team-b,,team-a ",
            "VLLM_RAY_OPERATOR_LOG_LEVEL": "DEBUG",
            "VLLM_RAY_OPERATOR_LOG_FORMAT": "text",
            "VLLM_RAY_OPERATOR_WORKERS": "3",
            "POD_NAME": "operator-abc",
            "POD_UID": "1a2b",
            "POD_NAMESPACE": "ops",
        }
    )
    assert loaded.engine_image == "example/engine:1"
    assert loaded.namespaces == ("team-a", "team-b")
    assert (loaded.log_level, loaded.log_format, loaded.workers) == ("debug", "text", 3)
    assert (loaded.pod_namespace, loaded.identity) == ("ops", "operator-abc_1a2b")


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("VLLM_RAY_OPERATOR_WORKERS", "0", "a whole number from 1 to 256"),
        ("VLLM_RAY_OPERATOR_WORKERS", "many", "a whole number from 1 to 256"),
        ("VLLM_RAY_OPERATOR_WORKERS", "٣", "a whole number from 1 to 256"),
        ("VLLM_RAY_OPERATOR_HEALTH_PORT", "65536", "a whole number from 1 to 65535"),
        ("VLLM_RAY_OPERATOR_LOG_LEVEL", "loud", "one of debug, info, warning, error"),
        ("VLLM_RAY_OPERATOR_LOG_FORMAT", "xml", "one of json, text"),
        ("VLLM_RAY_OPERATOR_NAMESPACES", "Team_A", "names of namespaces"),
        ("VLLM_RAY_OPERATOR_NAMESPACES", "team-*", "names of namespaces"),
        ("POD_NAMESPACE", "-x", "the name of a namespace"),
        ("VLLM_RAY_OPERATOR_HEALTH_PORT", "8080", "must differ"),
    ],
)
def test_bad_values_are_named_with_what_is_wanted(name: str, value: str, wanted: str) -> None:
    with pytest.raises(SettingsError, match=name) as error:
        load({name: value})
    assert wanted in str(error.value)
    assert "\n" not in str(error.value)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_ray_operator.runtime.main", *arguments],
        env={**os.environ, "PYTHONPATH": "operator", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_bad_value_gives_one_line_and_exit_code_2() -> None:
    done = run(VLLM_RAY_OPERATOR_WORKERS="0")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "VLLM_RAY_OPERATOR_WORKERS is '0'" in done.stderr


def test_help_lists_every_setting_with_its_default() -> None:
    done = run("--help")
    assert done.returncode == 0
    for variable in settings._VARIABLES:
        assert f"{variable.name}  (default: {variable.default or 'empty'})" in done.stdout


def test_version_and_unknown_arguments() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "vllm-ray-operator")
    assert run("--verbose").returncode == 2


def test_without_a_way_to_an_api_server_it_says_so_and_asks_to_be_started_anew() -> None:
    done = run(KUBECONFIG="/nonexistent/config", VLLM_RAY_OPERATOR_LOG_FORMAT="text")
    assert done.returncode == 1
    assert "cannot start: neither a service account nor a usable kubeconfig" in done.stderr
    assert "Traceback" not in done.stderr
