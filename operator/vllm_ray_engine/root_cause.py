"""From an engine's log to the cause of its end: the first real error, not the noise that follows it.

Known failures come from a table and count wherever they stand. Without one, the first exception that was logged as an
error or printed as a traceback is the cause: Python prints the innermost of a chain first, and the processes above
repeat it later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vllm_ray_engine import reasons
from vllm_ray_engine.reasons import Cause

MAX_TEXT = 600
"""Characters of a log line, or of a message taken from one, that are kept."""


@dataclass(frozen=True)
class Pattern:
    """A known failure. `message` may hold {0}, {1}, ... for the groups of `regex`."""

    reason: str
    regex: re.Pattern[str]
    message: str


def _pattern(reason: str, regex: str, message: str) -> Pattern:
    return Pattern(reason, re.compile(regex), message)


KNOWN = (
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
        reasons.SHARED_MEMORY,
        r"Error while creating shared memory segment|insufficient shared memory|[Uu]nable to (?:open|allocate) shared"
        r"|unable to write to file </torch_|No space left on device.*(?:/dev/shm|psm_)"
        r"|(?:/dev/shm|psm_).*No space left",
        "shared memory ran out: raise spec.engine.shmSize",
    ),
    _pattern(
        reasons.OUT_OF_MEMORY,
        r"Free memory on device.*less than desired GPU memory utilization",
        "the device has too little free memory at start: another process holds it, or --gpu-memory-utilization is too"
        " high",
    ),
    _pattern(
        reasons.OUT_OF_MEMORY,
        r"Available memory on node.*less than desired CPU memory utilization",
        "the node has too little free memory: give a KV cache size (--kv-cache-memory-bytes) or more memory",
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
        r"(?:CUDA|HIP|XPU) out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        "the device ran out of memory: lower --max-model-len or --gpu-memory-utilization, or use more accelerators"
        " (spec.parallelism)",
    ),
    _pattern(
        reasons.OUT_OF_MEMORY,
        r"node running low on memory|exceeds the memory usage threshold|DefaultCPUAllocator: can't allocate memory"
        r"|\bMemoryError\b|Cannot allocate memory",
        "the pod ran out of memory: raise its memory limit",
    ),
    _pattern(
        reasons.PORT_IN_USE,
        r"Address already in use|EADDRINUSE|error while attempting to bind on address",
        "a port is in use: check spec.engine.port, and what else runs in the pod or on its host network",
    ),
    _pattern(
        reasons.COMPILER_MISSING,
        r"InvalidCxxCompiler|No working C\+\+ compiler found|Failed to find C compiler|(?:gcc|g\+\+|cc): (?:command )?"
        r"not found|No such file or directory: '(?:gcc|g\+\+|cc|nvcc)'",
        "the image has no C++ compiler: add one, or set TORCHDYNAMO_DISABLE=1 where compiling is not wanted",
    ),
    _pattern(
        reasons.INVALID_ARGUMENTS,
        r"^vllm(?: serve)?: error: (.*)",
        "vLLM refuses spec.engine.args: {0}",
    ),
    _pattern(
        reasons.INVALID_ARGUMENTS,
        r"trust_remote_code=True",
        "the model brings code of its own: add --trust-remote-code to spec.engine.args if you trust it",
    ),
    _pattern(
        reasons.INVALID_ARGUMENTS,
        r"^\s*(?:Value error, |Assertion failed, )?(.*?) \[type=\w+, input_value=",
        "vLLM refuses the configuration: {0}",
    ),
)
"""Searched in this order in every line; the first line that holds any of them gives the cause."""

CONSEQUENCES = (
    _pattern(
        reasons.COMMUNICATION_FAILED,
        r"nccl(?:SystemError|UnhandledCudaError|InternalError|InvalidUsage|RemoteError)|NCCL [Ee]rror|DistBackendError"
        r"|DistNetworkError|Gloo connectFullMesh failed|collective operation timeout"
        r"|client socket has timed out|gloo/transport",
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
        r"EngineDeadError",
        "the engine core process died without saying why: look for an out-of-memory kill",
    ),
)
"""What is left in the log when the engine core died without a word: otherwise noise."""

_FAILED_WITH = re.compile(r"Worker failed with error ['\"](.+?)['\"], please check")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Exit|Failure|Timeout))(?::\s*(.*))?$")
_NOISE = re.compile(
    r"Engine core initialization failed|EngineDeadError|EngineGenerateError|ActorHandleNotFoundError"
    r"|ActorHandle objects are not valid|Failed to kill actor|ray::|RayTaskError\(|CancelledError|KeyboardInterrupt"
    r"|SystemExit|BrokenPipeError|During handling of|direct cause"
)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(
    r"^(?:\([^()]*\bpid=\d+[^()]*\)|\[rank\d+\]:|\((?:EngineCore|APIServer|Worker)[^()]*\)|\(raylet[^()]*\)"
    r"|(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\])\s?"
)
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")


def _clean(line: str) -> tuple[str, str]:
    """Return a line without colours and prefixes, and its log level ('' when it has none)."""
    text, level = _ANSI.sub("", line).rstrip(), ""
    while found := _PREFIX.match(text):
        level = found["level"] or level
        text = text[found.end() :]
    return _REPEATED.sub("", text), level


def _errors(lines: Iterable[str]) -> Iterator[str]:
    """Yield the cleaned lines that can hold a cause."""
    for line in lines:
        text, level = _clean(line)
        if text and level not in {"DEBUG", "INFO", "WARNING"} and not _NOISE.search(text):
            yield text


def _cause(pattern: Pattern, found: re.Match[str], line: str) -> Cause:
    groups = [(group or "").strip()[:MAX_TEXT] for group in found.groups()]
    return Cause(pattern.reason, pattern.message.format(*groups), line.strip()[:MAX_TEXT])


def find(lines: Iterable[str], *, known_only: bool = False) -> Cause | None:
    """Return the cause that the log states, None when it states none; `known_only` leaves out unknown exceptions."""
    fallback: Cause | None = None
    lines = list(lines)
    for text in _errors(lines):
        for pattern in KNOWN:
            if found := pattern.regex.search(text):
                return _cause(pattern, found, text)
        if fallback is None and not known_only:
            fallback = _unknown(text)
    return fallback if fallback or known_only else _silent(lines)


def _silent(lines: Iterable[str]) -> Cause | None:
    for line in lines:
        text, _ = _clean(line)
        for pattern in SILENT:
            if found := pattern.regex.search(text):
                return _cause(pattern, found, text)
    return None


def _unknown(text: str) -> Cause | None:
    for pattern in CONSEQUENCES:
        if found := pattern.regex.search(text):
            return _cause(pattern, found, text)
    if found := _FAILED_WITH.search(text):
        return Cause(reasons.ENGINE_EXITED, f"a worker failed: {found[1][:MAX_TEXT]}", text[:MAX_TEXT])
    if found := _EXCEPTION.match(text.strip()):
        detail = f": {found[2]}" if found[2] else ""
        return Cause(reasons.ENGINE_EXITED, f"the engine failed with {found[1]}{detail}"[:MAX_TEXT], text[:MAX_TEXT])
    return None
