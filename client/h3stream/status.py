"""Errors to gRPC statuses and back: one table, used by the servers to answer and by the SDK to raise.

A status carries `reason`, so the SDK raises the class that the server raised; other clients read the same trailer as the
standard google.rpc details.
"""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message

from h3stream import errors
from h3stream.errors import FieldViolation, GenerationError, InvalidRequestError, OverloadedError
from h3stream.v1 import status_pb2

DOMAIN = "h3stream"
DETAILS_KEY = "grpc-status-details-bin"
_TYPE_PREFIX = "type.googleapis.com/google.rpc."

STATUS_OF: dict[type[GenerationError], grpc.StatusCode] = {
    errors.GenerationError: grpc.StatusCode.UNKNOWN,
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.OffGridError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NotReadyError: grpc.StatusCode.UNAVAILABLE,
    errors.ModelLoadingError: grpc.StatusCode.UNAVAILABLE,
    errors.WorkerLostError: grpc.StatusCode.UNAVAILABLE,
    errors.JobNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.JobCancelledError: grpc.StatusCode.CANCELLED,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.PhaseError: grpc.StatusCode.INTERNAL,
    errors.DeviceMemoryError: grpc.StatusCode.INTERNAL,
    errors.MuxError: grpc.StatusCode.INTERNAL,
}
"""The status of every error class; a test walks every row."""

_CLASS_OF_REASON = {cls.reason: cls for cls in STATUS_OF}
_CLASS_OF_STATUS: dict[grpc.StatusCode, type[GenerationError]] = {
    # For failures that carry no reason: transport errors and answers of other servers.
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.UnsupportedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OverloadedError,
    grpc.StatusCode.UNAVAILABLE: errors.NotReadyError,
    grpc.StatusCode.NOT_FOUND: errors.JobNotFoundError,
    grpc.StatusCode.CANCELLED: errors.JobCancelledError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.INTERNAL: errors.PhaseError,
}


def to_status(error: GenerationError) -> tuple[grpc.StatusCode, str, bytes]:
    """Status code, message and the `grpc-status-details-bin` trailer of an error."""
    code = STATUS_OF[type(error)]
    metadata = {"job_id": error.job_id, "phase": error.phase}
    if error.chunk_index >= 0:
        metadata["chunk_index"] = str(error.chunk_index)
    details = [
        _pack(
            "ErrorInfo",
            status_pb2.RpcErrorInfo(
                reason=error.reason, domain=DOMAIN, metadata={k: v for k, v in metadata.items() if v}
            ),
        )
    ]
    if isinstance(error, InvalidRequestError) and error.violations:
        violations = [
            status_pb2.RpcBadRequest.FieldViolation(field=v.field, description=v.description, reason=v.reason)
            for v in error.violations
        ]
        details.append(_pack("BadRequest", status_pb2.RpcBadRequest(field_violations=violations)))
    if isinstance(error, OverloadedError):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_pack("RetryInfo", status_pb2.RpcRetryInfo(retry_delay=delay)))
    number: int = code.value[0]
    status = status_pb2.RpcStatus(code=number, message=error.message, details=details)
    return code, error.message, status.SerializeToString()


def from_rpc_error(error: grpc.RpcError) -> GenerationError:
    """The error that a failed call stands for; its cause is the gRPC error."""
    code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
    message: str = error.details() or code.name  # type: ignore[attr-defined]
    info, bad_request, retry = _details(error)
    cls = _CLASS_OF_REASON.get(info.reason) if info.domain == DOMAIN else None
    if cls is None or STATUS_OF[cls] != code:
        cls = _CLASS_OF_STATUS.get(code, GenerationError)
    job_id, phase = info.metadata["job_id"], info.metadata["phase"]
    chunk_index = int(info.metadata["chunk_index"] or -1)
    result: GenerationError
    if issubclass(cls, InvalidRequestError):
        violations = tuple(FieldViolation(v.field, v.description, v.reason) for v in bad_request.field_violations)
        result = cls(message, violations=violations, job_id=job_id, phase=phase, chunk_index=chunk_index)
    elif issubclass(cls, OverloadedError):
        retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9 or 1.0
        result = cls(message, retry_after_s=retry_after_s, job_id=job_id, phase=phase, chunk_index=chunk_index)
    else:
        result = cls(message, job_id=job_id, phase=phase, chunk_index=chunk_index)
    result.__cause__ = error
    return result


def _pack(name: str, message: Message) -> any_pb2.Any:
    # Not Any.Pack: the type named is the standard one, whose twin the message is.
    return any_pb2.Any(type_url=_TYPE_PREFIX + name, value=message.SerializeToString())


def _details(
    error: grpc.RpcError,
) -> tuple[status_pb2.RpcErrorInfo, status_pb2.RpcBadRequest, status_pb2.RpcRetryInfo]:
    info, bad_request, retry = status_pb2.RpcErrorInfo(), status_pb2.RpcBadRequest(), status_pb2.RpcRetryInfo()
    targets: dict[str, Message] = {"ErrorInfo": info, "BadRequest": bad_request, "RetryInfo": retry}
    trailer = next((v for k, v in error.trailing_metadata() or () if k == DETAILS_KEY), b"")  # type: ignore[attr-defined]
    try:
        for detail in status_pb2.RpcStatus.FromString(trailer).details:
            target = targets.get(detail.type_url.removeprefix(_TYPE_PREFIX))
            if target is not None:
                target.ParseFromString(detail.value)
    except DecodeError:  # a foreign or damaged trailer tells nothing; the status code still does
        pass
    return info, bad_request, retry
