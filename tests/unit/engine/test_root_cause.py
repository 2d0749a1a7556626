"""Failures and the causes read from their logs.

Logs are cut down from runs of vLLM 0.32 on Ray 2.60, or reworded from public reports.
"""

from __future__ import annotations

import pytest

from vllm_ray_engine import reasons, root_cause

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

FAILURES: dict[str, tuple[str, str, str]] = {
    "device memory at load": (
        f"{WORKER}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total",
        reasons.OUT_OF_MEMORY,
        "the device ran out of memory",
    ),
    "device memory at run time": (
        f"{CORE}EngineCore hit a fatal error.\n{CORE}RuntimeError: Worker failed with error 'CUDA out of memory."
        " Tried to allocate 20.00 MiB', please check the stack trace above for the root cause\n"
        f"{API}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        reasons.OUT_OF_MEMORY,
        "the device ran out of memory",
    ),
    "device held by another process": (
        f"{CORE}EngineCore failed to start.\n{CORE}Traceback (most recent call last):\n{CORE}ValueError: Free memory on"
        " device cuda:0 (3.22/79.1 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB).",
        reasons.OUT_OF_MEMORY,
        "another process holds it",
    ),
    "too little node memory on CPU": (
        f"{WORKER}ValueError: Available memory on node 0 (7.57/8.96 GiB) on startup is less than desired CPU memory"
        " utilization (0.92, 8.25 GiB)",
        reasons.OUT_OF_MEMORY,
        "--kv-cache-memory-bytes",
    ),
    "no memory for the KV cache": (
        f"{CORE}ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
        reasons.OUT_OF_MEMORY,
        "KV cache",
    ),
    "context too long for the KV cache": (
        f"{CORE}ValueError: To serve at least one request with the models's max seq len (131072), (4.54 GiB KV cache is"
        " needed, which is larger than the available KV cache memory (1.71 GiB).",
        reasons.OUT_OF_MEMORY,
        "--max-model-len",
    ),
    "Ray's memory monitor": (
        "(raylet, ip=10.0.0.2) ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        reasons.OUT_OF_MEMORY,
        "the pod ran out of memory",
    ),
    "pod memory in PyTorch": (
        f"{WORKER}RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory",
        reasons.OUT_OF_MEMORY,
        "the pod ran out of memory",
    ),
    "gated model": (
        f"{API}requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://hub/config.json\n"
        f"{API}The above exception was the direct cause of the following exception:\n"
        f"{API}huggingface_hub.errors.GatedRepoError: 401 Client Error.\n"
        f"{API}OSError: You are trying to access a gated repo.",
        reasons.MODEL_ACCESS_DENIED,
        "HF_TOKEN",
    ),
    "expired token": (
        f"{API}huggingface_hub.errors.HfHubHTTPError: 401 Client Error: Invalid user token.",
        reasons.MODEL_ACCESS_DENIED,
        "give a valid one",
    ),
    "no such repository": (
        f"{API}huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error.\n"
        f"{API}OSError: org/none is not a local folder and is not a valid model identifier listed on the hub",
        reasons.MODEL_NOT_FOUND,
        "spec.model.uri",
    ),
    "no such model in the configuration's check": (
        f"{API}pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        f"{API}  Value error, Invalid repository ID or local directory specified: '/models/none'.\n"
        f"{API}Please verify the following requirements: [type=value_error, input_value=ArgsKwargs((), {{...}}), a]",
        reasons.MODEL_NOT_FOUND,
        "there is no model /models/none",
    ),
    "hub out of reach": (
        f"{API}OSError: We couldn't connect to 'https://hub' to load the files, and couldn't find them in the cache",
        reasons.MODEL_NOT_FOUND,
        "its hub cannot be reached",
    ),
    "offline and not cached": (
        f"{API}huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder",
        reasons.MODEL_NOT_FOUND,
        "HF_HUB_OFFLINE",
    ),
    "no such revision": (
        f"{API}huggingface_hub.errors.RevisionNotFoundError: 404 Client Error. Revision Not Found for url",
        reasons.MODEL_NOT_FOUND,
        "spec.model.revision",
    ),
    "no weights in a worker": (
        f"{WORKER}RuntimeError: Cannot find any model weights with `/models/empty`\n"
        f"{CORE}ray.exceptions.RayTaskError(RuntimeError): ray::RayWorkerProc.initialize_worker() (pid=400)",
        reasons.MODEL_NOT_FOUND,
        "/models/empty holds no model weights",
    ),
    "API port in use": (
        f"{API}OSError: [Errno 98] Address already in use",
        reasons.PORT_IN_USE,
        "spec.engine.port",
    ),
    "rendezvous port in use": (
        f"{WORKER}torch.distributed.DistNetworkError: The server socket has failed to listen on any local network"
        " address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE",
        reasons.PORT_IN_USE,
        "a port is in use",
    ),
    "unknown flag": (
        "usage: vllm serve [model_tag] [options]\nvllm serve: error: unrecognized arguments: --no-such",
        reasons.INVALID_ARGUMENTS,
        "vLLM refuses spec.engine.args: unrecognized arguments: --no-such",
    ),
    "heads not divisible": (
        f"{API}pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
        f"{API}  Value error, Total number of attention heads (4) must be divisible by tensor parallel size (3)."
        " [type=value_error, input_value=ArgsKwargs((), {'model_config': ...}), input_type=ArgsKwargs]",
        reasons.INVALID_ARGUMENTS,
        "Total number of attention heads (4) must be divisible by tensor parallel size (3).",
    ),
    "remote code": (
        f"{API}ValueError: The repository contains custom code which must be executed to correctly load the model."
        " Please pass the argument `trust_remote_code=True` to allow custom code to be run.",
        reasons.INVALID_ARGUMENTS,
        "--trust-remote-code",
    ),
    "unknown architecture": (
        f"{API}  Value error, Model architectures ['NewForCausalLM'] are not supported for now. Supported: a, b"
        " [type=value_error, input_value=1]",
        reasons.UNSUPPORTED_VERSION,
        "['NewForCausalLM']",
    ),
    "head and engine differ": (
        f"{CORE}RuntimeError: Version mismatch: The cluster was started with:\n    Ray: 2.52.0\n    Python: 3.11.11\n"
        "This process on node 10.0.0.2 was started with:\n    Ray: 2.60.0",
        reasons.UNSUPPORTED_VERSION,
        "one image for head, workers and engine",
    ),
    "missing patch point": (
        f"{API}vllm_ray_engine.reasons.UnsupportedVersion: this image's vLLM has no vllm.x:y, which the plugin needs",
        reasons.UNSUPPORTED_VERSION,
        "this image's vLLM has no vllm.x:y",
    ),
    "no compiler": (
        f"{WORKER}torch._inductor.exc.Inductor: InvalidCxxCompiler: No working C++ compiler found in (None, 'g++')",
        reasons.COMPILER_MISSING,
        "TORCHDYNAMO_DISABLE=1",
    ),
    "no compiler for Triton": (
        f"{WORKER}RuntimeError: Failed to find C compiler. Please specify via CC environment variable.",
        reasons.COMPILER_MISSING,
        "no C++ compiler",
    ),
    "NCCL's shared memory": (
        "node:400:500 [0] include/shmutils.cc:72 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x"
        " (size 9637888)\n"
        f"{WORKER}RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
        reasons.SHARED_MEMORY,
        "spec.engine.shmSize",
    ),
    "shared memory of message queues": (
        f"{CORE}OSError: [Errno 28] No space left on device: '/psm_1a2b3c'",
        reasons.SHARED_MEMORY,
        "spec.engine.shmSize",
    ),
    "NCCL": (
        f"{WORKER}torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:268, unhandled system error",
        reasons.COMMUNICATION_FAILED,
        "NCCL_SOCKET_IFNAME",
    ),
    "Gloo": (
        f"{WORKER}RuntimeError: Gloo connectFullMesh failed with [/gloo/gloo/transport/tcp/pair.cc:144] no error",
        reasons.COMMUNICATION_FAILED,
        "GLOO_SOCKET_IFNAME",
    ),
    "rendezvous time-out": (
        f"{WORKER}torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to"
        " connect to (10.0.0.1, 29500).",
        reasons.COMMUNICATION_FAILED,
        "network between the pods",
    ),
    "killed worker": (
        f"{CORE}RayWorkerProc rank=[1] died unexpectedly, shutting down executor.\n"
        f"{API}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        reasons.WORKER_DIED,
        "without saying why",
    ),
    "killed engine core": (
        f"{API}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above).",
        reasons.WORKER_DIED,
        "the engine core process died without saying why",
    ),
    "engine core killed at start": (
        f"{API}RuntimeError: Engine core initialization failed. See root cause above."
        " Failed core proc(s): {'EngineCore': -9}",
        reasons.WORKER_DIED,
        "the engine core process was killed by signal 9",
    ),
    "unknown exception in a worker": (
        f"{WORKER}Traceback (most recent call last):\n{WORKER}AssertionError: head_dim=16 is not supported\n"
        f"{CORE}RayWorkerProc rank=[1] died unexpectedly, shutting down executor.",
        reasons.ENGINE_EXITED,
        "the engine failed with AssertionError: head_dim=16 is not supported",
    ),
    "unknown exception, and what the other worker sees of it": (
        f"{WORKER}KeyError: 'layer.7'\n"
        f"{WORKER}RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer",
        reasons.ENGINE_EXITED,
        "the engine failed with KeyError: 'layer.7'",
    ),
    "worker's error in quotes": (
        f"{CORE}Worker failed with error 'cannot unpack None', please check the stack trace above for the root cause",
        reasons.ENGINE_EXITED,
        "a worker failed: cannot unpack None",
    ),
    "platform that Ray does not know": (
        f"{CORE}ValueError: current platform cpu does not support ray.",
        reasons.ENGINE_EXITED,
        "current platform cpu does not support ray.",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_cause(name: str) -> None:
    log, reason, message = FAILURES[name]
    cause = root_cause.find((log + NOISE).splitlines())
    assert cause is not None
    assert cause.reason == reason
    assert message in cause.message
    assert cause.line in log, "the line as it stands in the log, without prefixes"
    assert "pid=" not in cause.line or "ray::" in cause.line


HARMLESS = {
    "nothing": "",
    "only noise": NOISE,
    "warnings with exceptions": "(APIServer pid=1) WARNING 11-30 08:00:00 [x.py:1] ImportError: CUDA out of memory",
    "configuration": f"{API}INFO 11-30 08:00:00 [core.py:133] config: trust_remote_code=True, seed=0",
    "stack frames": f'{API}  File "vllm/x.py", line 3, in f\n{API}    raise ValueError(',
}


@pytest.mark.parametrize("name", HARMLESS)
def test_no_cause(name: str) -> None:
    assert root_cause.find(HARMLESS[name].splitlines()) is None


def test_known_only_leaves_out_what_is_not_in_the_table() -> None:
    unknown = [f"{CORE}ValueError: a request's", f"{CORE}RayWorkerProc rank=[1] died unexpectedly"]
    assert root_cause.find(unknown, known_only=True) is None
    known = root_cause.find([*unknown, f"{CORE}OSError: [Errno 98] Address already in use"], known_only=True)
    assert known is not None
    assert known.reason == reasons.PORT_IN_USE


def test_long_lines_are_cut() -> None:
    cause = root_cause.find([f"ValueError: {'x' * 10_000}"])
    assert cause is not None
    assert len(cause.line) <= root_cause.MAX_TEXT
    assert len(cause.message) <= root_cause.MAX_TEXT


def test_every_reason_that_a_log_can_state_is_covered() -> None:
    stated = {pattern.reason for pattern in (*root_cause.KNOWN, *root_cause.CONSEQUENCES)}
    assert stated <= {reason for _, reason, _ in FAILURES.values()}
