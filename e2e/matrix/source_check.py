"""The check of a vLLM release that cannot run here: its real source, on real Ray, without its compiled kernels.

`python -m e2e.matrix.source_check OUT`, where the release's source comes first on the path, before the environment of
a release that runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from tests.engine.ray_cluster import HEAD, RayCluster


def main() -> int:
    """Check, write what was found, and return 0 when all checks passed."""
    parser = argparse.ArgumentParser(prog="python -m e2e.matrix.source_check", description=__doc__)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    cluster = RayCluster()
    try:
        cluster.start()
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=cluster.token, VLLM_HOST_IP=HEAD)
        # Ray reads these when it is imported.
        from e2e.matrix.source_checks import Checks, Session  # noqa: PLC0415

        checks = Checks(Session(cluster))
        checks.run()
    finally:
        cluster.stop()
    versions = {name: metadata.version(name) for name in ("vllm", "ray", "torch", "transformers")}
    seen = {
        "passed": checks.failure is None,
        "checks": checks.passed,
        "failure": checks.failure,
        "versions": versions | {"python": platform.python_version()},
    }
    out.write_text(json.dumps(seen, indent=1) + "\n")
    return 0 if checks.failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
