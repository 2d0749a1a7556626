"""From an engine's log to the cause of its end: the first real error, not the noise that follows it.

Known failures come from a table and count in every line that tells (`log_lines`). Without one, the first exception is
the cause: Python prints the innermost of a chain first, and the processes above repeat it later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from vllm_ray_engine import reasons
from vllm_ray_engine.diagnosis import log_lines
from vllm_ray_engine.diagnosis.known_failures import CONSEQUENCES, KNOWN, SILENT, Pattern
from vllm_ray_engine.reasons import Cause

MAX_TEXT = 600
"""Characters of a log line, or of a message taken from one, that are kept."""

_FAILED_WITH = re.compile(r"Worker failed with error ['\"](.+?)['\"], please check")
_NOISE = re.compile(
    r"Engine core initialization failed|EngineDeadError|EngineGenerateError|ActorHandleNotFoundError"
    r"|ActorHandle objects are not valid|Failed to kill actor|ray::|RayTaskError\(|CancelledError|KeyboardInterrupt"
    r"|SystemExit|BrokenPipeError|During handling of|direct cause|WorkerProc initialization failed"
)


def find(lines: Iterable[str], *, known_only: bool = False) -> Cause | None:
    """Return the cause that the log states, None when it states none; `known_only` leaves out unknown exceptions."""
    lines = list(lines)
    fallback: Cause | None = None
    for line in log_lines.telling(lines):
        if _NOISE.search(line.text):
            continue
        if cause := _first(KNOWN, line.text):
            return cause
        if fallback is None and not known_only:
            fallback = _unknown(line.text)
    return fallback if fallback or known_only else _silent(lines)


def reason_of(text: str) -> str:
    """Return the reason that the words of an exception tell, EngineExited when they are not known."""
    cause = _first((*KNOWN, *CONSEQUENCES), text)
    return reasons.ENGINE_EXITED if cause is None else cause.reason


def _silent(lines: Iterable[str]) -> Cause | None:
    causes = (_first(SILENT, log_lines.parse(line).text) for line in lines)
    return next(filter(None, causes), None)


def _first(patterns: Iterable[Pattern], text: str) -> Cause | None:
    for pattern in patterns:
        if found := pattern.regex.search(text):
            groups = [(group or "").strip()[:MAX_TEXT] for group in found.groups()]
            return Cause(pattern.reason, pattern.message.format(*groups), text.strip()[:MAX_TEXT])
    return None


def _unknown(text: str) -> Cause | None:
    if cause := _first(CONSEQUENCES, text):
        return cause
    if found := _FAILED_WITH.search(text):
        return Cause(reasons.ENGINE_EXITED, f"a worker failed: {found[1][:MAX_TEXT]}", text[:MAX_TEXT])
    if found := log_lines.EXCEPTION.match(text.strip()):
        detail = f": {found[2]}" if found[2] else ""
        return Cause(reasons.ENGINE_EXITED, f"the engine failed with {found[1]}{detail}"[:MAX_TEXT], text[:MAX_TEXT])
    return None
