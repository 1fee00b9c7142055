"""Every error a caller can meet, as one tree.

    GenerationError               reaches the caller; carries reason, job_id, phase, chunk_index
    ├─ InvalidRequestError        INVALID_ARGUMENT     one violation per field
    │  └─ OffGridError            ... a frame count off the 17k + 5 grid
    ├─ UnsupportedError           FAILED_PRECONDITION  this server cannot do that in its present state
    ├─ OverloadedError            RESOURCE_EXHAUSTED   carries retry_after_s
    │  ├─ QuotaExceededError      ... a limit of the caller's tenant
    │  └─ RateLimitedError        ... too many calls
    ├─ UnauthenticatedError       UNAUTHENTICATED      no key, or none that is known
    ├─ PermissionDeniedError      PERMISSION_DENIED    the key does not allow it
    ├─ IdempotencyKeyError        ALREADY_EXISTS       the key named another request
    ├─ NotReadyError              UNAVAILABLE          not started, or gone
    │  ├─ ModelLoadingError
    │  ├─ ServerStoppingError     ... jobs go on when it is back
    │  └─ WorkerLostError
    ├─ JobNotFoundError           NOT_FOUND
    ├─ ArtifactNotFoundError      NOT_FOUND            the job has no such artifact, or no longer
    ├─ JobCancelledError          CANCELLED            the job was cancelled, by whomever
    ├─ DeadlineError              DEADLINE_EXCEEDED    a call took too long, or a job stood still
    ├─ BrokenStreamError          DATA_LOSS            events are missing, doubled or out of order
    └─ PhaseError                 INTERNAL             a phase of the job failed
       ├─ DeviceMemoryError
       ├─ MuxError
       └─ ResumeError             ... the job cannot be taken up again as it was
    StartupError                  ends a process with one clear line
    ├─ ConfigError
    └─ CheckpointError

`reason` is the stable name on the wire (google.rpc.ErrorInfo.reason); `h3stream.status` maps classes to statuses and
back.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FieldViolation:
    """One thing that is wrong with one field of a request."""

    field: str
    """Name of the request field."""
    description: str
    """The field, its value, the rule and the nearest valid values, in a sentence."""
    reason: str = "INVALID"
    """Stable name of the rule."""


class GenerationError(Exception):
    """Base of everything that can go wrong with a call."""

    reason = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        job_id: str = "",
        phase: str = "",
        chunk_index: int = -1,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.job_id = job_id
        self.phase = phase
        self.chunk_index = chunk_index


class InvalidRequestError(GenerationError):
    """The request can never succeed as it is; `violations` says why, field by field."""

    reason = "INVALID_REQUEST"

    def __init__(
        self,
        message: str,
        *,
        violations: tuple[FieldViolation, ...] = (),
        job_id: str = "",
        phase: str = "",
        chunk_index: int = -1,
    ) -> None:
        super().__init__(message, job_id=job_id, phase=phase, chunk_index=chunk_index)
        self.violations = violations


class OffGridError(InvalidRequestError):
    """The frame count is not on the 17k + 5 grid."""

    reason = "FRAMES_OFF_GRID"


class UnsupportedError(GenerationError):
    """Not possible in the present state, e.g. a call outside its phase or out of order."""

    reason = "FAILED_PRECONDITION"


class OverloadedError(GenerationError):
    """No room now; try again after `retry_after_s`."""

    reason = "OVERLOADED"

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float = 1.0,
        job_id: str = "",
        phase: str = "",
        chunk_index: int = -1,
    ) -> None:
        super().__init__(message, job_id=job_id, phase=phase, chunk_index=chunk_index)
        self.retry_after_s = retry_after_s


class QuotaExceededError(OverloadedError):
    """A limit of the caller's tenant is reached."""

    reason = "QUOTA_EXCEEDED"


class RateLimitedError(OverloadedError):
    """Too many calls came from there."""

    reason = "RATE_LIMITED"


class UnauthenticatedError(GenerationError):
    """The server does not know who calls."""

    reason = "UNAUTHENTICATED"


class PermissionDeniedError(GenerationError):
    """The caller's key does not allow that."""

    reason = "PERMISSION_DENIED"


class IdempotencyKeyError(GenerationError):
    """The idempotency key has named another request."""

    reason = "IDEMPOTENCY_KEY_REUSED"


class NotReadyError(GenerationError):
    """The server cannot be reached, is starting or is stopping."""

    reason = "NOT_READY"


class ModelLoadingError(NotReadyError):
    """The model is still being loaded."""

    reason = "MODEL_LOADING"


class ServerStoppingError(NotReadyError):
    """The server is stopping; its jobs go on when it is back."""

    reason = "SERVER_STOPPING"


class WorkerLostError(NotReadyError):
    """A worker process is gone."""

    reason = "WORKER_LOST"


class JobNotFoundError(GenerationError):
    """There is no such job."""

    reason = "JOB_NOT_FOUND"


class ArtifactNotFoundError(GenerationError):
    """The job has no such artifact, or it is no longer there as the job left it."""

    reason = "ARTIFACT_NOT_FOUND"


class JobCancelledError(GenerationError):
    """The job was cancelled."""

    reason = "JOB_CANCELLED"


class DeadlineError(GenerationError):
    """The call's deadline passed, or a job stood still for longer than its caller allows."""

    reason = "DEADLINE_EXCEEDED"


class BrokenStreamError(GenerationError):
    """The events of a job did not arrive as the contract promises; what came before them is sound."""

    reason = "BROKEN_STREAM"


class PhaseError(GenerationError):
    """A phase of the job failed."""

    reason = "PHASE_FAILED"


class DeviceMemoryError(PhaseError):
    """The device or the host ran out of memory."""

    reason = "OUT_OF_MEMORY"


class MuxError(PhaseError):
    """A codec or the muxer failed."""

    reason = "MUX_FAILED"


class ResumeError(PhaseError):
    """The job cannot be taken up again: what is left of it is damaged, or does not agree with what was delivered."""

    reason = "RESUME_FAILED"


class StartupError(Exception):
    """A process cannot start; the message is the one line its user sees."""


class ConfigError(StartupError):
    """A setting is wrong."""


class CheckpointError(StartupError):
    """A model file is missing, incomplete or not what it should be."""
