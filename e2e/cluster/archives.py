"""Reads and writes image archives, as files: no container tool is needed."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from e2e.cluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
NAME_ANNOTATIONS = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


@dataclass(frozen=True)
class ArchivedImage:
    """An image in an archive. The digest of its configuration names its content: layers are listed in it."""

    name: str
    config_digest: str


def images_in(archive: Path) -> list[ArchivedImage]:
    """Return the images of a Docker or OCI archive; ClusterError when it is neither."""
    try:
        with tarfile.open(archive) as tar:
            members = {member.name.removeprefix("./"): member for member in tar}

            def blob(name: str) -> bytes:
                stream = tar.extractfile(members[name])
                return stream.read() if stream is not None else b""

            if "index.json" in members and "manifest.json" not in members:
                return _oci_images(json.loads(blob("index.json")), blob)
            return [
                ArchivedImage(name, "sha256:" + hashlib.sha256(blob(entry["Config"])).hexdigest())
                for entry in json.loads(blob("manifest.json"))
                for name in entry["RepoTags"] or []
            ]
    except (OSError, tarfile.TarError, KeyError, ValueError) as error:
        raise ClusterError(f"{archive}: not a Docker or OCI image archive ({error})") from error


def _oci_images(index: dict[str, Any], blob: Callable[[str], bytes]) -> list[ArchivedImage]:
    images = []
    for entry in index["manifests"]:
        annotations = entry.get("annotations") or {}
        name = next((annotations[key] for key in NAME_ANNOTATIONS if key in annotations), None)
        if name is None:
            raise ValueError("an image without a name: write the archive with a tag")
        manifest = json.loads(blob("blobs/" + entry["digest"].replace(":", "/")))
        images.append(ArchivedImage(name, manifest["config"]["digest"]))
    return images


def single_binary_archive(binary: Path, name: str, archive: Path, *arguments: str) -> None:
    """Write a Docker archive of an image that holds one static program and runs it.

    The same input gives the same bytes.
    """
    layer = _tar({binary.name: (binary.read_bytes(), 0o755)})
    config = json.dumps(
        {
            "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Entrypoint": [f"/{binary.name}", *arguments], "User": "65535:65535"},
            "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]},
            "history": [{"created_by": "single_binary_archive"}],
        }
    ).encode()
    config_name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    files = {config_name: (config, 0o644), "layer.tar": (layer, 0o644), "manifest.json": (manifest, 0o644)}
    archive.write_bytes(_tar(files))


def _tar(files: dict[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, (content, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
