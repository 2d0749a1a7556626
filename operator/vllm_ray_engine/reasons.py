"""Why an engine ended: a closed set of CamelCase reasons and the record that carries one."""

from __future__ import annotations

from dataclasses import asdict, dataclass

MODEL_NOT_FOUND = "ModelNotFound"
MODEL_ACCESS_DENIED = "ModelAccessDenied"
OUT_OF_MEMORY = "OutOfMemory"
PORT_IN_USE = "PortInUse"
INVALID_ARGUMENTS = "InvalidArguments"
OWNED_ARGUMENT = "OwnedArgument"
PLACEMENT_PENDING = "PlacementPending"
STARTUP_TIMEOUT = "StartupTimeout"
UNSUPPORTED_VERSION = "UnsupportedVersion"
COMPILER_MISSING = "CompilerMissing"
SHARED_MEMORY = "SharedMemory"
COMMUNICATION_FAILED = "CommunicationFailed"
WORKER_DIED = "WorkerDied"
ENGINE_EXITED = "EngineExited"

ALL = frozenset(
    {
        MODEL_NOT_FOUND,
        MODEL_ACCESS_DENIED,
        OUT_OF_MEMORY,
        PORT_IN_USE,
        INVALID_ARGUMENTS,
        OWNED_ARGUMENT,
        PLACEMENT_PENDING,
        STARTUP_TIMEOUT,
        UNSUPPORTED_VERSION,
        COMPILER_MISSING,
        SHARED_MEMORY,
        COMMUNICATION_FAILED,
        WORKER_DIED,
        ENGINE_EXITED,
    }
)


@dataclass(frozen=True)
class Cause:
    """The root cause of an engine's end.

    reason: one of `ALL`. message: plain words, with the remedy where it is known. line: the log line that it was read
    from, empty when it was not read from a log.
    """

    reason: str
    message: str
    line: str = ""

    def __post_init__(self) -> None:
        if self.reason not in ALL:
            raise ValueError(f"unknown reason {self.reason!r}")

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
