"""What a model's folder holds, without loading it: enough to tell a model that cannot be loaded."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIGS = ("config.json", "params.json")
"""One of them describes the model: the second is Mistral's own format."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json", "vocab.json", "vocab.txt")

_INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors format."""
_LFS_POINTER = b"version "
"""How a Git LFS pointer begins, up to the length of a safetensors file's first field."""


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder, or the single file that a model may be.

    readable: whether the folder and what vLLM reads of it by default may be read. config, tokenizer, weights: whether
    such a file is there. damaged: what is wrong with files that vLLM reads by default, in words. doubtful: the same of
    other files. two_formats: there are weights in Mistral's own format; what is read depends on more than the folder.
    """

    exists: bool
    readable: bool = False
    config: bool = False
    tokenizer: bool = False
    weights: bool = False
    damaged: tuple[str, ...] = field(default=())
    doubtful: tuple[str, ...] = field(default=())
    two_formats: bool = False


def look(path: Path) -> ModelFiles:
    """Look at a model; reads the first bytes of its weights only. Which files vLLM reads: default_loader.py."""
    try:
        path.stat()
    except PermissionError:
        return ModelFiles(exists=True)
    except OSError:
        return ModelFiles(exists=False)
    if path.is_file():
        readable = os.access(path, os.R_OK)
        return ModelFiles(exists=True, readable=readable, config=True, tokenizer=True, weights=True)
    if not os.access(path, os.R_OK | os.X_OK):
        return ModelFiles(exists=True)
    # As vLLM looks for weights, which leaves out hidden files.
    names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    closed = [name for name in names if name.endswith((".json", *WEIGHTS)) and not os.access(path / name, os.R_OK)]
    tensors = [name for name in names if name.endswith(".safetensors")]
    problems = dict.fromkeys(closed, "may not be read")
    for name in tensors:
        if name not in closed and (problem := _problem(path / name)):
            problems[name] = problem
    for name in CONFIGS:
        if name in names and name not in closed and not _is_json(path / name):
            problems[name] = "is no JSON"
    read = {"config.json", *tensors}
    if tensors and _INDEX in names:  # without such files vLLM reads others, and no index
        indexed = _indexed(path / _INDEX)
        # vLLM leaves out what the index does not name (filter_duplicate_safetensors_files).
        read = {"config.json", _INDEX, *indexed}
        problems.update({name: "is missing" for name in indexed if not os.path.lexists(path / name)})
        if not indexed and _INDEX not in closed:
            problems[_INDEX] = "names no weights"
    damaged = [f"{name} {problem}" for name, problem in problems.items() if name in read]
    return ModelFiles(
        exists=True,
        readable=read.isdisjoint(closed),
        config=any(name in names for name in CONFIGS) or any(name.endswith(".gguf") for name in names),
        tokenizer=any(name in names for name in TOKENIZERS) or any(name.endswith(".gguf") for name in names),
        # Some models have theirs one folder below.
        weights=any(entry.name.endswith(WEIGHTS) for entry in (*path.glob("*"), *path.glob("*/*"))),
        damaged=tuple(damaged),
        doubtful=tuple(f"{name} {problem}" for name, problem in problems.items() if name not in read),
        two_formats=any(name.startswith("consolidated") for name in tensors),
    )


def _problem(path: Path) -> str:
    """Return what is wrong with a safetensors file: 8 bytes with the header's length, the header, the tensors."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if start == _LFS_POINTER:
                return "is a Git LFS pointer and not the file itself: fetch it with git lfs pull"
            length = int.from_bytes(start, "little")
            if length > _LARGEST_HEADER:
                return "is no safetensors file"
            header = file.read(length)
        expected = 8 + length if len(header) < length else 8 + length + _end(json.loads(header))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "is no safetensors file"
    return f"is cut off: it has {size} bytes of {expected}" if size < expected else ""


def _end(header: dict[str, Any]) -> int:
    return max((tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0)


def _indexed(path: Path) -> list[str]:
    try:
        return sorted(set(json.loads(path.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True
