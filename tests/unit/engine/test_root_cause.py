"""Failures and the causes read from their logs.

Logs are cut down from runs of vLLM 0.32 on Ray 2.60, or reworded from public reports.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from vllm_ray_engine import reasons
from vllm_ray_engine.diagnosis import log_lines, root_cause
from vllm_ray_engine.diagnosis.known_failures import CONSEQUENCES, KNOWN, SILENT, Pattern
from vllm_ray_engine.reasons import Cause

CORE = "(EngineCore pid=300) ERROR 11-30 08:00:00 [core.py:1510] "
API = "(APIServer pid=200) "
WORKER = "\x1b[36m(RayWorkerProc pid=400, ip=10.0.0.2)\x1b[0m (Worker_TP1 pid=400) ERROR 11-30 08:00:00 [worker.py:9] "

NOISE = f"""
{CORE}Traceback (most recent call last):
{CORE}ray.exceptions.ActorHandleNotFoundError: Failed to find a corresponding actor handle for 58ff
{CORE}ActorHandle objects are not valid across Ray sessions. The actor handle was created in job 02000000
{API}Traceback (most recent call last):
{API}  File "vllm/v1/engine/utils.py", line 1432, in wait_for_engine_startup
{API}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""

SEEN = "here"
"""Seen in a run of vLLM 0.32 or 0.28 and Ray 2.60 by this project; other sources are public issues."""
READ = "its source"
"""Read in the source of vLLM 0.32."""

FAILURES: dict[str, tuple[str, str, str, str]] = {
    "device memory at load": (
        f"{WORKER}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total",
        reasons.OUT_OF_MEMORY,
        "the device ran out of memory",
        "vllm-project/vllm#26863",
    ),
    "device memory at run time": (
        f"{CORE}EngineCore hit a fatal error.\n{CORE}RuntimeError: Worker failed with error 'CUDA out of memory."
        " Tried to allocate 20.00 MiB', please check the stack trace above for the root cause\n"
        f"{API}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        reasons.OUT_OF_MEMORY,
        "the device ran out of memory",
        "noonghunna/club-3090#16",
    ),
    "device held by another process": (
        f"{CORE}EngineCore failed to start.\n{CORE}Traceback (most recent call last):\n{CORE}ValueError: Free memory on"
        " device cuda:0 (3.22/79.1 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB).",
        reasons.OUT_OF_MEMORY,
        "another process holds it",
        "vllm-project/vllm#20305",
    ),
    "device that an older worker does not leave": (
        f"{WORKER}ValueError: Free memory on device cuda:0 (3.22/79.1 GiB) on startup is less than desired GPU memory"
        " utilization (0.9, 71.2 GiB). Still so after 60 s, held by process 4242 (RayWorkerProc.run, 71.0 GiB)",
        reasons.OUT_OF_MEMORY,
        "it is held by process 4242 (RayWorkerProc.run, 71.0 GiB)",
        "vllm-project/vllm#20305",
    ),
    "too little node memory on CPU": (
        f"{WORKER}ValueError: Available memory on node 0 (7.57/8.96 GiB) on startup is less than desired CPU memory"
        " utilization (0.92, 8.25 GiB)",
        reasons.OUT_OF_MEMORY,
        "--kv-cache-memory-bytes",
        SEEN,
    ),
    "no memory for the KV cache": (
        f"{CORE}ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
        reasons.OUT_OF_MEMORY,
        "KV cache",
        SEEN,
    ),
    "context too long for the KV cache": (
        f"{CORE}ValueError: To serve at least one request with the models's max seq len (131072), (4.54 GiB KV cache is"
        " needed, which is larger than the available KV cache memory (1.71 GiB).",
        reasons.OUT_OF_MEMORY,
        "--max-model-len",
        "vllm-project/vllm#16118",
    ),
    "Ray's memory monitor": (
        "(raylet, ip=10.0.0.2) ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        reasons.OUT_OF_MEMORY,
        "the pod ran out of memory",
        "vllm-project/vllm#15102",
    ),
    "pod memory in PyTorch": (
        f"{WORKER}RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory",
        reasons.OUT_OF_MEMORY,
        "the pod ran out of memory",
        SEEN,
    ),
    "gated model": (
        f"{API}requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://hub/config.json\n"
        f"{API}The above exception was the direct cause of the following exception:\n"
        f"{API}huggingface_hub.errors.GatedRepoError: 401 Client Error.\n"
        f"{API}OSError: You are trying to access a gated repo.",
        reasons.MODEL_ACCESS_DENIED,
        "HF_TOKEN",
        SEEN,
    ),
    "expired token": (
        f"{API}huggingface_hub.errors.HfHubHTTPError: 401 Client Error: Invalid user token.",
        reasons.MODEL_ACCESS_DENIED,
        "give a valid one",
        SEEN,
    ),
    "no such repository": (
        f"{API}huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error.\n"
        f"{API}OSError: org/none is not a local folder and is not a valid model identifier listed on the hub",
        reasons.MODEL_NOT_FOUND,
        "spec.model.uri",
        SEEN,
    ),
    "no such model in the configuration's check": (
        f"{API}pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        f"{API}  Value error, Invalid repository ID or local directory specified: '/models/none'.\n"
        f"{API}Please verify the following requirements: [type=value_error, input_value=ArgsKwargs((), {{...}}), a]",
        reasons.MODEL_NOT_FOUND,
        "there is no model /models/none",
        SEEN,
    ),
    "hub out of reach": (
        f"{API}OSError: We couldn't connect to 'https://hub' to load the files, and couldn't find them in the cache",
        reasons.MODEL_NOT_FOUND,
        "its hub cannot be reached",
        SEEN,
    ),
    "offline and not cached": (
        f"{API}huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder",
        reasons.MODEL_NOT_FOUND,
        "HF_HUB_OFFLINE",
        SEEN,
    ),
    "no such revision": (
        f"{API}huggingface_hub.errors.RevisionNotFoundError: 404 Client Error. Revision Not Found for url",
        reasons.MODEL_NOT_FOUND,
        "spec.model.revision",
        SEEN,
    ),
    "no weights in a worker": (
        f"{WORKER}RuntimeError: Cannot find any model weights with `/models/empty`\n"
        f"{CORE}ray.exceptions.RayTaskError(RuntimeError): ray::RayWorkerProc.initialize_worker() (pid=400)",
        reasons.MODEL_NOT_FOUND,
        "/models/empty holds no model weights",
        SEEN,
    ),
    "API port in use": (
        f"{API}OSError: [Errno 98] Address already in use",
        reasons.PORT_IN_USE,
        "spec.engine.port",
        SEEN,
    ),
    "rendezvous port in use": (
        f"{WORKER}torch.distributed.DistNetworkError: The server socket has failed to listen on any local network"
        " address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE",
        reasons.PORT_IN_USE,
        "a port is in use",
        SEEN,
    ),
    "unknown flag": (
        "usage: vllm serve [model_tag] [options]\nvllm serve: error: unrecognized arguments: --no-such",
        reasons.INVALID_ARGUMENTS,
        "vLLM refuses spec.engine.args: unrecognized arguments: --no-such",
        SEEN,
    ),
    "heads not divisible": (
        f"{API}pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
        f"{API}  Value error, Total number of attention heads (4) must be divisible by tensor parallel size (3)."
        " [type=value_error, input_value=ArgsKwargs((), {'model_config': ...}), input_type=ArgsKwargs]",
        reasons.INVALID_ARGUMENTS,
        "Total number of attention heads (4) must be divisible by tensor parallel size (3).",
        SEEN,
    ),
    "remote code": (
        f"{API}ValueError: The repository contains custom code which must be executed to correctly load the model."
        " Please pass the argument `trust_remote_code=True` to allow custom code to be run.",
        reasons.INVALID_ARGUMENTS,
        "--trust-remote-code",
        SEEN,
    ),
    "unknown architecture": (
        f"{API}pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        f"{API}  Value error, Model architectures ['NewForCausalLM'] are not supported for now. Supported: a, b"
        " [type=value_error, input_value=1]",
        reasons.UNSUPPORTED_VERSION,
        "['NewForCausalLM']",
        SEEN,
    ),
    "head and engine differ": (
        f"{CORE}RuntimeError: Version mismatch: The cluster was started with:\n    Ray: 2.52.0\n    Python: 3.11.11\n"
        "This process on node 10.0.0.2 was started with:\n    Ray: 2.60.0",
        reasons.UNSUPPORTED_VERSION,
        "one image for head, workers and engine",
        "ray-project/ray#44063",
    ),
    "missing patch point": (
        f"{API}vllm_ray_engine.reasons.UnsupportedVersion: this image's vLLM has no vllm.x:y, which the plugin needs",
        reasons.UNSUPPORTED_VERSION,
        "this image's vLLM has no vllm.x:y",
        SEEN,
    ),
    "no compiler": (
        f"{WORKER}torch._inductor.exc.Inductor: InvalidCxxCompiler: No working C++ compiler found in (None, 'g++')",
        reasons.COMPILER_MISSING,
        "TORCHDYNAMO_DISABLE=1",
        SEEN,
    ),
    "no compiler for Triton": (
        f"{WORKER}RuntimeError: Failed to find C compiler. Please specify via CC environment variable.",
        reasons.COMPILER_MISSING,
        "no C++ compiler",
        "vllm-project/vllm#15329",
    ),
    "NCCL's shared memory": (
        "node:400:500 [0] include/shmutils.cc:72 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x"
        " (size 9637888)\n"
        f"{WORKER}RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
        reasons.SHARED_MEMORY,
        "spec.engine.shmSize",
        "MiniMax-AI/MiniMax-01#42",
    ),
    "shared memory of message queues": (
        f"{CORE}RuntimeError: Insufficient space in /dev/shm for shared-memory allocation: 240 MiB required, 64 free",
        reasons.SHARED_MEMORY,
        "spec.engine.shmSize",
        READ,
    ),
    "NCCL": (
        f"{WORKER}torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:268, unhandled system error",
        reasons.COMMUNICATION_FAILED,
        "NCCL_SOCKET_IFNAME",
        "vllm-project/vllm#4618",
    ),
    "Gloo": (
        f"{WORKER}RuntimeError: Gloo connectFullMesh failed with [/gloo/gloo/transport/tcp/pair.cc:144] no error",
        reasons.COMMUNICATION_FAILED,
        "GLOO_SOCKET_IFNAME",
        "gpustack/gpustack#2125",
    ),
    "rendezvous time-out": (
        f"{WORKER}torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to"
        " connect to (10.0.0.1, 29500).",
        reasons.COMMUNICATION_FAILED,
        "network between the pods",
        SEEN,
    ),
    "killed worker": (
        f"{CORE}RayWorkerProc rank=[1] died unexpectedly, shutting down executor.\n"
        f"{API}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        reasons.WORKER_DIED,
        "without saying why",
        SEEN,
    ),
    "killed engine core": (
        f"{API}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above).",
        reasons.WORKER_DIED,
        "the engine core process died without saying why",
        SEEN,
    ),
    "engine core killed at start": (
        f"{API}RuntimeError: Engine core initialization failed. See root cause above."
        " Failed core proc(s): {'EngineCore': -9}",
        reasons.WORKER_DIED,
        "the engine core process was killed by signal 9",
        SEEN,
    ),
    "engine core killed before it said hello": (
        f"{API}RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}",
        reasons.WORKER_DIED,
        "the engine core process died while it started, without saying why",
        SEEN,
    ),
    "unknown exception in a worker": (
        f"{WORKER}Traceback (most recent call last):\n{WORKER}AssertionError: head_dim=16 is not supported\n"
        f"{CORE}RayWorkerProc rank=[1] died unexpectedly, shutting down executor.",
        reasons.ENGINE_EXITED,
        "the engine failed with AssertionError: head_dim=16 is not supported",
        SEEN,
    ),
    "unknown exception, and what the other worker sees of it": (
        f"{WORKER}KeyError: 'layer.7'\n"
        f"{WORKER}RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer",
        reasons.ENGINE_EXITED,
        "the engine failed with KeyError: 'layer.7'",
        SEEN,
    ),
    "worker's error in quotes": (
        f"{CORE}Worker failed with error 'cannot unpack None', please check the stack trace above for the root cause",
        reasons.ENGINE_EXITED,
        "a worker failed: cannot unpack None",
        SEEN,
    ),
    "platform that Ray does not know": (
        f"{CORE}ValueError: current platform cpu does not support ray.",
        reasons.ENGINE_EXITED,
        "current platform cpu does not support ray.",
        SEEN,
    ),
    "device memory in NCCL": (
        f"{WORKER}torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:133, unhandled cuda error\n"
        f"{WORKER}ncclUnhandledCudaError: Call to CUDA function failed.\n"
        f"{WORKER}Last error:\n{WORKER}Cuda failure 'out of memory'",
        reasons.OUT_OF_MEMORY,
        "the device ran out of memory",
        "vllm-project/vllm#18446",
    ),
    "KV cache larger than the node's memory": (
        f"{WORKER}ValueError: Available memory on node 0 (18.9/23.5 GiB) on kv cache allocation is less than requested"
        " memory for kv (4000.0 GiB). Decrease --kv-cache-memory-bytes",
        reasons.OUT_OF_MEMORY,
        "--kv-cache-memory-bytes",
        SEEN,
    ),
    "workers killed by Ray": (
        "(raylet) [2025-04-02 15:02:00,117 E 135 135] (raylet) node_manager.cc:3069: 1 Workers (tasks / actors) killed"
        " due to memory pressure (OOM), 0 Workers crashed due to other reasons at node (ID: 351e, IP: 10.0.0.2)\n"
        f"{CORE}RayWorkerProc rank=[1] died unexpectedly, shutting down executor.",
        reasons.OUT_OF_MEMORY,
        "the pod ran out of memory",
        "vllm-project/vllm#1160",
    ),
    "driver too old": (
        f"{WORKER}RuntimeError: The NVIDIA driver on your system is too old (found version 12080). Please update it",
        reasons.DEVICE_UNSUPPORTED,
        "driver is too old",
        "modelscope/FunASR#2973",
    ),
    "no kernel for the device": (
        f"{CORE}RuntimeError: CUDA error: no kernel image is available for execution on the device\n"
        f"{CORE}CUDA kernel errors might be asynchronously reported at some other API call",
        reasons.DEVICE_UNSUPPORTED,
        "not built for this accelerator",
        "vllm-project/vllm#14452",
    ),
    "ptxas does not know the device": (
        "(EngineCore_DP0 pid=93) Traceback (most recent call last):\n"
        "(EngineCore_DP0 pid=93) torch._inductor.exc.InductorError: RuntimeError: Failed to run autotuning code block\n"
        "(EngineCore_DP0 pid=93) `ptxas` stderr:\n"
        "(EngineCore_DP0 pid=93) ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'",
        reasons.DEVICE_UNSUPPORTED,
        "not built for this accelerator",
        "vllm-project/vllm#29469",
    ),
    "bfloat16 on an old device": (
        f"{WORKER}ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4"
        " GPU has compute capability 7.5.",
        reasons.DEVICE_UNSUPPORTED,
        "--dtype=half",
        "vllm-project/vllm#1157",
    ),
    "quantization on an old device": (
        f"{WORKER}ValueError: The quantization method fp8 is not supported for the current GPU. Minimum capability: 89."
        " Current capability: 80.",
        reasons.DEVICE_UNSUPPORTED,
        "the model's quantization",
        "vllm-project/vllm#4327",
    ),
    "quantization scheme on an old device": (
        f"{WORKER}RuntimeError: ('Quantization scheme is not supported for ', 'the current GPU. Min capability: 80. ',"
        " 'Current capability: 75.')",
        reasons.DEVICE_UNSUPPORTED,
        "the model's quantization",
        "vllm-project/vllm#14040",
    ),
    "no accelerator": (
        f"{API}Traceback (most recent call last):\n{API}RuntimeError: Failed to infer device type",
        reasons.DEVICE_UNSUPPORTED,
        "sees no accelerator",
        "vllm-project/vllm#13946",
    ),
    "quantization that vLLM does not know": (
        f"{API}pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        f"{API}  Value error, Unknown quantization method: zork. Must be one of ['awq', 'fp8'] [type=value_error,"
        " input_value=ArgsKwargs((), {'model': ...}), input_type=ArgsKwargs]",
        reasons.INVALID_ARGUMENTS,
        "Unknown quantization method: zork",
        SEEN,
    ),
    "quantization for another type of numbers": (
        f"{API}pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
        f"{API}  Value error, torch.float32 is not supported for quantization method fp8. Supported dtypes:"
        " [torch.bfloat16, torch.float16] [type=value_error, input_value=ArgsKwargs((), {}), input_type=ArgsKwargs]",
        reasons.INVALID_ARGUMENTS,
        "torch.float32 is not supported for quantization method fp8",
        SEEN,
    ),
    "context longer than the model's": (
        f"{API}pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        f"{API}  Value error, User-specified max_model_len (100000) is greater than the derived max_model_len"
        " (max_position_embeddings=2048.0). [type=value_error, input_value=1, input_type=int]",
        reasons.INVALID_ARGUMENTS,
        "User-specified max_model_len (100000) is greater",
        SEEN,
    ),
    "chat template that is not there": (
        f"{API}Traceback (most recent call last):\n"
        f"{API}vllm.exceptions.VLLMValidationError: The supplied chat template string (/no/such.j2) appears path-like,"
        " but doesn't exist! Tried: /no/such.j2",
        reasons.INVALID_ARGUMENTS,
        "there is no chat template /no/such.j2",
        SEEN,
    ),
    "adapter that is not there": (
        f"{WORKER}vllm.exceptions.LoRAAdapterNotFoundError: Loading lora a failed: No adapter found for /no/lora\n"
        f"{CORE}RuntimeError: Worker failed with error 'Loading lora a failed: No adapter found for /no/lora', please"
        " check the stack trace above for the root cause",
        reasons.MODEL_NOT_FOUND,
        "there is no LoRA adapter /no/lora",
        SEEN,
    ),
    "model type that is not known": (
        f"{API}pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        f"{API}  Value error, The checkpoint you are trying to load has model type `zork9` but Transformers does not"
        " recognize this architecture.",
        reasons.UNSUPPORTED_VERSION,
        "model type zork9",
        SEEN,
    ),
    "weights cut off": (
        f"{WORKER}safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata,"
        " file not fully covered",
        reasons.MODEL_INVALID,
        "damaged or was not copied whole",
        SEEN,
    ),
    "weights cut off, older safetensors": (
        f"{WORKER}safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
        reasons.MODEL_INVALID,
        "damaged or was not copied whole",
        "vllm-project/vllm#15445",
    ),
    "Git LFS pointer": (
        f"{WORKER}safetensors._safetensors_rust.SafetensorError: Error while deserializing header: header too large",
        reasons.MODEL_INVALID,
        "damaged or was not copied whole",
        SEEN,
    ),
    "tokenizer missing": (
        f"{API}Traceback (most recent call last):\n"
        f"{API}ValueError: Couldn't instantiate the backend tokenizer from one of: ",
        reasons.MODEL_INVALID,
        "tokenizer",
        SEEN,
    ),
    "config.json is no JSON": (
        f"{API}OSError: It looks like the config file at '/models/x/config.json' is not a valid JSON file.",
        reasons.MODEL_INVALID,
        "config.json is no JSON",
        SEEN,
    ),
    "disk full": (
        f"{API}Traceback (most recent call last):\n{API}OSError: [Errno 28] No space left on device",
        reasons.DISK_FULL,
        "a disk is full",
        SEEN,
    ),
    "library missing": (
        f"{API}Traceback (most recent call last):\n"
        f"{API}ImportError: libcudart.so.13: cannot open shared object file: No such file or directory",
        reasons.LIBRARY_MISSING,
        "the library libcudart.so.13",
        "vllm-project/vllm#52300",
    ),
    "libnuma missing": (
        f"{API}Traceback (most recent call last):\n"
        f"{API}OSError: libnuma.so.1: cannot open shared object file: No such file or directory",
        reasons.LIBRARY_MISSING,
        "the library libnuma.so.1",
        SEEN,
    ),
    "package missing": (
        f"{WORKER}ModuleNotFoundError: No module named 'triton'",
        reasons.LIBRARY_MISSING,
        "the Python package triton",
        SEEN,
    ),
    "Triton finds no device": (
        f"{WORKER}RuntimeError: 0 active drivers ([]). There should only be one.",
        reasons.LIBRARY_MISSING,
        "Triton does not work",
        "verl-project/verl#904",
    ),
    "Triton is a stand-in": (
        f"{CORE}AttributeError: module 'triton' has no attribute 'next_power_of_2'",
        reasons.LIBRARY_MISSING,
        "Triton does not work",
        "vllm-project/vllm#53530",
    ),
    "port from a Service": (
        f"{API}Traceback (most recent call last):\n"
        f"{API}ValueError: VLLM_PORT 'tcp://10.96.0.10:8000' appears to be a URI. This may be caused by a Kubernetes"
        " service discovery issue",
        reasons.INVALID_ENVIRONMENT,
        "tcp://10.96.0.10:8000",
        SEEN,
    ),
    "address of another pod": (
        f"{CORE}OSError: [Errno 99] Cannot assign requested address",
        reasons.INVALID_ENVIRONMENT,
        "VLLM_HOST_IP",
        SEEN,
    ),
    "interface that is not there": (
        f"{WORKER}RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa !="
        " nullptr. Unable to find address for: eth9",
        reasons.INVALID_ENVIRONMENT,
        "*_SOCKET_IFNAME",
        SEEN,
    ),
    "PyTorch without CUDA": (
        f"{WORKER}AssertionError: Torch not compiled with CUDA enabled",
        reasons.DEVICE_UNSUPPORTED,
        "not built for this accelerator",
        SEEN,
    ),
    "unknown load format": (
        f"{CORE}ValueError: Load format `zork` is not supported",
        reasons.INVALID_ARGUMENTS,
        "Load format `zork` is not supported",
        SEEN,
    ),
    "Gloo time-out": (
        f"{WORKER}RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting"
        " 3000ms for recv operation to complete",
        reasons.COMMUNICATION_FAILED,
        "GLOO_SOCKET_IFNAME",
        SEEN,
    ),
    "rank that never comes": (
        f"{WORKER}torch.distributed.DistStoreError: Timed out after 4 seconds waiting for clients. 1/2 clients joined.",
        reasons.COMMUNICATION_FAILED,
        "network between the pods",
        SEEN,
    ),
    "folder too long for a socket": (
        f"{API}Traceback (most recent call last):\n"
        f'{API}zmq.error.ZMQError: ipc path "/tmp/xxx/14be" is longer than 107 characters (sizeof(sun_path)).',
        reasons.INVALID_ENVIRONMENT,
        "a shorter TMPDIR",
        SEEN,
    ),
    "file that may not be read": (
        f"{API}Traceback (most recent call last):\n"
        f"{API}PermissionError: [Errno 13] Permission denied: '/models/x/config.json'",
        reasons.PERMISSION_DENIED,
        "'/models/x/config.json'",
        SEEN,
    ),
    "actor's name taken": (
        f"{CORE}ray.exceptions.ActorAlreadyExistsError: The name vllm_Worker_1796 (namespace=None) is already taken.",
        reasons.ACTOR_NAME_TAKEN,
        "a name in Ray is taken",
        SEEN,
    ),
    "actor's name taken at the same moment": (
        f"{CORE}ray.exceptions.ActorAlreadyExistsError: Actor with name 'vllm_Worker_1796' already exists in the"
        " namespace 7ece1dc9",
        reasons.ACTOR_NAME_TAKEN,
        "a name in Ray is taken",
        SEEN,
    ),
    "placement group's name taken": (
        f"{CORE}ray.exceptions.RaySystemError: System error: Failed to create placement group '7c' because name"
        " 'dp_rank_0' already exists.",
        reasons.ACTOR_NAME_TAKEN,
        "a name in Ray is taken",
        SEEN,
    ),
    "no room for the ranks": (
        f"{CORE}ValueError: Not enough resources to allocate 2 placement groups, only created 0",
        reasons.PLACEMENT_PENDING,
        "too few free accelerators",
        SEEN,
    ),
    "control store gone": (
        "[2025-12-19 19:33:35,726 E 3584055 3584848] rpc_client.h:201: Failed to connect to GCS within 60 seconds. GCS"
        " may have been killed. The program will terminate.",
        reasons.RAY_CONNECTION_LOST,
        "lost Ray's head",
        "vllm-project/vllm#15385",
    ),
    "node gone": (
        "(raylet) The node with node id: 0f21 and address: 10.0.0.51 has been marked dead because the detector has"
        f" missed too many heartbeats from it.\n{CORE}RayWorkerProc rank=[1] died unexpectedly",
        reasons.RAY_CONNECTION_LOST,
        "or a node",
        "ray-project/ray#45179",
    ),
    "NCCL time-out": (
        "(RayWorkerProc pid=7) [rank0]:[E ProcessGroupNCCL.cpp:563] [Rank 0] Watchdog caught collective operation"
        " timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600086 milliseconds",
        reasons.COMMUNICATION_FAILED,
        "NCCL_SOCKET_IFNAME",
        "vllm-project/vllm#5458",
    ),
    "object that cannot be sent": (
        f"{CORE}_pickle.PicklingError: Can't pickle <class 'transformers_modules.x.Config'>: it's not the same object",
        reasons.ENGINE_EXITED,
        "cannot be sent to the workers: Can't pickle <class 'transformers_modules.x.Config'>",
        "vllm-project/vllm#18640",
    ),
    "argument that cannot be sent": (
        f"{CORE}TypeError: Could not serialize the argument <unlocked _thread.lock> for a task or actor __main__.f:\n"
        f"{CORE}!!! FAIL serialization: cannot pickle '_thread.lock' object",
        reasons.ENGINE_EXITED,
        "cannot be sent to the workers",
        SEEN,
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_cause(name: str) -> None:
    log, reason, message, _source = FAILURES[name]
    cause = root_cause.find((log + NOISE).splitlines())
    assert cause is not None
    assert cause.reason == reason
    assert message in cause.message
    assert cause.line in log, "the line as it stands in the log, without prefixes"
    assert "pid=" not in cause.line or "ray::" in cause.line


@pytest.mark.parametrize("name", FAILURES)
def test_source(name: str) -> None:
    source = FAILURES[name][3]
    assert source in {SEEN, READ} or re.fullmatch(r"[\w-]+/[\w.-]+#\d+", source)


def test_enough_is_known() -> None:
    assert len(FAILURES) >= 60
    assert sum(source == SEEN for _, _, _, source in FAILURES.values()) >= 25


QUOTED = "torch.OutOfMemoryError: CUDA out of memory"
"""What a user may put into a prompt, a header or a path; it must never be a cause."""

FRAMES = f"""{API}  File "x.py", line 3, in f
{API}    except torch.OutOfMemoryError:  # CUDA out of memory
{API}    trust_remote_code=True, MemoryError, GatedRepoError"""

REQUEST = CORE.replace("1510", "2056")
DUMP = CORE.replace("core.py:1510", "dump_input.py:72")

HARMLESS = {
    "prompt in the log": f"{API}INFO 11-30 08:00:00 [logger.py:39] Received request cmpl-1: prompt: '{QUOTED}'",
    "prompt of several lines": f"{API}INFO 11-30 08:00:00 [logger.py:39] prompt: 'a\r\n"
    f"{API}INFO 11-30 08:00:00 [logger.py:39] {QUOTED}\r\n{API}INFO 11-30 08:00:00 [logger.py:39] Traceback: {QUOTED}'",
    "path of a request": 'INFO:     10.0.0.1:4711 - "GET /CUDA%20out%20of%20memory/MemoryError HTTP/1.1" 404 Not Found',
    "answer of the model": f"{API}INFO 11-30 08:00:00 [logger.py:80] Generated response chatcmpl-1: output: '{QUOTED}'",
    "request that is refused": f"{API}ERROR 11-30 08:00:00 [serving.py:242] Error in preprocessing prompt inputs\n"
    f"{API}ERROR 11-30 08:00:00 [serving.py:242] Traceback (most recent call last):\n"
    f"{API}ERROR 11-30 08:00:00 [serving.py:242] jinja2.exceptions.TemplateError: {QUOTED}",
    "request that fails in the engine": f"{REQUEST}Unexpected error pre-processing request MemoryError\n"
    f"{REQUEST}Traceback (most recent call last):\n"
    f"{REQUEST}ValueError: {QUOTED}",
    "request that fails in the server": f"ERROR:    Exception in ASGI application\n"
    f'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    raise ValueError(\nValueError: {QUOTED}\n\n'
    f"During handling of the above exception, another exception occurred:\n\n"
    f"Traceback (most recent call last):\nRuntimeError: {QUOTED}\n",
    "group of exceptions in the server": "ERROR:    Exception in ASGI application\n"
    "  + Exception Group Traceback (most recent call last):\n"
    "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n  +-+---------------- 1 ----------------\n"
    f"    | Traceback (most recent call last):\n    | ValueError: {QUOTED}\n    +------------\n",
    "dump of what was scheduled": f"{DUMP}Dumping input data for V1 LLM engine"
    f" with config: trust_remote_code=True, model='MemoryError'\n"
    f"{DUMP}NewRequestData(req_id={QUOTED}",
    "attempts that are repeated": f"{API}ERROR 11-30 08:00:00 [repo_utils.py:126] Error retrieving file list: Repo id"
    " must use alphanumeric chars, retrying 1 of 2",
    "frames": FRAMES,
    "line of nobody": QUOTED.partition(": ")[2],
    "nothing": "",
    "only noise": "\n".join(NOISE.splitlines()[:-1]),
    "warnings with exceptions": "(APIServer pid=1) WARNING 11-30 08:00:00 [x.py:1] ImportError: CUDA out of memory",
    "configuration": f"{API}INFO 11-30 08:00:00 [core.py:133] config: trust_remote_code=True, seed=0",
    "stack frames": f'{API}  File "vllm/x.py", line 3, in f\n{API}    raise ValueError(',
}


@pytest.mark.parametrize("name", HARMLESS)
def test_no_cause(name: str) -> None:
    assert root_cause.find(HARMLESS[name].splitlines()) is None


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless_hides_no_cause(name: str) -> None:
    log = f"{HARMLESS[name]}\n{CORE}ValueError: the real one\n{HARMLESS[name]}"
    cause = root_cause.find(log.splitlines())
    assert cause is not None
    assert cause.message == "the engine failed with ValueError: the real one"


def test_servers_own_end_after_a_failed_request() -> None:
    log = f"{HARMLESS['request that fails in the server']}x\n"
    log += "Traceback (most recent call last):\nOSError: [Errno 28] No space"
    cause = root_cause.find(log.splitlines())
    assert cause is not None
    assert cause.message == "the engine failed with OSError: [Errno 28] No space"


def test_interleaved_workers() -> None:
    """One worker fails; the others lose their connections first in time, as loggers of several processes mix."""
    one, two = (WORKER.replace("400", str(pid)) for pid in (401, 402))
    log = [
        f"{one}WorkerProc hit an exception.",
        f"{two}WorkerProc hit an exception.",
        f"{one}Traceback (most recent call last):",
        f"{two}Traceback (most recent call last):",
        f'{two}  File "gloo.py", line 1, in all_reduce',
        f"{two}RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer",
        f'{one}  File "loader.py", line 1, in load',
        f"{one}safetensors_rust.SafetensorError: Error while deserializing header: header too large",
        f"{CORE}RayWorkerProc rank=[0] died unexpectedly, shutting down executor.",
    ]
    cause = root_cause.find(log)
    assert cause is not None
    assert cause.reason == reasons.MODEL_INVALID


LOGS = {
    "truncated.log": (reasons.MODEL_INVALID, "incomplete metadata, file not fully covered"),
    "remote.log": (reasons.INVALID_ARGUMENTS, "contains custom code"),
    "gated.log": (reasons.MODEL_ACCESS_DENIED, "GatedRepoError"),
    "kvtiny.log": (reasons.OUT_OF_MEMORY, "No available memory for the cache blocks"),
    "lora.log": (reasons.MODEL_NOT_FOUND, "LoRAAdapterNotFoundError"),
}


@pytest.mark.parametrize("name", LOGS)
def test_whole_log(name: str) -> None:
    """As vLLM 0.32 wrote it, from its start to its end."""
    reason, line = LOGS[name]
    cause = root_cause.find((Path(__file__).parent / "logs" / name).read_text().splitlines())
    assert cause is not None
    assert (cause.reason, line in cause.line) == (reason, True), cause


def test_known_only_leaves_out_what_is_not_in_the_table() -> None:
    unknown = [f"{CORE}ValueError: a request's", f"{CORE}RayWorkerProc rank=[1] died unexpectedly"]
    assert root_cause.find(unknown, known_only=True) is None
    known = root_cause.find([*unknown, f"{CORE}OSError: [Errno 98] Address already in use"], known_only=True)
    assert known is not None
    assert known.reason == reasons.PORT_IN_USE


SECRETS = {
    "token of the hub": ("401 for token hf_abcdefghijklmnopqrstuvwxyz", "hf_abcdefghijklmnopqrstuvwxyz"),
    "header": ("headers: {'Authorization': 'Bearer abcdefgh12345678'}", "abcdefgh12345678"),
    "URL with credentials": ("https://user:pa55word@hub.example/x", "pa55word"),
    "signed URL": ("https://s3.example/x?X-Amz-Signature=deadbeef&X-Amz-Credential=AK", "deadbeef"),
    "argument": ("unrecognized arguments: --my-api-key topsecret", "topsecret"),
    "argument with equals sign": ("unrecognized arguments: --api-key=topsecret", "topsecret"),
    "variable": ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI/K7MDENG"),
    "JSON": ('{"api_key": "topsecret", "x": 1}', "topsecret"),
    "list": ("'api_key': ['topsecret']", "topsecret"),
    "cloud key": ("AKIAIOSFODNN7EXAMPLE is not authorized", "AKIAIOSFODNN7EXAMPLE"),
    "OpenAI's form": ("Incorrect API key provided: sk-proj-abcdefgh", "sk-proj-abcdefgh"),
}


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_redacted(name: str) -> None:
    text, secret = SECRETS[name]
    cause = root_cause.find([f"{CORE}ValueError: {text}"])
    assert cause is not None
    assert secret not in str(cause.as_dict())
    assert "[redacted]" in cause.line


def test_nothing_else_is_redacted() -> None:
    plain = "give that token (HF_TOKEN): max_num_batched_tokens=2048, eos_token: 2, tcp://10.96.0.10:8000, user@host"
    assert Cause(reasons.ENGINE_EXITED, plain).message == plain


def test_words_of_an_exception() -> None:
    assert root_cause.reason_of("Version mismatch: The cluster was started with:") == reasons.UNSUPPORTED_VERSION
    assert root_cause.reason_of("Failed to connect to GCS") == reasons.RAY_CONNECTION_LOST
    assert root_cause.reason_of("something else") == reasons.ENGINE_EXITED


HOSTILE = {
    "word": "a" * 4000,
    "blanks": " " * 4000,
    "beginnings of a pattern": "Available memory on node " * 160,
    "library": "a.so." * 800,
    "brackets": "(" * 4000,
    "names": "a." * 2000 + "Error",
    "addresses": "a://b" * 800,
    "names of secrets": "--a-key" * 570,
    "tokens": "token_" * 660,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_lines_take_no_time(name: str) -> None:
    """A line of the greatest length that is kept; thousands of them are searched when an engine ends."""
    lines = [f"{CORE}ValueError: {HOSTILE[name]}", HOSTILE[name]] * 20
    started = time.process_time()
    root_cause.find(lines)
    assert time.process_time() - started < 2


def test_long_lines_are_cut() -> None:
    cause = root_cause.find([f"ValueError: {'x' * 10_000}"])
    assert cause is not None
    assert len(cause.line) <= root_cause.MAX_TEXT
    assert len(cause.message) <= root_cause.MAX_TEXT


ROWS = (*KNOWN, *CONSEQUENCES, *SILENT)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.reason}: {row.message[:40]}")
def test_every_row_has_a_case(row: Pattern) -> None:
    texts = [log for log, reason, _, _ in FAILURES.values() if reason == row.reason]
    assert any(row.regex.search(log_lines.parse(line).text) for text in texts for line in text.splitlines())
