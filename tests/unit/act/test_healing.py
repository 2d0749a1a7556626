"""The faults of the campaign (e2e/chaos) in miniature: the whole operator over the fakes, one fault each.

Each ends Ready again without help, replaces whom it hit and nobody else, is named in the status, and uses no instance
id twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from tests.fakes.kube import fail_always
from tests.unit.act.test_together import Lab
from vllm_ray_operator.api.status import Attempt
from vllm_ray_operator.clients.protocols import (
    ENDPOINT_SLICES,
    PODS,
    RAY_CLUSTERS,
    VLLM_DEPLOYMENTS,
    ApiError,
    Object,
)
from vllm_ray_operator.plan import names

AWAY_SECONDS = 60
NODE_DIED = "Job supervisor actor died: ... The actor died because its node has died. Node Id: e48"


def attempt(lab: Lab, index: int) -> Attempt:
    found = lab.replica(index).attempt
    assert found is not None
    return found


def pods(lab: Lab, group: str) -> list[Object]:
    return [pod for pod in lab.kube.objects(PODS) if pod["metadata"]["labels"]["ray.io/group"] == group]


def silence(lab: Lab, index: int) -> None:
    """The launcher is no more."""
    for where, launcher in list(lab.engine.launchers.items()):
        if launcher.instance_id == attempt(lab, index).instance_id:
            del lab.engine.launchers[where]


def end_job(lab: Lab, message: str = "", **result: str) -> None:
    silence(lab, 0)
    lab.dashboard.end(attempt(lab, 0).instance_id, "FAILED", result or None)
    if message:
        job = lab.dashboard.jobs[attempt(lab, 0).instance_id]
        job.row = replace(job.row, message=message)


def stop_job(lab: Lab) -> None:
    end_job(lab, outcome="Stopped", reason="Stopped", message="asked to stop")


def kill_worker(lab: Lab) -> None:
    end_job(lab, outcome="Failed", reason="WorkerDied", message="a worker died")


def delete_pods(lab: Lab) -> None:
    end_job(lab, NODE_DIED)
    for pod in pods(lab, names.slot(0)):
        lab.kube.remove(PODS, "default", pod["metadata"]["name"])


def delete_head(lab: Lab) -> None:
    (head,) = pods(lab, "headgroup")
    lab.kube.remove(PODS, "default", head["metadata"]["name"])
    lose_memory(lab)


def kill_gcs(lab: Lab) -> None:
    (head,) = pods(lab, "headgroup")
    lab.kuberay.restart_container(head)
    lose_memory(lab)


def lose_memory(lab: Lab) -> None:
    for index in (0, 1):
        silence(lab, index)
    lab.dashboard.restart_head()


def lose_node(lab: Lab) -> None:
    """Kubernetes marks the pods, Ray gives its node up, and nothing there says a word."""
    end_job(lab, NODE_DIED)
    for pod in pods(lab, names.slot(0)):
        unready = {"type": "Ready", "status": "False", "lastTransitionTime": "2020-01-01T00:00:00Z"}
        containers = next(c for c in pod["status"]["conditions"] if c["type"] == "ContainersReady")
        status = {**pod["status"], "conditions": [unready, containers]}
        lab.kube.set_status(PODS, "default", pod["metadata"]["name"], status)


@dataclass(frozen=True)
class Fault:
    inject: Callable[[Lab], None]
    reason: str
    hits: frozenset[int] = frozenset({0})


FAULTS = {
    "job-stopped": Fault(stop_job, "Stopped"),
    "worker-killed": Fault(kill_worker, "WorkerDied"),
    "worker-pod-deleted": Fault(delete_pods, "PodsLost"),
    "head-pod-deleted": Fault(delete_head, "HeadLost", frozenset({0, 1})),
    "gcs-killed": Fault(kill_gcs, "HeadLost", frozenset({0, 1})),
    "node-gone": Fault(lose_node, "NodeLost"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_it_heals(name: str) -> None:
    fault, lab = FAULTS[name], Lab()
    await lab.until_ready()
    before = {index: attempt(lab, index) for index in (0, 1)}
    fault.inject(lab)
    reasons = set()
    for _ in range(100):
        await lab.pass_by()
        reasons |= {r.last_failure.reason for r in lab.status.replicas if r.last_failure}
        if 1 not in fault.hits:
            assert lab.replica(1).phase == "Ready", "the other one is left alone"
        ready = lab.status.condition("Ready")
        replaced = {index for index, old in before.items() if (lab.replica(index).attempt or old) != old}
        if ready is not None and ready.status == "True" and fault.hits <= replaced:
            break
    else:
        raise AssertionError(f"not Ready again: {lab.status!r}")
    now = {index: attempt(lab, index) for index in (0, 1)}
    assert {index for index in now if now[index].number != before[index].number} == fault.hits
    assert reasons == {fault.reason}
    ids = [a.instance_id for a in (*before.values(), *(now[index] for index in fault.hits))]
    assert len(set(ids)) == len(ids)
    assert {s["endpoints"][0]["addresses"][0] for s in lab.kube.objects(ENDPOINT_SLICES)} == {
        a.endpoint.address for a in now.values() if a.endpoint
    }


def hang_dashboard(lab: Lab) -> None:
    lab.dashboard.error = ApiError("the Ray dashboard does not answer: no answer within 10 s")


def stop_kubernetes_api(lab: Lab) -> None:
    for resource in (VLLM_DEPLOYMENTS, PODS, RAY_CLUSTERS):
        for verb in ("get", "list"):
            lab.kube.before.append(fail_always(ApiError("no connection"), verb=verb, resource=resource))  # type: ignore[arg-type]


@pytest.mark.parametrize("inject", [hang_dashboard, stop_kubernetes_api])
async def test_with_only_an_api_away_the_replicas_are_left_alone(inject: Callable[[Lab], None]) -> None:
    lab = Lab()
    await lab.until_ready()
    before = {index: attempt(lab, index) for index in (0, 1)}
    inject(lab)
    for _ in range(AWAY_SECONDS):
        try:
            await lab.reconcile()
        except ApiError:
            assert inject is stop_kubernetes_api
        assert all(s["endpoints"][0]["conditions"]["ready"] for s in lab.kube.objects(ENDPOINT_SLICES))
        await lab.clock.advance(1)
    lab.dashboard.error = None
    lab.kube.before.clear()
    await lab.until_ready()
    assert {index: attempt(lab, index) for index in (0, 1)} == before
