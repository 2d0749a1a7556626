"""The engine job: what is submitted to Ray for an attempt.

No input of the user is ever in ``entrypoint``, which Ray hands to a shell; all configuration is one JSON value in the
job's environment. Nothing in it is secret: a job's runtime environment can be read on the dashboard.
"""

from __future__ import annotations

import json

from vllm_ray_operator.api.status import Attempt
from vllm_ray_operator.plan import names, submissions
from vllm_ray_operator.plan.actions import SubmitJob
from vllm_ray_operator.plan.revision import ResolvedEngine
from vllm_ray_operator.plan.world import Deployment

ENTRYPOINT = "exec python3 -m vllm_ray_engine.guard"
CONFIG_VARIABLE = "VLLM_RAY_ENGINE_CONFIG"
CONFIG_VERSION = 1
STOP_GRACE_SECONDS = 20

# The launcher gives up before the operator would: it knows better why.
LAUNCHER_MARGIN_SECONDS = 15


def submission(deployment: Deployment, replica: int, attempt: Attempt, engine: ResolvedEngine) -> SubmitJob:
    """Return the submission of an attempt. Its id is derived from the attempt, so twice submitted is once run.

    A standby waits for its accelerators without limit.
    """
    config = {
        "version": CONFIG_VERSION,
        "instanceId": attempt.instance_id,
        "deployment": f"{deployment.namespace}/{deployment.name}",
        "replica": replica,
        "attempt": attempt.number,
        "model": engine.model,
        "revision": engine.model_revision,
        "servedName": engine.served_name,
        "host": "0.0.0.0",  # noqa: S104 - the pod's own network
        "port": engine.port + attempt.turn,
        "controlPort": names.control_port(attempt.turn),
        "tensor": engine.tensor,
        "pipeline": engine.pipeline,
        "acceleratorKey": "GPU",
        "acceleratorsPerNode": engine.accelerators_per_node,
        "slotResource": names.slot_resource(replica),
        "args": engine.args,
        "startupTimeoutSeconds": _launcher_timeout(engine.startup_timeout_seconds),
        "stopGraceSeconds": STOP_GRACE_SECONDS,
        "standby": attempt.standby,
    }
    if engine.probe is not None:
        config |= {
            "probePeriodSeconds": engine.probe.period_seconds,
            "probeTimeoutSeconds": engine.probe.timeout_seconds,
            "probeFailureThreshold": engine.probe.failure_threshold,
        }
    environment = {variable.name: variable.value for variable in engine.env}
    environment[CONFIG_VARIABLE] = json.dumps(config, separators=(",", ":"))
    return SubmitJob(
        cluster=attempt.ray_cluster,
        submission_id=attempt.instance_id,
        entrypoint=ENTRYPOINT,
        resources={names.driver_resource(replica): 1},
        environment=environment,
        metadata=submissions.metadata(deployment, replica, attempt),
    )


def _launcher_timeout(seconds: int) -> int:
    return seconds - min(LAUNCHER_MARGIN_SECONDS, seconds // 4)
