"""The control endpoint of an attempt's launcher."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from vllm_ray_operator.clients.http import SessionHolder, excerpt, failure_in_words
from vllm_ray_operator.clients.protocols import ApiError, EngineEndpoint, Forbidden

CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 5.0


class EngineClient(SessionHolder):
    """Implements :class:`vllm_ray_operator.clients.protocols.Engine`. One connection pool; ``close`` it."""

    async def state(self, engine: EngineEndpoint, since: int | None, wait_seconds: float) -> Mapping[str, Any]:
        """Return the launcher's state. ApiError too when the one that answers is another attempt's launcher."""
        query = {"waitSeconds": f"{wait_seconds:g}"}
        if since is not None:
            query["since"] = str(since)
        return await self._ask("GET", engine, "state", query, wait_seconds)

    async def drain(self, engine: EngineEndpoint) -> None:
        """Tell the launcher that its engine has left the traffic."""
        await self._ask("POST", engine, "drain", {}, 0)

    async def _ask(
        self, method: str, engine: EngineEndpoint, what: str, query: Mapping[str, str], wait_seconds: float
    ) -> Mapping[str, Any]:
        """Send a request and return the state in the answer."""
        headers = {}
        if engine.ray_token is not None:
            headers["Authorization"] = f"Bearer {control_token(engine.ray_token, engine.instance_id)}"
        where = f"the launcher of {engine.instance_id} at {_host(engine.address)}:{engine.port}"
        timeout = aiohttp.ClientTimeout(total=wait_seconds + ANSWER_SECONDS, sock_connect=CONNECT_SECONDS)
        url = f"http://{_host(engine.address)}:{engine.port}/v1/{what}"
        try:
            async with self.session.request(method, url, params=query, headers=headers, timeout=timeout) as response:
                status, text = response.status, (await response.read()).decode(errors="replace")
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(f"{where} does not answer: {failure_in_words(error, timeout)}") from error
        if status in (401, 403):
            raise Forbidden(f"{where} refuses our token", status)
        try:
            state = json.loads(text) if status == 200 else None
        except ValueError:
            state = None
        if not isinstance(state, dict):
            raise ApiError(f"{where} gave an unexpected answer (HTTP {status}): {excerpt(text)}", status)
        if state.get("instanceId") != engine.instance_id:
            raise ApiError(f"{where} is another one: {excerpt(str(state.get('instanceId')))}", status)
        return state


def control_token(ray_token: str, instance_id: str) -> str:
    """Return the bearer token of a control endpoint: only who has the Ray token can make it, for this attempt only."""
    message = f"vllm-ray-control/{instance_id}".encode()
    return hmac.new(ray_token.encode(), message, hashlib.sha256).hexdigest()


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
