"""What the launchers say of themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ray_operator.api.status import Attempt
from vllm_ray_operator.clients.protocols import ApiError, Engine, EngineEndpoint, RayEndpoint
from vllm_ray_operator.observe.limit import Limit
from vllm_ray_operator.plan import names
from vllm_ray_operator.plan.world import AttemptView, EngineState, Job


def endpoints(
    views: Mapping[str, AttemptView], attempts: Sequence[Attempt], dashboards: Mapping[str, RayEndpoint]
) -> dict[str, EngineEndpoint]:
    """Return the control endpoints of the running attempts by instance id."""
    found: dict[str, EngineEndpoint] = {}
    for attempt in attempts:
        view, dashboard = views.get(attempt.instance_id), dashboards.get(attempt.ray_cluster)
        job = view.job if view is not None else None
        if not isinstance(job, Job) or job.status != "RUNNING" or job.driver_ip is None or dashboard is None:
            continue
        found[attempt.instance_id] = EngineEndpoint(
            job.driver_ip, names.CONTROL_PORT, attempt.instance_id, dashboard.token
        )
    return found


async def read_states(
    engine: Engine, endpoints: Mapping[str, EngineEndpoint], limit: Limit
) -> dict[str, EngineState | None]:
    """Return what every launcher says now; None where it does not answer (yet)."""
    states = await limit.gather(_read_state(engine, endpoint) for endpoint in endpoints.values())
    return dict(zip(endpoints, states, strict=True))


async def _read_state(engine: Engine, endpoint: EngineEndpoint) -> EngineState | None:
    try:
        return parse_state(await engine.state(endpoint, since=None, wait_seconds=0))
    except ApiError:
        return None


def parse_state(reply: Mapping[str, Any]) -> EngineState | None:
    """Return the state in a launcher's reply, None if it is not one."""
    try:
        health, placement, cause = reply.get("health") or {}, reply.get("placement") or {}, reply.get("cause")
        return EngineState(
            phase=str(reply["phase"]),
            message=str(reply.get("message") or placement.get("explanation") or ""),
            ready=health.get("ready") is True,
            reason=str(health.get("reason") or ""),
            ranks=tuple(
                (int(rank["rank"]), str(rank["instanceId"]), tuple(str(ip) for ip in rank.get("nodeIps") or ()))
                for rank in reply.get("ranks") or ()
            ),
            cause={str(key): str(value) for key, value in cause.items() if value is not None} if cause else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
