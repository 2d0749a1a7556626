"""What the operator sets itself and users may not: engine arguments, environment variables, labels.

One table per kind. The CRD's CEL rules (:mod:`.rules`) and the reference (:mod:`.docs`) are made from them. The
launcher checks the final command line again with vLLM's own parser, since a rule on text cannot see everything.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Owned:
    """Names that belong to the operator for one reason.

    ``names`` are exact; a name that ends in ``-`` or ``_`` or ``/`` stands for all names that begin with it.
    ``instead`` says why, and what to do; it ends a sentence that begins with "owned by the operator".
    """

    names: tuple[str, ...]
    instead: str


ENGINE_ARGUMENTS: tuple[Owned, ...] = (
    Owned(("--model",), "use spec.model.uri"),
    Owned(("--revision",), "use spec.model.revision"),
    Owned(("--served-model-name",), "use spec.model.servedName"),
    Owned(("--tensor-parallel-size", "-tp"), "use spec.parallelism.tensor"),
    Owned(("--pipeline-parallel-size", "-pp"), "use spec.parallelism.pipeline"),
    Owned(
        ("--data-parallel-", "--no-data-parallel-", "-dp"),
        "data parallelism is not supported yet; spec.replicas gives independent engines",
    ),
    Owned(
        ("--prefill-context-parallel-size", "-pcp"),
        "context parallelism over more accelerators is not supported yet; use spec.parallelism.tensor",
    ),
    Owned(("--distributed-executor-backend",), "engines always run on Ray; remove it"),
    Owned(
        ("--nnodes", "--node-rank", "--master-", "--headless", "-n", "-r"),
        "Ray spreads an engine over pods; use spec.parallelism and spec.cluster.workers.acceleratorsPerNode",
    ),
    Owned(("--device-ids",), "Ray assigns the accelerators; use spec.cluster.workers.acceleratorsPerNode"),
    Owned(("--ray-workers-use-nsight",), "the operator places Ray workers without a runtime environment of their own"),
    Owned(("--worker-cls",), "the operator needs vLLM's Ray workers; use --worker-extension-cls"),
    Owned(("--port",), "use spec.engine.port"),
    Owned(("--host", "--uds"), "the server listens on every address of its pod; use spec.engine.port for the port"),
    Owned(("--grpc",), "the server speaks HTTP, which its health checks need; remove it"),
    Owned(("--ssl-",), "the server speaks plain HTTP in the cluster; end TLS in the gateway before its Service"),
    Owned(("--config",), "write its content into spec.engine.args, so that the resource tells the whole truth"),
    Owned(("--help", "-h"), "it ends the server at once; remove it"),
)

ENVIRONMENT: tuple[Owned, ...] = (
    Owned(("VLLM_HOST_IP", "VLLM_HOST_PORT"), "it is the address of each pod"),
    Owned(("VLLM_PORT",), "use spec.engine.port"),
    Owned(("VLLM_PLUGINS",), "the operator's plugin has to be loaded; every installed plugin is"),
    Owned(("VLLM_DP_",), "data parallelism is not supported yet; spec.replicas gives independent engines"),
    Owned(("VLLM_RAY_ENGINE_",), "it configures the launcher"),
    Owned(("VLLM_RAY_BUNDLE_INDICES", "VLLM_RAY_PER_WORKER_GPUS"), "the operator places the workers"),
    Owned(("VLLM_USE_RAY_V2_EXECUTOR_BACKEND",), "the older executor needs an accelerator for the server; remove it"),
    Owned(("VLLM_WORKER_MULTIPROC_METHOD",), "processes in a Ray actor have to be spawned"),
    Owned(
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        "Ray assigns the accelerators of each worker",
    ),
    Owned(
        ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_AUTH_", "RAY_JOB_", "RAY_RUNTIME_ENV_"),
        "it connects the engine with its Ray cluster; use spec.cluster",
    ),
    Owned(("PYTHONPATH", "PYTHONHOME"), "it would hide Ray and the engine package; install packages in the image"),
)

# Labels and annotations of the RayCluster.
METADATA: tuple[Owned, ...] = (
    Owned(("vllm-ray.dev/", "app.kubernetes.io/managed-by"), "the operator finds its objects by them"),
    Owned(("ray.io/",), "they belong to KubeRay; use the fields of spec.cluster"),
)
