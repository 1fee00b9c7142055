"""Errors to gRPC statuses and back: one table, used by the servers to answer and by the SDK to raise.

A status carries `reason`, so the SDK raises the class that the server raised; other clients read the same trailer as
the standard google.rpc details.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message

from h3stream import errors
from h3stream.errors import FieldViolation, GenerationError, InvalidRequestError, OverloadedError
from h3stream.v1 import status_pb2

log = logging.getLogger(__name__)

DOMAIN = "h3stream"
DETAILS_KEY = "grpc-status-details-bin"
_TYPE_PREFIX = "type.googleapis.com/google.rpc."

# gRPC drops a call whose trailers pass 8 KiB. The message travels twice (percent-encoded, and in the base64 details),
# the violations once.
MAX_TEXT_BYTES = 1_000
MAX_VIOLATION_BYTES = 2_000

STATUS_OF: dict[type[GenerationError], grpc.StatusCode] = {
    errors.GenerationError: grpc.StatusCode.UNKNOWN,
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.OffGridError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QuotaExceededError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.RateLimitedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.IdempotencyKeyError: grpc.StatusCode.ALREADY_EXISTS,
    errors.NotReadyError: grpc.StatusCode.UNAVAILABLE,
    errors.ModelLoadingError: grpc.StatusCode.UNAVAILABLE,
    errors.ServerStoppingError: grpc.StatusCode.UNAVAILABLE,
    errors.WorkerLostError: grpc.StatusCode.UNAVAILABLE,
    errors.JobNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.ArtifactNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.JobCancelledError: grpc.StatusCode.CANCELLED,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.BrokenStreamError: grpc.StatusCode.DATA_LOSS,
    errors.PhaseError: grpc.StatusCode.INTERNAL,
    errors.DeviceMemoryError: grpc.StatusCode.INTERNAL,
    errors.MuxError: grpc.StatusCode.INTERNAL,
    errors.ResumeError: grpc.StatusCode.INTERNAL,
}
"""The status of every error class; a test walks every row."""

_CLASS_OF_REASON = {cls.reason: cls for cls in STATUS_OF}
_CLASS_OF_STATUS: dict[grpc.StatusCode, type[GenerationError]] = {
    # For failures that carry no reason: transport errors and answers of other servers.
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.UnsupportedError,
    grpc.StatusCode.UNIMPLEMENTED: errors.UnsupportedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OverloadedError,
    grpc.StatusCode.UNAVAILABLE: errors.NotReadyError,
    grpc.StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
    grpc.StatusCode.ALREADY_EXISTS: errors.IdempotencyKeyError,
    grpc.StatusCode.NOT_FOUND: errors.JobNotFoundError,
    grpc.StatusCode.CANCELLED: errors.JobCancelledError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.DATA_LOSS: errors.BrokenStreamError,
    grpc.StatusCode.INTERNAL: errors.PhaseError,
}


def to_status(error: GenerationError) -> tuple[grpc.StatusCode, str, bytes]:
    """Status code, message and the `grpc-status-details-bin` trailer of an error.

    Texts beyond what a trailer can carry are cut, and say so.
    """
    code = STATUS_OF[type(error)]
    message = _cut(error.message, MAX_TEXT_BYTES)
    metadata = {"job_id": error.job_id, "phase": error.phase}
    if error.chunk_index >= 0:
        metadata["chunk_index"] = str(error.chunk_index)
    info = status_pb2.RpcErrorInfo(
        reason=error.reason, domain=DOMAIN, metadata={key: value for key, value in metadata.items() if value}
    )
    details = [_pack("ErrorInfo", info)]
    if isinstance(error, InvalidRequestError) and error.violations:
        details.append(_pack("BadRequest", _bad_request(error.violations)))
    if isinstance(error, OverloadedError):
        retry = status_pb2.RpcRetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_pack("RetryInfo", retry))
    number: int = code.value[0]
    status = status_pb2.RpcStatus(code=number, message=message, details=details)
    return code, message, status.SerializeToString()


def is_starting(error: grpc.RpcError) -> bool:
    """Whether a server answers that its model is still being loaded."""
    info, _, _ = _details(error)
    return info.domain == DOMAIN and info.reason == errors.ModelLoadingError.reason


_NO_HANDSHAKE = "handshake failed"
_NO_HOST = ("DNS resolution failed", "errors resolving")


def is_connection_loss(error: grpc.RpcError) -> bool:
    """Whether a call failed for its connection: the server itself says why it refuses, and how a job ended.

    A server that stops is about to end it: its jobs go on when it is back.
    """
    info, _, _ = _details(error)
    if info.domain == DOMAIN:
        return info.reason == errors.ServerStoppingError.reason
    return _is_cut_sending(error) or _is_turned_away(error) or error.code() == grpc.StatusCode.UNAVAILABLE


def _is_turned_away(error: grpc.RpcError) -> bool:
    """Whether a server with too much to do ended a call unread: who cancels a job says so, and who cancels a call knows
    it."""
    return error.code() == grpc.StatusCode.CANCELLED and error.details() in (None, "", "CANCELLED")


def _is_cut_sending(error: grpc.RpcError) -> bool:
    """Whether a call ended under a message that was being sent: grpc.aio then has no status but one of its own."""
    return error.code() == grpc.StatusCode.INTERNAL and error.details() == "Internal error from Core"


def is_nobody_there(error: grpc.RpcError) -> bool:
    """Whether there has been no connection, for what listens at the address, if anything: not one that was cut."""
    message: str = error.details() or ""
    signs = ("Connection refused", "No such file or directory", *_NO_HOST, _NO_HANDSHAKE)
    return any(sign in message for sign in signs) or _is_shut_out(message)


def _is_shut_out(message: str) -> bool:
    """Whether something listens that ends a connection at once, as what speaks TLS does to who does not."""
    return "failed to connect" in message and "Socket closed" in message


def from_rpc_error(error: grpc.RpcError, address: str = "") -> GenerationError:
    """The error that a failed call stands for; its cause is the gRPC error.

    address: of the server as the caller gave it, named where nothing answers there.
    """
    code: grpc.StatusCode = error.code()
    message: str = error.details() or code.name
    info, bad_request, retry = _details(error)
    cls = _CLASS_OF_REASON.get(info.reason) if info.domain == DOMAIN else None
    if cls is None or STATUS_OF[cls] != code:
        cls = _CLASS_OF_STATUS.get(code, GenerationError)
        if code == grpc.StatusCode.UNIMPLEMENTED:
            message = f"the server does not know this call; it may be older than this client ({message})"
    if _is_cut_sending(error):
        cls, message = errors.NotReadyError, "the connection was lost while a message was being sent"
    if info.domain != DOMAIN and _is_turned_away(error):
        cls, message = errors.NotReadyError, "the server has too much to do to read the call; try again"
    if address and is_connection_loss(error):
        log.debug("%s: %s", address, message)
        message = _unreachable(message, address)
    job_id, phase = info.metadata.get("job_id", ""), info.metadata.get("phase", "")
    chunk_text = info.metadata.get("chunk_index", "")
    chunk_index = int(chunk_text) if chunk_text.isdecimal() else -1
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


def _unreachable(message: str, address: str) -> str:
    """What a lost connection means in words, where there has been none; else what gRPC says."""
    if any(sign in message for sign in _NO_HOST):
        return f"there is no host of that name: {address}"
    if "WRONG_VERSION_NUMBER" in message:
        return f"what listens at {address} does not speak TLS; connect without it"
    if _NO_HANDSHAKE in message:
        told = re.sub(r".*SSL routines:(OPENSSL_internal:)?", "", message.removesuffix(": OK"))
        return f"TLS with {address} fails ({told}): no certificate that is trusted here vouches for this server"
    if _is_shut_out(message):
        return f"what listens at {address} ends the connection: it may ask for TLS, or for a client's certificate"
    if "failed to connect" in message.lower():
        return f"nothing answers at {address}; is a server running there (h3stream serve)?"
    return message


def _bad_request(violations: tuple[FieldViolation, ...]) -> status_pb2.RpcBadRequest:
    result = status_pb2.RpcBadRequest()
    left = MAX_VIOLATION_BYTES
    for number, violation in enumerate(violations):
        description = _cut(violation.description, MAX_TEXT_BYTES)
        left -= len(description.encode()) + len(violation.field.encode()) + len(violation.reason)
        if left < 0:
            result.field_violations.add(
                field=violation.field,
                description=f"this and {len(violations) - number - 1} more fields are wrong too",
                reason=violation.reason,
            )
            break
        result.field_violations.add(field=violation.field, description=description, reason=violation.reason)
    return result


def _cut(text: str, max_bytes: int) -> str:
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    return data[: max_bytes - 3].decode(errors="ignore") + "…"


def _pack(name: str, message: Message) -> any_pb2.Any:
    # Not Any.Pack: the type named is the standard one, whose twin the message is.
    return any_pb2.Any(type_url=_TYPE_PREFIX + name, value=message.SerializeToString())


def _details(
    error: grpc.RpcError,
) -> tuple[status_pb2.RpcErrorInfo, status_pb2.RpcBadRequest, status_pb2.RpcRetryInfo]:
    info, bad_request, retry = status_pb2.RpcErrorInfo(), status_pb2.RpcBadRequest(), status_pb2.RpcRetryInfo()
    targets: dict[str, Message] = {"ErrorInfo": info, "BadRequest": bad_request, "RetryInfo": retry}
    metadata: Any = error.trailing_metadata() or ()  # pairs, whatever the stubs say
    trailer = next((value for key, value in metadata if key == DETAILS_KEY), b"")
    try:
        for detail in status_pb2.RpcStatus.FromString(trailer).details:
            target = targets.get(detail.type_url.removeprefix(_TYPE_PREFIX))
            if target is not None:
                target.ParseFromString(detail.value)
    except DecodeError:  # a foreign or damaged trailer tells nothing; the status code still does
        pass
    return info, bad_request, retry
