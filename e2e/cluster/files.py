"""Writes files so that neither an interruption nor a reader ever meets half of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Have the file hold this text. It is touched only if it does not: kube-proxy ends when its file is written."""
    if path.is_file() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text)
    draft.chmod(mode)
    draft.replace(path)
