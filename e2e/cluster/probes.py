"""Asks components whether they are ready. All of these block for at most a few seconds; none raises."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from e2e.cluster.namespaces import network_of

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE = 3.0  # seconds per request


@dataclass(frozen=True)
class HttpProbe:
    """Ready when the address answers 200, asked from inside a network namespace."""

    net: Path
    url: str

    def __call__(self) -> str | None:
        """Return what is missing, or None."""
        parts = urlsplit(self.url)
        try:
            with network_of(self.net):
                connection = _connect(parts.scheme, parts.hostname or "", parts.port, None)
                connection.request("GET", parts.path)
                response = connection.getresponse()
                body = response.read().decode(errors="replace").strip()
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            return f"{self.url}: {error}"
        return None if response.status == http.HTTPStatus.OK else f"{self.url}: {response.status} {body[:300]}"


@dataclass(frozen=True)
class SocketProbe:
    """Ready when the Unix socket accepts connections."""

    path: Path

    def __call__(self) -> str | None:
        """Return what is missing, or None."""
        try:
            # By the folder's descriptor: a socket's path may have only 107 characters.
            folder = os.open(self.path.parent, os.O_PATH | os.O_DIRECTORY)
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(f"/proc/self/fd/{folder}/{self.path.name}")
            finally:
                os.close(folder)
        except OSError as error:
            return f"{self.path}: {error}"
        return None


@dataclass(frozen=True)
class ApiServer:
    """The API server, as seen from the machine."""

    port: int
    authority: Path
    token: str

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return the status and the body (plain text as a message); OSError when it does not answer."""
        connection = _connect("https", "127.0.0.1", self.port, self.authority)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}"})
            response = connection.getresponse()
            body = response.read().decode(errors="replace")
            is_json = "json" in (response.getheader("Content-Type") or "")
            return response.status, json.loads(body) if is_json else {"message": body}
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()

    def missing(self, path: str) -> str | None:
        """Return why an object is not there, or None when it is."""
        try:
            status, body = self.get(path)
        except OSError as error:
            return f"{path}: {error}"
        if status == http.HTTPStatus.OK:
            return None
        return f"{path}: {status} {str(body.get('message', ''))[:300]}"

    def unserved(self, crds: list[str]) -> str | None:
        """Return which resources of these CRDs (``plural.group``) are not served yet, or None."""
        try:
            served = {crd for group in {crd.partition(".")[2] for crd in crds} for crd in self._served(group)}
        except OSError as error:
            return str(error)
        missing = sorted(set(crds) - served)
        return f"not served yet: {', '.join(missing)}" if missing else None

    def _served(self, group: str) -> set[str]:
        _, versions = self.get(f"/apis/{group}")
        names = [version["groupVersion"] for version in versions.get("versions", [])]
        found = [resource["name"] for name in names for resource in self.get(f"/apis/{name}")[1].get("resources", [])]
        return {f"{name}.{group}" for name in found}

    def missing_condition(self, path: str, condition: str) -> str | None:
        """Return why an object's condition is not True, or None when it is."""
        try:
            _, body = self.get(path)
        except OSError as error:
            return f"{path}: {error}"
        status = body.get("status")  # of a failure, a word
        for found in status.get("conditions", []) if isinstance(status, dict) else []:
            if found["type"] == condition:
                return None if found["status"] == "True" else f"{path}: {found.get('message') or condition}"
        return f"{path}: {condition} is not reported"


def _connect(scheme: str, host: str, port: int | None, authority: Path | None) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=PATIENCE)
    if authority is not None:
        context = ssl.create_default_context(cafile=str(authority))
    else:
        context = ssl._create_unverified_context()  # noqa: S323 - components' own self-signed health ports
    return http.client.HTTPSConnection(host, port, timeout=PATIENCE, context=context)
