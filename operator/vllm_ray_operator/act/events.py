"""Kubernetes events on a VLLMDeployment."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from vllm_ray_operator.api import API_VERSION, GROUP, KIND
from vllm_ray_operator.plan.actions import Emit
from vllm_ray_operator.plan.names import MANAGER
from vllm_ray_operator.plan.world import Deployment

MAX_NOTE_BYTES = 1024
MAX_NAME_CHARACTERS = 253


def event(deployment: Deployment, emit: Emit, now: float) -> Mapping[str, Any]:
    """Return the event. Its name is made from its content, so that posting it again finds it there."""
    note = cut(emit.message, MAX_NOTE_BYTES)
    content = "\0".join((deployment.uid, emit.type, emit.reason, note))
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "namespace": deployment.namespace,
            "name": f"{deployment.name[: MAX_NAME_CHARACTERS - len(digest) - 1]}.{digest}",
        },
        "eventTime": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": f"{GROUP}/{MANAGER}",
        "reportingInstance": MANAGER,
        "action": "Reconcile",
        "type": emit.type,
        "reason": emit.reason,
        "regarding": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": deployment.namespace,
            "name": deployment.name,
            "uid": deployment.uid,
        },
        "note": note,
    }


def cut(text: str, most: int) -> str:
    """Return the text cut to so many bytes of UTF-8, never inside a character."""
    encoded = text.encode()
    if len(encoded) <= most:
        return text
    ellipsis = "…"
    return encoded[: most - len(ellipsis.encode())].decode(errors="ignore") + ellipsis
