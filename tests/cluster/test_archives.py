"""Image archives are read and written as plain files."""

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from e2e.cluster.archives import ArchivedImage, images_in, single_binary_archive
from e2e.cluster.errors import ClusterError


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "pause"
    path.write_bytes(b"\x7fELF static")
    return path


def test_a_written_archive_holds_the_program_and_can_be_read_back(program: Path, tmp_path: Path) -> None:
    archive = tmp_path / "pause.tar"
    single_binary_archive(program, "localhost/pause:1", archive)

    (image,) = images_in(archive)
    assert image.name == "localhost/pause:1"
    with tarfile.open(archive) as tar:
        manifest = json.load(tar.extractfile("manifest.json"))[0]  # type: ignore[arg-type]
        config = tar.extractfile(manifest["Config"]).read()  # type: ignore[union-attr]
        layer = tar.extractfile("layer.tar").read()  # type: ignore[union-attr]
    assert image.config_digest == digest(config)
    assert json.loads(config)["rootfs"]["diff_ids"] == [digest(layer)]
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        member = tar.getmember("pause")
        assert member.mode == 0o755
        assert tar.extractfile(member).read() == program.read_bytes()  # type: ignore[union-attr]
    assert json.loads(config)["config"]["Entrypoint"] == ["/pause"]


def test_the_same_program_gives_the_same_bytes_and_another_gives_another_image(program: Path, tmp_path: Path) -> None:
    one, two, other = (tmp_path / name for name in ("one.tar", "two.tar", "other.tar"))
    single_binary_archive(program, "localhost/pause:1", one)
    single_binary_archive(program, "localhost/pause:1", two)
    assert one.read_bytes() == two.read_bytes()
    program.write_bytes(b"changed")
    single_binary_archive(program, "localhost/pause:1", other)
    assert images_in(other) != images_in(one)


def test_an_oci_archive_is_read_through_its_index(tmp_path: Path) -> None:
    config = b'{"os": "linux"}'
    manifest = json.dumps({"config": {"digest": digest(config)}}).encode()
    names = {"org.opencontainers.image.ref.name": "localhost/engine:1"}
    index = {"manifests": [{"digest": digest(manifest), "annotations": names}]}
    files = {"oci-layout": b"{}", "index.json": json.dumps(index).encode()}
    files |= {"blobs/" + digest(blob).replace(":", "/"): blob for blob in (config, manifest)}
    archive = write_tar(tmp_path / "oci.tar", files)
    assert images_in(archive) == [ArchivedImage("localhost/engine:1", digest(config))]

    compressed = tmp_path / "oci.tar.gz"
    compressed.write_bytes(gzip.compress(archive.read_bytes()))
    assert images_in(compressed) == images_in(archive)


@pytest.mark.parametrize(
    "files",
    [
        {"unrelated": b"x"},
        {"manifest.json": b"not JSON"},
        {"manifest.json": json.dumps([{"Config": "gone.json", "RepoTags": ["a:1"]}]).encode()},
        {"index.json": json.dumps({"manifests": [{"digest": "sha256:00"}]}).encode()},
    ],
)
def test_other_files_are_refused_with_their_name(files: dict[str, bytes], tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "bad.tar", files)
    with pytest.raises(ClusterError, match=r"bad\.tar: not a Docker or OCI image archive"):
        images_in(archive)


def test_a_missing_archive_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"gone\.tar"):
        images_in(tmp_path / "gone.tar")
