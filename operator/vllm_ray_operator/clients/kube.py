"""The Kubernetes API over ``kubernetes.aio``: its configuration, credentials and transport; plain JSON objects."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import aiohttp

from vllm_ray_operator.clients.protocols import (
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    KindMissing,
    NotFound,
    Object,
    Resource,
)
from vllm_ray_operator.plan.names import MANAGER

if TYPE_CHECKING:
    from kubernetes.aio.client.api_client import ApiClient

TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=10)
PAGE_SIZE = 500
LIST_ATTEMPTS = 3
SERVICE_ACCOUNT_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")

JSON = "application/json"
JSON_PATCH = "application/json-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

# A field that the API server does not know is refused, not dropped: a typing error in a pod overlay would go unnoticed,
# and so would a CRD of KubeRay that is too old for token authentication.
STRICT = {"fieldManager": MANAGER, "fieldValidation": "Strict"}

# An applied object that does not fit its schema comes back with a 500 and this text.
DOES_NOT_FIT = "failed to create typed patch object"
# All that the API server says of a JSON patch that could not be applied: a test that failed, a path that is not there.
PATCH_NOT_APPLICABLE = "the server rejected our request due to an error in our request"


class KubeClient:
    """Implements :class:`vllm_ray_operator.clients.protocols.Kube`. One connection pool; ``close`` it."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    @classmethod
    async def connect(cls, kubeconfig: str | None = None, context: str | None = None) -> KubeClient:
        """Return a client for the kubeconfig or context given, else the pod's service account, else the default
        kubeconfig. The service account's token is read again every minute: it is rotated.
        """
        # Imported when needed: it takes most of a second, which --help and the tests of everything else do not owe.
        from kubernetes.aio.client.api_client import ApiClient  # noqa: PLC0415
        from kubernetes.aio.client.configuration import Configuration  # noqa: PLC0415
        from kubernetes.aio.config.incluster_config import load_incluster_config  # noqa: PLC0415
        from kubernetes.aio.config.kube_config import load_kube_config  # noqa: PLC0415

        configuration = Configuration()
        if kubeconfig is None and context is None and _in_pod():
            load_incluster_config(configuration)
        else:
            await load_kube_config(config_file=kubeconfig, context=context, client_configuration=configuration)
        api = ApiClient(configuration)
        api.user_agent = MANAGER
        return cls(api)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def __aenter__(self) -> KubeClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Return the object."""
        return await self._call("GET", resource, namespace, name)

    async def list(
        self, resource: Resource, namespace: str, selector: Mapping[str, str], *, fields: str = ""
    ) -> Sequence[Object]:
        """Return all objects whose labels match, whole; from the start again if a page's snapshot expired."""
        for remaining in reversed(range(LIST_ATTEMPTS)):
            try:
                return await self._pages(resource, namespace, selector, fields)
            except ApiError as error:
                if error.status != 410 or not remaining:
                    raise
        raise AssertionError("unreachable")

    async def create(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        """Create."""
        return await self._call("POST", resource, namespace, query=STRICT, body=dict(obj))

    async def apply(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        """Server-side apply."""
        query = {"fieldManager": MANAGER, "force": "true"}
        name = obj["metadata"]["name"]
        return await self._call("PATCH", resource, namespace, name, query=query, body=dict(obj), content=APPLY_PATCH)

    async def replace(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        """Replace."""
        query = {"fieldManager": MANAGER}
        return await self._call("PUT", resource, namespace, obj["metadata"]["name"], query=query, body=dict(obj))

    async def json_patch(
        self, resource: Resource, namespace: str, name: str, operations: Sequence[Mapping[str, Any]]
    ) -> Object:
        """Apply a JSON patch."""
        body = [dict(operation) for operation in operations]
        return await self._call("PATCH", resource, namespace, name, query=STRICT, body=body, content=JSON_PATCH)

    async def replace_status(self, resource: Resource, namespace: str, obj: Mapping[str, Any]) -> Object:
        """Replace the status subresource."""
        name = f"{obj['metadata']['name']}/status"
        return await self._call("PUT", resource, namespace, name, query={"fieldManager": MANAGER}, body=dict(obj))

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str | None, *, grace_seconds: int | None = None
    ) -> None:
        """Delete in the background."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        await self._call("DELETE", resource, namespace, name, body=options)

    async def _pages(
        self, resource: Resource, namespace: str, selector: Mapping[str, str], fields: str
    ) -> Sequence[Object]:
        items = []
        query = {"limit": str(PAGE_SIZE)}
        if selector:
            query["labelSelector"] = ",".join(f"{key}={value}" for key, value in selector.items())
        if fields:
            query["fieldSelector"] = fields
        while True:
            page = await self._call("GET", resource, namespace, query=query)
            for item in page.get("items") or []:
                # The items of a list carry neither; a single object does.
                items.append({"apiVersion": resource.api_version, "kind": resource.kind, **item})
            token = page.get("metadata", {}).get("continue")
            if not token:
                return items
            query = {**query, "continue": token}

    async def _call(
        self,
        method: str,
        resource: Resource,
        namespace: str,
        name: str = "",
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content: str = JSON,
    ) -> Object:
        path = _path(resource, namespace, name)
        if query:
            path += f"?{urlencode(query)}"
        headers = {"Accept": JSON, "Content-Type": content}
        try:
            # The credentials are refreshed and added here.
            _, url, headers, _, _ = await self._api.param_serialize(
                method, path, header_params=headers, auth_settings=["BearerToken"]
            )
            response = await self._api.call_api(method, url, headers, body, _request_timeout=TIMEOUT)
            content_read: bytes = await response.read()
        except TimeoutError as error:
            raise ApiError("the Kubernetes API server did not answer within 30 s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(f"the Kubernetes API server cannot be reached: {error}") from error
        status: int = response.status
        document = _document(content_read)
        if status >= 300:
            raise _error(status, document, resource, name, patch=content == JSON_PATCH)
        if document is None:
            raise ApiError(f"the Kubernetes API server answered something that is not JSON (HTTP {status})", status)
        return document


def _in_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and SERVICE_ACCOUNT_TOKEN.exists()


def _path(resource: Resource, namespace: str, name: str) -> str:
    root = "apis" if "/" in resource.api_version else "api"
    space = f"namespaces/{quote(namespace, safe='')}/" if resource.namespaced else ""
    path = f"/{root}/{resource.api_version}/{space}{resource.plural}"
    return f"{path}/{quote(name, safe='/')}" if name else path


def _document(content: bytes) -> Object | None:
    try:
        parsed = json.loads(content)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _error(status: int, document: Object | None, resource: Resource, name: str, *, patch: bool) -> ApiError:
    """Map an error's answer to its kind. Only the API server's own message is passed on."""
    is_status = document is not None and document.get("kind") == "Status"
    told = document if document is not None and is_status else {}
    reason = str(told.get("reason") or "")
    details = told.get("details") or {}
    message = str(told.get("message") or "").strip()
    what = f"{resource.kind} {name}" if name else resource.plural
    message = message or f"{what}: the Kubernetes API server answered HTTP {status}"
    kind: type[ApiError]
    if status == 404:
        # Without the kind of what was not found it is the path that is not served.
        if not details.get("kind"):
            message = f"the API server does not serve {resource.plural} ({resource.api_version}): its CRD is missing"
            return KindMissing(message, status, reason)
        kind = NotFound
    elif status == 409 or (patch and status == 422 and message == PATCH_NOT_APPLICABLE):
        kind = Conflict
    elif status in (400, 413, 422) or (status == 500 and message.startswith(DOES_NOT_FIT)):
        kind = Invalid
    elif status in (401, 403):
        kind = Forbidden
    else:
        kind = ApiError
    return kind(message, status, reason)
