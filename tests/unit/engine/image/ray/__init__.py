"""A Ray of two nodes. Files in FAKE_WORLD: `placement` holds the group's state, `workers` the number of live actors,
`raylet` the port of their raylets.

What was done to it is written to `ray.log` there.
"""

import os
from pathlib import Path
from types import SimpleNamespace

from ray import util as util

WORLD = Path(os.environ["FAKE_WORLD"])


def log(text):
    with (WORLD / "ray.log").open("a") as file:
        file.write(text + "\n")


def read(name, default):
    path = WORLD / name
    return path.read_text().strip() if path.exists() else default


def init(address, namespace, log_to_driver):
    if read("placement", "") == "UNREACHABLE":
        raise ConnectionError("no Ray is running at this address")
    util.namespace = namespace
    log(f"init {address} {namespace}")


def is_initialized():
    return True  # asked by the engine only, which shares the launcher's namespace


def nodes():
    resources = {"GPU": 1.0, "vd-slot-0": 1.0}
    return [
        {
            "NodeID": f"n{i}",
            "NodeManagerAddress": f"127.0.0.{i}",
            "NodeManagerPort": int(read("raylet", "1")),
            "NodeManagerHostname": f"pod-{i}",
            "Alive": True,
            "Resources": resources,
        }
        for i in (1, 2)
    ]


def get_runtime_context():
    return SimpleNamespace(get_node_id=lambda: "n2")


def shutdown():
    log("shutdown")
