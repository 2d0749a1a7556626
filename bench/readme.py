"""Where benches write down what they measured: a file in results/, and their part of README.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"


def write(name: str, result: Mapping[str, Any], text: str) -> None:
    """Keep the raw figures, and put the text between the marks of that name."""
    (HERE / "results" / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    README.write_text(replaced(README.read_text(encoding="utf-8"), name, text), encoding="utf-8")


def replaced(document: str, name: str, text: str) -> str:
    """Return a document with another text between ``<!-- NAME begin -->`` and ``<!-- NAME end -->``.

    Raises:
        ValueError: the marks are not there.
    """
    begin, end = f"<!-- {name} begin -->", f"<!-- {name} end -->"
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ValueError(f"the marks of {name} are not there")
    before, _, rest = document.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


def table(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [heading, ("---",) * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def conditions(result: Mapping[str, Any]) -> str:
    """Tell under which a bench of a served deployment ran (``stage.Stage.conditions``)."""
    low, high = min(result["memory_mib"]), max(result["memory_mib"])
    return (
        f"Measured {result['date']} at commit {result['commit']}: {len(result['cold_seconds'])} replicas of one "
        f"process for the model each (tiny model, tensor 1, one thread, {low:.0f} to {high:.0f} MiB a pod), "
        f"{result['clients']} clients with {result['requests_per_second']:g} requests a second in all, vLLM "
        f"{result['vllm']}, Ray {result['ray']}, Kubernetes {result['kubernetes']}, Python {result['python']}, "
        f"{result['processors']} processors."
    )
