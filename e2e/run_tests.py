"""Brings up what a tier of tests needs, runs it, and takes down what it brought up.

python -m e2e.run_tests integration|engine|e2e|bench|kill-campaign|bench-handover|helm-lint [-- PYTEST ARGUMENTS]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from e2e import environment, kill_report
from e2e.waiting import say

ROOT = Path(__file__).resolve().parents[1]
ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
CHARTS = sorted((ROOT / "charts").glob("*/Chart.yaml"))


def main() -> int:
    """Run one tier; returns the exit code of its tests."""
    tiers: dict[str, Callable[[Sequence[str]], int]] = {
        "integration": integration,
        "engine": engine,
        "e2e": e2e,
        "bench": bench,
        "kill-campaign": kill_campaign,
        "bench-handover": bench_handover,
        "helm-lint": helm_lint,
    }
    parser = argparse.ArgumentParser(
        prog="python -m e2e.run_tests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tier", choices=tiers)
    parser.add_argument("rest", nargs="*", metavar="PYTEST ARGUMENT", help="after --, for pytest")
    options = parser.parse_args()
    return tiers[options.tier](options.rest)


def integration(rest: Sequence[str]) -> int:
    """Run against a real control plane with KubeRay, and test the cluster tool itself."""
    name = "vro-integration"
    try:
        kube = environment.up("control-plane", name)
        env = {"KUBECONFIG": str(kube.kubeconfig), "VRO_TOOLS": str(kube.tools), "VRO_CLUSTER": name}
        code = pytest(["tests/integration", "-m", "integration", *rest], env)
    finally:
        environment.module("e2e.cluster", "--name", name, "down")
    return code or pytest(["tests/cluster", "-m", "cluster", *rest], {})


def engine(rest: Sequence[str]) -> int:
    """Run real vLLM on real Ray inside the engine image, in a network of its own that has only a loopback."""
    inside = engine_image()
    flags = ["-p", "no:cacheprovider", "-m", "engine", "-v", "tests/engine"]
    command = [*ALONE, *inside, "python3", "-m", "pytest", *flags, *rest]
    say("pytest tests/engine, inside the engine image")
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def engine_image() -> list[str]:
    """Prepare the engine image; returns the command that runs another inside it, with the repository and pytest."""
    environment.prepare()
    environment.build_images("engine-cpu")
    inside = [sys.executable, "-m", "e2e.images", "run", "engine-cpu", "--tests", "--"]
    subprocess.run([*inside, "python3", "-m", "pytest", "--version"], cwd=ROOT, check=True)  # installs what is missing
    return inside


def e2e(rest: Sequence[str]) -> int:
    """Run the whole path on a one-machine cluster with a node."""
    name = "vro-e2e"
    try:
        env = environment.bring_up(name, more=["redis"])
        settings = {
            "KUBECONFIG": str(env.kube.kubeconfig),
            "VRO_TOOLS": str(env.kube.tools),
            "VRO_CLUSTER": name,
            "VRO_OPERATOR_IMAGE": env.operator_image,
            "VRO_ENGINE_IMAGE": env.engine_image,
            "VRO_REDIS_IMAGE": env.more["redis"],
        }
        return pytest(["e2e/tests", "-m", "e2e", *rest], settings)
    finally:
        environment.module("e2e.cluster", "--name", name, "down")


def bench(rest: Sequence[str]) -> int:
    """Measure the operator's start-up time and memory against a real control plane."""
    name = "vro-bench"
    try:
        kube = environment.up("control-plane", name)
        env = {**os.environ, "KUBECONFIG": str(kube.kubeconfig)}
        command = [sys.executable, "-m", "bench.operator_footprint", *rest]
        return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    finally:
        environment.module("e2e.cluster", "--name", name, "down")


def kill_campaign(rest: Sequence[str]) -> int:
    """Kill every process of an engine at every moment (or at the phases given), and write docs/ownership.md."""
    command = [*ALONE, *engine_image(), "python3", "-m", "tests.engine.kill_campaign", *rest]
    cells, facts = [], ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # noqa: S101  for the type checker
        for line in process.stdout:
            print(line, end="", flush=True)
            mark, _, text = line.partition(" ")
            if mark == "CELL":
                cells.append(json.loads(text))
            elif mark == "FACTS":
                facts = text.strip()
    report = ROOT / "docs" / "ownership.md"
    report.write_text(kill_report.update(report.read_text() if report.exists() else "", facts, cells))
    return process.returncode


def bench_handover(rest: Sequence[str]) -> int:
    """Measure hand-overs with real vLLM on real Ray, inside the engine image, and write them down outside of it."""
    command = [*ALONE, *engine_image(), "python3", "bench/handover.py", *rest]
    measured = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    write = [sys.executable, "-m", "bench.handover_report"]
    return subprocess.run(write, cwd=ROOT, input=measured, check=False).returncode


def helm_lint(_rest: Sequence[str]) -> int:
    """Lint the charts with the real helm."""
    helm = environment.tools() / "helm"
    charts = [str(chart.parent) for chart in CHARTS]
    return subprocess.run([str(helm), "lint", "--strict", "--quiet", *charts], check=False).returncode


def pytest(args: Sequence[str], env: dict[str, str]) -> int:
    """Run pytest with more environment; what the tests wait for is shown as it happens."""
    say(f"pytest {' '.join(args)}")
    command = [sys.executable, "-m", "pytest", "-v", "--capture=no", *args]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
