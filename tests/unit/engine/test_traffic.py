"""Who is connected to the engine, and when it counts as drained."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from vllm_ray_engine.launcher.traffic import QUIET_LOOKS, Quiet, open_connections

from .conftest import wait_for


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


def test_drained_is_what_was_quiet_for_a_while_and_not_a_moment_longer() -> None:
    quiet = Quiet()
    assert [quiet.judge(0) for _ in range(QUIET_LOOKS)] == [False] * (QUIET_LOOKS - 1) + [True]
    assert [quiet.judge(count) for count in (1, 0, None)] == [False, False, None]
    assert [quiet.judge(0) for _ in range(QUIET_LOOKS)] == [False] * (QUIET_LOOKS - 1) + [True], "from the start"
