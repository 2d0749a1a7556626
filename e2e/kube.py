"""kubectl and helm against one cluster."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CommandError(RuntimeError):
    """A command ended with an error; the message is what it said."""


def run(command: Sequence[str], *, stdin: str | None = None, seconds: float = 120) -> str:
    """Run a command and return its output.

    Raises:
        CommandError: it ended with an error (with the last lines of what it said on stderr), not in time, or is not
            there.
    """
    called = " ".join(command[:6])
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise CommandError(f"{called} ... did not end within {seconds:g} s") from None
    except FileNotFoundError:
        raise CommandError(f"{command[0]} is not on this machine") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise CommandError(f"{called} ... ended with {done.returncode}: {said[-2000:]}")
    return done.stdout


@dataclass(frozen=True)
class Kube:
    """One cluster: where kubectl and helm are, and which context of which kubeconfig they use."""

    tools: Path | None
    kubeconfig: Path | None = None
    context: str | None = None

    def kubectl(self, *args: str, stdin: str | None = None, seconds: float = 120) -> str:
        """Run kubectl and return what it printed."""
        flags = ["--context", self.context] if self.context else []
        return run([self._binary("kubectl"), *self._config(), *flags, *args], stdin=stdin, seconds=seconds)

    def helm(self, *args: str, seconds: float = 300) -> str:
        """Run helm and return what it printed."""
        flags = ["--kube-context", self.context] if self.context else []
        return run([self._binary("helm"), *self._config(), *flags, *args], seconds=seconds)

    def get(self, *args: str) -> dict[str, Any]:
        """Return ``kubectl get ... -o json``; an empty dict when there is none."""
        text = self.kubectl("get", *args, "-o", "json", "--ignore-not-found")
        result: dict[str, Any] = json.loads(text) if text.strip() else {}
        return result

    def items(self, *args: str) -> list[dict[str, Any]]:
        """Return the items of ``kubectl get ... -o json``."""
        return list(self.get(*args).get("items", []))

    def _binary(self, name: str) -> str:
        return str(self.tools / name) if self.tools else name

    def _config(self) -> list[str]:
        return ["--kubeconfig", str(self.kubeconfig)] if self.kubeconfig else []
