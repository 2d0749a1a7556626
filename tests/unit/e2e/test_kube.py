"""Commands that fail, hang or are not there end a demo with one line, not with a trace."""

from __future__ import annotations

import pytest

from e2e.kube import CommandError, run


def test_output_and_input() -> None:
    assert run(["cat"], stdin="text") == "text"


@pytest.mark.parametrize(
    ("command", "seconds", "words"),
    [
        (["sh", "-c", "echo no such pod >&2; exit 3"], 60, "ended with 3: no such pod"),
        (["tail", "-f", "/dev/null"], 0.1, "tail -f /dev/null ... did not end within 0.1 s"),
        (["/no/such/kubectl", "get"], 60, "/no/such/kubectl is not on this machine"),
    ],
    ids=["fails", "hangs", "is not there"],
)
def test_what_goes_wrong_is_a_command_error(command: list[str], seconds: float, words: str) -> None:
    with pytest.raises(CommandError, match=words):
        run(command, seconds=seconds)
