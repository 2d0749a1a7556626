"""Runs the faults of vLLM on Ray, each as a scenario on vLLM's real classes and a real Ray cluster.

vLLM is imported once; every scenario then has a fork of its own, which connects to Ray, does what the scenario says,
and ends as a Python program ends, exit hooks included. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any


def main() -> None:
    # vLLM first: the order in which exit hooks run is that of these imports.
    import vllm.v1.engine.core
    import vllm.v1.engine.utils
    import vllm.v1.executor.ray_executor
    import vllm.v1.executor.ray_executor_v2  # noqa: F401

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
            return
        _, status = os.waitpid(child, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


def run(request: dict[str, Any]) -> None:
    """Run one scenario in this process."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    signal.alarm(request["seconds"])  # a scenario may well hang, to its end as an interpreter
    os.environ.update(request["environment"])
    import device
    import ray.cloudpickle
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine import utils

    ray.cloudpickle.register_pickle_by_value(device)
    if request["unnamed"]:
        utils._apply_dp_identity_suffix = lambda config, rank: None
    before = utils._apply_dp_identity_suffix
    load_general_plugins()
    device.tell(upstream_names_ranks=utils._apply_dp_identity_suffix is before)
    module, _, name = request["scenario"].partition(".")
    getattr(__import__(module), name)(**request["arguments"])


if __name__ == "__main__":
    main()
