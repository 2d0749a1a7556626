"""What a real API server lets in and what it refuses: types, CEL rules and their messages.

KUBECONFIG names a server that has the CRD. Objects are only tried (dry run), but for the few tests that read them back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from vllm_ray_operator.api import API_VERSION, GROUP, KIND, PLURAL, VERSION, owned, rules
from vllm_ray_operator.api.base import ApiModel
from vllm_ray_operator.api.status import VLLMDeploymentStatus

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
Object = dict[str, Any]
MINIMAL = {"model": {"uri": "hf://Qwen/Qwen3-32B"}}


@dataclass(frozen=True)
class Refusal:
    """Why the API server refused an object: message by field. Errors of the request itself stand under ``""``."""

    causes: tuple[tuple[str, str], ...]

    def at(self, field: str) -> str:
        return "; ".join(message for where, message in self.causes if where == field)


class Server:
    """Creates VLLMDeployments in a namespace of its own."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.namespace = namespace
        self._objects = client.CustomObjectsApi(api)

    def create(self, obj: Object, *, dry_run: bool = True) -> Object | Refusal:
        try:
            created: Object = self._objects.create_namespaced_custom_object(
                GROUP,
                VERSION,
                self.namespace,
                PLURAL,
                obj,
                field_validation="Strict",
                **({"dry_run": "All"} if dry_run else {}),
            )
        except ApiException as error:
            status = json.loads(error.body)
            causes = status.get("details", {}).get("causes") or [{"message": status["message"]}]
            return Refusal(tuple((cause.get("field", ""), cause["message"]) for cause in causes))
        return created

    def try_spec(self, spec: Object) -> Object | Refusal:
        return self.create(deployment(spec))

    def scale(self, name: str) -> Object:
        result: Object = self._objects.get_namespaced_custom_object_scale(GROUP, VERSION, self.namespace, PLURAL, name)
        return result

    def replace_status(self, obj: Object) -> Object:
        result: Object = self._objects.replace_namespaced_custom_object_status(
            GROUP, VERSION, self.namespace, PLURAL, obj["metadata"]["name"], obj
        )
        return result


@pytest.fixture(scope="module")
def api() -> Iterator[client.ApiClient]:
    if "KUBECONFIG" not in os.environ:
        pytest.fail("KUBECONFIG must name a control plane with our CRD: run `make test-integration`")
    with config.new_client_from_config(os.environ["KUBECONFIG"]) as connected:
        yield connected


@pytest.fixture(scope="module")
def server(api: client.ApiClient) -> Iterator[Server]:
    core = client.CoreV1Api(api)
    namespace = core.create_namespace({"metadata": {"generateName": "admission-"}}).metadata.name
    yield Server(api, namespace)
    core.delete_namespace(namespace)


def deployment(spec: Mapping[str, Any], name: str = "chat") -> Object:
    """Return a minimal object with parts of its spec replaced, merged by key."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name},
        "spec": merged(MINIMAL, spec),
    }


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Object:
    result = deepcopy(dict(base))
    for key, value in over.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def refused(result: Object | Refusal, field: str, text: str) -> None:
    assert isinstance(result, Refusal), f"the API server took it: {result['spec']}"
    assert text in result.at(field), f"no {text!r} at {field!r}, but: {result.causes}"


def model(uri: str, **more: str) -> Object:
    return {"model": {"uri": uri, **more}}


def args(*values: str) -> Object:
    return {"engine": {"args": list(values)}}


def env(name: str, value: str = "1") -> Object:
    return {"engine": {"env": [{"name": name, "value": value}]}}


def workers(**fields: Any) -> Object:
    return {"cluster": {"workers": fields}}


GOOD: dict[str, Object] = {
    "minimal": {},
    "no replicas": {"replicas": 0},
    "most replicas": {"replicas": 256},
    "hf with a revision": model("hf://Qwen/Qwen3-32B", revision="refs/pr/1"),
    "hf with dots and dashes": model("hf://meta-llama/Llama-3.1-70B-Instruct_v2"),
    "volume": model("pvc://models/qwen/32b"),
    "volume without a path": model("pvc://claim"),
    "volume with a dotted claim": model("pvc://models.team-a/qwen"),
    "file": model("file:///models/tiny"),
    "two dots inside a name": model("file:///models/v1..2/tiny"),
    "other schemes pass": model("s3://bucket/qwen"),
    "plain names pass": model("Qwen/Qwen3-32B"),
    "served name": model("hf://Qwen/Qwen3-32B", servedName="qwen/3-32b"),
    "arguments": args("--max-model-len", "4096", "--dtype=float32", "-O3", "-cc.mode=2", "-q", "awq"),
    "argument with JSON": args('--speculative-config={"model": "x", "num_speculative_tokens": 3}'),
    "argument value with spaces": args("--default-chat-template-kwargs", '{"a": 1}'),
    "argument with a dotted key": args("--speculative-config.model", "org/name"),
    "negative value": args("--seed", "-1"),
    "empty value": args("--root-path", ""),
    "most and longest arguments": args(*["--additional-config=" + "x" * 4074] * 128),
    "environment": env("NCCL_DEBUG", "INFO"),
    "environment of Ray that is free": env("RAY_DEDUP_LOGS", "0"),
    "environment value with lines": env("BANNER", "a\nb"),
    "preloaded allocator": env("LD_PRELOAD", "/usr/lib/libtcmalloc.so.4"),
    "most environment": {"engine": {"env": [{"name": f"V{n}", "value": "x" * 8192} for n in range(64)]}},
    "image by digest": {"engine": {"image": "registry.example:5000/vllm@sha256:" + "0" * 64}},
    "port": {"engine": {"port": 9000}},
    "last port": {"engine": {"port": 65534}},
    "shm as a string": {"engine": {"shmSize": "1.5Gi"}},
    "shm as a number": {"engine": {"shmSize": 1073741824}},
    "most accelerators": {"parallelism": {"tensor": 32, "pipeline": 32}},
    "tensor alone": {"parallelism": {"tensor": 1024}},
    "Ray of the future": {"cluster": {"rayVersion": "3.0.0"}},
    "oldest Ray with tokens": {"cluster": {"rayVersion": "2.52.0"}},
    "old Ray without tokens": {"cluster": {"rayVersion": "2.51.1", "auth": "Disabled"}},
    "Ray release candidate": {"cluster": {"rayVersion": "2.60.0rc1"}},
    "CPU only": workers(acceleratorResource="", acceleratorsPerNode=1),
    "as many on a node as a replica has": {
        "parallelism": {"tensor": 4, "pipeline": 2},
        **workers(acceleratorsPerNode=8),
    },
    "other accelerator": workers(acceleratorResource="amd.com/gpu"),
    "resources": workers(resources={"requests": {"cpu": "500m", "memory": "4Gi"}, "limits": {"memory": 4294967296}}),
    "a second device": workers(resources={"limits": {"rdma/hca": 1}}),
    "queue label": {"cluster": {"labels": {"kueue.x-k8s.io/queue-name": "team-a"}}},
    "annotation": {"cluster": {"annotations": {"example.org/note": "two words"}}},
    "a roll in numbers": {"rollout": {"maxUnavailable": 2, "maxSurge": 1, "progressDeadlineSeconds": 600}},
    "a roll in shares": {"rollout": {"maxUnavailable": "25%", "maxSurge": "100%", "clusterUpgrade": "Recreate"}},
    "none unavailable, one more": {"rollout": {"maxUnavailable": "0%", "maxSurge": 1}},
    "all at once, whatever the numbers": {"rollout": {"type": "Recreate", "maxUnavailable": 0}},
    "paused": {"rollout": {"paused": True}},
    "suspended": {"suspend": True, "rollout": {"maxSurge": 1}},
    "paused, not suspended": {"suspend": False, "rollout": {"paused": True}},
    "undo": {"rollout": {"toRevision": "chat-engine-1a2b3c4d", "toClusterRevision": "chat-cluster-1a2b3c4d"}},
    "blue and green": {"rollout": {"clusterUpgrade": "BlueGreen"}},
    "restart": {"restartedAt": "2026-01-02T03:04:05Z", "restart": {"backoffSeconds": 300, "crashLoopAfter": 1}},
    "no drain, no history": {"engine": {"drainTimeoutSeconds": 0}, "revisionHistoryLimit": 0},
    "overlay of anything": workers(template={"spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}}),
}


@pytest.mark.parametrize("name", GOOD)
def test_lets_in(server: Server, name: str) -> None:
    result = server.try_spec(GOOD[name])
    assert not isinstance(result, Refusal), result.causes


# name: (spec, field, part of the message)
BAD: dict[str, tuple[Object, str, str]] = {
    # Rolls
    "nothing may be unavailable": (
        {"rollout": {"maxUnavailable": 0}},
        "spec.rollout.maxUnavailable",
        "must not both be 0",
    ),
    "nothing either way": (
        {"rollout": {"maxUnavailable": "0%", "maxSurge": 0}},
        "spec.rollout.maxUnavailable",
        "must not both be 0",
    ),
    "suspended and paused": (
        {"suspend": True, "rollout": {"paused": True}},
        "spec.suspend",
        "must not both be true",
    ),
    "more than all": ({"rollout": {"maxUnavailable": "101%"}}, "spec.rollout.maxUnavailable", "should match"),
    "a surge of more than all": ({"rollout": {"maxSurge": "150%"}}, "spec.rollout.maxSurge", "should match"),
    "a share below none": ({"rollout": {"maxUnavailable": "-1%"}}, "spec.rollout.maxUnavailable", "should match"),
    "more than there can be": (
        {"rollout": {"maxSurge": 257}},
        "spec.rollout.maxSurge",
        "should be less than or equal to 256",
    ),
    "none in two spellings": (
        {"rollout": {"maxUnavailable": 0, "maxSurge": "0%"}},
        "spec.rollout.maxUnavailable",
        "must not both be 0",
    ),
    "a share without its sign": ({"rollout": {"maxSurge": "25"}}, "spec.rollout.maxSurge", "should match"),
    "less than none": (
        {"rollout": {"maxUnavailable": -1}},
        "spec.rollout.maxUnavailable",
        "should be greater than or equal to 0",
    ),
    "another way to upgrade": (
        {"rollout": {"clusterUpgrade": "Canary"}},
        "spec.rollout.clusterUpgrade",
        'supported values: "Recreate", "BlueGreen"',
    ),
    "another way to roll": ({"rollout": {"type": "OnDelete"}}, "spec.rollout.type", "supported values"),
    "undo of the other kind": (
        {"rollout": {"toRevision": "chat-cluster-1a2b3c4d"}},
        "spec.rollout.toRevision",
        "goes into spec.rollout.toClusterRevision",
    ),
    "undo of pods to an engine": (
        {"rollout": {"toClusterRevision": "chat-engine-1a2b3c4d"}},
        "spec.rollout.toClusterRevision",
        "goes into spec.rollout.toRevision",
    ),
    "undo to no name": ({"rollout": {"toRevision": "Chat 3"}}, "spec.rollout.toRevision", "should match"),
    "no moment": ({"restartedAt": "now"}, "spec.restartedAt", "date-time"),
    "shorter at most than at first": (
        {"restart": {"backoffSeconds": 301}},
        "spec.restart.maxBackoffSeconds",
        "must not be less",
    ),
    "endless drain": (
        {"engine": {"drainTimeoutSeconds": 100000}},
        "spec.engine.drainTimeoutSeconds",
        "should be less than or equal to 86400",
    ),
    # Types, bounds and unknown fields
    "no model": ({"model": {"uri": ""}}, "spec.model.uri", "should be at least 1 chars long"),
    "model of a wrong type": ({"model": "hf://a/b"}, "spec.model", "must be of type object"),
    "replicas of a wrong type": ({"replicas": "two"}, "spec.replicas", "must be of type integer"),
    "fractional replicas": ({"replicas": 1.5}, "spec.replicas", "must be of type integer"),
    "negative replicas": ({"replicas": -1}, "spec.replicas", "should be greater than or equal to 0"),
    "too many replicas": ({"replicas": 257}, "spec.replicas", "should be less than or equal to 256"),
    "tensor 0": ({"parallelism": {"tensor": 0}}, "spec.parallelism.tensor", "should be greater than or equal to 1"),
    "negative pipeline": (
        {"parallelism": {"pipeline": -2}},
        "spec.parallelism.pipeline",
        "should be greater than or equal to 1",
    ),
    "negative size": ({"engine": {"shmSize": "-1Gi"}}, "spec.engine.shmSize", "should match"),
    "negative size as a number": ({"engine": {"shmSize": -1}}, "spec.engine.shmSize", "greater than or equal to 0"),
    "size of words": ({"engine": {"shmSize": "8 GB"}}, "spec.engine.shmSize", "should match"),
    "negative memory": (
        workers(resources={"limits": {"memory": "-4Gi"}}),
        "spec.cluster.workers.resources.limits.memory",
        "should match",
    ),
    "args as one string": ({"engine": {"args": "--seed 1"}}, "spec.engine.args", "must be of type array"),
    "args of a wrong type": ({"engine": {"args": ["--seed", 1]}}, "spec.engine.args[1]", "must be of type string"),
    "too many args": (args(*["--seed"] * 129), "spec.engine.args", "must have at most 128 items"),
    "too long an arg": (args("--a=" + "x" * 4096), "spec.engine.args[0]", "may not be more than 4096"),
    "privileged port": ({"engine": {"port": 80}}, "spec.engine.port", "should be greater than or equal to 1024"),
    "no port after it": ({"engine": {"port": 65535}}, "spec.engine.port", "should be less than or equal to 65534"),
    "no start-up time": (
        {"engine": {"startupTimeoutSeconds": 0}},
        "spec.engine.startupTimeoutSeconds",
        "should be greater than or equal to 10",
    ),
    "environment name": (env("1A"), "spec.engine.env[0].name", "should match"),
    "environment without a value": ({"engine": {"env": [{"name": "A"}]}}, "spec.engine.env[0].value", "Required"),
    "environment twice": (
        {"engine": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}},
        "spec.engine.env[1]",
        "Duplicate value",
    ),
    "auth": ({"cluster": {"auth": "token"}}, "spec.cluster.auth", "Unsupported value"),
    "Ray version": ({"cluster": {"rayVersion": "latest"}}, "spec.cluster.rayVersion", "should match"),
    "accelerator without a domain": (
        workers(acceleratorResource="gpu"),
        "spec.cluster.workers.acceleratorResource",
        "should match",
    ),
    "accelerators per node": (
        workers(acceleratorsPerNode=0),
        "spec.cluster.workers.acceleratorsPerNode",
        "should be greater than or equal to 1",
    ),
    "label value": ({"cluster": {"labels": {"a": "b c"}}}, "spec.cluster.labels.a", "should match"),
    "unknown field": ({"replica": 2}, "", 'unknown field "spec.replica"'),
    "unknown nested field": (
        {"parallelism": {"tensorParallel": 2}},
        "",
        'unknown field "spec.parallelism.tensorParallel"',
    ),
    "snake case": (model("hf://a/b", served_name="x"), "", 'unknown field "spec.model.served_name"'),
    # Model
    "hf without an organisation": (model("hf://gpt2"), "spec.model.uri", "hf://organisation/name"),
    "hf with a path": (model("hf://a/b/c"), "spec.model.uri", "hf://organisation/name"),
    "hf with a revision in the uri": (model("hf://a/b@main"), "spec.model.uri", "spec.model.revision"),
    "hf without slashes": (model("hf:a/b"), "spec.model.uri", "hf://organisation/name"),
    "volume without a claim": (model("pvc:///x"), "spec.model.uri", "pvc://claim/path"),
    "volume with a bad claim": (model("pvc://Claim_1/x"), "spec.model.uri", "pvc://claim/path"),
    "volume and two dots": (model("pvc://claim/../x"), "spec.model.uri", "'..'"),
    "relative file": (model("file://models/tiny"), "spec.model.uri", "file:///absolute/path"),
    "empty file": (model("file:///"), "spec.model.uri", "file:///absolute/path"),
    "file and two dots": (model("file:///models/.."), "spec.model.uri", "'..'"),
    "uri with a space": (model("hf://a/b c"), "spec.model.uri", "no spaces"),
    "uri with a line break": (model("file:///a\nb"), "spec.model.uri", "no spaces or control characters"),
    "uri like an option": (model("--port"), "spec.model.uri", "must not begin with '-'"),
    "revision of a file": (model("file:///a", revision="main"), "spec.model.revision", "only hf:// models"),
    "revision like an option": (model("hf://a/b", revision="-x"), "spec.model.revision", "must not begin with '-'"),
    "served name like an option": (model("a", servedName="--x"), "spec.model.servedName", "must not begin with '-'"),
    "served name with a space": (model("a", servedName="a b"), "spec.model.servedName", "no spaces"),
    # Engine
    "image with a space": ({"engine": {"image": "a b"}}, "spec.engine.image", "no spaces"),
    "model as the first argument": (args("org/name"), "spec.engine.args", "spec.model.uri"),
    "number as the first argument": (args("-1"), "spec.engine.args", "must be an option"),
    "option and value in one item": (args("--max-model-len 4096"), "spec.engine.args[0]", "two items"),
    "argument with a line break": (args("--root-path", "a\nb"), "spec.engine.args[1]", "line breaks"),
    "argument with a NUL": (args("--root-path", "a\0b"), "spec.engine.args[1]", "control characters"),
    "separator": (args("--seed", "1", "--", "x"), "spec.engine.args[2]", "'--' and '-'"),
    "environment with a NUL": (env("A", "a\0b"), "spec.engine.env[0].value", "NUL"),
    "port of the launcher": ({"engine": {"port": 8070}}, "spec.engine.port", "the launcher"),
    "port of a standby's launcher": ({"engine": {"port": 8071}}, "spec.engine.port", "the launcher"),
    "port before the launcher's": ({"engine": {"port": 8069}}, "spec.engine.port", "the port after it"),
    "port of Ray's metrics": ({"engine": {"port": 8080}}, "spec.engine.port", "metrics"),
    "port of Ray's agent": ({"engine": {"port": 52365}}, "spec.engine.port", "agent"),
    "port of Ray's workers": ({"engine": {"port": 10002}}, "spec.engine.port", "10001 to 19999"),
    # Cluster
    "more on a node than a replica has": (
        {"parallelism": {"tensor": 4}, **workers(acceleratorsPerNode=8)},
        "spec.cluster.workers.acceleratorsPerNode",
        "at most spec.parallelism.tensor x pipeline",
    ),
    "more on a node than the default": (
        workers(acceleratorsPerNode=2),
        "spec.cluster.workers.acceleratorsPerNode",
        "at most spec.parallelism.tensor x pipeline",
    ),
    "too many accelerators": (
        {"parallelism": {"tensor": 64, "pipeline": 32}},
        "spec.parallelism",
        "at most 1024 accelerators",
    ),
    "Ray without tokens": ({"cluster": {"rayVersion": "2.51.9"}}, "spec.cluster.rayVersion", "Ray 2.52 or newer"),
    "old Ray asked for tokens": (
        {"cluster": {"rayVersion": "1.99.0", "auth": "Token"}},
        "spec.cluster.rayVersion",
        "spec.cluster.auth to Disabled",
    ),
    "accelerators as resources": (
        workers(resources={"limits": {"nvidia.com/gpu": 8}}),
        "spec.cluster.workers.resources.limits",
        "acceleratorsPerNode",
    ),
    "own accelerators as resources": (
        workers(acceleratorResource="amd.com/gpu", resources={"requests": {"amd.com/gpu": 8}}),
        "spec.cluster.workers.resources.requests",
        "acceleratorsPerNode",
    ),
    "our label": ({"cluster": {"labels": {"vllm-ray.dev/replica": "0"}}}, "spec.cluster.labels", "vllm-ray.dev/*"),
    "managed-by label": (
        {"cluster": {"labels": {"app.kubernetes.io/managed-by": "me"}}},
        "spec.cluster.labels",
        "app.kubernetes.io/managed-by",
    ),
    "KubeRay's annotation": (
        {"cluster": {"annotations": {"ray.io/ft-enabled": "true"}}},
        "spec.cluster.annotations",
        "ray.io/*",
    ),
    # Engine arguments that the operator owns: the spellings, one by one
    "two items": (args("--tensor-parallel-size", "2"), "spec.engine.args[0]", "spec.parallelism.tensor"),
    "with =": (args("--tensor-parallel-size=2"), "spec.engine.args[0]", "spec.parallelism.tensor"),
    "underscores": (args("--tensor_parallel_size", "2"), "spec.engine.args[0]", "spec.parallelism.tensor"),
    "underscores and =": (args("--tensor_parallel-size=2"), "spec.engine.args[0]", "spec.parallelism.tensor"),
    "abbreviation": (args("--tensor-par", "2"), "spec.engine.args[0]", "spec.parallelism.tensor"),
    "abbreviation with =": (args("--tens=2"), "spec.engine.args[0]", "spec.parallelism.tensor"),
    "dotted": (args("--port.x", "2"), "spec.engine.args[0]", "spec.engine.port"),
    "short": (args("-tp", "2"), "spec.engine.args[0]", "spec.parallelism.tensor"),
    "short with =": (args("-tp=2"), "spec.engine.args[0]", "spec.parallelism.tensor"),
    "short abbreviated": (args("-t", "2"), "spec.engine.args[0]", "spec.parallelism.tensor"),
    "short with its value": (args("-n2"), "spec.engine.args[0]", "spec.parallelism"),
    "not the first": (args("--seed", "1", "--pipeline-parallel-size", "2"), "spec.engine.args[2]", "pipeline"),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(server: Server, name: str) -> None:
    spec, field, text = BAD[name]
    refused(server.try_spec(spec), field, text)


def with_name(name: str) -> Callable[[Server], Object | Refusal]:
    return lambda server: server.create(deployment({}, name))


@pytest.mark.parametrize("name", ["a", "chat-2", "x" * rules.MAX_NAME_LENGTH, "vllm-chat"])
def test_lets_names_in(server: Server, name: str) -> None:
    result = with_name(name)(server)
    assert not isinstance(result, Refusal), result.causes


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("2chat", "begin with a letter"),
        ("chat.v2", "a-z, 0-9 and '-'"),
        ("vllm", "VLLM_PORT"),
        ("x" * (rules.MAX_NAME_LENGTH + 1), "at most 44 characters"),
    ],
)
def test_refuses_names(server: Server, name: str, text: str) -> None:
    refused(with_name(name)(server), "metadata.name", text)


def test_a_cluster_for_each_replica_leaves_fewer_characters(server: Server) -> None:
    own = {"cluster": {"policy": "PerReplica"}}
    longest = server.create(deployment(own, "x" * rules.MAX_NAME_LENGTH_PER_REPLICA))
    assert not isinstance(longest, Refusal), longest.causes
    longer = "x" * (rules.MAX_NAME_LENGTH_PER_REPLICA + 1)
    refused(server.create(deployment(own, longer)), "metadata.name", "at most 39 characters when")
    shared = server.create(deployment({"cluster": {"policy": "Shared"}}, longer))
    assert not isinstance(shared, Refusal), shared.causes


def options() -> list[list[str]]:
    """Return the names of every option that vLLM has."""
    lines = (Path(__file__).parent / "vllm_options.txt").read_text(encoding="utf-8").splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


def entry_for(name: str) -> owned.Owned | None:
    """Return the table's entry for the full name of an option."""
    for entry in owned.ENGINE_ARGUMENTS:
        families = tuple(n for n in entry.names if n.startswith("--") and n.endswith("-"))
        short = tuple(n for n in entry.names if not n.startswith("--"))
        if name in entry.names or name.startswith(families) or (not name.startswith("--") and name.startswith(short)):
            return entry
    return None


def spellings() -> Iterator[tuple[str, str]]:
    """Yield every spelling that vLLM's parser takes for exactly one option, and that option's name."""
    names = [name for group in options() for name in group]
    owner = {name: group[0] for group in options() for name in group}
    for spelling in sorted({name[:end] for name in names for end in range(2, len(name) + 1)} - {"--"}):
        found = {owner[name] for name in names if name.startswith(spelling)}
        if spelling in owner:
            yield spelling, spelling
        elif len(found) == 1:
            yield spelling, next(name for name in names if name.startswith(spelling))


def test_every_spelling_of_an_owned_option_is_refused_and_no_other(server: Server) -> None:
    free: list[str] = []
    count = 0
    for spelling, name in spellings():
        entry = entry_for(name)
        if entry is None:
            free.append(spelling)
            continue
        for argument in (spelling, f"{spelling}=1", "--" + spelling[2:].replace("-", "_")):
            if argument.startswith("--") == spelling.startswith("--"):
                refused(server.try_spec(args("--seed", "1", argument)), "spec.engine.args[2]", entry.instead)
                count += 1
    assert count > 300
    assert len(free) > 2000
    for start in range(0, len(free), 128):
        result = server.try_spec(args(*free[start : start + 128]))
        assert not isinstance(result, Refusal), result.causes


def test_the_table_names_only_options_that_exist() -> None:
    names = [name for group in options() for name in group]
    for entry in owned.ENGINE_ARGUMENTS:
        for name in entry.names:
            exists = any(n.startswith(name) if name.endswith("-") else n == name for n in names)
            assert exists, name


@pytest.mark.parametrize("entry", owned.ENVIRONMENT, ids=lambda entry: entry.names[0])
def test_owned_variables_are_refused(server: Server, entry: owned.Owned) -> None:
    for name in entry.names:
        variable = f"{name}X" if name.endswith("_") else name
        refused(server.try_spec(env(variable)), "spec.engine.env[0].name", entry.instead)


def test_only_replicas_has_a_default(server: Server) -> None:
    result = server.try_spec({"engine": {}, "parallelism": {}, "cluster": {"workers": {}}})
    assert not isinstance(result, Refusal), result.causes
    assert result["spec"] == {**MINIMAL, "replicas": 1, "engine": {}, "parallelism": {}, "cluster": {"workers": {}}}


def test_scale_and_columns(api: client.ApiClient, server: Server) -> None:
    created = server.create(deployment({"replicas": 2}, "columns"), dry_run=False)
    assert not isinstance(created, Refusal), created.causes
    condition = {
        "type": "Ready",
        "status": "False",
        "reason": "EnginesStarting",
        "message": "x",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    created["status"] = {
        "replicaSummary": "1/2",
        "engineRevision": "columns-engine-1a2b3c4d",
        "currentReplicas": 1,
        "selector": "vllm-ray.dev/deployment=columns",
        "conditions": [condition],
    }
    server.replace_status(created)
    scale = server.scale("columns")
    assert scale["spec"] == {"replicas": 2}
    assert scale["status"] == {"replicas": 1, "selector": "vllm-ray.dev/deployment=columns"}

    table = api.call_api(
        *api.param_serialize(
            "GET",
            f"/apis/{API_VERSION}/namespaces/{server.namespace}/{PLURAL}/columns",
            header_params={"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"},
            auth_settings=["BearerToken"],
        )
    )
    shown = json.loads(table.read())
    heads = [column["name"] for column in shown["columnDefinitions"]]
    assert heads == ["Name", "Model", "Replicas", "Revision", "Ready", "Reason", "Age"]
    assert shown["rows"][0]["cells"][:6] == [
        "columns",
        MINIMAL["model"]["uri"],
        "1/2",
        "columns-engine-1a2b3c4d",
        "False",
        "EnginesStarting",
    ]


def filled(annotation: Any) -> Any:
    """Return a value of a type with every field set, so that nothing is left out by default."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return arguments[-1]
    if origin in (Union, UnionType):
        return filled(next(a for a in arguments if a is not NoneType))
    if origin is list:
        return [filled(arguments[0])]
    if isinstance(annotation, type) and issubclass(annotation, ApiModel):
        return annotation(**{name: filled(field.annotation) for name, field in annotation.model_fields.items()})
    return {int: 1, str: "x", bool: True, datetime: datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)}[annotation]


def test_every_field_of_the_status_comes_back(server: Server) -> None:
    created = server.create(deployment({}, "status"), dry_run=False)
    assert not isinstance(created, Refusal), created.causes
    status = filled(VLLMDeploymentStatus)
    stored = server.replace_status({**created, "status": status.to_wire()})
    assert VLLMDeploymentStatus.model_validate(stored["status"]) == status


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples(server: Server, path: Path) -> None:
    for obj in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        if obj["kind"] == KIND:
            obj["metadata"].pop("namespace", None)
            result = server.create(obj)
            assert not isinstance(result, Refusal), result.causes
