"""What a refinement is asked for with: a header, and the bytes of a latents file where the clip is no job's."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO, Protocol, runtime_checkable

from h3stream.codec import PRIORITY_TO_PROTO, refine_spec_to_proto
from h3stream.errors import FieldViolation, GenerationError, InvalidRequestError, NotReadyError
from h3stream.fields import MAX_PROMPT_BYTES, invalid_request, text_violations
from h3stream.refine import RefineSpec
from h3stream.request import JobPriority, order_violations, random_key
from h3stream.v1 import video_pb2

PIECE_BYTES = 512 * 1024
"""Bytes of the file in one message, whose limit is 1 MiB."""


@runtime_checkable
class HasJobId(Protocol):
    """A job, or what follows one."""

    @property
    def job_id(self) -> str:
        """The job."""


JobSource = str | HasJobId
"""A job: its id, a Job, or a generation."""
Source = JobSource | os.PathLike[str]
"""A clip to refine: a job's, or that of a `latents.safetensors`, by its path."""


def job_id_of(source: JobSource) -> str:
    """The id of a job."""
    return source.job_id if isinstance(source, HasJobId) else source


class RefineCall:
    """The messages that ask for a refinement, and what went wrong in making them.

    A file that turns out to be another than the one announced ends them early; the server then refuses what has come,
    and `error` says why.
    """

    def __init__(
        self,
        source: Source,
        prompt: str,
        spec: RefineSpec,
        *,
        cancel_on_disconnect: bool = False,
        priority: JobPriority = "normal",
        deadline_s: float | None = None,
        idempotency_key: str = "",
    ) -> None:
        """The options are fields of GenerateRequest; without a key one is made.

        Raises InvalidRequestError for a source that is none, and for a file that cannot be read.
        """
        check_source(source, prompt)
        if violations := order_violations(priority, deadline_s, idempotency_key):
            raise invalid_request(violations)
        self.error: GenerationError | None = None
        """Why the messages ended early."""
        self.num_bytes_sent = 0
        """Bytes of the file that have been handed over."""
        self._header = video_pb2.RefineHeader(
            spec=refine_spec_to_proto(spec),
            cancel_on_disconnect=cancel_on_disconnect,
            idempotency_key=idempotency_key or random_key(),
        )
        if priority != "normal":
            self._header.priority = PRIORITY_TO_PROTO[priority]
        if deadline_s is not None:
            self._header.deadline_s = deadline_s
        self._path = ""
        if isinstance(source, os.PathLike):
            self._path = os.fspath(source)
            self._header.upload.prompt = prompt
            self._header.upload.size_bytes = os.stat(source).st_size
        else:
            self._header.job_id = job_id_of(source)

    @property
    def is_upload(self) -> bool:
        """Whether a file is sent."""
        return bool(self._path)

    def __iter__(self) -> Iterator[video_pb2.RefineAudioRequest]:
        """The messages; those of an upload once: the file is read twice, first for its checksum, in pieces."""
        if not self._path:
            yield video_pb2.RefineAudioRequest(header=self._header)
            return
        try:
            with open(self._path, "rb") as file:
                self._header.upload.sha256 = self._sha256(file)
                yield video_pb2.RefineAudioRequest(header=self._header)
                sent = hashlib.sha256()
                for piece in self._pieces(file):
                    sent.update(piece)
                    yield video_pb2.RefineAudioRequest(data=piece)
                    self.num_bytes_sent += len(piece)
                if sent.hexdigest() != self._header.upload.sha256:
                    raise self._invalid("has changed while it was read; try again once nobody writes it")
        except InvalidRequestError as error:
            self.error = error
        except OSError as error:
            self.error = _unreadable(self._path, error)

    def explain(self, error: GenerationError, has_job: bool) -> GenerationError:
        """The error to raise where the call has failed with one."""
        if self.error is not None:
            return self.error
        if not self._path or has_job or not isinstance(error, NotReadyError):
            return error
        size = self._header.upload.size_bytes
        told = f"the upload broke off after {self.num_bytes_sent} of {size} bytes, before there was a job"
        return type(error)(f"{told}: {error.message}; nothing of it is kept: start again")

    def _sha256(self, file: BinaryIO) -> str:
        digest = hashlib.sha256()
        for piece in self._pieces(file):
            digest.update(piece)
        file.seek(0)
        return digest.hexdigest()

    def _pieces(self, file: BinaryIO) -> Iterator[bytes]:
        """The file in pieces, as long as it was when it was opened."""
        left = self._header.upload.size_bytes
        while left:
            piece = file.read(min(left, PIECE_BYTES))
            if not piece:
                size = self._header.upload.size_bytes
                raise self._invalid(f"has become shorter while it was read: {size - left} bytes are left of {size}")
            left -= len(piece)
            yield piece

    def _invalid(self, what: str) -> InvalidRequestError:
        return _invalid_source(f"source {self._path} {what}")


def check_source(source: Any, prompt: str) -> None:
    """Raises InvalidRequestError where nothing can be refined of a source, as far as can be seen from here."""
    if isinstance(source, os.PathLike):
        _check_file(os.fspath(source))
        if violations := text_violations("prompt", prompt, MAX_PROMPT_BYTES):
            raise invalid_request(violations)
        if not prompt:
            rule = "it must be the prompt that the latents were made with"
            raise invalid_request([FieldViolation("prompt", f"prompt is missing; {rule}")])
        return
    job_id = job_id_of(source)
    if not isinstance(job_id, str):
        rule = "it must be the id of a job, a Job, a generation, or the Path of a latents.safetensors"
        raise _invalid_source(f"source is {source!r:.80}; {rule}")
    if job_id.endswith(".safetensors"):
        raise _invalid_source(f"source is {job_id[:80]!r}, a job's id as it stands; for a file give a pathlib.Path")
    if violations := text_violations("source", job_id, MAX_PROMPT_BYTES):
        raise invalid_request(violations)
    if not job_id:
        raise _invalid_source("source has no job yet; it must be one that has ended")
    if prompt != "":
        rule = "the prompt of a job's clip is known; leave it out"
        raise invalid_request([FieldViolation("prompt", f"prompt is {prompt!r:.80}; {rule}")])


def _check_file(path: str) -> None:
    try:
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            with open(path, "rb"):
                pass
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
        what = "is empty" if stat.S_ISREG(status.st_mode) else "is no regular file"
        raise _invalid_source(f"source {path} {what}; it must be a latents.safetensors as jobs leave it")


def _unreadable(path: str, error: OSError) -> InvalidRequestError:
    return _invalid_source(f"source {path} cannot be read: {error.strerror}")


def _invalid_source(description: str) -> InvalidRequestError:
    return invalid_request([FieldViolation("source", description)])
