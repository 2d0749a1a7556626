"""KubeRay, kubelet and Ray for RayClusters in a FakeKube: ``step`` brings them all one step further."""

from __future__ import annotations

import base64
import itertools
from typing import Any

from tests.fakes.kube import FakeKube
from tests.fakes.ray import FakeDashboard, FakeRay
from vllm_ray_operator.clients.bundle import dashboard_in_cluster
from vllm_ray_operator.clients.protocols import PODS, RAY_CLUSTERS, SECRETS, Object

READY = {"type": "Ready", "status": "True"}


class FakeKubeRay:
    """``pods_run``: whether new pods become ready. Pods being deleted end at the next step."""

    def __init__(self, kube: FakeKube, ray: FakeRay) -> None:
        self._kube, self._ray = kube, ray
        self._numbers = itertools.count(1)
        self.pods_run = True

    def step(self) -> None:
        for pod in self._kube.objects(PODS):
            if pod["metadata"].get("deletionTimestamp"):
                self._kube.remove(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])
        for cluster in self._kube.objects(RAY_CLUSTERS):
            self._reconcile(cluster)

    def restart_container(self, pod: Object) -> None:
        """Start the Ray container of a pod anew; with the head's, GCS forgets everything."""
        status = pod["status"]
        status["containerStatuses"][0]["restartCount"] += 1
        metadata = pod["metadata"]
        self._kube.set_status(PODS, metadata["namespace"], metadata["name"], status)
        if metadata["labels"]["ray.io/node-type"] == "head":
            self.dashboard(metadata["namespace"], metadata["labels"]["ray.io/cluster"]).restart_head()

    def dashboard(self, namespace: str, cluster: str) -> FakeDashboard:
        return self._ray.dashboards[dashboard_in_cluster(namespace, cluster)]

    def _reconcile(self, cluster: Object) -> None:
        metadata, spec = cluster["metadata"], cluster["spec"]
        namespace, name = metadata["namespace"], metadata["name"]
        token = None
        if (spec.get("authOptions") or {}).get("mode") == "token":
            token = f"token-of-{name}"
            encoded = base64.b64encode(token.encode()).decode()
            secret = {"metadata": self._metadata(cluster, name, {}), "data": {"auth_token": encoded}}
            self._kube.put(SECRETS, secret)
        wanted = {"headgroup": (1, "head", spec["headGroupSpec"]["template"])}
        for group in spec.get("workerGroupSpecs") or ():
            wanted[group["groupName"]] = (group["replicas"], "worker", group["template"])
        pods = [p for p in self._kube.objects(PODS) if p["metadata"]["labels"]["ray.io/cluster"] == name]
        for group_name, (count, role, template) in wanted.items():
            there = [p for p in pods if p["metadata"]["labels"]["ray.io/group"] == group_name]
            for pod in there[count:]:
                self._kube.remove(PODS, namespace, pod["metadata"]["name"])
            for _ in range(count - len(there)):
                self._make_pod(cluster, group_name, role, template)
        # As KubeRay does, the pods of a group that is no more are forgotten.
        head_ready = any(_is_ready_head(p, name) for p in self._kube.objects(PODS))
        condition = {"type": "HeadPodReady", "status": "True" if head_ready else "False", "reason": "x"}
        self._kube.set_status(RAY_CLUSTERS, namespace, name, {"conditions": [condition]})
        if head_ready:
            self._ray.dashboards.setdefault(dashboard_in_cluster(namespace, name), FakeDashboard(token=token))

    def _make_pod(self, cluster: Object, group: str, role: str, template: Object) -> None:
        number = next(self._numbers)
        labels = {
            **(template.get("metadata") or {}).get("labels", {}),
            "ray.io/cluster": cluster["metadata"]["name"],
            "ray.io/group": group,
            "ray.io/node-type": role,
        }
        name = f"{cluster['metadata']['name']}-{group}-{number}"
        status: Object = {"phase": "Pending"}
        if self.pods_run:
            status = {
                "phase": "Running",
                "podIP": f"10.0.{number // 250}.{number % 250 + 1}",
                "conditions": [READY, {"type": "ContainersReady", "status": "True"}],
                "containerStatuses": [
                    {"name": "ray", "ready": True, "restartCount": 0, "state": {"running": {}}},
                ],
            }
        spec = {**template["spec"], "nodeName": f"node-{number}"}
        self._kube.put(PODS, {"metadata": self._metadata(cluster, name, labels), "spec": spec, "status": status})

    @staticmethod
    def _metadata(cluster: Object, name: str, labels: dict[str, Any]) -> Object:
        owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": cluster["metadata"]["name"]}
        return {
            "namespace": cluster["metadata"]["namespace"],
            "name": name,
            "labels": labels,
            "ownerReferences": [{**owner, "uid": cluster["metadata"]["uid"]}],
        }


def _is_ready_head(pod: Object, cluster: str) -> bool:
    labels, statuses = pod["metadata"]["labels"], pod["status"].get("containerStatuses") or [{}]
    is_head = labels["ray.io/node-type"] == "head" and labels["ray.io/cluster"] == cluster
    return is_head and bool(statuses[0].get("ready"))
