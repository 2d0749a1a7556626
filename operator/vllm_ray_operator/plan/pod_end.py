"""How a worker pod ends: with time for its engine to drain, and a hook that keeps the pod alive for just that long.

A pod that is deleted gets its preStop hook first, then SIGTERM, on which Ray ends everything, then SIGKILL when its
grace is over. The operator sees the deletion, drains the replica and stops its engine; the hook waits for that end.
"""

from __future__ import annotations

from typing import Any

# What the end takes besides the drain: until the operator has noticed, the launcher's own time to stop (20 s), and
# Ray's end after the hook.
MARGIN_SECONDS = 60
# An engine that is not told to drain in this time has no operator that would end it: it goes as if there were no hook,
# after what Kubernetes gives a pod by default.
PATIENCE_SECONDS = 30

# Every process of an attempt holds a shared lock on its `.lock` as long as it lives; the attempt's launcher, if it is
# in this pod, on a file `-serving`, which is called `-draining` once it was told to drain (vllm_ray_engine: debris.py
# and drain_mark.py). Small, for it is in the RayCluster once for every slot.
WAIT_FOR_ENGINES = """
import fcntl, glob, sys, time
base, patience = sys.argv[1], time.monotonic() + float(sys.argv[2])
def held(path):
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
def alive(end):
    return any([held(path) for path in glob.glob(base + "*" + end)])
while alive(".lock") or alive("-serving") or alive("-draining"):
    if time.monotonic() > patience and alive("-serving") and not alive("-draining"):
        break
    time.sleep(0.5)
""".strip()


def lifecycle() -> dict[str, Any]:
    """Return the hook of a worker's Ray container. Nothing of it is the user's, and no shell reads it."""
    command = ["python3", "-c", WAIT_FOR_ENGINES, "/dev/shm/vllm-ray-attempt-", str(PATIENCE_SECONDS)]  # noqa: S108
    return {"preStop": {"exec": {"command": command}}}


def grace_seconds(drain_timeout_seconds: int) -> int:
    """Return the least terminationGracePeriodSeconds of a worker pod."""
    return drain_timeout_seconds + MARGIN_SECONDS


def with_grace(template: dict[str, Any], least: int) -> dict[str, Any]:
    """Return the pod template with no less grace than that."""
    spec = template["spec"]
    return {**template, "spec": {**spec, "terminationGracePeriodSeconds": max(_grace(spec), least)}}


def _grace(spec: dict[str, Any]) -> int:
    """Return the grace that the user's template asks for; what is no number is for the API server to refuse."""
    grace = spec.get("terminationGracePeriodSeconds")
    return grace if isinstance(grace, int) else 0
