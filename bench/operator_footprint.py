"""Measures what the operator costs: import, start until ready, memory, processor time at rest.

Starts the real process against the API server that KUBECONFIG names (control plane with our CRD and KubeRay), with a
number of VLLMDeployments in a namespace of its own. Writes results/operator_footprint.json and the table in README.md.

python -m bench.operator_footprint [--deployments 20] [--rest 30]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from kubernetes import client, config

from bench import readme
from vllm_ray_operator.api import API_VERSION, GROUP, KIND, PLURAL, VERSION

HERE = Path(__file__).resolve().parent
OPERATOR = HERE.parent / "operator"

KOPF = "import kopf"
# What the process has loaded once it runs; the client's modules come with its first use.
ALL = "import vllm_ray_operator.runtime.wiring, kubernetes.aio.client.api_client, kubernetes.aio.config.kube_config"
PROBE = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"

Result = dict[str, str | int | float]


def main() -> int:
    """Measure, and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deployments", type=int, default=20)
    parser.add_argument("--rest", type=float, default=30.0, help="seconds at rest over which processor time is taken")
    options = parser.parse_args()
    if "KUBECONFIG" not in os.environ:
        sys.stderr.write("KUBECONFIG must name a control plane: run `make bench`\n")
        return 2
    result: Result = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "processors": os.cpu_count() or 0,
        "load": round(os.getloadavg()[0], 1),
        **imports(),
        **running(options.deployments, options.rest),
    }
    write(result)
    print(json.dumps(result, indent=2))
    return 0


def imports() -> Result:
    """Compare the import of all that the operator loads with that of kopf alone; in turns, so that load hits both."""
    seconds: dict[str, list[float]] = {KOPF: [], ALL: []}
    memory = {}
    for _ in range(7):
        for statement, runs in seconds.items():
            start = time.perf_counter()
            done = python("-c", f"{statement}; {PROBE}")
            runs.append(time.perf_counter() - start)
            memory[statement] = int(done.stdout) / 1024
    kopf, everything = (min(seconds[statement]) for statement in (KOPF, ALL))
    return {
        "import_kopf_seconds": round(kopf, 2),
        "import_operator_seconds": round(everything, 2),
        "import_ratio": round(statistics.median(b / a for a, b in zip(*seconds.values(), strict=True)), 2),
        "import_kopf_rss_mib": round(memory[KOPF], 1),
        "import_operator_rss_mib": round(memory[ALL], 1),
    }


def running(deployments: int, rest: float) -> Result:
    """Start the process, give it deployments, leave it alone, stop it."""
    config.load_kube_config()
    core, objects = client.CoreV1Api(), client.CustomObjectsApi()
    namespace = f"bench-{secrets.token_hex(3)}"
    core.create_namespace({"metadata": {"name": namespace}})
    health, metrics = free_port(), free_port()
    environment = {
        **os.environ,
        "PYTHONPATH": str(OPERATOR),
        "POD_NAMESPACE": namespace,
        "VLLM_RAY_OPERATOR_NAMESPACES": namespace,
        "VLLM_RAY_OPERATOR_ENGINE_IMAGE": "registry.example/engine:1",
        "VLLM_RAY_OPERATOR_HEALTH_PORT": str(health),
        "VLLM_RAY_OPERATOR_METRICS_PORT": str(metrics),
    }
    log = tempfile.TemporaryFile()  # noqa: SIM115  # outlives the start of the process
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_ray_operator.runtime.main"], env=environment, stdout=log, stderr=log
    )
    try:
        wait("the operator to be ready", process, lambda: answers(f"http://127.0.0.1:{health}/readyz"))
        ready = time.perf_counter() - start
        rss_idle = rss_mib(process.pid)
        start = time.perf_counter()
        for number in range(deployments):
            body = {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "metadata": {"name": f"bench-{number}"},
                "spec": {"model": {"uri": "hf://org/model"}},
            }
            objects.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, body)

        def taken_up() -> bool:
            items = objects.list_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL)["items"]
            return all(item.get("status", {}).get("rayCluster") for item in items)

        wait(f"{deployments} deployments to be taken up", process, taken_up)
        reconciled = time.perf_counter() - start
        time.sleep(10)  # the pods of their RayClusters come in
        before = processor_seconds(process.pid)
        time.sleep(rest)
        used = processor_seconds(process.pid) - before
        rss_busy = rss_mib(process.pid)
        start = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=30)
        return {
            "ready_seconds": round(ready, 2),
            "rss_idle_mib": round(rss_idle, 1),
            "deployments": deployments,
            "deployments_taken_up_seconds": round(reconciled, 2),
            "rss_with_deployments_mib": round(rss_busy, 1),
            "processor_percent_with_deployments": round(100 * used / rest, 2),
            "stop_seconds": round(time.perf_counter() - start, 2),
            "stop_exit_code": code,
        }
    except BaseException:
        log.seek(0)
        sys.stderr.write(log.read().decode()[-4000:])
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        core.delete_namespace(namespace)


def write(result: Result) -> None:
    """Keep the result, and put it into README.md."""
    rows = [
        ("import, against `import kopf`", f"{result['import_ratio']} times ({result['import_operator_seconds']} s)"),
        ("start until ready", f"{result['ready_seconds']} s"),
        ("memory (RSS), nothing to do", f"{result['rss_idle_mib']} MiB"),
        (f"memory (RSS), {result['deployments']} deployments", f"{result['rss_with_deployments_mib']} MiB"),
        (
            f"{result['deployments']} deployments from creation to a planned RayCluster each",
            f"{result['deployments_taken_up_seconds']} s",
        ),
        ("processor at rest with them", f"{result['processor_percent_with_deployments']} %"),
        ("stop after SIGTERM", f"{result['stop_seconds']} s"),
    ]
    machine = f"{result['processors']} processors under a load of {result['load']}"
    note = f"Measured {result['date']} with Python {result['python']} on {machine}."
    readme.write("operator_footprint", result, f"{readme.table(('what', 'measured'), rows)}\n\n{note}")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with our package on its path."""
    environment = {**os.environ, "PYTHONPATH": str(OPERATOR)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True)


def wait(what: str, process: subprocess.Popen[bytes], probe: Callable[[], bool], seconds: float = 120) -> None:
    """Call ``probe`` until it is true. RuntimeError if the process ends before, or the time."""
    sys.stderr.write(f"waiting for {what}\n")
    deadline = time.monotonic() + seconds
    while not probe():
        if process.poll() is not None:
            raise RuntimeError(f"{what}: the operator ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.02)


def answers(url: str) -> bool:
    """Whether the address answers with 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310
            return bool(response.status == 200)
    except OSError:
        return False


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    raise SystemExit(main())
