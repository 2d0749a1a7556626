"""Log lines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from vllm_ray_operator.runtime.logging import Format, bound, configure, fields

log = logging.getLogger("vllm_ray_operator.test")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers, root.level = handlers, level


def written(format: Format) -> io.StringIO:
    stream = io.StringIO()
    configure("info", format, stream)
    return stream


def test_json_lines_carry_the_fields_of_the_pass_and_of_the_line() -> None:
    stream = written("json")
    with bound(namespace="default", name="chat"):
        log.info("replica %d is ready", 0, extra=fields(generation=3, attempt=None))
    log.info("outside")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["message"] == "replica 0 is ready"
    assert (first["namespace"], first["name"], first["generation"]) == ("default", "chat", 3)
    assert (first["level"], first["logger"]) == ("info", "vllm_ray_operator.test")
    assert "attempt" not in first
    assert first["time"].endswith("Z")
    assert "namespace" not in second


def test_text_lines_are_for_people() -> None:
    stream = written("text")
    with bound(namespace="default", name="chat"):
        log.warning("no answer", extra=fields(retry_seconds=2.0))
    assert stream.getvalue().endswith("WARNING no answer namespace=default name=chat retry_seconds=2.0\n")


@pytest.mark.parametrize("format", ["json", "text"])
def test_an_error_brings_its_trace_and_no_token(format: Format) -> None:
    stream = written(format)
    error = RuntimeError("headers: {'Authorization': 'Bearer eyJ.secret-_~+/='}")
    try:
        raise error
    except RuntimeError:
        log.exception("failed with bearer abc.def")
    text = stream.getvalue()
    assert "Traceback" in text
    assert "RuntimeError" in text
    assert "eyJ" not in text
    assert "abc.def" not in text
    if format == "json":
        assert text.count("\n") == 1


def test_libraries_only_warn() -> None:
    stream = written("json")
    logging.getLogger("kopf.objects").info("Handler succeeded.")
    logging.getLogger("kopf.objects").warning("Unresolved resources cannot be served")
    assert stream.getvalue().count("\n") == 1
