"""``VLLMDeployment.spec`` as the user writes it.

Fields that decide how pods or engines look have no schema default: a default written into stored objects (or read
into them by a newer CRD) would look like a change by the user and roll a fleet. Their defaults stand in
:mod:`vllm_ray_operator.plan.revision`, which writes them into a revision once.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from vllm_ray_operator.api.base import ApiModel

# The next port is kept for the engine that takes over.
Port = Annotated[int, Field(ge=1024, le=65534)]
# A Kubernetes quantity without a sign: no size or amount here can be negative.
Quantity = (
    Annotated[int, Field(ge=0)]
    | Annotated[
        str,
        Field(pattern=r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?$", max_length=32),
    ]
)
# As in a Deployment: a number of replicas, or a share of them.
Count = Annotated[int, Field(ge=0, le=256)] | Annotated[str, Field(pattern=r"^(100|[1-9]?[0-9])%$", max_length=4)]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?$")]
AnnotationValue = Annotated[str, Field(max_length=65536)]
PodOverlay = Annotated[
    dict[str, Any],
    Field(
        description=(
            "A partial PodTemplateSpec (`metadata`, `spec`), merged over the generated one by strategic-merge rules: "
            "lists with a merge key (containers, volumes, env, ...) merge by it, null removes. The Ray container is "
            "named `ray`."
        ),
    ),
]


class Model(ApiModel):
    """Which model is served."""

    uri: str = Field(
        min_length=1,
        max_length=1024,
        description=(
            "Where the model is: `hf://org/name`, `pvc://claim/path/in/claim`, `file:///path/in/the/image`. "
            "Anything else goes to vLLM as it is."
        ),
    )
    revision: str | None = Field(
        default=None, min_length=1, max_length=256, description="Branch, tag or commit of a `hf://` model."
    )
    served_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="The name clients use in requests. Default: the uri without its scheme.",
    )


class EnvVar(ApiModel):
    """One environment variable of the engine, in plain text."""

    name: str = Field(
        min_length=1,
        max_length=256,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Name. Variables that the operator owns are refused.",
    )
    value: str = Field(max_length=8192, description="Value, as it is: no references to other variables.")


class Probe(ApiModel):
    """A completion of one token, by which an engine shows that it does more than answer health checks.

    It has to give one before it is ready. After that it is asked only when requests are open and nothing has moved for
    a while, by its metrics.
    """

    enabled: bool | None = Field(default=None, description="Whether the engine is asked at all. Default: true.")
    period_seconds: int | None = Field(
        default=None,
        ge=1,
        le=3600,
        description="After so long without progress under load the engine is asked. Default: 30.",
    )
    timeout_seconds: int | None = Field(
        default=None, ge=1, le=3600, description="How long the token is waited for. Default: 60."
    )
    failure_threshold: int | None = Field(
        default=None,
        ge=1,
        le=100,
        description=(
            "Failures in a row after which the engine is stopped and started again; it has left the traffic with the "
            "first. Default: 2."
        ),
    )


class Engine(ApiModel):
    """How vLLM is run."""

    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description=(
            "Image of head and workers, with vLLM and Ray. Default: the operator's `defaults.engineImage`. "
            "The official vLLM images carry no Ray."
        ),
    )
    args: list[Annotated[str, Field(max_length=4096)]] = Field(
        default_factory=list,
        max_length=128,
        description="More arguments of `vllm serve`. Arguments that the operator owns are refused.",
    )
    env: list[EnvVar] = Field(
        default_factory=list,
        max_length=64,
        description="Environment of the engine. Not for secrets: it can be read on the Ray dashboard.",
    )
    port: Port | None = Field(
        default=None,
        description=(
            "Port of the OpenAI-compatible server; the next engine of a replica takes the port after it, in turn. "
            "Default: 8000."
        ),
    )
    startup_timeout_seconds: int | None = Field(
        default=None,
        ge=10,
        le=86400,
        description="How long an engine may take from its start until it is ready. Default: 1800.",
    )
    drain_timeout_seconds: int = Field(
        default=30,
        ge=0,
        le=86400,
        description=(
            "How long a replica that is stopped on purpose may finish its requests after it has left the traffic. "
            "Default: 30. Changing it restarts nothing."
        ),
    )
    probe: Probe | None = None
    shm_size: Quantity | None = Field(default=None, description="Size of /dev/shm in each pod. Default: 8Gi.")


class Parallelism(ApiModel):
    """How one replica is spread over accelerators: tensor x pipeline of them."""

    tensor: int | None = Field(default=None, ge=1, le=1024, description="Tensor-parallel size. Default: 1.")
    pipeline: int | None = Field(default=None, ge=1, le=1024, description="Pipeline-parallel size. Default: 1.")


class Resources(ApiModel):
    """Compute resources of one Ray container."""

    requests: dict[str, Quantity] = Field(
        default_factory=dict, max_length=32, description="What is set aside for it, by resource: cpu, memory, ..."
    )
    limits: dict[str, Quantity] = Field(
        default_factory=dict, max_length=32, description="What it may use at most, by resource."
    )


class Head(ApiModel):
    """The head pod of the RayCluster. It needs no accelerator."""

    resources: Resources | None = None
    template: PodOverlay | None = None


class Workers(ApiModel):
    """The worker pods. Each replica has its own group of them (its slot)."""

    accelerator_resource: str | None = Field(
        default=None,
        max_length=253,
        pattern=r"^([a-z0-9][a-z0-9.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*)?$",
        description=(
            "Extended resource that a worker pod asks for. Default: nvidia.com/gpu. "
            "An empty string asks for none (CPU builds of vLLM)."
        ),
    )
    accelerators_per_node: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description=(
            "Accelerators of one worker pod, not more than the replica has (tensor x pipeline). Default: the replica's "
            "accelerators, at most 8."
        ),
    )
    resources: Resources | None = None
    template: PodOverlay | None = None


class SecretKeyRef(ApiModel):
    """One entry of a Secret in the same namespace."""

    name: str = Field(
        min_length=1, max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", description="Name of the Secret."
    )
    key: str = Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._-]+$", description="Which entry of it.")


class GcsFaultTolerance(ApiModel):
    """A Redis that keeps what the Ray head knows (its GCS): engines serve on while a lost head is replaced."""

    redis_address: str = Field(
        max_length=300,
        pattern=r"^(rediss?://)?([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$",
        description="Host and port, such as `redis.cache:6379`; `rediss://` before it for TLS.",
    )
    redis_username: str | None = Field(
        default=None, min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._@-]+$", description="Of Redis 6 and newer."
    )
    redis_password_secret_ref: SecretKeyRef | None = Field(
        default=None, description="The password: letters, digits and `._@-` only, since KubeRay hands it to a shell."
    )


class Cluster(ApiModel):
    """The RayCluster that carries the engines."""

    ray_version: str | None = Field(
        default=None,
        pattern=r"^[0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4}([a-z0-9.]+)?$",
        max_length=32,
        description="Version of Ray in the engine image. Default: 2.60.0.",
    )
    auth: Literal["Token", "Disabled"] | None = Field(
        default=None,
        description=(
            "Token authentication of the Ray cluster. Default: Token. Disabled lets everyone who reaches the "
            "dashboard run code in the pods."
        ),
    )
    policy: Literal["Shared", "PerReplica"] | None = Field(
        default=None,
        description=(
            "Shared (default): one RayCluster with a slot for each replica. PerReplica: a RayCluster for each replica, "
            "so that the loss of a head takes one replica, and a change of the image or the pods goes from replica to "
            "replica; each has a head pod of its own, and metadata.name at most 39 characters."
        ),
    )
    gcs_fault_tolerance: GcsFaultTolerance | None = Field(
        default=None,
        description=(
            "Where the Ray head keeps what it knows, outside of itself. Default: nowhere; with the head all engines "
            "of its RayCluster are lost then, and start again."
        ),
    )
    head: Head | None = None
    workers: Workers | None = None
    labels: dict[str, LabelValue] = Field(
        default_factory=dict, max_length=32, description="More labels of the RayCluster (queues, cost centres)."
    )
    annotations: dict[str, AnnotationValue] = Field(
        default_factory=dict, max_length=32, description="More annotations of the RayCluster."
    )


class Rollout(ApiModel):
    """How a changed spec reaches the replicas."""

    type: Literal["RollingUpdate", "Recreate"] = Field(
        default="RollingUpdate",
        description=(
            "RollingUpdate (default): a change of the engine restarts replica by replica. Recreate: all at once."
        ),
    )
    max_unavailable: Count = Field(
        default=1,
        description=(
            "How many replicas, or which share of them (rounded down), may be away at once on purpose. Default: 1."
        ),
    )
    max_surge: Count = Field(
        default=0,
        description=(
            "How many replicas, or which share of them (rounded up), a roll may have more than `replicas`; each needs "
            "accelerators of its own. Default: 0."
        ),
    )
    standby: bool = Field(
        default=True,
        description=(
            "Whether the next engine of a replica comes up beside the one that serves, without accelerators, and takes "
            "them over (default). It takes main memory of the slot for a while; false: first stop, then start."
        ),
    )
    cluster_upgrade: Literal["Recreate", "BlueGreen"] = Field(
        default="Recreate",
        description=(
            "How a change of the image or the pods is made. Recreate (default): a RayCluster goes before the next is "
            "made, so no spare accelerators are needed. With cluster.policy Shared all replicas stop for that, with "
            "PerReplica one after the other as in any roll. BlueGreen: new replicas come up beside the old ones in "
            "RayClusters of their own, with as many accelerators again, and one of the old goes for each that is ready."
        ),
    )
    progress_deadline_seconds: int | None = Field(
        default=None,
        ge=10,
        le=604800,
        description=(
            "A roll in which no replica gets ready for that long says so and takes no further replica. "
            "Default: engine.drainTimeoutSeconds plus engine.startupTimeoutSeconds plus 600."
        ),
    )
    paused: bool = Field(
        default=False,
        description="Changes of the spec wait, a roll stops where it is. What fails is restarted as it was.",
    )
    to_revision: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        pattern=r"^[a-z0-9][a-z0-9.-]*$",
        description=(
            "Undo: name of a kept engine revision (`kubectl get controllerrevisions`) that is to run instead of what "
            "the rest of the spec says about the engine, until this field is removed."
        ),
    )
    to_cluster_revision: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        pattern=r"^[a-z0-9][a-z0-9.-]*$",
        description=(
            "Undo: name of a kept cluster revision that is to run instead of what the rest of the spec says about the "
            "image and the pods, until this field is removed."
        ),
    )


class Restart(ApiModel):
    """When a replica that failed starts again: after a time that doubles with every failure in a row."""

    backoff_seconds: int = Field(default=10, ge=1, le=3600, description="After the first failure. Default: 10.")
    max_backoff_seconds: int = Field(default=300, ge=1, le=86400, description="At most. Default: 300.")
    crash_loop_after: int = Field(
        default=3, ge=1, le=1000, description="Failures in a row that are called a crash loop. Default: 3."
    )


class VLLMDeploymentSpec(ApiModel):
    """What the user asks for."""

    replicas: int = Field(
        default=1,
        ge=0,
        le=256,
        description=(
            "Independent engine groups, each with its own accelerators. When there are to be fewer, the least healthy "
            "go first, of those that are alike the highest index. 0 stops them all."
        ),
    )
    suspend: bool = Field(
        default=False,
        description=(
            "All replicas are drained and stopped, then the RayCluster is deleted: nothing is held any more. "
            "`replicas` stays what it is. When it ends, they start as the spec says then. Default: false."
        ),
    )
    model: Model
    engine: Engine = Field(default_factory=Engine)
    parallelism: Parallelism = Field(default_factory=Parallelism)
    cluster: Cluster = Field(default_factory=Cluster)
    rollout: Rollout = Field(default_factory=Rollout)
    restart: Restart = Field(default_factory=Restart)
    restarted_at: datetime | None = Field(
        default=None,
        description="A restart on demand: any new time here rolls the engines like a change of their arguments.",
    )
    revision_history_limit: int = Field(
        default=10,
        ge=0,
        le=100,
        description="Revisions of each kind that are kept, beside those in use, to go back to. Default: 10.",
    )
