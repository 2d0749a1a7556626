"""The doctor's look at all nodes of the Ray cluster: a task on each gathers the facts there, which are then compared.

It is a Ray job of its own and takes some seconds, so it is made on request only.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ray_engine import reasons
from vllm_ray_engine.diagnosis import facts
from vllm_ray_engine.diagnosis.checks import ERROR, OK, WARNING, Finding
from vllm_ray_engine.diagnosis.facts import Facts, Wanted

TASK_SECONDS = 60.0
"""How long a node may take to start a worker process and answer."""
KNOCK_SECONDS = 5.0
"""How long Ray's head may take to accept a connection."""

_OF_ONE_NODE = frozenset({"VLLM_HOST_IP", "VLLM_PORT", "VLLM_RPC_BASE_PATH"})
"""Variables that may differ between nodes."""


@dataclass(frozen=True)
class Node:
    """A node of the Ray cluster. facts: None when it did not answer. resources: in all, also those in use."""

    address: str
    resources: Mapping[str, float]
    facts: Facts | None


def gather(wanted: Wanted) -> list[Node]:
    """Return all living nodes. Connects to Ray, and leaves it again; raises what Ray raises when it cannot."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    import vllm_ray_engine

    _knock(os.environ.get("RAY_ADDRESS", ""))
    package = str(Path(str(vllm_ray_engine.__file__)).parent)
    ray.init(address="auto", log_to_driver=False, runtime_env={"py_modules": [package]})
    try:
        task = ray.remote(num_cpus=0, max_retries=0)(facts.gather)
        living = [node for node in ray.nodes() if node["Alive"]]
        asked = {
            task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(wanted):
            node for node in living
        }  # fmt: skip
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=TASK_SECONDS)
        answers: dict[Any, Facts] = {}
        for reference in answered:
            try:
                answers[reference] = ray.get(reference)
            except Exception:  # noqa: S112  a node that died meanwhile has not answered
                continue
        return [
            Node(node["NodeManagerAddress"], node["Resources"], answers.get(reference))
            for reference, node in asked.items()
        ]
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raise ConnectionError when nothing answers at Ray's address: Ray itself would try for minutes."""
    host, found, port = address.rpartition(":")
    if not found or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {address}: {error}") from None


def compare(nodes: list[Node]) -> list[Finding]:
    """Return what differs between nodes and must not, and which did not answer."""
    findings = [
        Finding("node", ERROR, f"does not answer within {TASK_SECONDS:g} s", "look at the pod", node=node.address,
                reason=reasons.RAY_CONNECTION_LOST)
        for node in nodes if node.facts is None
    ]  # fmt: skip
    known = {node.address: node.facts for node in nodes if node.facts is not None}
    for name, values in (
        ("Python", {address: one.python for address, one in known.items()}),
        ("Ray", {address: str(one.versions.get("ray")) for address, one in known.items()}),
        ("vLLM", {address: str(one.versions.get("vllm")) for address, one in known.items()}),
    ):
        findings.append(_same(f"same-{name.lower()}", f"{name} of the nodes", values, "use one image for all"))
    findings += _environment(known)
    return findings


def _same(check: str, what: str, values: Mapping[str, str], remedy: str) -> Finding:
    if len(set(values.values())) <= 1:
        return Finding(check, OK, f"{what}: {next(iter(values.values()), 'none answered')}")
    listed = ", ".join(f"{value} on {address}" for address, value in values.items())
    return Finding(check, ERROR, f"{what} differs: {listed}", remedy, reasons.UNSUPPORTED_VERSION)


def _environment(known: Mapping[str, Facts]) -> list[Finding]:
    environments = [one.node_environment or one.environment for one in known.values()]
    names = {name for environment in environments for name in environment if name.startswith(facts.COPIED)}
    differs = sorted(
        name for name in names - _OF_ONE_NODE if len({environment.get(name) for environment in environments}) > 1
    )
    if not differs:
        return [Finding("same-environment", OK, "the nodes set the same variables")]
    remedy = "set them the same for all nodes: workers keep the value of their node"
    return [Finding("same-environment", WARNING, f"set differently on the nodes: {', '.join(differs)}", remedy)]


def enough(nodes: list[Node], needed: Mapping[str, float]) -> Finding:
    """Say whether the cluster has what is needed, in all."""
    has = {name: sum(node.resources.get(name, 0) for node in nodes) for name in needed}
    listed = ", ".join(f"{has[name]:g} of {name}, {count:g} needed" for name, count in needed.items())
    if all(has[name] >= count for name, count in needed.items()):
        return Finding("resources", OK, listed)
    remedy = "compare spec.parallelism with spec.cluster.workers"
    return Finding("resources", ERROR, listed, remedy, reasons.PLACEMENT_PENDING)
