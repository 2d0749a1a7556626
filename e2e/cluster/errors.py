"""What can go wrong, in words for the person at the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LOG_LINES_SHOWN = 15


class ClusterError(Exception):
    """Something failed; the message says what, and what to do or where to look."""


class CommandError(ClusterError):
    """A command ended with a status other than 0."""

    def __init__(self, argv: list[str], status: int, output: str) -> None:
        """Keep the last lines of the output: the cause is there."""
        self.status = status
        self.output = output
        super().__init__(f"{' '.join(argv)}: exit {status}\n{tail(output)}")


class ComponentError(ClusterError):
    """A component died or did not become ready in time."""

    def __init__(self, name: str, problem: str, log: Path) -> None:
        """Show the end of the component's log, and where all of it is."""
        text = log.read_text(errors="replace") if log.exists() else ""
        super().__init__(f"{name}: {problem}; the end of {log}:\n{tail(text)}")


def tail(text: str, lines: int = LOG_LINES_SHOWN) -> str:
    """Return the last lines of a text, indented."""
    return "\n".join(f"    {line[:400]}" for line in text.strip().splitlines()[-lines:]) or "    (nothing)"
