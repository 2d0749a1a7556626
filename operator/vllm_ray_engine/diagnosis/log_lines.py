"""The lines of an engine's log, and which of them can tell why it ended.

Many processes write into one stream: API server, engine core, Ray workers of several nodes, Ray itself, C++ libraries,
each with prefixes of its own. What users send to the engine is in it too, so a line counts only if a process wrote it
about itself: logged as an error, or part of an exception that Python printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MAX_LINE = 1500
"""Characters of a line that are looked at: what a line says, it says at its beginning, and a log may be hostile."""

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LEVELS = {"D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_LEVEL = r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)"
_PLACE = r"(?P<place>[\w./-]+:\d+)"

_PREFIXES = tuple(
    re.compile(prefix)
    for prefix in (
        # Marks of a process, by vLLM, Ray and PyTorch: (EngineCore pid=7), (RayWorkerProc pid=7, ip=10.0.0.2), [rank1]:
        r"^\((?P<process>[^()]*\bpid=\d+[^()]*|(?:EngineCore|APIServer|Worker|raylet)[^()]*)\)\s?",
        r"^\[(?P<process>rank\d+)\]:\s?",
        # vLLM: ERROR 11-30 08:00:00 [core.py:1510]
        rf"^{_LEVEL} [\d-]+ [\d:.,]+ \[{_PLACE}\]\s?",
        # uvicorn: INFO:     127.0.0.1:5000 - "POST /v1/completions HTTP/1.1" 200 OK
        rf"^{_LEVEL}:\s+",
        # PyTorch: W1130 11:23:26.411 68 triton.py:53], [E528 08:52:46.1 ProcessGroupGloo.cpp:145]
        rf"^\[?(?P<letter>[IWEF])(?:\d{{3,4}} [\d:.]+)?(?: \d+)? {_PLACE}\]\s?",
        # Ray: 2026-11-30 08:00:00,123 INFO worker.py:1514 --
        rf"^\d{{4}}-\d\d-\d\d [\d:,.]+\s+{_LEVEL} {_PLACE} -- ",
        # Ray's C++ parts: [2026-11-30 08:00:00,123 E 68 68] (gcs_server) file.cc:10:
        rf"^\[\d{{4}}-\d\d-\d\d [\d:,.]+ (?P<letter>[DIWEF]) \d+ \d+\] (?:\([^)]*\) )?{_PLACE}:\s?",
        # An exception group's margin.
        r"^\s*(?P<margin>\|(?: |$)|\+(?:-| ))",
    )
)
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")

_TRACEBACK = re.compile(r"Traceback \(most recent call last\):|^ray::\S")
_FRAME = re.compile(r'^\s*File ".*", line \d+|^ {4}')
"""A frame of a traceback, or the line of code below it, which may name any error."""
EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Exit|Fail(?:ed|ure)|Timeout|Version|NotFound|Compiler)|Exception)"
    r"(?::\s*(.*))?$"
)
_PLAIN = re.compile(
    r"^vllm(?: \w+)?: error: |\bNCCL WARN |^terminate called|^Fatal Python error|^\s*what\(\): "
    r"|: (?:command )?not found$|^libnuma: Warning"
)
"""What programs that use no logger print when they fail."""

_QUOTES_REQUESTS = re.compile(
    r"(?:^|/)(?:serving\w*|api_router|http|exception|validation|vllm_error|server_utils|connection|dump_input|logger"
    r"|protocol|preprocess)\.py$"
)
"""Files of vLLM that log what a request holds or suffers, and no end of the engine."""
_RETRIES = re.compile(r"(?:^|/)repo_utils\.py$")
"""Logs as errors what is tried again, or gone without; if that ends the engine, the exception follows."""
_REQUEST_FAILED = re.compile(r"Exception in ASGI application|Unexpected error pre-processing request")
_CHAINED = re.compile(r"^\s*$|^During handling of the above|^The above exception was the direct cause")


@dataclass(frozen=True)
class Line:
    """One line without its prefixes. process: its mark; level, place (file:line): of the logger; '' when unknown.

    grouped: whether it stood behind the margin of an exception group.
    """

    text: str
    process: str = ""
    level: str = ""
    place: str = ""
    grouped: bool = False

    @property
    def file(self) -> str:
        """Return the name of the file that logged it."""
        return self.place.rpartition(":")[0]


def parse(raw: str) -> Line:
    """Take the prefixes off a line."""
    text = _ANSI.sub("", raw[:MAX_LINE]).rstrip()
    process = level = place = ""
    grouped = False
    matched = True
    while matched:
        matched = False
        for prefix in _PREFIXES:
            if found := prefix.match(text):
                groups = found.groupdict()
                process = process or groups.get("process") or ""
                level = groups.get("level") or _LEVELS.get(groups.get("letter") or "", level)
                place = groups.get("place") or place
                grouped = grouped or "margin" in groups
                text = text[found.end() :]
                matched = True
    return Line(_REPEATED.sub("", text), process, level, place, grouped)


class _Process:
    """What the last lines of one process were about."""

    def __init__(self) -> None:
        self._request: str | None = None
        """The place whose lines tell what befell a single request; '' while they come from no logger."""
        self._request_ends = False
        """Whether the request's exception is over, unless another is chained to it."""
        self.printing = False
        """Whether an exception is being printed, by no logger."""

    def counts(self, line: Line) -> bool:
        """Take the next line; return whether it tells what is wrong with the process."""
        if _REQUEST_FAILED.search(line.text) or line.level in {"DEBUG", "INFO", "WARNING"}:
            self.printing = self._request_ends = False
            self._request = line.place if line.level == "ERROR" else None
            return False
        return self._counts_logged(line) if line.level else self._counts_printed(line)

    def _counts_logged(self, line: Line) -> bool:
        self.printing = False
        if self._request != line.place:
            self._request = None
        return self._request is None and not _QUOTES_REQUESTS.search(line.file) and not _RETRIES.search(line.file)

    def _counts_printed(self, line: Line) -> bool:
        if self._request is not None:
            if not self._request_ends or line.grouped or _CHAINED.match(line.text):
                self._request_ends = EXCEPTION.match(line.text) is not None or (
                    self._request_ends and not line.text.startswith(("During", "The above"))
                )
                return False
            self._request = None
        if _TRACEBACK.search(line.text) or EXCEPTION.match(line.text):
            self.printing = True
        return self.printing or line.process.startswith("raylet") or _PLAIN.search(line.text) is not None


def telling(lines: Iterable[str]) -> Iterator[Line]:
    """Yield, in order, the lines in which a process says what is wrong with itself, without frames and code."""
    processes: dict[str, _Process] = {}
    for raw in lines:
        line = parse(raw)
        counts = processes.setdefault(line.process, _Process()).counts(line)
        if line.process and line.level:
            # A logger's prefix names the process, which what the interpreter prints does not.
            processes.setdefault("", _Process()).printing = False
        if counts and line.text.strip() and not _FRAME.match(line.text):
            yield line
