"""An upload on its way to disk: bounded, in order, checked as it comes, and never in memory as a whole."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from core.request import Violation, prompt_violations
from h3stream.errors import DeadlineError, FieldViolation, InvalidRequestError, PhaseError
from h3stream.fields import invalid_request
from h3stream.v1 import video_pb2
from orchestrator.latents import MAX_FILE_BYTES, to_its_end

IDLE_S = 30.0
"""Longest silence of a caller who is expected to send."""
UPLOAD_S = 1800.0
"""Longest that an upload may take: the largest one at 200 kbit/s."""

Messages = AsyncIterator[video_pb2.RefineAudioRequest]


async def read_header(messages: Messages) -> video_pb2.RefineHeader:
    """The header of a call. Raises InvalidRequestError if the first message is none, DeadlineError if none comes."""
    message: video_pb2.RefineAudioRequest | None = await _next(messages)
    if message is None or not message.HasField("header"):
        came = "the call ended without one" if message is None else f"it holds {message.WhichOneof('payload')}"
        raise InvalidRequestError(f"the first message must hold a header; {came}")
    return message.header


async def read_end(messages: Messages) -> None:
    """Returns when the caller has sent all. Raises InvalidRequestError for one more message, DeadlineError."""
    if await _next(messages) is not None:
        raise InvalidRequestError("a message follows the header, which announces no upload: it must be the only one")


def upload_violations(upload: video_pb2.LatentsUpload) -> Iterator[Violation]:
    """What is wrong with an upload, as far as its announcement shows."""
    for violation in prompt_violations(upload.prompt):
        yield Violation("upload.prompt", f"upload.prompt: {violation.description}", violation.reason)
    if not 0 < upload.size_bytes <= MAX_FILE_BYTES:
        description = (
            f"upload.size_bytes is {upload.size_bytes}; it must be from 1 to {MAX_FILE_BYTES}, which the longest clip "
            "on the largest canvas needs"
        )
        yield Violation("upload.size_bytes", description, "OUT_OF_RANGE")
    if upload.sha256 and not re.fullmatch("[0-9a-f]{64}", upload.sha256):
        description = (
            f"upload.sha256 is {upload.sha256[:80]!r}; it must be 64 hexadecimal digits in lower case, or empty"
        )
        yield Violation("upload.sha256", description, "INVALID")


async def receive(messages: Messages, upload: video_pb2.LatentsUpload, path: Path) -> str:
    """Writes the bytes of an announced upload to a new file; returns their SHA-256.

    Raises InvalidRequestError if they are not what was announced or come in no order, DeadlineError if they do not
    come, PhaseError if they cannot be written.
    """
    try:
        async with asyncio.timeout(UPLOAD_S):
            return await _receive(messages, upload, path)
    except TimeoutError:
        raise DeadlineError(f"the upload is not complete after {UPLOAD_S:.0f} s") from None
    except OSError as error:
        raise PhaseError(f"the upload cannot be written: {error.strerror}") from error


async def _receive(messages: Messages, upload: video_pb2.LatentsUpload, path: Path) -> str:
    digest = hashlib.sha256()
    num_bytes = 0
    with path.open("xb", buffering=0) as file:

        def take(data: bytes) -> None:
            digest.update(data)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]

        while (message := await _next(messages)) is not None:
            if not message.HasField("data"):
                came = message.WhichOneof("payload") or "nothing"
                raise InvalidRequestError(f"a message after the header holds {came}; it must hold data")
            num_bytes += len(message.data)
            if num_bytes > upload.size_bytes:
                raise _wrong(f"the upload has more than the {upload.size_bytes} bytes that were announced", "TOO_LONG")
            await to_its_end(take, message.data)
    if num_bytes < upload.size_bytes:
        raise _wrong(f"the upload ended after {num_bytes} of {upload.size_bytes} bytes", "TOO_SHORT")
    sha256 = digest.hexdigest()
    if upload.sha256 and sha256 != upload.sha256:
        raise _wrong(f"the bytes that came have the SHA-256 {sha256}, not {upload.sha256}", "WRONG_CHECKSUM")
    return sha256


async def _next(messages: Messages) -> video_pb2.RefineAudioRequest | None:
    """The next message; None at the end."""
    try:
        async with asyncio.timeout(IDLE_S):
            return await anext(messages)
    except StopAsyncIteration:
        return None
    except TimeoutError:
        raise DeadlineError(f"nothing came for {IDLE_S:.0f} s, and the call has not ended either") from None


def _wrong(description: str, reason: str) -> InvalidRequestError:
    return invalid_request([FieldViolation("upload", description, reason)])
