"""What the launchers say of themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from vllm_ray_operator.api.status import Attempt
from vllm_ray_operator.clients.protocols import ApiError, Engine, EngineEndpoint
from vllm_ray_operator.observe.limit import Limit
from vllm_ray_operator.observe.words import MAX_MESSAGE_CHARACTERS, cut
from vllm_ray_operator.plan import names
from vllm_ray_operator.plan.world import AttemptView, EngineState, Job


def endpoints(
    views: Mapping[str, AttemptView], attempts: Sequence[Attempt], tokens: Mapping[str, str | None]
) -> dict[str, EngineEndpoint]:
    """Return the control endpoints of the attempts that run, as far as is known, by instance id.

    ``tokens``: of the RayClusters, as far as they are known.
    """
    found: dict[str, EngineEndpoint] = {}
    for attempt in attempts:
        view = views.get(attempt.instance_id)
        address = _address(attempt, view.job if view is not None else None)
        if address is not None and attempt.ray_cluster in tokens:
            found[attempt.instance_id] = EngineEndpoint(
                address, names.control_port(attempt.turn), attempt.instance_id, tokens[attempt.ray_cluster]
            )
    return found


def _address(attempt: Attempt, job: Job | Literal["absent"] | None) -> str | None:
    """Return where the launcher listens. A silent dashboard says nothing about an engine that was seen before."""
    if isinstance(job, Job):
        return job.driver_ip if job.status == "RUNNING" else None
    if job is None and attempt.endpoint is not None:
        return attempt.endpoint.address
    return None


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
            phase=_text(reply["phase"]),
            message=_text(reply.get("message") or placement.get("explanation") or ""),
            ready=health.get("ready") is True,
            reason=_text(health.get("reason") or ""),
            ranks=tuple(
                (int(rank["rank"]), str(rank["instanceId"]), tuple(str(ip) for ip in rank.get("nodeIps") or ()))
                for rank in reply.get("ranks") or ()
            ),
            drained=drained if isinstance(drained := reply.get("drained"), bool) else None,
            cause={str(key): _text(value) for key, value in cause.items() if value is not None} if cause else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _text(value: object) -> str:
    return cut(str(value), MAX_MESSAGE_CHARACTERS)
