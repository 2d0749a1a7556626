"""Why an engine ended: a closed set of CamelCase reasons and the record that carries one."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from vllm_ray_engine.redact import redact

MODEL_NOT_FOUND = "ModelNotFound"
MODEL_ACCESS_DENIED = "ModelAccessDenied"
MODEL_INVALID = "ModelInvalid"
OUT_OF_MEMORY = "OutOfMemory"
SHARED_MEMORY = "SharedMemory"
DISK_FULL = "DiskFull"
DEVICE_UNSUPPORTED = "DeviceUnsupported"
PORT_IN_USE = "PortInUse"
INVALID_ARGUMENTS = "InvalidArguments"
OWNED_ARGUMENT = "OwnedArgument"
INVALID_ENVIRONMENT = "InvalidEnvironment"
PERMISSION_DENIED = "PermissionDenied"
PLACEMENT_PENDING = "PlacementPending"
STARTUP_TIMEOUT = "StartupTimeout"
UNSUPPORTED_VERSION = "UnsupportedVersion"
COMPILER_MISSING = "CompilerMissing"
LIBRARY_MISSING = "LibraryMissing"
COMMUNICATION_FAILED = "CommunicationFailed"
RAY_CONNECTION_LOST = "RayConnectionLost"
ACTOR_NAME_TAKEN = "ActorNameTaken"
WORKER_DIED = "WorkerDied"
ENGINE_EXITED = "EngineExited"
ENGINE_HUNG = "EngineHung"
ENGINE_STALLED = "EngineStalled"

ALL = frozenset(
    {
        MODEL_NOT_FOUND,
        MODEL_ACCESS_DENIED,
        MODEL_INVALID,
        OUT_OF_MEMORY,
        SHARED_MEMORY,
        DISK_FULL,
        DEVICE_UNSUPPORTED,
        PORT_IN_USE,
        INVALID_ARGUMENTS,
        OWNED_ARGUMENT,
        INVALID_ENVIRONMENT,
        PERMISSION_DENIED,
        PLACEMENT_PENDING,
        STARTUP_TIMEOUT,
        UNSUPPORTED_VERSION,
        COMPILER_MISSING,
        LIBRARY_MISSING,
        COMMUNICATION_FAILED,
        RAY_CONNECTION_LOST,
        ACTOR_NAME_TAKEN,
        WORKER_DIED,
        ENGINE_EXITED,
        ENGINE_HUNG,
        ENGINE_STALLED,
    }
)


@dataclass(frozen=True)
class Cause:
    """The root cause of an engine's end.

    reason: one of `ALL`. message: plain words, with the remedy where it is known. line: the log line that it was read
    from, empty when it was not read from a log. Neither holds secrets: they are redacted here.
    """

    reason: str
    message: str
    line: str = ""

    def __post_init__(self) -> None:
        if self.reason not in ALL:
            raise ValueError(f"unknown reason {self.reason!r}")
        for field in ("message", "line"):
            object.__setattr__(self, field, redact(getattr(self, field)))

    def as_dict(self) -> dict[str, str]:
        """Return the cause as the control endpoint and the result line carry it."""
        return asdict(self)


class EngineFailure(Exception):
    """The attempt cannot go on; carries the cause."""

    def __init__(self, reason: str, message: str, line: str = "") -> None:
        super().__init__(message)
        self.cause = Cause(reason, message, line)


class UnsupportedVersion(EngineFailure):
    """The installed vLLM or Ray lacks something that the plugin needs; it is never run half patched."""

    def __init__(self, message: str) -> None:
        super().__init__(UNSUPPORTED_VERSION, message)
