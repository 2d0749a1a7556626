"""The engine package as Ray takes it: a zip that travels with every job, named by its content.

It holds the sources of ``vllm_ray_engine`` and a ``.dist-info``, by which vLLM finds the plugin. The same sources make
the same bytes on every machine.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "vllm_ray_engine"
DISTRIBUTION = f"{PACKAGE}-0.dist-info"  # its version is its content
METADATA = f"Metadata-Version: 2.1\nName: {PACKAGE.replace('_', '-')}\nVersion: 0\n"
ENTRY_POINTS = f"[vllm.general_plugins]\n{PACKAGE} = {PACKAGE}.plugin:register\n"

# The oldest time that a zip can tell.
TIMESTAMP = (1980, 1, 1, 0, 0, 0)
FILE_MODE = 0o644


@dataclass(frozen=True)
class EnginePackage:
    """A package for ``runtime_env.py_modules``."""

    name: str
    content: bytes

    @property
    def uri(self) -> str:
        """Where a job finds it."""
        return f"gcs://{self.name}"


@functools.cache
def installed() -> EnginePackage:
    """Return the package of the ``vllm_ray_engine`` that is installed beside us; it is read, never imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"{PACKAGE} is not installed: it comes in one wheel with the operator")
    return build(Path(spec.submodule_search_locations[0]))


def build(source: Path) -> EnginePackage:
    """Return the package of the sources in a folder."""
    files = {
        f"{PACKAGE}/{path.relative_to(source).as_posix()}": path.read_bytes()
        for path in source.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in path.parts
    }
    files[f"{DISTRIBUTION}/METADATA"] = METADATA.encode()
    files[f"{DISTRIBUTION}/entry_points.txt"] = ENTRY_POINTS.encode()
    buffer = io.BytesIO()
    # Stored, not deflated: the bytes must not depend on the version of zlib.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, TIMESTAMP)
            entry.create_system = 3  # Unix, so that the mode counts
            entry.external_attr = FILE_MODE << 16
            archive.writestr(entry, files[name])
    content = buffer.getvalue()
    return EnginePackage(f"_ray_pkg_{hashlib.sha256(content).hexdigest()[:16]}.zip", content)
