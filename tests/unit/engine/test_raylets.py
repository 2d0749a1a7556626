"""Raylets that accept connections, refuse them, and do not answer."""

from __future__ import annotations

import socket

import pytest

from vllm_ray_engine.launcher import raylets
from vllm_ray_engine.launcher.raylets import REFUSALS, Raylets

from .conftest import free_port


def test_one_that_refuses_after_it_accepted_is_dead() -> None:
    with socket.create_server(("127.0.0.1", 0)) as alive, socket.create_server(("127.0.0.1", 0)) as dies:
        looked = Raylets({"a": alive.getsockname(), "b": dies.getsockname()})
        assert looked.dead() == ()
        dies.close()
        assert [looked.dead() for _ in range(REFUSALS)] == [*[()] * (REFUSALS - 1), ("b",)]


def test_one_that_comes_back_lives() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        address = first.getsockname()
        looked = Raylets({"a": address})
        looked.dead()
    looked.dead()
    with socket.create_server(address):
        assert looked.dead() == ()
    assert looked.dead() == (), "the count begins anew"


def test_one_that_never_accepted_may_be_out_of_reach() -> None:
    looked = Raylets({"a": ("127.0.0.1", free_port())})
    assert [looked.dead() for _ in range(REFUSALS + 1)] == [()] * (REFUSALS + 1)


def test_silence_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        looked = Raylets({"a": server.getsockname()})
        assert looked.dead() == ()

    def silent(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(raylets.socket, "create_connection", silent)
    assert [looked.dead() for _ in range(REFUSALS + 1)] == [()] * (REFUSALS + 1)
