"""The control endpoint: the attempt's state over HTTP, for the operator.

GET /healthz answers 200 to anyone. For those who hold the Ray cluster's token, GET
/v1/state?since=<version>&waitSeconds=<0..60> is a long poll, and POST /v1/drain tells that the engine has left the
traffic; it may come again and again.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from vllm_ray_engine.config import EngineConfig
from vllm_ray_engine.launcher.state import State

MAX_WAIT_SECONDS = 60.0
MAX_CONNECTIONS = 32
"""Each connection holds a thread; the operator needs one."""
STRANGER_SECONDS = 5.0
"""How long a connection may go on without a request that is allowed, however slowly it sends one."""


def ray_token(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the Ray cluster's authentication token, None when the cluster has none.

    Raises OSError when the file that is said to hold it cannot be read.
    """
    if token := environment.get("RAY_AUTH_TOKEN", "").strip():
        return token
    if path := environment.get("RAY_AUTH_TOKEN_PATH"):
        return Path(path).read_text().strip() or None
    return None


def bearer(token: str, instance_id: str) -> str:
    """Return the credential for one attempt's endpoint: derived, so the Ray token itself never travels here."""
    return hmac.new(token.encode(), f"vllm-ray-control/{instance_id}".encode(), hashlib.sha256).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: ControlServer
    protocol_version = "HTTP/1.1"
    timeout = 10
    """Seconds a connection may be idle before its (next) request; a long poll is not idle."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/healthz":
            self._answer(HTTPStatus.OK, {"status": "ok"})
        elif self._let_in():
            if url.path == "/v1/state":
                self._state(parse_qs(url.query))
            else:
                self._answer(HTTPStatus.NOT_FOUND, {"error": f"no such path: {url.path}"})

    def do_POST(self) -> None:
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # what follows would be read as the next request
            self._answer(HTTPStatus.BAD_REQUEST, {"error": "commands have no body"})
        elif self._let_in():
            if self.path == "/v1/drain":
                self.server.drain()
                self._answer(HTTPStatus.OK, self.server.state.read())
            else:
                self._answer(HTTPStatus.NOT_FOUND, {"error": f"no such command: {self.path}"})

    def _let_in(self) -> bool:
        """Return whether the request may be answered; one that may not has been refused."""
        if not self._allowed():
            self._answer(HTTPStatus.UNAUTHORIZED, {"error": "a valid bearer token is needed"})
            return False
        self.server.trust(self.connection)
        return True

    def _allowed(self) -> bool:
        if self.server.credential is None:
            return True
        given = self.headers.get("Authorization", "")
        # Bytes, because compare_digest refuses text that is not ASCII.
        return hmac.compare_digest(given.encode(), f"Bearer {self.server.credential}".encode())

    def _state(self, query: Mapping[str, list[str]]) -> None:
        try:
            since = int(query["since"][-1]) if "since" in query else None
            wait = float(query.get("waitSeconds", ["0"])[-1])
        except ValueError:
            since, wait = None, -1.0
        if not 0 <= wait <= MAX_WAIT_SECONDS:
            self._answer(
                HTTPStatus.BAD_REQUEST,
                {"error": f"since must be an integer, waitSeconds a number from 0 to {MAX_WAIT_SECONDS:g}"},
            )
            return
        self._answer(HTTPStatus.OK, self.server.state.read(since, wait))

    def _answer(self, status: HTTPStatus, body: Mapping[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Log nothing: the output is the engine's log."""


class ControlServer(ThreadingHTTPServer):
    """Serves one attempt's state until closed.

    Strangers, connections that have made no allowed request yet, neither stay for long nor keep anybody out.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, config: EngineConfig, state: State, token: str | None, drain: Callable[[], None]) -> None:
        """Bind 0.0.0.0:controlPort; raises OSError when that is in use. `drain` is called from any thread."""
        self.state = state
        self.drain = drain
        self.credential = bearer(token, config.instance_id) if token else None
        self._lock = threading.Lock()
        self._strangers: dict[Any, float] = {}  # when each came, the oldest first
        self._trusted: set[Any] = set()
        super().__init__(("0.0.0.0", config.control_port), _Handler)  # noqa: S104  the operator is another pod

    def start(self) -> None:
        """Serve from a thread of its own."""
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.2}, name="control", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread; when there are too many, drop the oldest stranger, or else this one."""
        with self._lock:
            full = len(self._strangers) + len(self._trusted) >= MAX_CONNECTIONS
            if full and self._strangers:
                self._drop(next(iter(self._strangers)))
                full = False
            if not full:
                self._strangers[request] = time.monotonic()
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def trust(self, request: Any) -> None:
        """Keep a connection: what it asks for is allowed."""
        with self._lock:
            if self._strangers.pop(request, None) is not None:
                self._trusted.add(request)

    def service_actions(self) -> None:
        """Drop the strangers whose time is up; called several times a second."""
        with self._lock:
            for request, came in list(self._strangers.items()):
                if time.monotonic() - came > STRANGER_SECONDS:
                    self._drop(request)

    def _drop(self, request: Any) -> None:
        del self._strangers[request]
        with contextlib.suppress(OSError):  # gone already
            request.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection and give its place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._strangers.pop(request, None)
                self._trusted.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away."""
