"""The table: what is broken, for how long, and whom it hits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from e2e.chaos import injection
from e2e.chaos.scene import Scene


class Hits(Enum):
    """Whose attempt has to be replaced."""

    NOBODY = "nobody"
    ONE = "one replica"
    ALL = "all replicas"


@dataclass(frozen=True)
class Fault:
    """One row.

    Without ``mend`` nothing is undone. With it, it is undone after ``hold`` seconds; with ``heals_broken`` as soon as
    the deployment is Ready all the same, and after ``hold`` seconds at the latest.
    """

    name: str
    what: str
    hits: Hits
    inject: Callable[[Scene], None]
    mend: Callable[[Scene], None] | None = None
    hold: float = 0.0
    heals_broken: bool = False


FAULTS = (
    Fault("job-stopped", "the engine job is stopped by hand (`ray job stop`)", Hits.ONE, injection.stop_job),
    Fault("worker-killed", "SIGKILL of a worker actor", Hits.ONE, injection.kill_worker),
    Fault("engine-core-killed", "SIGKILL of the engine core", Hits.ONE, injection.kill_engine_core),
    Fault("api-server-killed", "SIGKILL of vLLM's API server", Hits.ONE, injection.kill_api_server),
    Fault("worker-pod-deleted", "the replica's pod is deleted", Hits.ONE, injection.delete_worker_pod),
    Fault("head-pod-deleted", "the Ray head's pod is deleted", Hits.ALL, injection.delete_head_pod),
    Fault("gcs-killed", "SIGKILL of the GCS, which keeps nothing", Hits.ALL, injection.kill_gcs),
    Fault(
        "dashboard-down",
        "the Ray dashboard hangs for a minute (SIGSTOP)",
        Hits.NOBODY,
        injection.stop_dashboard,
        injection.continue_dashboard,
        hold=60,
    ),
    Fault(
        "kubernetes-api-down",
        "the Kubernetes API server is away for a minute",
        Hits.NOBODY,
        injection.stop_kubernetes_api,
        injection.start_kubernetes_api,
        hold=60,
    ),
    Fault(
        "operator-killed-in-roll",
        "the operator is killed while a roll drains its first replica",
        Hits.ALL,
        injection.kill_operator_in_roll,
    ),
    Fault(
        "node-drained",
        "the node is cordoned and its pods are evicted (`kubectl drain`)",
        Hits.ONE,
        injection.drain_node,
        injection.uncordon_node,
        hold=600,
        heals_broken=True,
    ),
    Fault(
        "node-partitioned",
        "the node is cut off for two and a half minutes, its engine lives on",
        Hits.ONE,
        injection.cut_network,
        injection.join_network,
        hold=150,
    ),
    Fault(
        "node-gone",
        "the node loses its power, and gets it back only if nothing heals without it for ten minutes",
        Hits.ONE,
        injection.cut_power,
        injection.restore_power,
        hold=600,
        heals_broken=True,
    ),
)


def chosen(names: list[str]) -> list[Fault]:
    """Return the faults of these names, in the table's order; all without any.

    Raises:
        ValueError: a name is not in the table; the message lists those that are.
    """
    known = [fault.name for fault in FAULTS]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)}; there are: {', '.join(known)}")
    return [fault for fault in FAULTS if not names or fault.name in names]
