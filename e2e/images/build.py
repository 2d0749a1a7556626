"""Builds an image once: the base it stands on, the image, the archive to import it from."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.images.cache import cache_folder, locked, made_whole
from e2e.images.process import CommandError, Progress, run_logged
from e2e.images.spec import REPOSITORY, Recipe, public_base, recipe, stage, tag
from e2e.images.tools import BuildRequest, Tool, find_tool

AUTO, LOCAL = "auto", "local"
KEPT_ARCHIVES = 1
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")

# The local base: what the public one (Python on Debian) has that the Dockerfiles use.
_MMDEBSTRAP = (
    *("mmdebstrap", "--mode=root", "--variant=apt", "--format=tar"),
    "--include=ca-certificates,python3,python3-venv,usr-is-merged",
    # /usr is merged from the start, in place of the package usrmerge, which would bring all of Perl.
    "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
    *(f"--dpkgopt=path-exclude=/usr/share/{unused}/*" for unused in ("doc", "info", "locale", "man")),
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
    "bookworm",
)
_LOCAL_BASE = f"localhost/vllm-ray-base:{hashlib.sha256(' '.join(_MMDEBSTRAP).encode()).hexdigest()[:12]}"

# Settings of the package installer that a build step needs as well. Anything else (cache folders, targets) is about
# this machine.
_BUILD_SETTINGS = (
    *("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy"),
    *("PIP_DEFAULT_TIMEOUT", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_RETRIES", "PIP_TRUSTED_HOST"),
    *("UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_HTTP_TIMEOUT", "UV_INDEX", "UV_INDEX_URL", "UV_INSECURE_HOST"),
)


@dataclass(frozen=True)
class Built:
    """An image that exists: its full name, and the archive (Docker's format, uncompressed) to import it from."""

    name: str
    image: str
    archive: Path
    built: bool
    """False when it was there already."""
    seconds: float

    def as_json(self) -> dict[str, object]:
        """Return what the command line prints."""
        return {
            "image": self.image,
            "archive": str(self.archive),
            "bytes": self.archive.stat().st_size,
            "built": self.built,
            "seconds": round(self.seconds, 1),
        }


def image_name(name: str, base: str = AUTO) -> str:
    """Return the full name, content tag included, that an image has or would have."""
    return tag(recipe(name), base)


def build(name: str, base: str = AUTO, out: Path | None = None, repository: Path = REPOSITORY) -> Built:
    """Make sure that an image and its archive exist, and return them. Safe to interrupt and to run again.

    `base`: `auto` (the public base, or a local one where it cannot be pulled), `local`, or an image reference.
    `out`: the folder for the archive; by default one in the cache, where only the newest are kept.
    """
    progress = Progress(name)
    made_of = recipe(name)
    folder = (out or _archives()).absolute()
    image = tag(made_of, base, repository)
    if (archive := folder / archive_name(image)).exists():
        return Built(name, image, archive, built=False, seconds=progress.elapsed)
    state = cache_folder() / name
    with locked(state / "lock", progress), tempfile.TemporaryDirectory(prefix="vllm-ray-image-") as temporary:
        # The files are edited while we look: what counts is the copy that is built.
        context = Path(temporary)
        stage(made_of, context, repository)
        image = tag(made_of, base, context)
        if (archive := folder / archive_name(image)).exists():
            return Built(name, image, archive, built=False, seconds=progress.elapsed)
        tool = find_tool(state)
        if not tool.has(image):
            _build(tool, made_of, image, base, context, progress)
        progress.say(f"writing {archive}")
        with made_whole(archive) as partial:
            tool.export(image, partial)
        if out is None:
            _forget_old(tool, name, progress)
    progress.say(f"{image} is ready")
    return Built(name, image, archive, built=True, seconds=progress.elapsed)


def tool_with_image(name: str, base: str = AUTO) -> tuple[Tool, str]:
    """Return a tool that has the image, ready to run, and the image's full name; builds or loads it when needed."""
    built = build(name, base)
    tool = find_tool(cache_folder() / name)
    if not tool.has(built.image):
        progress = Progress(name)
        progress.say(f"loading {built.archive}")
        tool.load(built.archive)
    return tool, built.image


def build_settings(environ: Mapping[str, str]) -> str:
    """Return the shell file that hands the package installer's settings to a build step."""
    settings = {key: environ[key] for key in _BUILD_SETTINGS if environ.get(key)}
    if "PIP_INDEX_URL" in settings and not any(key.startswith("UV_") and "INDEX" in key for key in settings):
        settings["UV_DEFAULT_INDEX"] = settings["PIP_INDEX_URL"]  # uv reads its own names only
    return "".join(f"{key}={shlex.quote(value)}\n" for key, value in sorted(settings.items()))


def _archives() -> Path:
    return cache_folder() / "archives"


def archive_name(image: str) -> str:
    """Return the file name of an image's archive."""
    return f"{image.removeprefix('localhost/').replace(':', '-')}.tar"


def _build(tool: Tool, made_of: Recipe, image: str, base: str, context: Path, progress: Progress) -> None:
    base_image = _find_base(tool, base, public_base((context / made_of.dockerfile).read_text()), progress)
    progress.say(f"building {image} on {base_image}")
    with tempfile.NamedTemporaryFile("w", prefix="vllm-ray-build-env-") as settings:
        settings.write(build_settings(os.environ))
        settings.flush()
        secrets = {"build-env": Path(settings.name)}
        if CA_BUNDLE.exists():
            secrets["ca-bundle"] = CA_BUNDLE
        request = BuildRequest(
            image=image,
            context=context,
            dockerfile=made_of.dockerfile,
            build_args={"BASE": base_image, **made_of.build_args},
            contexts=made_of.contexts,
            secrets=secrets,
            log=cache_folder() / made_of.name / "build.log",
        )
        tool.build(request, progress)


def _find_base(tool: Tool, base: str, public: str, progress: Progress) -> str:
    """Return a base image that the tool has."""
    if base not in {AUTO, LOCAL}:
        if not tool.has(base) and not tool.pull(base):
            raise CommandError(f"the base image {base} cannot be pulled")
        return base
    if base == AUTO:
        if tool.has(public):
            return public
        if not tool.has(_LOCAL_BASE):
            progress.say(f"pulling {public}")
            if tool.pull(public):
                return public
            progress.say("it cannot be pulled here: making a local base from Debian packages")
    if not tool.has(_LOCAL_BASE):
        tool.load_base(_local_base_tarball(progress), _LOCAL_BASE)
    return _LOCAL_BASE


def _local_base_tarball(progress: Progress) -> Path:
    """Make the local base's root file system with mmdebstrap, once."""
    tarball = cache_folder() / "base" / f"{_LOCAL_BASE.rpartition(':')[2]}.tar"
    with locked(tarball.with_suffix(".lock"), progress):
        if not tarball.exists():
            if not shutil.which("mmdebstrap"):
                raise CommandError("a local base image needs mmdebstrap: apt-get install mmdebstrap")
            progress.say("mmdebstrap: Debian with Python")
            with made_whole(tarball) as partial:
                run_logged([*_MMDEBSTRAP, str(partial)], tarball.with_suffix(".log"), progress)
    return tarball


def _forget_old(tool: Tool, name: str, progress: Progress) -> None:
    """Remove all archives of an image but the newest, and the images in them. An import in progress keeps its file."""
    archives = sorted(_archives().glob(f"vllm-ray-{name}-*.tar"), key=lambda path: path.stat().st_mtime)
    for archive in archives[:-KEPT_ARCHIVES]:
        old = f"localhost/vllm-ray-{name}:{archive.stem.rpartition('-')[2]}"
        progress.say(f"removing the old {old}")
        tool.forget(old)
        archive.unlink(missing_ok=True)
