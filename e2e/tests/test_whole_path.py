"""Apply, chat, break, heal, delete: on real Kubernetes, KubeRay, Ray and vLLM. The tests build on one another."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import yaml

from e2e.demo import EXAMPLE
from e2e.kube import Kube
from e2e.serving import chat, condition, describe, wait_ready
from e2e.tests import operator_pod
from e2e.waiting import say, wait_for

NAME = yaml.safe_load(EXAMPLE.read_text())["metadata"]["name"]
REST_SECONDS = 320  # five minutes, and beyond the slow resync


def deployment(kube: Kube) -> dict[str, Any]:
    return kube.get("vllmdeployment", NAME)


def attempts(resource: dict[str, Any]) -> list[dict[str, Any]]:
    return [r["attempt"] for r in resource.get("status", {}).get("replicas", []) if r.get("attempt")]


MOMENTS: dict[str, Callable[[Kube], bool]] = {
    "the RayCluster exists": lambda kube: bool(kube.items("rayclusters")),
    "an attempt is written down": lambda kube: bool(attempts(deployment(kube))),
    "an engine is loading": lambda kube: any(a.get("endpoint") for a in attempts(deployment(kube))),
}


def test_the_operator_killed_three_times_during_start_up_still_makes_one_attempt_per_replica(kube: Kube) -> None:
    kube.kubectl("apply", "-f", str(EXAMPLE))
    container = operator_pod.wait_running(kube)
    for moment, reached in MOMENTS.items():
        wait_for(moment, partial(reached, kube), seconds=300, poll=0.2)
        say("killing the operator")
        operator_pod.kill(container)
        container = operator_pod.wait_running(kube, other_than=container)
    ready = wait_ready(kube, NAME, "default", seconds=600)
    assert ready["status"]["lastAttempt"] == 2
    assert [r["phase"] for r in ready["status"]["replicas"]] == ["Ready", "Ready"]
    assert len({a["instanceId"] for a in attempts(ready)}) == 2
    for replica in ready["status"]["replicas"]:
        assert replica["restarts"] == 0
        assert len(replica["attempt"]["ranks"][0]["pods"]) == 2  # tensor 2, one accelerator a pod


def test_kubectl_get_shows_the_columns(kube: Kube) -> None:
    header, row = kube.kubectl("get", "vd", NAME).strip().splitlines()
    assert header.split() == ["NAME", "MODEL", "REPLICAS", "REVISION", "READY", "REASON", "AGE"]
    assert row.split()[:3] == [NAME, "file:///models/tiny", "2/2"]
    assert row.split()[4:6] == ["True", "AllReplicasReady"]


def test_a_chat_goes_through_the_service(kube: Kube) -> None:
    answer = chat(kube, deployment(kube), "Say hello.")
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] > 0


def test_one_endpoint_per_replica_is_ready(kube: Kube) -> None:
    slices = kube.items("endpointslices", "-l", f"kubernetes.io/service-name={NAME}")
    ready = [e["addresses"][0] for s in slices for e in s["endpoints"] if e["conditions"]["ready"]]
    assert sorted(ready) == sorted(a["endpoint"]["address"] for a in attempts(deployment(kube)))


def test_the_actors_carry_the_instance_ids(kube: Kube) -> None:
    resource = deployment(kube)
    selector = f"ray.io/cluster={resource['status']['rayCluster']},ray.io/node-type=head"
    head = kube.items("pods", "-l", selector)[0]["metadata"]["name"]
    listed = kube.kubectl(
        *("exec", head, "-c", "ray", "--", "ray", "list", "actors", "--format", "json", "--filter", "state=ALIVE"),
        *("--detail", "--limit", "1000"),
    )
    actors = [a for a in json.loads(listed[listed.index("[") :]) if a["name"].startswith("vllm_Worker")]
    for attempt in attempts(resource):
        instance_id = attempt["instanceId"]
        mine = [a for a in actors if a["ray_namespace"] == instance_id]
        assert sorted(a["name"] for a in mine) == [f"vllm_Worker_{instance_id}_TP{rank}" for rank in range(2)]
    assert len(actors) == 4


def test_without_the_token_the_dashboard_refuses(kube: Kube) -> None:
    resource = deployment(kube)
    selector = f"ray.io/cluster={resource['status']['rayCluster']},ray.io/node-type=head"
    head = kube.items("pods", "-l", selector)[0]["metadata"]["name"]
    code = (
        "import urllib.request, urllib.error\n"
        "try: print(urllib.request.urlopen('http://127.0.0.1:8265/api/jobs/', timeout=10).status)\n"
        "except urllib.error.HTTPError as e: print(e.code)"
    )
    assert kube.kubectl("exec", head, "-c", "ray", "--", "python3", "-c", code).strip() == "401"


def test_at_rest_the_operator_writes_nothing_but_its_lease(kube: Kube) -> None:
    version = deployment(kube)["metadata"]["resourceVersion"]
    start = datetime.datetime.now(datetime.UTC)
    until = start + datetime.timedelta(seconds=REST_SECONDS)
    since = start.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    wait_for(
        f"{REST_SECONDS} s at rest", lambda: datetime.datetime.now(datetime.UTC) >= until, seconds=REST_SECONDS + 60
    )
    calls = [e for e in operator_pod.audit(since) if e["verb"] in operator_pod.WRITES]
    assert {e["objectRef"]["resource"] for e in calls} == {"leases"}
    assert deployment(kube)["metadata"]["resourceVersion"] == version


def test_a_killed_engine_is_fenced_and_starts_again_with_a_new_identity(kube: Kube) -> None:
    before = deployment(kube)
    victim = attempts(before)[0]
    say(f"killing the API server of {victim['instanceId']}")
    pod = victim["endpoint"]["pod"]
    code = (
        "import os, signal\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try: command = open(f'/proc/{pid}/cmdline').read().split('\\0')\n"
        "    except OSError: continue\n"
        "    if 'vllm_ray_engine.serve' in command: os.kill(int(pid), signal.SIGKILL); print(pid)"
    )
    assert kube.kubectl("exec", pod, "-c", "ray", "--", "python3", "-c", code).split(), "no API server was found"

    def fenced() -> dict[str, Any] | None:
        replica = deployment(kube)["status"]["replicas"][0]
        return replica if replica.get("lastFence", {}).get("attempt") == victim["number"] else None

    replica = wait_for("the old attempt to be fenced", fenced, seconds=120, describe=lambda: describe(deployment(kube)))
    assert replica["lastFence"]["how"] == "JobEnded"
    assert replica["lastFailure"]["attempt"] == victim["number"]
    assert replica["lastFailure"]["message"]
    after = wait_ready(kube, NAME, "default", seconds=400)
    healed, other = after["status"]["replicas"]
    assert healed["attempt"]["number"] == 3
    assert healed["attempt"]["instanceId"] != victim["instanceId"]
    assert other["attempt"]["instanceId"] == attempts(before)[1]["instanceId"]  # its neighbour was left alone
    assert chat(kube, after, "Still there?")["choices"]


def test_scaled_down_the_slot_of_the_replica_that_failed_goes_and_the_other_stays(kube: Kube) -> None:
    kept = attempts(deployment(kube))[1]["instanceId"]
    kube.kubectl("scale", "vd", NAME, "--replicas=1")

    def slots() -> bool:
        clusters = kube.items("rayclusters")
        groups = [g["groupName"] for g in clusters[0]["spec"]["workerGroupSpecs"]]
        return groups == ["slot-1"] and len(kube.items("pods", "-l", "ray.io/node-type=worker")) == 2

    wait_for("slot 0 to be removed", slots, seconds=180, describe=lambda: describe(deployment(kube)))
    resource = wait_ready(kube, NAME, "default", seconds=60)
    assert [a["instanceId"] for a in attempts(resource)] == [kept]


BROKEN = {
    "an image that cannot be pulled": (
        {"engine": {"image": "registry.invalid/no/such-image:1"}},
        "ImagePullBackOff",
        "registry.invalid/no/such-image:1",
    ),
    "a model that does not exist": ({"model": {"uri": "file:///models/none"}}, "ModelNotFound", "/models/none"),
    "too few accelerators": (
        {"cluster": {"workers": {"acceleratorResource": "nvidia.com/gpu"}}},
        "Unschedulable",
        "nvidia.com/gpu",
    ),
    "an engine that exits at start": ({"engine": {"args": ["--no-such-flag"]}}, "InvalidArguments", "--no-such-flag"),
}


@pytest.mark.parametrize(("change", "reason", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_what_is_wrong_is_said_in_a_condition_and_one_event(
    kube: Kube, change: dict[str, Any], reason: str, words: str
) -> None:
    manifest = yaml.safe_load(EXAMPLE.read_text())
    name = f"broken-{list(BROKEN).index(next(k for k, v in BROKEN.items() if v[0] is change))}"
    manifest["metadata"]["name"] = name
    spec = manifest["spec"]
    spec["replicas"], spec["parallelism"] = 1, {"tensor": 1}
    for part, values in change.items():
        for key, value in values.items():
            spec[part][key] = {**spec[part].get(key, {}), **value} if isinstance(value, dict) else value
    kube.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest))

    def said() -> dict[str, Any] | None:
        found = condition(kube.get("vllmdeployment", name), "Ready")
        return dict(found) if found.get("reason") == reason else None

    try:
        ready = wait_for(
            f"Ready=False, {reason}", said, seconds=240, describe=lambda: describe(kube.get("vllmdeployment", name))
        )
        assert ready["status"] == "False"
        assert words in ready["message"]
        events = kube.items("events.events.k8s.io", "--field-selector", f"reason={reason}")
        mine = [e for e in events if e["regarding"]["name"] == name]
        assert len(mine) == 1
        assert words in mine[0]["note"]
    finally:
        kube.kubectl("delete", "vd", name, "--wait=true")


def test_deleted_it_leaves_no_pods_jobs_or_services(kube: Kube) -> None:
    kube.kubectl("delete", "vd", NAME)

    def left() -> list[str]:
        kinds = "rayclusters,pods,services,endpointslices,controllerrevisions,secrets,jobs"
        listed = kube.items(kinds, "-n", "default")
        return [f"{o['kind']}/{o['metadata']['name']}" for o in listed if o["metadata"]["name"] != "kubernetes"]

    wait_for("nothing to be left", lambda: not left(), seconds=120, describe=lambda: ", ".join(left()) or "nothing")


def test_the_chart_s_role_sufficed(kube: Kube) -> None:
    refused = [
        (e["verb"], e["objectRef"]) for e in operator_pod.audit() if e.get("responseStatus", {}).get("code") == 403
    ]
    assert refused == []
