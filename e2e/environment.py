"""The embedded cluster, its tools and its images, brought up together."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from e2e.kube import Kube
from e2e.waiting import say

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Image:
    """An image that was built: its tag, and an archive of it."""

    tag: str
    archive: Path


@dataclass(frozen=True)
class Environment:
    """A cluster that runs, with images that its nodes know. ``more``: the tags of further ones, by name."""

    kube: Kube
    operator_image: str
    engine_image: str
    more: Mapping[str, str] = field(default_factory=dict)


def module(*args: str) -> str:
    """Run one of our own modules; its progress goes to our stderr. Returns what it printed.

    Raises:
        SystemExit: the module failed; it has said why.
    """
    done = subprocess.run([sys.executable, "-m", *args], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    return done.stdout


def prepare() -> None:
    """Check the machine, and install the programs that the cluster and the images need, before any long work.

    Raises:
        SystemExit: the machine does not do; what it lacks and the remedy have been said.
    """
    module("e2e.cluster", "prepare")


def build_images(*names: str) -> dict[str, Image]:
    """Build images, or find them built."""
    built = json.loads(module("e2e.images", "build", *names))
    return {name: Image(built[name]["image"], Path(built[name]["archive"])) for name in names}


def tools() -> Path:
    """Return the folder of kubectl and helm."""
    return Path(module("e2e.cluster", "tools").strip())


def up(mode: str, name: str | None = None, nodes: int = 1) -> Kube:
    """Bring a cluster up and return access to it."""
    named = ["--name", name] if name else []
    module("e2e.cluster", *named, "up", "--mode", mode, "--nodes", str(nodes))
    return Kube(tools=tools(), kubeconfig=Path(module("e2e.cluster", *named, "kubeconfig").strip()))


def bring_up(name: str | None = None, nodes: int = 1, more: Sequence[str] = ()) -> Environment:
    """Bring up the whole: cluster and images side by side, then the images into the nodes. ``more``: further images."""
    prepare()
    with ThreadPoolExecutor() as pool:
        images = pool.submit(build_images, "operator", "engine-cpu", *more)
        kube = pool.submit(up, "node", name, nodes)
        built, cluster = images.result(), kube.result()
    say("loading the images into the nodes")
    named = ["--name", name] if name else []
    module("e2e.cluster", *named, "load", *(str(image.archive) for image in built.values()))
    return Environment(
        cluster, built["operator"].tag, built["engine-cpu"].tag, {name: built[name].tag for name in more}
    )


def commit() -> str:
    """Return the commit of this code, with a mark when it was changed since."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
