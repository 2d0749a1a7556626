"""What is known to end an engine: how its log says so, and what to do about it.

Texts of vLLM 0.32 on Ray 2.60 were seen; for hardware that the project does not have they are from public reports. Each
row has a named case with its source in tests/unit/engine/test_root_cause.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_ray_engine import reasons


@dataclass(frozen=True)
class Pattern:
    """A failure. `message` may hold {0}, {1}, ... for the groups of `regex`."""

    reason: str
    regex: re.Pattern[str]
    message: str


def _pattern(reason: str, regex: str, message: str) -> Pattern:
    return Pattern(reason, re.compile(regex), message)


KNOWN = (
    # Versions.
    _pattern(reasons.UNSUPPORTED_VERSION, r"UnsupportedVersion: (.*)", "{0}"),
    _pattern(
        reasons.UNSUPPORTED_VERSION,
        r"Version mismatch: (?:The cluster was started|.*started) with:?(.*)",
        "the engine's Ray or Python differs from the cluster's: use one image for head, workers and engine",
    ),
    _pattern(
        reasons.UNSUPPORTED_VERSION,
        r"Model architectures (\[.*?\]) (?:are not supported|failed to be inspected)",
        "this vLLM does not know the model's architecture {0}: use a newer engine image or another model",
    ),
    _pattern(
        reasons.UNSUPPORTED_VERSION,
        r"model type `([^`]+)` but Transformers does not recognize",
        "this image's Transformers does not know the model type {0}: use a newer engine image",
    ),
    # The accelerator and its driver.
    _pattern(
        reasons.DEVICE_UNSUPPORTED,
        r"driver on your system is too old \(found version (\d+)\)|CUDA driver version is insufficient",
        "the node's NVIDIA driver is too old for the image's CUDA: update the driver or use an image for an older CUDA",
    ),
    _pattern(
        reasons.DEVICE_UNSUPPORTED,
        r"no kernel image is available for execution|ptxas fatal\s*: Value '(\w+)' is not defined"
        r"|Torch not compiled with CUDA enabled",
        "the image was not built for this accelerator: use an image that supports its compute capability",
    ),
    _pattern(
        reasons.DEVICE_UNSUPPORTED,
        r"(Bfloat16) is only supported on GPUs with compute capability",
        "the accelerator does not support bfloat16: add --dtype=half to spec.engine.args",
    ),
    _pattern(
        reasons.DEVICE_UNSUPPORTED,
        r"quantization method (\S+) is not supported for the current GPU"
        r"|Quantization scheme is not supported for .*the current GPU",
        "the accelerator does not support the model's quantization: use another accelerator or another model",
    ),
    _pattern(
        reasons.DEVICE_UNSUPPORTED,
        r"Failed to infer device type|No CUDA GPUs are available|no CUDA-capable device is detected"
        r"|Found no NVIDIA driver",
        "the process sees no accelerator: check the device plugin, the runtime class and the pod's resource limits",
    ),
    # The model.
    _pattern(
        reasons.MODEL_ACCESS_DENIED,
        r"GatedRepoError|trying to access a gated repo|Access to model \S+ is restricted|Cannot access gated repo",
        "the model is gated: accept its terms with the account whose token is used, and give that token (HF_TOKEN)",
    ),
    _pattern(
        reasons.MODEL_ACCESS_DENIED,
        r"Invalid user token|Invalid username or password|User Access Token .* is expired",
        "the model hub refuses the token: give a valid one (HF_TOKEN)",
    ),
    _pattern(
        reasons.MODEL_NOT_FOUND,
        r"RevisionNotFoundError|is not a valid git identifier",
        "the model has no such revision: check spec.model.revision",
    ),
    _pattern(
        reasons.MODEL_NOT_FOUND,
        r"[Ll]oading lora (\S+) failed: No adapter found for (\S+?)'?,?(?:$| )",
        "there is no LoRA adapter {1}: check --lora-modules in spec.engine.args, and that every pod sees the path",
    ),
    _pattern(
        reasons.MODEL_NOT_FOUND,
        r"Invalid repository ID or local directory specified: '?([^'\s]*)",
        "there is no model {0}: check spec.model.uri, and that every pod of the slot sees the path",
    ),
    _pattern(
        reasons.MODEL_NOT_FOUND,
        r"RepositoryNotFoundError|is not a local folder and is not a valid model identifier|Repo id must (?:be|use)"
        r"|Can't load the configuration of|HFValidationError",
        "there is no such model: check spec.model.uri, and the token if the repository is private",
    ),
    _pattern(
        reasons.MODEL_NOT_FOUND,
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|couldn't connect to 'https?://[^']*'"
        r"|Cannot find an appropriate cached snapshot",
        "the model is not in the cache and its hub cannot be reached: check the network and HF_HUB_OFFLINE",
    ),
    _pattern(
        reasons.MODEL_NOT_FOUND,
        r"Cannot find any model weights with [`'\"]?([^`'\"\s]+)",
        "{0} holds no model weights: check spec.model.uri",
    ),
    _pattern(
        reasons.MODEL_INVALID,
        r"SafetensorError: (.*)|invalid load key|PytorchStreamReader failed",
        "a weights file is damaged or was not copied whole: copy or download the model again",
    ),
    _pattern(
        reasons.MODEL_INVALID,
        r"Can't load tokenizer for '([^']*)'|Couldn't instantiate the backend tokenizer",
        "the model's tokenizer is missing or cannot be read: add its files, or name one by --tokenizer",
    ),
    _pattern(
        reasons.MODEL_INVALID,
        r"[Ii]t looks like the config file at '([^']*)' is not a valid JSON|Failed to parse.*config\.json",
        "the model's config.json is no JSON: copy or download the model again",
    ),
    # Memory of the device, of the pod, shared; disk.
    _pattern(
        reasons.SHARED_MEMORY,
        r"Error while creating shared memory segment|Insufficient space in /dev/shm|insufficient shared memory"
        r"|[Uu]nable to (?:open|allocate) shared"
        r"|unable to write to file </torch_|No space left on device.*(?:/dev/shm|psm_)"
        r"|(?:/dev/shm|psm_).*No space left",
        "shared memory ran out: raise spec.engine.shmSize",
    ),
    _pattern(
        reasons.DISK_FULL,
        r"No space left on device|Disk quota exceeded|Not enough free disk space",
        "a disk is full: a larger volume for the model cache (HF_HOME), or more ephemeral storage",
    ),
    _pattern(
        reasons.OUT_OF_MEMORY,
        r"Free memory on device.*Still so after \d+ s, (held by .+)",  # device_memory.py
        "the device did not get the free memory that the engine asks for: it is {0}",
    ),
    _pattern(
        reasons.OUT_OF_MEMORY,
        r"Free memory on device.*less than desired GPU memory utilization",
        "the device has too little free memory at start: another process holds it, or --gpu-memory-utilization is too"
        " high",
    ),
    _pattern(
        reasons.OUT_OF_MEMORY,
        r"Available memory on node.*less than (?:desired CPU memory utilization|requested memory for kv)",
        "the node has too little free memory: give a smaller KV cache (--kv-cache-memory-bytes) or more memory",
    ),
    _pattern(
        reasons.OUT_OF_MEMORY,
        r"No available memory for the cache blocks"
        r"|larger than the (?:available KV cache memory|maximum number of tokens)",
        "no device memory is left for the KV cache: lower --max-model-len, raise --gpu-memory-utilization, or use more"
        " accelerators (spec.parallelism)",
    ),
    _pattern(
        reasons.OUT_OF_MEMORY,
        r"(?:CUDA|HIP|XPU) out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED"
        r"|[Cc]uda (?:failure|error)\b.*out of memory|CUDA error: out of memory",
        "the device ran out of memory: lower --max-model-len or --gpu-memory-utilization, or use more accelerators"
        " (spec.parallelism)",
    ),
    _pattern(
        reasons.OUT_OF_MEMORY,
        r"node running low on memory|killed due to memory pressure|exceeds the memory usage threshold"
        r"|DefaultCPUAllocator: can't allocate memory"
        r"|\bMemoryError\b|Cannot allocate memory|std::bad_alloc",
        "the pod ran out of memory: raise its memory limit",
    ),
    # What the image lacks.
    _pattern(
        reasons.COMPILER_MISSING,
        r"InvalidCxxCompiler|No working C\+\+ compiler found|Failed to find C compiler|(?:gcc|g\+\+|cc): (?:command )?"
        r"not found|No such file or directory: '(?:gcc|g\+\+|cc|nvcc)'",
        "the image has no C++ compiler: add one, or set TORCHDYNAMO_DISABLE=1 where compiling is not wanted",
    ),
    _pattern(
        reasons.LIBRARY_MISSING,
        r"(?:^|\s)([\w./+-]+\.so(?:\.\d+)*): cannot open shared object file",
        "the image lacks the library {0}: add it, or use an image made for this accelerator",
    ),
    _pattern(
        reasons.LIBRARY_MISSING,
        r"ModuleNotFoundError: No module named '?([\w.]+)",
        "the image lacks the Python package {0}",
    ),
    _pattern(
        reasons.LIBRARY_MISSING,
        r"\d+ active drivers \(\[|module 'triton' has no attribute|Cannot find (?:ptxas|a working triton)",
        "Triton does not work with this image and accelerator: use an image made for the accelerator",
    ),
    # Surroundings.
    _pattern(
        reasons.INVALID_ENVIRONMENT,
        r"VLLM_PORT '?([^' ]*)'? appears to be a URI",
        "VLLM_PORT is set to {0} by a Service called vllm: rename it, or set enableServiceLinks: false in the template",
    ),
    _pattern(
        reasons.INVALID_ENVIRONMENT,
        r"Cannot assign requested address|EADDRNOTAVAIL|Unable to find address for: \S+",
        "an address or interface is none of this pod's: check VLLM_HOST_IP and the *_SOCKET_IFNAME variables",
    ),
    _pattern(
        reasons.INVALID_ENVIRONMENT,
        r"[Pp]ath .*is longer than \d+ characters|AF_UNIX path too long",
        "the path of a socket is too long: use a shorter TMPDIR or VLLM_RPC_BASE_PATH",
    ),
    _pattern(
        reasons.PERMISSION_DENIED,
        r"(?:PermissionError|OSError): (?:\[Errno (?:13|30)\] )?(?:[Pp]ermission denied|Read-only file system):? ?(.*)",
        "a file or folder may not be used: {0}; check the volume and the pod's user (securityContext)",
    ),
    _pattern(
        reasons.PORT_IN_USE,
        r"Address already in use|EADDRINUSE|error while attempting to bind on address",
        "a port is in use: check spec.engine.port, and what else runs in the pod or on its host network",
    ),
    _pattern(
        reasons.ACTOR_NAME_TAKEN,
        r"ActorAlreadyExistsError|Actor with name '?([^' ]+)'? already exists|name '([^']+)' already exists",
        "a name in Ray is taken: another engine with the same instance id runs on this cluster",
    ),
    _pattern(
        reasons.PLACEMENT_PENDING,
        r"Cannot provide a placement group|placement group .*within \d+ seconds|Not enough resources to allocate",
        "Ray has too few free accelerators: compare spec.parallelism with spec.cluster.workers",
    ),
    # What the user asked for.
    _pattern(
        reasons.INVALID_ARGUMENTS,
        r"^vllm(?: serve)?: error: (.*)",
        "vLLM refuses spec.engine.args: {0}",
    ),
    _pattern(
        reasons.INVALID_ARGUMENTS,
        r"pass the argument `trust_remote_code=True`|contains custom code which must be executed",
        "the model brings code of its own: add --trust-remote-code to spec.engine.args if you trust it",
    ),
    _pattern(
        reasons.INVALID_ARGUMENTS,
        r"chat template string \((.*?)\) appears path-like, but doesn't exist",
        "there is no chat template {0}: check --chat-template in spec.engine.args",
    ),
    _pattern(
        reasons.INVALID_ARGUMENTS,
        r"(Load format `[^`]*` is not supported)",
        "vLLM refuses the configuration: {0}",
    ),
    _pattern(
        reasons.INVALID_ARGUMENTS,
        r"^\s*(?:Value error, |Assertion failed, )?(.*?) \[type=\w+, input_value=",
        "vLLM refuses the configuration: {0}",
    ),
    _pattern(
        reasons.INVALID_ARGUMENTS,
        r"^\s+Value error, (.*)",
        "vLLM refuses the configuration: {0}",
    ),
    _pattern(
        reasons.ENGINE_EXITED,
        r"((?:[Cc]annot|[Cc]an't|[Cc]ould not) (?:pickle|serialize)\b.*)",
        "something cannot be sent to the workers: {0}; often a model with code of its own",
    ),
)
"""Searched in this order in every line that tells; the first line that holds any of them gives the cause."""

CONSEQUENCES = (
    _pattern(
        reasons.RAY_CONNECTION_LOST,
        r"[Ff]ailed to connect to (?:the )?GCS|GCS (?:server )?(?:is|was|has) .*(?:unavailable|dead|unreachable|down)"
        r"|RpcError: .*failed to connect to all addresses|Raylet is terminated|has been marked dead",
        "the engine lost Ray's head, or a node: look at the head pod and the nodes",
    ),
    _pattern(
        reasons.COMMUNICATION_FAILED,
        r"nccl(?:SystemError|UnhandledCudaError|InternalError|InvalidUsage|RemoteError)|NCCL [Ee]rror|DistBackendError"
        r"|DistNetworkError|DistStoreError|Gloo connectFullMesh failed|collective operation timeout"
        r"|client socket has timed out|gloo/transport|Timed out waiting \d+ms for"
        r"|Timed out after \d+ seconds waiting for clients|Socket Timeout",
        "the workers could not talk to each other: check the network between the pods and NCCL_SOCKET_IFNAME,"
        " GLOO_SOCKET_IFNAME, NCCL_IB_DISABLE",
    ),
    _pattern(
        reasons.WORKER_DIED,
        r"RayWorkerProc rank=\S+ died unexpectedly|ActorDiedError|ActorUnavailableError|WorkerCrashedError",
        "a worker process died without saying why: look for an out-of-memory kill or a lost node",
    ),
)
"""What also befalls the other workers when one of them failed: a cause only if no other error came before."""

SILENT = (
    _pattern(
        reasons.WORKER_DIED,
        r"Failed core proc\(s\): \{'[^']+': -(\d+)",
        "the engine core process was killed by signal {0}: look for an out-of-memory kill",
    ),
    _pattern(
        reasons.WORKER_DIED,
        r"Engine core initialization failed\..*Failed core proc\(s\): \{\}",
        "the engine core process died while it started, without saying why: look for an out-of-memory kill",
    ),
    _pattern(
        reasons.WORKER_DIED,
        r"EngineDeadError",
        "the engine core process died without saying why: look for an out-of-memory kill",
    ),
)
"""What is left in the log when the engine core died without a word: otherwise noise."""
