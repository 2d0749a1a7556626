"""The doctor's checks: each judges the facts of one node and says what to do about what it finds.

An error is what certainly ends an engine, for it ends the attempt; what only might, or not with every vLLM or with
every argument, is a warning.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

from vllm_ray_engine import reasons, versions
from vllm_ray_engine.diagnosis.facts import Facts
from vllm_ray_engine.diagnosis.model_files import ModelFiles
from vllm_ray_engine.reasons import UnsupportedVersion

OK = "ok"
WARNING = "warning"
ERROR = "error"

QUEUE_CHUNKS = 10
RESPONSE_CHUNK = 24 << 20
BROADCAST_CHUNK_MIB = 16
"""vLLM's queues in shared memory (0.32: shm_broadcast.py, ray_executor_v2.py): one for every worker beside the engine
core, and one for all of them."""
REFUSES_QUEUES = (0, 32)
"""A vLLM that is known to refuse to make a queue larger than what is free; 0.21 makes it, and may never fill it."""
LEAST_FREE = 1 << 30
"""Bytes in a folder for caches or temporary files, below which a warning is given."""
SOCKET_PATH = 107
SOCKET_NAME = 37
"""Characters of a socket's path, and of what vLLM appends to the folder: a slash and a UUID."""


@dataclass(frozen=True)
class Finding:
    """What a check found. reason: of an error, one of `reasons.ALL`. node: where, '' for this one."""

    check: str
    status: str
    message: str
    remedy: str = ""
    reason: str = ""
    node: str = ""


@dataclass(frozen=True)
class Verdict:
    """A check's answer, before it has the check's name."""

    status: str
    message: str
    remedy: str = ""
    reason: str = ""


Check = Callable[[Facts], Verdict | None]


def vllm_version(facts: Facts) -> Verdict | None:
    """vLLM is installed and new enough."""
    return _version("vllm", facts)


def ray_version(facts: Facts) -> Verdict | None:
    """Ray is installed and new enough."""
    return _version("ray", facts)


def _version(package: str, facts: Facts) -> Verdict:
    version = facts.versions.get(package)
    try:
        versions.check_version(package, version)
    except UnsupportedVersion as error:
        return Verdict(ERROR, str(error), "", reasons.UNSUPPORTED_VERSION)
    return Verdict(OK, f"{package} {version} on Python {facts.python}")


def plugin(facts: Facts) -> Verdict | None:
    """vLLM finds the engine plugin."""
    if facts.plugin_found:
        return Verdict(OK, "vLLM finds the engine plugin")
    return Verdict(
        ERROR,
        f"vLLM would not find the plugin {versions.PLUGIN_NAME}",
        "the engine package lacks its distribution metadata: install it, or put its folder on PYTHONPATH",
        reasons.UNSUPPORTED_VERSION,
    )


def patch_points(facts: Facts) -> Verdict | None:
    """Every function that the plugin changes is in this vLLM's source; importing it would take ten seconds."""
    if facts.patch_points is None:
        return None
    lacking = [f"{why} ({where})" for where, why in facts.patch_points.items() if why]
    if not lacking:
        return Verdict(OK, f"all {len(facts.patch_points)} functions that the plugin changes are there")
    return Verdict(
        ERROR,
        f"the plugin does not know this vLLM: {'; '.join(lacking)}",
        "use a vLLM version that this operator release supports",
        reasons.UNSUPPORTED_VERSION,
    )


def vllm_port(facts: Facts) -> Verdict | None:
    """VLLM_PORT is a port and not what Kubernetes makes of a Service called vllm."""
    value = facts.environment.get("VLLM_PORT")
    if value is None:
        return Verdict(OK, "VLLM_PORT is not set")
    remedy = "unset it"
    try:
        port = int(value)
    except ValueError:
        port = -1
    if 0 < port < 65536:
        return Verdict(OK, f"VLLM_PORT is {value}: ports of vLLM's own are looked for from there")
    if port == 0:
        return Verdict(WARNING, "VLLM_PORT is 0, which vLLM may hand on as a port", remedy)
    if "://" in value:
        remedy = "a Service called vllm sets it: rename the Service, or set enableServiceLinks: false in the template"
    return Verdict(ERROR, f"VLLM_PORT is {value!r} and no port", remedy, reasons.INVALID_ENVIRONMENT)


def vllm_host_ip(facts: Facts) -> Verdict | None:
    """VLLM_HOST_IP is an address of this pod. Never an error: not every engine binds it."""
    value = facts.environment.get("VLLM_HOST_IP")
    remedy = "take it from the pod's status.podIP, or unset it"
    if not value:
        return Verdict(OK, "VLLM_HOST_IP is not set: vLLM takes the address that leads out of the pod")
    if facts.own_address is None:
        return Verdict(WARNING, f"VLLM_HOST_IP is {value!r} and no address", remedy)
    if not facts.own_address:
        return Verdict(WARNING, f"VLLM_HOST_IP is {value}, which is no address of this pod", remedy)
    if ipaddress.ip_address(value).is_loopback and facts.node_environment is None:
        return Verdict(WARNING, f"VLLM_HOST_IP is {value}: workers in other pods cannot reach it", remedy)
    return Verdict(OK, f"VLLM_HOST_IP {value} is an address of this pod")


def shared_memory(facts: Facts) -> Verdict | None:
    """Shared memory has room for vLLM's queues between processes."""
    free = facts.shared_memory
    if free is None:
        return _too_little(facts, "there is no /dev/shm", "mount an emptyDir of medium Memory there")
    chunk = facts.environment.get("VLLM_MQ_MAX_CHUNK_BYTES_MB", "")
    broadcast = QUEUE_CHUNKS * ((int(chunk) if chunk.isdecimal() else BROADCAST_CHUNK_MIB) << 20)
    response = QUEUE_CHUNKS * RESPONSE_CHUNK
    workers = facts.wanted.local_workers
    message = f"{_size(free)} are free in /dev/shm"
    remedy = "raise spec.engine.shmSize"
    if workers and free < max(broadcast, response):
        needed = _size(max(broadcast, response))
        return _too_little(facts, f"{message}; vLLM's queues need {needed} each", remedy)
    if free < broadcast + workers * response:
        return Verdict(WARNING, f"{message}; the queues of {workers} workers can grow beyond that", remedy)
    return Verdict(OK, message)


def _too_little(facts: Facts, message: str, remedy: str) -> Verdict:
    refuses = versions.parse(facts.versions.get("vllm")) >= REFUSES_QUEUES
    # The classic executor has no such queues.
    if refuses and facts.environment.get("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1") == "1":
        return Verdict(ERROR, message, remedy, reasons.SHARED_MEMORY)
    return Verdict(WARNING, message, remedy)


def ports(facts: Facts) -> Verdict | None:
    """The engine's ports are free."""
    wanted = facts.wanted.ports
    if not wanted:
        return None
    if not facts.ports_taken:
        return Verdict(OK, f"free: {', '.join(map(str, wanted))}")
    taken = ", ".join(f"port {port} of the {wanted[port]}" for port in facts.ports_taken)
    return Verdict(
        ERROR, f"{taken} is in use in this pod", "an engine has not ended, or another container has it",
        reasons.PORT_IN_USE,
    )  # fmt: skip


def model_path(facts: Facts) -> Verdict | None:
    """A model given as a path is there, can be read and is whole."""
    model, files = facts.wanted.model, facts.model
    if files is None:
        return None
    if not files.exists:
        remedy = "check spec.model.uri and the volume that should hold it"
        return Verdict(ERROR, f"there is no {model} in this pod", remedy, reasons.MODEL_NOT_FOUND)
    what = "; ".join(files.damaged[:3])
    remedy, reason = "copy or download the model again", reasons.MODEL_INVALID
    if not files.readable:
        remedy = "check the volume's permissions and the pod's user (securityContext)"
        reason = reasons.PERMISSION_DENIED
    if not files.readable and not what:
        return Verdict(ERROR, f"{model}: the folder may not be entered", remedy, reason)
    if what and _reads_as_usual(facts, files):
        return Verdict(ERROR, f"{model}: {what}", remedy, reason)
    return _model_parts(facts, files)


def _reads_as_usual(facts: Facts, files: ModelFiles) -> bool:
    """Return whether vLLM certainly reads the files that it reads by default."""
    return (
        not files.two_formats
        and facts.wanted.flag("--load-format") in {None, "auto", "hf", "safetensors"}
        and facts.wanted.flag("--config-format") in {None, "auto", "hf"}
        and facts.wanted.flag("--hf-config-path") is None
    )


def _model_parts(facts: Facts, files: ModelFiles) -> Verdict:
    model, wanted = facts.wanted.model, facts.wanted
    if not files.weights and wanted.flag("--load-format") in {None, "auto", "hf", "safetensors", "pt"}:
        return Verdict(ERROR, f"{model} holds no model weights", "check spec.model.uri", reasons.MODEL_NOT_FOUND)
    usual = wanted.flag("--config-format") in {None, "auto", "hf", "mistral"}
    if not files.config and usual and wanted.flag("--hf-config-path") is None:
        return Verdict(ERROR, f"{model} has no config.json", "check spec.model.uri", reasons.MODEL_INVALID)
    if suspect := (*files.damaged, *files.doubtful):
        remedy = "it may not be read; if it is, copy or download the model again"
        return Verdict(WARNING, f"{model}: {'; '.join(suspect[:3])}", remedy)
    if not files.tokenizer and wanted.flag("--tokenizer") is None and wanted.flag("--skip-tokenizer-init") is None:
        return Verdict(WARNING, f"{model} has no tokenizer", "add its files, or name one by --tokenizer")
    return Verdict(OK, f"{model} can be read")


def model_cache(facts: Facts) -> Verdict | None:
    """A model given by its name can come from its hub or the cache."""
    model = facts.wanted.model
    if model is None or facts.model is not None or "://" in model:
        return None
    elsewhere = "VLLM_USE_MODELSCOPE" in facts.environment or facts.wanted.flag("--download-dir") is not None
    offline = facts.environment.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    if not offline or elsewhere:
        return Verdict(OK, f"{model} is in the cache" if facts.cached else f"{model} comes from its hub")
    if facts.cached:
        return Verdict(OK, f"{model} is in the cache")
    cache = facts.folders["HF_HOME"].path
    return Verdict(
        ERROR, f"{model} is not in the cache {cache}, and HF_HUB_OFFLINE forbids to download it",
        "unset HF_HUB_OFFLINE, or fill the cache", reasons.MODEL_NOT_FOUND,
    )  # fmt: skip


def writable_folders(facts: Facts) -> Verdict | None:
    """Folders for caches and temporary files can be written."""
    closed = {name: folder.path for name, folder in facts.folders.items() if not folder.writable}
    if facts.model is not None:
        closed.pop("HF_HOME", None)
    if not closed:
        return Verdict(OK, "caches and temporary files can be written")
    listed = ", ".join(f"{path} ({name})" for name, path in closed.items())
    remedy = "mount a volume there, or set the variable to a folder that the pod's user may write"
    # Not even TMPDIR is one to end for: Python takes the next folder then.
    return Verdict(WARNING, f"cannot be written: {listed}", remedy)


def free_space(facts: Facts) -> Verdict | None:
    """Folders for caches and temporary files have room."""
    low = {folder.path: folder.free for folder in facts.folders.values() if folder.free < LEAST_FREE}
    if not low:
        return Verdict(OK, "caches and temporary files have room")
    listed = ", ".join(f"{path} ({_size(free)})" for path, free in low.items())
    return Verdict(WARNING, f"little room in {listed}", "a larger volume, or more ephemeral storage")


def executable_folders(facts: Facts) -> Verdict | None:
    """Compiled code can be loaded from the folders that it is put into."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR")
    held = [facts.folders[name].path for name in names if not facts.folders[name].executable]
    if not held:
        return None
    remedy = "mount it without noexec, or set the variable to another folder"
    return Verdict(WARNING, f"compiled code cannot be loaded from {', '.join(held)} (noexec)", remedy)


def socket_path(facts: Facts) -> Verdict | None:
    """The folder for sockets is short enough for the paths of sockets."""
    given = facts.environment.get("VLLM_RPC_BASE_PATH")
    folder = given or facts.folders["TMPDIR"].path
    if len(folder) + SOCKET_NAME <= SOCKET_PATH:
        return None
    remedy = "use a shorter TMPDIR or VLLM_RPC_BASE_PATH"
    message = f"{folder} is too long for the sockets that vLLM makes in it"
    if not given:  # an attempt takes /tmp instead (debris.py)
        return Verdict(WARNING, message, remedy)
    return Verdict(ERROR, message, remedy, reasons.INVALID_ENVIRONMENT)


def compiler(facts: Facts) -> Verdict | None:
    """There is a C++ compiler where one is needed."""
    if facts.environment.get("TORCHDYNAMO_DISABLE") == "1" and not facts.has_gpu:
        return Verdict(OK, "not needed: TORCHDYNAMO_DISABLE=1")
    if facts.compiler is not None:
        return Verdict(OK, facts.compiler)
    remedy = "use an image with one, or set TORCHDYNAMO_DISABLE=1 where compiling is not wanted"
    return Verdict(WARNING, "the image has no C++ compiler, which PyTorch and Triton need to compile", remedy)


def environment_of_workers(facts: Facts) -> Verdict | None:
    """What this process sets arrives in the workers.

    What a Ray job sets does; of the rest, vLLM gives workers only what the raylet, whose environment they inherit, does
    not set.
    """
    node = facts.node_environment
    if node is None:
        return None
    differs = sorted(
        name
        for name, value in facts.environment.items()
        if name not in facts.job_environment
        and node.get(name, value) != value
        and name.startswith(("VLLM_", "HF_", "NCCL_", "GLOO_", "UCX_", "TORCH"))
    )
    if not differs:
        return Verdict(OK, "the node sets nothing else than this process")
    return Verdict(
        WARNING, f"set to other values where Ray was started: {', '.join(differs)}",
        "set them in one place: in the workers' template, or in spec.engine.env",
    )  # fmt: skip


CHECKS: tuple[Check, ...] = (
    vllm_version, ray_version, plugin, patch_points, vllm_port, vllm_host_ip, shared_memory, ports, model_path,
    model_cache, writable_folders, free_space, executable_folders, socket_path, compiler, environment_of_workers,
)  # fmt: skip
"""In the order in which their errors are told: the first error ends an attempt."""

OF_NODES = tuple(check for check in CHECKS if check is not plugin)
"""Without what comes with a job."""


def judge(facts: Facts, checks: tuple[Check, ...] = CHECKS, node: str = "") -> list[Finding]:
    """Return what the checks find, in their order; a check that does not apply finds nothing."""
    findings = []
    for check in checks:
        if (verdict := check(facts)) is not None:
            name = check.__name__.replace("_", "-")
            findings.append(Finding(name, verdict.status, verdict.message, verdict.remedy, verdict.reason, node))
    return findings


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
