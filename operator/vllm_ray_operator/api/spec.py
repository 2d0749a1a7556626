"""``VLLMDeployment.spec`` as the user writes it.

Fields that decide how pods or engines look have no schema default: a default written into stored objects (or read
into them by a newer CRD) would look like a change by the user and roll a fleet. Their defaults stand in
:mod:`vllm_ray_operator.plan.revision`, which writes them into a revision once.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vllm_ray_operator.api.base import ApiModel

Port = Annotated[int, Field(ge=1024, le=65535)]
# A Kubernetes quantity without a sign: no size or amount here can be negative.
Quantity = (
    Annotated[int, Field(ge=0)]
    | Annotated[
        str,
        Field(pattern=r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?$", max_length=32),
    ]
)
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
    port: Port | None = Field(default=None, description="Port of the OpenAI-compatible server. Default: 8000.")
    startup_timeout_seconds: int | None = Field(
        default=None,
        ge=10,
        le=86400,
        description="How long an engine may take from its start until it is ready. Default: 1800.",
    )
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
        description="Accelerators of one worker pod. Default: the replica's accelerators, at most 8.",
    )
    resources: Resources | None = None
    template: PodOverlay | None = None


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
    head: Head | None = None
    workers: Workers | None = None
    labels: dict[str, LabelValue] = Field(
        default_factory=dict, max_length=32, description="More labels of the RayCluster (queues, cost centres)."
    )
    annotations: dict[str, AnnotationValue] = Field(
        default_factory=dict, max_length=32, description="More annotations of the RayCluster."
    )


class VLLMDeploymentSpec(ApiModel):
    """What the user asks for."""

    replicas: int = Field(
        default=1,
        ge=0,
        le=256,
        description="Independent engine groups, each with its own accelerators. 0 stops them all.",
    )
    model: Model
    engine: Engine = Field(default_factory=Engine)
    parallelism: Parallelism = Field(default_factory=Parallelism)
    cluster: Cluster = Field(default_factory=Cluster)
