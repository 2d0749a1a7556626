"""Why a pod does not run, in plain words and with the remedy.

Nothing that changes by itself (times, counts, back-off delays) is in the words: they end up in conditions, and an
unchanged world must write nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

Json = Mapping[str, Any]

OVERLAYS = "spec.cluster.head.template and spec.cluster.workers.template"
IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
CORDON_TAINT = "node.kubernetes.io/unschedulable"
CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")

MAX_CHARACTERS = 600
# Of a whole message that Ray or a launcher gives; it ends up in the status several times for every replica.
MAX_MESSAGE_CHARACTERS = 1000

_NOT_THERE = re.compile(r"not found|manifest unknown|name unknown|does not exist", re.IGNORECASE)
_NOT_ALLOWED = re.compile(r"unauthorized|denied|forbidden|authentication|\b40[13]\b", re.IGNORECASE)
_BACK_OFF = re.compile(r"^Back-off pulling image \"[^\"]*\"(: )?|^(ErrImagePull|ImagePullBackOff): ?")


def conditions(status: Json) -> Mapping[str, Json]:
    """Return the conditions of a status by type."""
    return {condition["type"]: condition for condition in status.get("conditions") or ()}


def cluster_problem(status: Json) -> str:
    """Say what KubeRay reports as wrong with a RayCluster, "" if nothing."""
    failure = conditions(status).get("ReplicaFailure", {})
    if failure.get("status") == "True":
        text = failure.get("message") or failure.get("reason") or ""
        return f"KubeRay cannot make all pods: {cut(text)}"
    if status.get("state") == "failed":
        return f"KubeRay gave up on the RayCluster: {cut(status.get('reason') or 'it does not say why')}"
    return ""


def ray_container_status(pod: Json) -> Json:
    """Return the status of the pod's Ray container (its first), {} before it has one."""
    containers = pod["spec"].get("containers") or ()
    name = containers[0]["name"] if containers else None
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((status for status in statuses if status["name"] == name), {})


def node_is_lost(pod: Json) -> bool:
    """Whether the pod was marked unready because its node does not answer: its containers' states are stale then."""
    if pod["spec"].get("readinessGates"):
        return False
    found = conditions(pod.get("status") or {})
    ready, containers = found.get("Ready", {}), found.get("ContainersReady", {})
    return ready.get("status") in ("False", "Unknown") and containers.get("status") == "True"


def lost_since(pod: Json) -> datetime | None:
    """Return since when the pod's node has not answered; None if it does."""
    if not node_is_lost(pod):
        return None
    since = conditions(pod["status"])["Ready"].get("lastTransitionTime")
    return datetime.fromisoformat(since) if since else None


def tolerates_cordon(pod: Json) -> bool:
    """Whether the pod could be scheduled on a cordoned node: then there is no sense in taking it off one."""
    return any(
        toleration.get("key", "") in ("", CORDON_TAINT)
        and toleration.get("effect", "") in ("", "NoSchedule")
        and (toleration.get("operator") == "Exists" or (toleration.get("key") and not toleration.get("value")))
        for toleration in pod["spec"].get("tolerations") or ()
    )


def pod_problem(pod: Json) -> tuple[str, str]:
    """Return (CamelCase reason, words) of what keeps a pod from running; two empty strings if nothing is known."""
    status = pod.get("status") or {}
    if node_is_lost(pod):
        node = pod["spec"].get("nodeName") or "unknown"
        return "NodeNotReady", f"pod {_name(pod)}: its node {node} does not answer"
    if pod["metadata"].get("deletionTimestamp"):
        return "", ""
    scheduled = conditions(status).get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return _not_scheduled(pod, scheduled)
    for spec, container in _containers(pod):
        found = _container_problem(pod, spec, container)
        if found is not None:
            return found
    if status.get("phase") == "Failed":
        reason = status.get("reason") or "PodFailed"
        text = status.get("message") or "its containers ended and are not started again"
        return reason, f"pod {_name(pod)} failed ({reason}): {cut(text)}"
    return "", ""


def _not_scheduled(pod: Json, condition: Json) -> tuple[str, str]:
    reason = condition.get("reason") or "Unschedulable"
    if reason == "SchedulingGated":
        return reason, f"pod {_name(pod)} is held back by a scheduling gate, such as a queue's; it waits for its turn"
    text = cut(condition.get("message") or "the scheduler does not say why")
    return reason, (
        f"no node can take pod {_name(pod)}: {text.rstrip('.')}. Add or free nodes, or ask for less in spec.cluster"
    )


def _containers(pod: Json) -> Iterator[tuple[Json, Json]]:
    """Yield (container, its status): the init containers, which come first, then the others."""
    status = pod.get("status") or {}
    for specs, statuses in (("initContainers", "initContainerStatuses"), ("containers", "containerStatuses")):
        by_name = {spec["name"]: spec for spec in pod["spec"].get(specs) or ()}
        for container in status.get(statuses) or ():
            yield by_name.get(container["name"], {}), container


def _container_problem(pod: Json, spec: Json, container: Json) -> tuple[str, str] | None:
    state = container.get("state") or {}
    if container.get("ready") or "running" in state:
        return None
    where = f"container {container['name']} of pod {_name(pod)}"
    waiting = state.get("waiting") or {}
    reason, message = waiting.get("reason") or "", waiting.get("message") or ""
    if reason in IMAGE_REASONS:
        return "ImagePullBackOff", _image(spec.get("image") or container.get("image") or "", message)
    if reason in CONFIG_REASONS:
        return reason, f"{where} cannot be created: {cut(message) or 'the kubelet does not say why'}. See {OVERLAYS}"
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
    if ended.get("reason") == "OOMKilled":
        limit = ((spec.get("resources") or {}).get("limits") or {}).get("memory")
        bound = f" (its limit is {limit})" if limit else ""
        return "OOMKilled", (
            f"{where} was killed for want of memory{bound}: raise resources.limits.memory in spec.cluster.head "
            "or spec.cluster.workers"
        )
    if reason == "CrashLoopBackOff":
        return reason, f"{where} exits again and again{_exit(ended)}; see kubectl logs --previous {_name(pod)}"
    return None


def _image(image: str, message: str) -> str:
    cause = message
    while (stripped := _BACK_OFF.sub("", cause)) != cause:
        cause = stripped
    if _NOT_THERE.search(cause):
        remedy = "check its name and tag in spec.engine.image"
    elif _NOT_ALLOWED.search(cause):
        remedy = f"the registry wants credentials: set imagePullSecrets in {OVERLAYS}"
    else:
        remedy = "check spec.engine.image, and that the nodes reach its registry"
    return f"image {image} cannot be pulled{f': {cut(cause)}' if cause.strip() else ''}; {remedy}"


def _exit(ended: Json) -> str:
    if not ended:
        return ""
    message = cut(ended.get("message") or "")
    code = f" with code {ended['exitCode']}" if "exitCode" in ended else ""
    return f"{code}{f' ({message})' if message else ''}"


def _name(pod: Json) -> str:
    return str(pod["metadata"]["name"])


def cut(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return the text as one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
