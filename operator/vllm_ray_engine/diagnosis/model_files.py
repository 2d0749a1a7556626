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

    config, tokenizer, weights: whether such a file is there. damaged: what is wrong with its files, in words.
    """

    exists: bool
    readable: bool = False
    config: bool = False
    tokenizer: bool = False
    weights: bool = False
    damaged: tuple[str, ...] = field(default=())


def look(path: Path) -> ModelFiles:
    """Look at a model; reads the first bytes of its weights only."""
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
    names = sorted(entry.name for entry in path.iterdir())
    closed = [name for name in names if name.endswith((".json", *WEIGHTS)) and not os.access(path / name, os.R_OK)]
    damaged = [f"{name} may not be read" for name in closed]
    for name in names:
        if name.endswith(".safetensors") and name not in closed and (problem := _problem(path / name)):
            damaged.append(f"{name} {problem}")
    if _INDEX in names and _INDEX not in closed:
        damaged += [f"{name} is missing" for name in _indexed(path / _INDEX) if name not in names]
    for name in CONFIGS:
        if name in names and name not in closed and not _is_json(path / name):
            damaged.append(f"{name} is no JSON")
    return ModelFiles(
        exists=True,
        readable=not closed,
        config=any(name in names for name in CONFIGS) or any(name.endswith(".gguf") for name in names),
        tokenizer=any(name in names for name in TOKENIZERS) or any(name.endswith(".gguf") for name in names),
        weights=any(name.endswith(WEIGHTS) for name in names),
        damaged=tuple(damaged),
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
