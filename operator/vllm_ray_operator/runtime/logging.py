"""Log lines: one fact each, as JSON or text, with the fields that say what it is about."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Literal, TextIO

Format = Literal["json", "text"]
Value = str | int | float | bool | None

_context: ContextVar[Mapping[str, Value]] = ContextVar("log_context", default=MappingProxyType({}))
_BEARER = re.compile(r"(Bearer\s+)[^\s'\",}]+", re.IGNORECASE)


def fields(**values: Value) -> dict[str, object]:
    """Return the ``extra`` of a log call that adds fields to its line."""
    return {"fields": values}


@contextmanager
def bound(**values: Value) -> Iterator[None]:
    """Add fields to every line logged inside, by whomever."""
    token = _context.set({**_context.get(), **values})
    try:
        yield
    finally:
        _context.reset(token)


def configure(level: str, format: Format, stream: TextIO = sys.stderr) -> None:
    """Send all logging of the process to ``stream``."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Libraries speak when something is wrong; kopf's per-event success lines would drown ours.
    for library in ("kopf", "aiohttp", "kubernetes", "asyncio", "urllib3"):
        logging.getLogger(library).setLevel(logging.WARNING)


class JsonFormatter(logging.Formatter):
    """A JSON object a line: time, level, logger, message, the fields, and an error's trace."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return _redact(json.dumps(line, ensure_ascii=False, default=str))


class TextFormatter(logging.Formatter):
    """A line for people: time, level, message, then the fields as key=value."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        parts = [_time(record), record.levelname.ljust(7), record.getMessage()]
        parts += [f"{key}={value}" for key, value in _fields(record).items()]
        text = " ".join(parts)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return _redact(text)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    merged = {**_context.get(), **getattr(record, "fields", {})}
    return {key: value for key, value in merged.items() if value is not None}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _redact(text: str) -> str:
    """Take out bearer tokens, should a library put one into an error's words."""
    return _BEARER.sub(r"\1***", text)
