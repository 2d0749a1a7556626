"""The example for users outside Kubernetes, as it stands in examples/, submitted as a Ray job.

The user has set VLLM_WORKER_MULTIPROC_METHOD=spawn, and Ray is not to be found without its address: as with every
cluster that is not the last one started on its machine.
"""

from __future__ import annotations

import io
import json
import secrets
import zipfile
from typing import Any

from .conftest import MODEL, ROOT, _package
from .ray_cluster import RayCluster, wait_for

OPTIONS = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "kv_cache_memory_bytes": 64 * 2**20}
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def without_plugin() -> bytes:
    """Return a package in whose place nothing happens."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("vllm_ray_engine/__init__.py", "")
        archive.writestr("vllm_ray_engine/plugin.py", "def enable(instance_id):\n    pass\n")
    return content.getvalue()


def run(cluster: RayCluster, name: str, content: bytes) -> tuple[str, str, list[dict[str, Any]]]:
    """Run the example; return the job's status, its log, and the worker actors that it ever had."""
    submission = f"example-{secrets.token_hex(4)}"
    cluster.upload(name, content)
    known = {row["actor_id"] for row in cluster._rows("actors")}
    command = f"exec python3 {ROOT}/examples/ray_actor.py --model {MODEL} --tensor 2 --options '{json.dumps(OPTIONS)}'"
    cluster.submit(submission, f"gcs://{name}", VARIABLES, entrypoint=command)

    def ended() -> bool:
        return cluster.job(submission)["status"] in {"SUCCEEDED", "FAILED", "STOPPED"}

    try:
        wait_for("the example to end", ended, 240, interval=0.5)
    finally:
        print(cluster.logs(submission))
        if not ended():
            cluster.stop_job(submission)
    workers = [row for row in cluster._rows("actors") if row["actor_id"] not in known]
    return cluster.job(submission)["status"], cluster.logs(submission), workers


def test_without_the_plugin_the_engine_core_does_not_find_its_cluster(cluster: RayCluster) -> None:
    status, log, actors = run(cluster, "_ray_pkg_0123456789abcdef.zip", without_plugin())
    assert status == "FAILED"
    assert "KeyError: 'bundles'" in log, "the actor's group is unknown to the cluster that the engine core started"
    assert "RayWorkerProc" not in {row["class_name"] for row in actors}


def test_with_the_plugin_the_engine_uses_the_actors_cluster_and_group(cluster: RayCluster) -> None:
    package = _package()
    status, log, actors = run(cluster, package.name, package.content)
    assert status == "SUCCEEDED"
    assert "answer: '" in log
    (engine,) = [row for row in actors if row["class_name"] == "Engine"]
    workers = [row for row in actors if row["class_name"] == "RayWorkerProc"]
    assert len(workers) == 2
    assert {row["placement_group_id"] for row in workers} == {engine["placement_group_id"]}
    assert {row["ray_namespace"] for row in workers} == {"chat"}
    assert all(row["name"].startswith("vllm_Worker_chat-") for row in workers)
    assert all(row["job_id"] != engine["job_id"] for row in workers), "the engine core is a Ray job of its own"
