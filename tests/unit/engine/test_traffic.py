"""Who is connected to the engine, and when it counts as drained."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from vllm_ray_engine.launcher.traffic import QUIET_LOOKS, Quiet, Traffic, idle_seconds, open_connections

from .conftest import wait_for

IDLE = 10.0


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_clients_count_while_they_are_connected(family: socket.AddressFamily, host: str) -> None:
    if family == socket.AF_INET6 and not Path("/proc/self/net/tcp6").exists():
        pytest.skip("no IPv6 here")
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        assert open_connections(port) == 0, "a listener is no connection"
        with socket.create_connection((host, port)) as client, listener.accept()[0]:
            assert open_connections(port) == 1
            assert open_connections(client.getsockname()[1]) == 1, "and is another's port to us"
            client.shutdown(socket.SHUT_WR)
            assert open_connections(port) == 1, "it may wait for its answer"
        wait_for("the connection to be closed", lambda: open_connections(port) == 0)


def test_a_kernel_that_does_not_tell(tmp_path: Path) -> None:
    assert open_connections(8000, [tmp_path / "tcp"]) is None


def test_drained_is_what_had_no_connection_for_a_while_and_not_a_moment_longer() -> None:
    quiet = Quiet(0, IDLE)
    none = Traffic(0)
    assert [quiet.judge(none, 1) for _ in range(QUIET_LOOKS)] == [False] * (QUIET_LOOKS - 1) + [True]
    assert [quiet.judge(Traffic(count), 1) for count in (1, 0, None)] == [False, False, False]
    assert [quiet.judge(none, 1) for _ in range(QUIET_LOOKS)] == [False] * (QUIET_LOOKS - 1) + [True], "from the start"


def test_a_client_that_never_asks_anything_does_not_hold_the_drain() -> None:
    quiet = Quiet(100, IDLE)
    silent = Traffic(connections=1, requests=0, moved=95)
    assert not quiet.judge(silent, 105), "since the drain began a request may have been on its way"
    assert not quiet.judge(Traffic(connections=1, requests=1, moved=106), 200), "one is open"
    assert not quiet.judge(Traffic(connections=1, requests=0, moved=200), 209), "the next may be on its way"
    assert quiet.judge(Traffic(connections=1, requests=0, moved=200), 210)


def test_without_anybody_who_counts_requests_a_connection_holds_the_drain() -> None:
    assert not Quiet(0, IDLE).judge(Traffic(connections=1, requests=None), 1e6)


@pytest.mark.parametrize(("value", "seconds"), [(None, 10), ("65", 70), ("x", 10)])
def test_a_request_is_waited_for_as_long_as_its_connection_is_kept(value: str | None, seconds: float) -> None:
    assert idle_seconds({} if value is None else {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": value}) == seconds
