"""The doctor in the engine image: what it says of real vLLM and Ray, and of the nodes of a real Ray cluster."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from typing import Any

from .conftest import MODEL, ROOT, Attempts
from .ray_cluster import HEAD, SLOT, WORKER, RayCluster, free_port, wait_for


def run(*arguments: str, **environment: str) -> tuple[int, list[dict[str, Any]], float]:
    """Run it; return exit code, findings and seconds."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "vllm_ray_engine.doctor", "--json", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT / "operator")} | environment, stdout=subprocess.PIPE, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout)["findings"], time.monotonic() - started


def bad(findings: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    return {found["check"]: (found["status"], found["message"]) for found in findings if found["status"] != "ok"}


def named(findings: list[dict[str, Any]], check: str) -> dict[str, Any]:
    (found,) = [found for found in findings if found["check"] == check]
    return found


def test_image_is_healthy() -> None:
    code, findings, seconds = run("--model", MODEL, "--port", str(free_port()))
    print(f"MEASURED doctor: {seconds:.2f} s")
    # The package lies in the repository here and not as an installed distribution, so only that is missing.
    assert set(bad(findings)) == {"plugin"}, bad(findings)
    assert code == 1
    assert named(findings, "patch-points")["message"].startswith("all ")


def test_patches_are_there_when_vllm_is_imported() -> None:
    _, findings, seconds = run("--patches")
    print(f"MEASURED doctor --patches: {seconds:.1f} s")
    assert named(findings, "patches")["status"] == "ok", named(findings, "patches")


IN_A_JOB = """
import os, subprocess, sys, ray
done = subprocess.run([sys.executable, "-m", "vllm_ray_engine.doctor", "--json"], stdout=subprocess.PIPE, text=True)
print("DOCTOR", done.returncode, " ".join(done.stdout.split()))
os.environ["VLLM_HOST_IP"] = "127.0.1.8"
ray.init(address="auto", log_to_driver=False)
seen = ray.get(ray.remote(num_cpus=0)(lambda: os.environ["VLLM_HOST_IP"]).remote())
print("WORKER", seen)
"""


def test_in_a_job(attempts: Attempts) -> None:
    """The plugin travels with the job; what the job sets is what workers see, whatever the node or the driver set."""
    cluster, package = attempts.cluster, attempts._package
    cluster.upload(package.name, package.content)
    entrypoint = f"exec python3 -c {shlex.quote(IN_A_JOB)}"
    cluster.submit("doctor", package.uri, {"VLLM_HOST_IP": "127.0.1.9"}, entrypoint=entrypoint)
    wait_for("the doctor", lambda: cluster.job("doctor")["status"] in {"SUCCEEDED", "FAILED"}, 60)
    log = cluster.logs("doctor")
    print(log)
    (line,) = [line for line in log.splitlines() if line.startswith("DOCTOR ")]
    _, code, text = line.split(" ", 2)
    findings = json.loads(text)["findings"]
    assert (code, bad(findings)) == ("0", {})
    assert "WORKER 127.0.1.9" in log


def test_every_node_is_looked_at(cluster: RayCluster) -> None:
    environment = {
        "RAY_ADDRESS": f"{HEAD}:{cluster.gcs_port}", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": cluster.token,
    }  # fmt: skip
    code, findings, seconds = run(
        "--nodes", "--model", "/models/none", "--need", f"{SLOT}=2", "--need", "GPU=3", **environment
    )
    print(f"MEASURED doctor --nodes: {seconds:.1f} s")
    assert code == 1
    absent = [found["node"] for found in findings if found["check"] == "model-path"]
    assert sorted(absent) == ["", HEAD, WORKER], "here, and by a task on each node"
    for check in ("same-python", "same-ray", "same-vllm", "same-environment"):
        assert named(findings, check)["status"] == "ok", named(findings, check)
    lacking = named(findings, "resources")
    assert (lacking["status"], lacking["message"]) == ("error", f"2 of {SLOT}, 2 needed, 2 of GPU, 3 needed")


def test_a_ray_that_is_not_there() -> None:
    code, findings, seconds = run("--nodes", RAY_ADDRESS=f"{HEAD}:1")
    assert code == 1
    assert seconds < 20, "Ray itself would try for minutes"
    assert named(findings, "ray")["reason"] == "RayConnectionLost"
