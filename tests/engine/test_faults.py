"""The three faults of vLLM on Ray, in pairs: without the plug-in the fault is there, with it the same script passes.

The scenarios stand in faults/: vLLM's real classes on a real Ray cluster of two nodes, stand-ins for the device only.
"""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vllm_ray_engine.patches.context import ENVIRONMENT_VARIABLE, Context

from .conftest import _package
from .ray_cluster import HEAD, WORKER, RayCluster

BROKEN = "the worker's model is broken"
FOREIGN = "ActorHandleNotFoundError"
TAKEN = "ActorAlreadyExistsError"


@dataclass
class Outcome:
    """How a scenario ended. found: what it told."""

    code: int
    output: str
    found: dict[str, Any]

    @property
    def last(self) -> str:
        return [line for line in self.output.splitlines() if line.strip()][-1]


class Scenarios:
    """The program that runs scenarios, each in a fork of it."""

    def __init__(self, cluster: RayCluster, folder: Path) -> None:
        self._folder = folder
        archive = folder / "package.zip"
        archive.write_bytes(_package().content)
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(folder / "package")
        environment = dict(os.environ) | {
            "PYTHONPATH": str(folder / "package"),
            cluster.mark.partition("=")[0]: cluster.mark.partition("=")[2],
            "RAY_ADDRESS": f"{HEAD}:{cluster.gcs_port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": cluster.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "VLLM_HOST_IP": HEAD,
        }
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "faults/run.py")], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._answer("ready")

    def _answer(self, key: str) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)[key]
        raise AssertionError("the scenarios' program ended")

    def __call__(
        self, scenario: str, *, plugin: bool, instance_id: str = "", unnamed: bool = False, seconds: int = 180,
        **arguments: Any,
    ) -> Outcome:  # fmt: skip
        """Run it, for so many seconds at most; unnamed: without vLLM's naming of the ranks that Ray actors run."""
        output = self._folder / f"{secrets.token_hex(4)}.log"
        instance_id = instance_id or f"faults-{secrets.token_hex(4)}"
        context = Context(instance_id, instance_id, rank=arguments.get("rank"))
        variables = {ENVIRONMENT_VARIABLE: context.as_json()} if plugin else {}
        request = {
            "scenario": scenario, "output": str(output), "environment": variables, "unnamed": unnamed,
            "seconds": seconds, "arguments": arguments,
        }  # fmt: skip
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        code = self._answer("code")
        text = re.sub(r"\x1b\[\d+m", "", output.read_text(errors="replace"))
        found: dict[str, Any] = {}
        for line in text.splitlines():
            if line.startswith("FOUND "):
                found |= json.loads(line.removeprefix("FOUND "))
        print(f"--- {scenario} {'with' if plugin else 'without'} the plug-in: exit code {code}\n{text}", flush=True)
        return Outcome(code, text, found)

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture(scope="module")
def scenario(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenarios]:
    scenarios = Scenarios(cluster, tmp_path_factory.mktemp("faults"))
    yield scenarios
    scenarios.close()


TRIES = 5


def pair(test: Callable[..., None]) -> Callable[..., None]:
    """Without the plug-in and with it.

    Without, most of the faults are races of threads with exit hooks: each is to show in one of so many runs, the way
    the test says. With it, there is one run, and nothing to forgive.
    """

    @functools.wraps(test)
    def run(*, plugin: bool, **arguments: Any) -> None:
        for tried in range(1, 1 if plugin else TRIES):
            try:
                return test(plugin=plugin, **arguments)
            except (AssertionError, KeyError) as error:
                print(f"run {tried} did not show it: {error}")
        return test(plugin=plugin, **arguments)

    return pytest.mark.parametrize("plugin", [False, True], ids=["without", "with"])(run)


# Teardown.


@pair
def test_worker_fails_at_start(scenario: Scenarios, plugin: bool) -> None:
    ended = scenario("teardown.worker_fails_at_start", plugin=plugin)
    assert ended.code == 1
    assert (FOREIGN in ended.output) is not plugin
    assert (ended.last == f"RuntimeError: {BROKEN}") is plugin, "the error that ended it is the last thing in the log"


@pair
def test_engine_fails_with_workers_up(scenario: Scenarios, plugin: bool) -> None:
    ended = scenario("teardown.engine_fails_with_workers_up", plugin=plugin)
    assert (FOREIGN in ended.output) is not plugin
    assert (ended.last == f"RuntimeError: {BROKEN}") is plugin


@pair
def test_second_engine_after_the_first_died(scenario: Scenarios, plugin: bool) -> None:
    ended = scenario("teardown.second_engine_after_the_first_died", plugin=plugin)
    first, second, at_last = ended.found["jobs"]
    assert first != second == at_last
    assert (FOREIGN in ended.output) is not plugin
    assert ended.found["workers"] == 2, "the second engine lives"


@pair
def test_executor_when_ray_is_down(scenario: Scenarios, plugin: bool) -> None:
    ended = scenario("teardown.executor_when_ray_is_down", plugin=plugin)
    assert ended.found["connected"] is not plugin, "without the plug-in, the teardown has opened a new Ray job"
    assert (FOREIGN in ended.output) is not plugin


@pair
def test_executor_in_its_own_job(scenario: Scenarios, plugin: bool) -> None:
    found = scenario("teardown.executor_in_its_own_job", plugin=plugin).found
    assert (found["before"], found["gone"]) == (2, True)


@pair
def test_executor_that_made_nothing(scenario: Scenarios, plugin: bool) -> None:
    ended = scenario("teardown.executor_that_made_nothing", plugin=plugin)
    assert ended.last == f"RuntimeError: {BROKEN}"
    assert "Connecting to existing Ray cluster" not in ended.output


@pair
def test_worker_dies(scenario: Scenarios, plugin: bool) -> None:
    found = scenario("teardown.worker_dies", plugin=plugin).found
    assert (found["gone"], found["failed"]) == (True, True)


@pair
@pytest.mark.parametrize("reconnected", [False, True], ids=["own job", "older job"])
def test_classic_executor(scenario: Scenarios, reconnected: bool, plugin: bool) -> None:
    ended = scenario("teardown.classic_executor", plugin=plugin, reconnected=reconnected, seconds=40)
    assert (FOREIGN in ended.output) is (reconnected and not plugin)
    # Without: its __del__ tries again at the interpreter's end, connects once more, and hangs.
    assert (ended.code == 0) is (plugin or not reconnected)
    assert ended.found.get("gone", True)


@pair
def test_manager_at_exit(scenario: Scenarios, plugin: bool) -> None:
    ended = scenario("teardown.manager_at_exit", plugin=plugin)
    assert (FOREIGN in ended.output) is not plugin
    assert (ended.last == f"RuntimeError: {BROKEN}") is plugin


@pair
def test_manager_of_an_older_job(scenario: Scenarios, plugin: bool) -> None:
    ended = scenario("teardown.manager_of_an_older_job", plugin=plugin)
    assert (FOREIGN in ended.output) is not plugin
    assert (ended.code == 0) is plugin
    if plugin:
        assert ended.found["jobs"][1] == ended.found["jobs"][2]


@pair
@pytest.mark.parametrize(
    "name", ["manager_when_ray_is_down", "monitor_when_ray_is_down", "scale_down_when_ray_is_down"]
)
def test_nothing_of_a_manager_connects_to_ray_again(scenario: Scenarios, name: str, plugin: bool) -> None:
    assert scenario(f"teardown.{name}", plugin=plugin).found["connected"] is not plugin


@pair
def test_one_kill_fails(scenario: Scenarios, plugin: bool) -> None:
    found = scenario("teardown.one_kill_fails", plugin=plugin).found
    assert (found["gone"], found["removed"]) == (plugin, plugin)
    assert ("error" in found) is not plugin


@pair
def test_engine_cores_that_are_dead_already(scenario: Scenarios, plugin: bool) -> None:
    ended = scenario("teardown.engine_cores_are_dead_already", plugin=plugin)
    assert (ended.code, ended.found["dead"]) == (0, True)


# Identity.


@pair
def test_config_copies(scenario: Scenarios, plugin: bool) -> None:
    found = scenario("identity.config_copies", plugin=plugin, instance_id="chat-a7").found
    if plugin:
        assert set(found["base"].values()) == {"chat-a7"}
        assert set(found["rank"].values()) == {"chat-a7_dp1"}
    else:
        assert found["base"]["replace"] != found["base"]["copy"] == found["base"]["deepcopy"]
        assert not any(name.endswith("_dp1") for name in found["rank"].values()), "replace loses the rank"


@pair
def test_namespace(scenario: Scenarios, plugin: bool) -> None:
    found = scenario("identity.namespace", plugin=plugin, instance_id="chat-a7").found
    assert (found["namespace"] == "chat-a7") is plugin


@pair
@pytest.mark.parametrize("unnamed", [True, False], ids=["vLLM names nothing", "as vLLM 0.21 and newer"])
def test_ranks_in_actors(scenario: Scenarios, unnamed: bool, plugin: bool) -> None:
    ended = scenario("identity.ranks_in_actors", plugin=plugin, unnamed=unnamed, instance_id="chat-a7")
    if unnamed and not plugin:
        assert TAKEN in ended.output
        return
    names = [rank["instance_id"] for rank in ended.found["ids"]]
    assert len(set(names)) == 2
    assert (names == ["chat-a7_dp0", "chat-a7_dp1"]) is plugin
    assert ended.found["upstream_names_ranks"] is not unnamed or not plugin, "our patch stepped aside"


def test_groups_of_two_services(scenario: Scenarios) -> None:
    found = scenario("identity.two_services", plugin=False, nodes={"chat-a7": HEAD, "code-a3": WORKER}).found
    chat, code = found["chat-a7"], found["code-a3"]
    assert chat[0] != code[0], "both have a group of the name dp_rank_0"
    assert chat[1:] == code[1:] == ["CREATED", 1]


@pair
@pytest.mark.parametrize("unnamed", [True, False], ids=["vLLM names nothing", "as vLLM 0.21 and newer"])
def test_elastic_scale(scenario: Scenarios, unnamed: bool, plugin: bool) -> None:
    ended = scenario("identity.elastic_scale", plugin=plugin, unnamed=unnamed, instance_id="chat-a7")
    if unnamed and not plugin:
        assert TAKEN in ended.output
        return
    assert ended.found["left_after_scale_down"]
    if plugin:
        assert [rank["instance_id"] for rank in ended.found["ids"]] == ["chat-a7", "chat-a7_dp1"]


@pair
def test_ranks_in_processes(scenario: Scenarios, plugin: bool) -> None:
    found = scenario("identity.ranks_in_processes", plugin=plugin, method="fork", size=2, instance_id="chat-a7").found
    if plugin:
        assert (found["0"], found["1"]) == (["chat-a7_dp0", "chat-a7_dp0", None], ["chat-a7_dp1", "chat-a7_dp1", None])
    else:
        assert found["0"][0] == found["1"][0], "two ranks share the instance id"
        assert (found["0"][1], found["1"][1]) == ("fixed_dp0", "fixed_dp1"), "every attempt has the same engine ids"


def test_ranks_in_spawned_processes(scenario: Scenarios) -> None:
    ended = scenario(
        "identity.ranks_in_processes", plugin=True, method="spawn", size=2, instance_id="chat-a7", seconds=240
    )
    found = ended.found
    assert (found["0"][:2], found["1"][:2]) == (["chat-a7_dp0"] * 2, ["chat-a7_dp1"] * 2)


@pair
@pytest.mark.parametrize("rank", [0, 3])
def test_rank_launched_by_itself(scenario: Scenarios, rank: int, plugin: bool) -> None:
    found = scenario("identity.rank_launched_by_itself", plugin=plugin, instance_id="chat-a7", rank=rank).found
    instance_id, kv, _ = found[str(rank)]
    if plugin:
        assert found["api_server"] == instance_id == kv == f"chat-a7_dp{rank}"
    else:
        assert (instance_id.isdigit(), kv) == (True, f"fixed_dp{rank}"), (
            "no suffix; the same engine id in every attempt"
        )


# Spawn.


@pair
def test_forked_from_a_driver(scenario: Scenarios, plugin: bool) -> None:
    ended = scenario("spawn.forked_from_a_driver", plugin=plugin)
    found = ended.found
    assert found["method"] == ("spawn" if plugin else "fork")
    # A forked child hangs, or fails, or takes its parent with it: SIGSEGV in the threads of Ray's client was seen.
    works = (ended.code, found.get("ended"), found.get("child_works")) == (0, True, True)
    assert works is plugin
    assert ("VLLM_WORKER_MULTIPROC_METHOD=fork is set to spawn" in ended.output) is plugin


@pair
def test_spawned_without_address(scenario: Scenarios, plugin: bool) -> None:
    found = scenario("spawn.spawned_without_address", plugin=plugin).found
    assert (found["child"] == found["parent"]) is plugin, (
        "without the plug-in the child starts a Ray cluster of its own"
    )


@pair
def test_connected_twice(scenario: Scenarios, plugin: bool) -> None:
    ended = scenario("spawn.connected_twice", plugin=plugin)
    assert (ended.code == 0) is plugin
    if plugin:
        assert ended.found["jobs"][0] == ended.found["jobs"][1]
    else:
        assert "Maybe you called ray.init twice by accident?" in ended.output


GROUPS = {
    "named, same namespace": ("mine", "the parent's", True),
    "named, other namespace": ("mine", "another", False),
    "unnamed, other namespace": ("", "another", None),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_group_from_another_job(scenario: Scenarios, kind: str) -> None:
    """Ray's own behaviour, on which handing the group on rests."""
    name, namespace, by_name = GROUPS[kind]
    found = scenario("spawn.group_from_another_job", plugin=False, name=name, namespace=namespace).found
    used = [1, found["group"]]
    assert found["by_id"] == used
    if by_name:
        assert found["by_name"] == used
    elif name:
        assert found["by_name"].startswith("ValueError"), found["by_name"]
