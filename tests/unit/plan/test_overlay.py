from __future__ import annotations

from typing import Any

import pytest

from vllm_ray_operator.plan import overlay

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nothing": ({"a": 1}, {}, {"a": 1}),
    "scalar replaced": ({"a": 1}, {"a": 2}, {"a": 2}),
    "maps merge deeply": ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}, {"a": {"b": 1, "c": 3}}),
    "a hook in place of another": (
        {"lifecycle": {"preStop": {"exec": {"command": ["a"]}}, "postStart": {"exec": {"command": ["b"]}}}},
        {"lifecycle": {"preStop": {"httpGet": {"port": 80}}}},
        {"lifecycle": {"preStop": {"httpGet": {"port": 80}}, "postStart": {"exec": {"command": ["b"]}}}},
    ),
    "null removes": ({"a": {"b": 1, "c": 2}}, {"a": {"b": None}}, {"a": {"c": 2}}),
    "null of what is not there": ({"a": 1}, {"b": None}, {"a": 1}),
    "nulls below what is not there": ({}, {"a": {"b": None, "c": {"d": None}}}, {"a": {"c": {}}}),
    "map in place of a scalar": ({"a": 1}, {"a": {"b": 2}}, {"a": {"b": 2}}),
    "empty map stays": ({}, {"emptyDir": {}}, {"emptyDir": {}}),
    "list without a key replaced": ({"args": [1, 2]}, {"args": [3]}, {"args": [3]}),
    "tolerations replaced": (
        {"tolerations": [{"key": "a"}]},
        {"tolerations": [{"key": "b"}]},
        {"tolerations": [{"key": "b"}]},
    ),
    "merged by name, order of the base": (
        {"containers": [{"name": "ray", "image": "a"}]},
        {"containers": [{"name": "sidecar"}, {"name": "ray", "image": "b"}]},
        {"containers": [{"name": "ray", "image": "b"}, {"name": "sidecar"}]},
    ),
    "merged inside the merged": (
        {"containers": [{"name": "ray", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}]},
        {"containers": [{"name": "ray", "env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]}]},
        {
            "containers": [
                {
                    "name": "ray",
                    "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}, {"name": "C", "value": "4"}],
                }
            ]
        },
    ),
    "mounts by path": (
        {"volumeMounts": [{"mountPath": "/dev/shm", "name": "shm"}]},
        {"volumeMounts": [{"mountPath": "/dev/shm", "name": "mine"}, {"mountPath": "/x", "name": "x"}]},
        {"volumeMounts": [{"mountPath": "/dev/shm", "name": "mine"}, {"mountPath": "/x", "name": "x"}]},
    ),
    "a field of an item removed": (
        {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]},
        {"volumes": [{"name": "shm", "emptyDir": None, "hostPath": {"path": "/x"}}]},
        {"volumes": [{"name": "shm", "hostPath": {"path": "/x"}}]},
    ),
    "nulls of a new item": ({"volumes": []}, {"volumes": [{"name": "x", "a": None}]}, {"volumes": [{"name": "x"}]}),
    "item without its key": (
        {"containers": [{"name": "ray"}]},
        {"containers": [{}]},
        {"containers": [{"name": "ray"}, {}]},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_merge(name: str) -> None:
    base, over, expected = CASES[name]
    before = (repr(base), repr(over))
    assert overlay.merge(base, over) == expected
    assert (repr(base), repr(over)) == before, "an argument was changed"
