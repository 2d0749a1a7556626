"""The two programs that can build and run an image, behind one Protocol: Docker and buildah."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from e2e.images.cache import remove
from e2e.images.process import ISOLATE, CommandError, Progress, output_of, run_logged


@dataclass(frozen=True)
class BuildRequest:
    """One image build: a staged context, the Dockerfile in it, and what is handed to it."""

    image: str
    context: Path
    dockerfile: str
    build_args: Mapping[str, str]
    contexts: Mapping[str, Path]
    secrets: Mapping[str, Path]
    log: Path


@dataclass(frozen=True)
class RunRequest:
    """One command inside an image, with the host's network. Volumes are `host:container[:ro]`."""

    image: str
    command: Sequence[str]
    volumes: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    workdir: str | None = None


class Tool(Protocol):
    """Builds, exports and runs images."""

    def has(self, image: str) -> bool:
        """Tell whether the image is there, without looking anywhere else."""

    def pull(self, image: str) -> bool:
        """Try to fetch an image from its registry; False when that is not possible."""

    def load_base(self, tarball: Path, image: str) -> None:
        """Make an image of one root file system."""

    def build(self, request: BuildRequest, progress: Progress) -> None:
        """Build an image; CommandError carries the end of the build's log."""

    def export(self, image: str, archive: Path) -> None:
        """Write the image as an uncompressed archive in Docker's format."""

    def load(self, archive: Path) -> None:
        """Read an archive written by `export`."""

    def run(self, request: RunRequest) -> int:
        """Run a command with our stdin, stdout and stderr, and return its exit code; leaves nothing behind."""

    def forget(self, image: str) -> None:
        """Remove an image unless it is in use."""


def find_tool(state: Path) -> Tool:
    """Return Docker when its daemon answers, else buildah with its storage under `state`.

    CommandError says in one line what is missing.
    """
    if shutil.which("docker"):
        with suppress(CommandError):
            output_of(["docker", "version", "--format", "{{.Server.Version}}"])
            return Docker()
    if not shutil.which("buildah"):
        raise CommandError("no Docker daemon answers and buildah is not installed: apt-get install buildah")
    if os.geteuid() != 0:
        raise CommandError("no Docker daemon answers, and buildah needs root here: run as root or start Docker")
    return Buildah(state)


class Docker:
    """The Docker command line with BuildKit."""

    def has(self, image: str) -> bool:  # noqa: D102  # see Tool
        with suppress(CommandError):
            output_of(["docker", "image", "inspect", "--format", "{{.Id}}", image])
            return True
        return False

    def pull(self, image: str) -> bool:  # noqa: D102
        with suppress(CommandError):
            output_of(["docker", "pull", "--quiet", image])
            return True
        return False

    def load_base(self, tarball: Path, image: str) -> None:  # noqa: D102
        output_of(["docker", "import", str(tarball), image])

    def build(self, request: BuildRequest, progress: Progress) -> None:  # noqa: D102
        command = ["docker", "build", "--progress=plain", "--network=host", *_build_options(request)]
        env = {**os.environ, "DOCKER_BUILDKIT": "1"}
        run_logged(command, request.log, progress, env)

    def export(self, image: str, archive: Path) -> None:  # noqa: D102
        output_of(["docker", "save", "--output", str(archive), image])

    def load(self, archive: Path) -> None:  # noqa: D102
        output_of(["docker", "load", "--quiet", "--input", str(archive)])

    def run(self, request: RunRequest) -> int:  # noqa: D102
        command = ["docker", "run", "--rm", "--init", "--interactive", "--network=host", "--shm-size=4g"]
        command += [
            *_run_options(request, "--workdir"),
            "--entrypoint",
            request.command[0],
            request.image,
            *request.command[1:],
        ]
        return subprocess.run(command, check=False).returncode

    def forget(self, image: str) -> None:  # noqa: D102
        with suppress(CommandError):
            output_of(["docker", "image", "rm", image])


class Buildah:
    """buildah with storage of its own; every call isolated, since it keeps its storage mounted while it works."""

    def __init__(self, state: Path) -> None:
        self._state = state

    def has(self, image: str) -> bool:  # noqa: D102
        with suppress(CommandError):
            self._call("inspect", "--type", "image", "--format", "{{.FromImageID}}", image)
            return True
        return False

    def pull(self, image: str) -> bool:  # noqa: D102
        with suppress(CommandError):
            self._call("pull", "--quiet", image)
            return True
        return False

    def load_base(self, tarball: Path, image: str) -> None:  # noqa: D102
        container = self._call("from", "scratch").strip()
        try:
            self._call("add", "--quiet", container, str(tarball), "/")
            self._call("commit", "--quiet", container, image)
        finally:
            self._call("rm", container)

    def build(self, request: BuildRequest, progress: Progress) -> None:  # noqa: D102
        self._remove_leftovers()
        command = ["buildah", "bud", "--isolation=chroot", "--network=host", "--layers", "--pull=never"]
        run_logged([*ISOLATE, *command, *_build_options(request)], request.log, progress, self._environment("build"))

    def export(self, image: str, archive: Path) -> None:  # noqa: D102
        self._call("push", "--quiet", image, f"docker-archive:{archive}:{image}")

    def load(self, archive: Path) -> None:  # noqa: D102
        self._call("pull", "--quiet", f"docker-archive:{archive}")

    def run(self, request: RunRequest) -> int:  # noqa: D102
        self._remove_dead_runs()
        container = f"run-{os.getpid()}"
        # Ray opens many files: as many as KubeRay asks for in pods, where we may.
        files = min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        self._call("from", "--pull=never", f"--ulimit=nofile={files}:{files}", "--name", container, request.image)
        options = ["--isolation=chroot", "--network=host", *_run_options(request, "--workingdir")]
        command = ["buildah", "run", *options, container, "--"]
        process = subprocess.Popen([*ISOLATE, *command, *request.command], env=self._environment(container))
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            self._remove_run(container)

    def forget(self, image: str) -> None:  # noqa: D102
        with suppress(CommandError):
            self._call("rmi", image)

    def _remove_leftovers(self) -> None:
        """Remove what a killed build has left: working containers and temporary files. The caller holds the lock."""
        for name in self._containers():
            if not name.startswith("run-"):
                self._call("rm", name)
        remove(self._state / "tmp" / "build")

    def _remove_dead_runs(self) -> None:
        """Remove the containers of runs whose process was killed before it could."""
        for name in self._containers():
            pid = name.removeprefix("run-")
            if pid != name and (pid == str(os.getpid()) or not Path("/proc", pid).exists()):
                with suppress(CommandError):  # another run may have been quicker
                    self._remove_run(name)

    def _remove_run(self, container: str) -> None:
        remove(self._state / "tmp" / container)
        self._call("rm", container)

    def _containers(self) -> list[str]:
        return self._call("containers", "--format", "{{.ContainerName}}").split()

    def _call(self, *arguments: str) -> str:
        return output_of([*ISOLATE, "buildah", *arguments], self._environment())

    def _environment(self, purpose: str = "call") -> dict[str, str]:
        """Return variables that point buildah to its storage, and to a temporary folder for the purpose."""
        temporary = self._state / "tmp" / purpose
        temporary.mkdir(parents=True, exist_ok=True)
        storage = f'[storage]\ndriver = "overlay"\ngraphroot = "{self._state}/storage"\nrunroot = "{self._state}/run"\n'
        configuration = self._state / "storage.conf"
        if not configuration.exists() or configuration.read_text() != storage:
            configuration.write_text(storage)
        return {**os.environ, "CONTAINERS_STORAGE_CONF": str(configuration), "TMPDIR": str(temporary)}


def _build_options(request: BuildRequest) -> list[str]:
    """Options that both programs' build commands understand."""
    options = ["--tag", request.image, "--file", str(request.context / request.dockerfile)]
    for key, value in request.build_args.items():
        options += ["--build-arg", f"{key}={value}"]
    for name, folder in request.contexts.items():
        options += ["--build-context", f"{name}={folder}"]
    for name, file in request.secrets.items():
        options += ["--secret", f"id={name},src={file}"]
    return [*options, str(request.context)]


def _run_options(request: RunRequest, workdir_option: str) -> list[str]:
    """Options that both programs' run commands understand; the one that they call differently is given."""
    options: list[str] = []
    for volume in request.volumes:
        options += ["--volume", volume]
    for key, value in request.env.items():
        options += ["--env", f"{key}={value}"]
    if request.user:
        options += ["--user", request.user]
    if request.workdir:
        options += [workdir_option, request.workdir]
    return options
