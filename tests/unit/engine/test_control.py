from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_ray_engine.launcher import control
from vllm_ray_engine.launcher.control import ControlServer, bearer, ray_token
from vllm_ray_engine.launcher.state import State

from .conftest import DATA, TOKEN, configure, free_port, get


def serve(token: str | None) -> Iterator[str]:
    config = configure(controlPort=free_port())
    state = State(config)
    server = ControlServer(config, state, token, lambda: state.update(drained=False))
    server.start()
    yield f"http://127.0.0.1:{config.control_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def guarded() -> Iterator[str]:
    yield from serve(TOKEN)


@pytest.fixture
def unguarded() -> Iterator[str]:
    yield from serve(None)


CREDENTIAL = bearer(TOKEN, DATA["instanceId"])


def test_credential_is_the_contracts() -> None:
    message = f"vllm-ray-control/{DATA['instanceId']}".encode()
    assert hmac.new(TOKEN.encode(), message, hashlib.sha256).hexdigest() == CREDENTIAL


def test_state_needs_the_credential(guarded: str) -> None:
    assert get(f"{guarded}/v1/state")[0] == 401
    for wrong in (TOKEN, bearer(TOKEN, "other"), CREDENTIAL.upper(), "ä"):
        assert get(f"{guarded}/v1/state", wrong.encode().decode("latin-1"))[0] == 401
    status, state = get(f"{guarded}/v1/state", CREDENTIAL)
    assert (status, state["phase"], state["attempt"]) == (200, "Checking", 7)


def test_health_needs_none(guarded: str) -> None:
    assert get(f"{guarded}/healthz") == (200, {"status": "ok"})


def test_unknown_paths_say_nothing_without_the_credential(guarded: str) -> None:
    assert get(f"{guarded}/other")[0] == 401
    assert get(f"{guarded}/other", CREDENTIAL)[0] == 404


def test_drain_is_a_command_for_those_who_may(guarded: str) -> None:
    assert get(f"{guarded}/v1/drain", method="POST")[0] == 401
    assert get(f"{guarded}/v1/state", CREDENTIAL)[1]["drained"] is None
    assert get(f"{guarded}/v1/drain", CREDENTIAL)[0] == 404, "to look changes nothing"
    assert get(f"{guarded}/v1/other", CREDENTIAL, "POST")[0] == 404
    status, state = get(f"{guarded}/v1/drain", CREDENTIAL, "POST")
    assert (status, state["drained"]) == (200, False)


def test_a_body_is_never_taken_for_the_next_request(unguarded: str) -> None:
    hidden = b"POST /v1/drain HTTP/1.1\r\n\r\n"
    head = f"POST /v1/drain HTTP/1.1\r\nContent-Length: {len(hidden)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", int(unguarded.rpartition(":")[2])), timeout=10) as client:
        client.sendall(head + hidden)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while received := client.recv(1000):
                answer += received
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 400")


def test_cluster_without_a_token_is_open(unguarded: str) -> None:
    assert get(f"{unguarded}/v1/state")[0] == 200


@pytest.mark.parametrize("query", ["since=x", "waitSeconds=x", "waitSeconds=61", "waitSeconds=-1", "waitSeconds=nan"])
def test_bad_queries(unguarded: str, query: str) -> None:
    assert get(f"{unguarded}/v1/state?{query}")[0] == 400


def test_connections_beyond_the_limit_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_CONNECTIONS", 1)
    for url in serve(None):
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(address) as first:
            first.sendall(b"GET /v1/state HTTP/1.1\r\n\r\n")
            assert first.recv(100).startswith(b"HTTP/1.1 200")
            with socket.create_connection(address) as second:
                second.settimeout(10)
                assert second.recv(100) == b"", "dropped while the first is open"


def test_strangers_do_not_keep_the_operator_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_CONNECTIONS", 2)
    for url in serve(TOKEN):
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with contextlib.ExitStack() as strangers:
            oldest, other = (strangers.enter_context(socket.create_connection(address)) for _ in range(2))
            for stranger in (oldest, other):
                stranger.sendall(b"GET /v1/state HTTP/1.1\r\n")
                stranger.settimeout(10)
            assert get(f"{url}/v1/state", CREDENTIAL)[0] == 200
            assert oldest.recv(100) == b"", "dropped for the operator"
            other.sendall(b"\r\n")
            assert other.recv(100).startswith(b"HTTP/1.1 401"), "there was room for it"


def test_slow_requests_of_strangers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "STRANGER_SECONDS", 0.3)
    for url in serve(TOKEN):
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        operator = http.client.HTTPConnection(*address, timeout=10)
        with socket.create_connection(address) as slow, contextlib.closing(operator):
            operator.request("GET", "/v1/state", headers={"Authorization": f"Bearer {CREDENTIAL}"})
            assert json.load(operator.getresponse())["phase"] == "Checking"
            known = operator.sock
            slow.settimeout(0.05)
            deadline, ended = time.monotonic() + 5, False
            while not ended:
                assert time.monotonic() < deadline, "each byte gave it more time"
                with contextlib.suppress(TimeoutError):
                    try:
                        slow.sendall(b"G")
                        ended = slow.recv(100) == b""
                    except ConnectionError:
                        ended = True
            operator.request("GET", "/v1/state", headers={"Authorization": f"Bearer {CREDENTIAL}"})
            assert json.load(operator.getresponse())["phase"] == "Checking"
            assert operator.sock is known, "who is known may stay"


TOKENS = {
    "none": ({}, None),
    "in the environment": ({"RAY_AUTH_TOKEN": " t \n"}, "t"),
    "in a file": ({"RAY_AUTH_TOKEN_PATH": "file"}, "from the file"),
    "the environment goes first": ({"RAY_AUTH_TOKEN": "t", "RAY_AUTH_TOKEN_PATH": "file"}, "t"),
}


@pytest.mark.parametrize("name", TOKENS)
def test_ray_token(name: str, tmp_path: Path) -> None:
    environment, expected = TOKENS[name]
    (tmp_path / "file").write_text("from the file\n")
    if "RAY_AUTH_TOKEN_PATH" in environment:
        environment = environment | {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "file")}
    assert ray_token(environment) == expected
