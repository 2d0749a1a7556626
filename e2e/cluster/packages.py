"""Debian packages that the cluster runs or that images are built with."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from e2e.cluster.commands import run
from e2e.cluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from e2e.cluster.progress import Progress

# What has to be there, and the Debian package it comes from.
NEEDED = {
    "etcd": "etcd-server",
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ipset": "ipset",
    "ip": "iproute2",
    "ethtool": "ethtool",
    "socat": "socat",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    "zstd": "zstd",
    "openssl": "openssl",
    "nsenter": "util-linux",
}

# Debian's way to say that an installation must not start services.
POLICY = Path("/usr/sbin/policy-rc.d")


def missing_packages() -> list[str]:
    """Return the packages whose programs are not on this machine."""
    return [package for program, package in NEEDED.items() if shutil.which(program) is None]


async def ensure_packages(progress: Progress) -> None:
    """Install what is missing; ClusterError when that cannot be done here."""
    missing = missing_packages()
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise ClusterError(f"missing programs and no apt-get here: install the equivalents of {' '.join(missing)}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    async with progress.step(f"installing {' '.join(missing)}"):
        with services_not_started():
            # An interrupted dpkg would need repair by hand: always let it finish.
            await run(["apt-get", "update", "-q"], env=quiet, must_finish=True)
            # Another package manager may be at work: wait for it, up to five minutes.
            install = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-q", "-y", "--no-install-recommends"]
            await run([*install, *missing], env=quiet, must_finish=True)
    still = missing_packages()
    if still:
        raise ClusterError(f"apt-get installed them, but their programs are not on PATH: {' '.join(still)}")


@contextmanager
def services_not_started() -> Iterator[None]:
    """Forbid packages to start their services for the block, unless the machine has a policy of its own."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)
