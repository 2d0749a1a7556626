"""Merge of a partial pod template over a generated one, by Kubernetes' strategic-merge rules.

Merge keys as in the Pod API's ``patchMergeKey`` tags (kubernetes ``core/v1`` types); lists without one are replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# One of several kinds, never two at once: an overlay's takes the place of the whole.
WHOLE = frozenset({"preStop", "postStart"})

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "schedulingGates": "name",
}


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``overlay`` laid over it; a null in the overlay removes the field."""
    merged = dict(base)
    for key, value in overlay.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and key not in WHOLE:
            there = merged.get(key)
            merged[key] = merge(there if isinstance(there, Mapping) else {}, value)
        elif isinstance(value, list) and isinstance(merged.get(key), list) and key in MERGE_KEYS:
            merged[key] = _merge_list(merged[key], value, MERGE_KEYS[key])
        else:
            merged[key] = value
    return merged


def _merge_list(base: list[Any], overlay: list[Any], merge_key: str) -> list[Any]:
    """Merge by key, keeping the base's order (Ray has to stay the first container); new items come after."""
    merged = list(base)
    for item in overlay:
        identity = item.get(merge_key) if isinstance(item, Mapping) else None
        position = next(
            (i for i, b in enumerate(merged) if isinstance(b, Mapping) and b.get(merge_key) == identity), None
        )
        if identity is None or position is None:
            merged.append(merge({}, item) if isinstance(item, Mapping) else item)
        else:
            merged[position] = merge(merged[position], item)
    return merged
