"""The check of a vLLM release that cannot run here: its real source, on real Ray, without its compiled kernels.

`python -m e2e.matrix.source_check OUT`, where the release's source comes first on the path, before the environment of
a release that runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.engine.ray_cluster import HEAD, RayCluster

TIMEOUT_SECONDS = 300


class FunctionCheckError(AssertionError):
    """A function of the release does not do what it must; `failure` names the check and the error."""

    def __init__(self, failure: dict[str, str]) -> None:
        super().__init__(f"{failure['step']}: {failure['error']}")
        self.failure = failure


def check_functions(cluster: RayCluster, *options: str) -> list[str]:
    """Run the function checks on a cluster, in a process of their own, and return the names of those that passed.

    Raises FunctionCheckError at the first that does not.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "checks.json"
        address = f"{HEAD}:{cluster.gcs_port}"
        # Ray reads its token once, when it is imported.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": cluster.token, "VLLM_HOST_IP": HEAD}
        command = [sys.executable, "-m", "e2e.matrix.function_checks", *options, address, str(out)]
        code = subprocess.run(command, env=os.environ | token, timeout=TIMEOUT_SECONDS, check=False).returncode
        if not out.exists():
            raise FunctionCheckError({"step": "functions", "error": f"the checks ended with {code}"})
        seen: dict[str, Any] = json.loads(out.read_text())
    if seen["failure"]:
        raise FunctionCheckError(seen["failure"])
    checks: list[str] = seen["checks"]
    return checks


def main() -> int:
    """Check, write what was found, and return 0 when all checks passed."""
    parser = argparse.ArgumentParser(prog="python -m e2e.matrix.source_check", description=__doc__)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    checks: list[str] = []
    failure = None
    cluster = RayCluster()
    try:
        cluster.start()
        checks += check_functions(cluster, "--unpatched")
        checks += check_functions(cluster)
    except FunctionCheckError as error:
        failure = error.failure
    finally:
        cluster.stop()
    versions = {name: metadata.version(name) for name in ("vllm", "ray", "torch", "transformers")}
    seen = {
        "passed": failure is None,
        "checks": checks,
        "failure": failure,
        "versions": versions | {"python": platform.python_version()},
    }
    out.write_text(json.dumps(seen, indent=1) + "\n")
    return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main())
