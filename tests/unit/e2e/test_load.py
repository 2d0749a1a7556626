"""Clients that send a steady load: what they take for a failure, and how it is counted."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from e2e.load import CLIENT, Request, percentiles, tally
from e2e.load_client import is_closed

WHOLE = json.dumps({"choices": [{"text": "a", "finish_reason": "length"}]}).encode()
STREAM = b'data: {"choices":[{"text":"a","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
KINDS = {"fresh, plain", "fresh, stream", "kept, plain", "kept, stream"}


class Server(BaseHTTPRequestHandler):
    """Answers as the test wants it to."""

    protocol_version = "HTTP/1.1"
    status, whole, stream, says_close = 200, WHOLE, STREAM, False

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = self.stream if body["stream"] else self.whole
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(answer)))
        if self.says_close:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(answer)
        self.close_connection = self.says_close

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(**behaviour: Any) -> Iterator[str]:
    handler = type("Handler", (Server,), behaviour)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def told(url: str, enough: Callable[[list[Request]], bool]) -> list[Request]:
    """What the clients tell until that is enough."""
    with subprocess.Popen(
        [sys.executable, str(CLIENT), url, "tiny", "1", "0.05"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        requests: list[Request] = []
        while not enough(requests):
            requests.append(Request(**json.loads(process.stdout.readline())))
        process.kill()
        return requests


def kinds(requests: list[Request]) -> set[str]:
    return {request.kind for request in requests}


def test_four_kinds_of_clients_are_served() -> None:
    with serving() as url:
        requests = told(url, lambda seen: len(seen) >= 16 and kinds(seen) >= KINDS)
    assert kinds(requests) == KINDS
    assert [r.error for r in requests if r.error] == []
    assert not any(r.moved for r in requests)


def test_a_client_that_keeps_its_connection_tells_that_it_was_sent_away() -> None:
    with serving(says_close=True) as url:
        requests = told(url, lambda seen: len(seen) >= 16 and kinds(seen) >= KINDS)
    assert [r.error for r in requests if r.error] == []
    assert kinds([r for r in requests if r.moved]) == {"kept, plain", "kept, stream"}


def test_a_connection_that_was_closed_while_idle_is_known_to_be() -> None:
    connection = HTTPConnection("unused")
    ours, theirs = socket.socketpair()
    connection.sock = ours
    assert not is_closed(connection)
    theirs.close()  # at once known at the other end of a pair
    assert is_closed(connection)
    connection.close()


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        ({"status": 503}, "503"),
        ({"stream": b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'}, "a stream that was cut off"),
        ({"stream": b""}, "a stream that was cut off"),
        ({"whole": WHOLE.replace(b"length", b"abort")}, "an answer that is not whole"),
    ],
)
def test_what_is_not_a_whole_answer_is_a_failure(behaviour: dict[str, Any], error: str) -> None:
    with serving(**behaviour) as url:
        requests = told(url, lambda seen: kinds(seen) >= KINDS)
    assert any(error in r.error for r in requests)


def test_a_server_that_is_not_there_is_a_failure() -> None:
    with serving() as url:
        pass
    assert all("ConnectionRefused" in r.error for r in told(url, lambda seen: len(seen) >= 8))


def request(at: float, took: float, kind: str = "fresh, plain", error: str = "", moved: bool = False) -> Request:
    return Request(kind, at, took / 2, took, moved, error)


def test_requests_under_way_in_a_window_are_counted() -> None:
    requests = [
        request(0, 1),  # before
        request(9, 2),
        request(15, 1, error="reset"),
        request(19, 5, "kept, stream", moved=True),
        request(21, 1),  # after
    ]
    found = tally(requests, 10, 20)
    assert (found.sent, found.failed, found.moved, found.errors) == (3, 1, 1, {"reset": 1})
    assert found.latency == {"p50": 2000, "p90": 2000, "p99": 2000, "p100": 2000}
    assert found.first["p50"] == 2500
    assert found.stream["p50"] == 5000


def test_percentiles_are_measured_values() -> None:
    assert percentiles([]) == {}
    assert percentiles(n / 1000 for n in range(1, 101)) == {"p50": 50, "p90": 90, "p99": 99, "p100": 100}
