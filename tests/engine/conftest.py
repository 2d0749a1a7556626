"""Fixtures of the engine tests: one Ray cluster, and attempts that run on it.

They need the environment of the engine image (vLLM and Ray beside the running Python) and nothing of the repository's
development environment but pytest.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [path for path in [str(ROOT / "operator")] if path not in sys.path]

from vllm_ray_engine.launcher.control import bearer  # noqa: E402

from .ray_cluster import DRIVER, HEAD, SLOT, RayCluster, free_port, get, processes, wait_for  # noqa: E402

MODEL = os.environ.get("VLLM_RAY_TEST_MODEL", "/models/tiny")
ENGINE_ARGUMENTS = ["--dtype=float32", "--max-model-len=256", "--enforce-eager", "--kv-cache-memory-bytes=64M"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in ("ray", "vllm") if importlib.util.find_spec(name) is None]
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("engine")
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"not installed here: {', '.join(missing)}"))


def _package() -> Any:
    """Build the zip with the operator's own builder, loaded by its path: its package's dependencies are not here."""
    path = ROOT / "operator/vllm_ray_operator/act/engine_package.py"
    spec = importlib.util.spec_from_file_location("engine_package", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.build(ROOT / "operator/vllm_ray_engine")


@dataclass
class Attempt:
    """One submitted engine job."""

    cluster: RayCluster
    config: dict[str, Any]

    @property
    def instance_id(self) -> str:
        return str(self.config["instanceId"])

    @property
    def submission(self) -> str:
        """Return the id of its Ray job: the ranks of an attempt may have one each."""
        rank = self.config.get("dataRank")
        return self.instance_id if rank is None else f"{self.instance_id}_dp{rank}"

    @property
    def port(self) -> int:
        return int(self.config["port"])

    @property
    def control_port(self) -> int:
        return int(self.config["controlPort"])

    @property
    def token(self) -> str:
        return bearer(self.cluster.token, self.instance_id)

    def state(self, query: str = "") -> dict[str, Any]:
        """Return the control endpoint's state, {} while it does not listen."""
        return get(f"http://{HEAD}:{self.control_port}/v1/state{query}", self.token, timeout=70)[1] or {}

    def wait_phase(self, phase: str, timeout: float) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            state = self.state()
            if not state or state["phase"] != phase:
                assert self.status() in {"PENDING", "RUNNING"}, self.logs()[-4000:]
                return None
            return state

        reached_state: dict[str, Any] = wait_for(f"{self.submission} to be {phase}", reached, timeout)
        return reached_state

    def status(self) -> str:
        return str(self.cluster.job(self.submission)["status"])

    def logs(self) -> str:
        return self.cluster.logs(self.submission)

    def complete(self, tokens: int = 4, timeout: float = 60) -> int:
        """Have so many tokens generated; return the status, and check that all of them came if it is 200."""
        status, answer = get(
            f"http://{HEAD}:{self.port}/v1/completions", timeout=timeout,
            body={"model": "tiny", "prompt": "hello", "max_tokens": tokens, "ignore_eos": True},
        )  # fmt: skip
        assert status != 200 or answer["usage"]["completion_tokens"] == tokens, answer
        return status

    def stop(self) -> None:
        self.cluster.stop_job(self.submission)

    def left(self) -> list[str]:
        """Return everything of this attempt that still exists."""
        return [
            *(f"actor {row['name']}" for row in self.cluster.actors(self.instance_id)),
            *(f"placement group {row['placement_group_id']}" for row in self.cluster.groups(self.instance_id)),
            *(f"process {pid}" for pid in self.processes()),
        ]

    def processes(self, *marks: str) -> list[int]:
        return processes(f'"instanceId": "{self.instance_id}"', *marks)

    def wait_ended(self, timeout: float) -> dict[str, str]:
        """Wait until the job is over and return its result line."""
        wait_for(f"{self.submission} to end", lambda: self.status() in {"STOPPED", "FAILED", "SUCCEEDED"}, timeout)
        return self.result()

    def result(self) -> dict[str, str]:
        last = self.logs().rstrip().splitlines()[-1]
        mark, _, text = last.partition(" ")
        assert mark == "VLLM_RAY_ENGINE_RESULT", last
        result: dict[str, str] = json.loads(text)
        return result


class Attempts:
    """Starts attempts on the cluster."""

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster
        self._package = _package()
        self.started: list[Attempt] = []

    def start(
        self, *extra: str, environment: dict[str, str] | None = None, driver: str = DRIVER, **changes: Any
    ) -> Attempt:
        """Submit an attempt; `extra` are more engine arguments, `changes` are put over the configuration.

        `driver` is the resource that its launcher takes.
        """
        number = len(self.started) + 1
        config = {
            "version": 1,
            "instanceId": f"test-a{number}-{os.getpid()}",
            "deployment": "default/test",
            "replica": 0,
            "attempt": number,
            "model": MODEL,
            "revision": None,
            "servedName": "tiny",
            "host": "0.0.0.0",
            "port": free_port(),
            "controlPort": free_port(),
            "tensor": 2,
            "pipeline": 1,
            "acceleratorKey": "GPU",
            "acceleratorsPerNode": 1,
            "slotResource": SLOT,
            "args": [*ENGINE_ARGUMENTS, *extra],
            "startupTimeoutSeconds": 300,
            "stopGraceSeconds": 20,
        } | changes
        attempt = Attempt(self.cluster, config)
        variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
        self.cluster.upload(self._package.name, self._package.content)
        self.cluster.submit(
            attempt.submission,
            self._package.uri,
            variables | (environment or {}) | {"VLLM_RAY_ENGINE_CONFIG": json.dumps(config)},
            driver,
        )
        self.started.append(attempt)
        return attempt


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    cluster = RayCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def attempts(cluster: RayCluster) -> Attempts:
    return Attempts(cluster)
