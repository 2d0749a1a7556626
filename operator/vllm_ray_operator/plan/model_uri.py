"""What a model's uri means for vLLM and for the pods."""

from __future__ import annotations

from dataclasses import dataclass

MOUNT_ROOT = "/models"


@dataclass(frozen=True)
class ModelSource:
    """``argument`` is what ``vllm serve`` gets; ``claim`` the PersistentVolumeClaim to mount at ``mount_path``."""

    argument: str
    name: str
    claim: str | None = None

    @property
    def mount_path(self) -> str:
        """Where the claim is mounted."""
        return f"{MOUNT_ROOT}/{self.claim}"


def parse(uri: str) -> ModelSource:
    """Read a uri: ``hf://org/name``, ``pvc://claim/path``, ``file:///path``; anything else passes through."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return ModelSource(argument=uri, name=uri)
    if scheme == "hf":
        return ModelSource(argument=rest, name=rest)
    if scheme == "file":
        return ModelSource(argument=rest, name=_last_part(rest))
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        argument = f"{MOUNT_ROOT}/{claim}/{path}".rstrip("/")
        return ModelSource(argument=argument, name=_last_part(argument), claim=claim)
    return ModelSource(argument=uri, name=_last_part(rest))


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
