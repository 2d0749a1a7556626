"""Which handler for SIGTERM is in place after a driver connected to Ray."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_ray_engine.patches import context
from vllm_ray_engine.processes import signals

from .conftest import configure


def rays(*_: object) -> None:
    raise SystemExit


def vllms(*_: object) -> None:
    """As the engine core's: takes a note."""


def ray_init(**options: Any) -> dict[str, Any]:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, rays)
    return options


INIT = signals.keep_sigterm(ray_init, context.of_launcher(configure()))


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_handler_that_was_there_stays() -> None:
    signal.signal(signal.SIGTERM, vllms)
    assert INIT(address="auto") == {"address": "auto"}
    assert signal.getsignal(signal.SIGTERM) is vllms


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_where_there_was_none_ray_has_its_own(before: signal.Handlers) -> None:
    signal.signal(signal.SIGTERM, before)
    INIT()
    assert signal.getsignal(signal.SIGTERM) is rays


def test_connecting_from_another_thread() -> None:
    signal.signal(signal.SIGTERM, vllms)
    failed: list[BaseException] = []

    def connect() -> None:
        try:
            INIT()
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join()
    assert failed == []
    assert signal.getsignal(signal.SIGTERM) is vllms
