"""What a job's directory says of the job: how it was taken and how it ended, and how the directory comes and goes.

Each record is a message of `records.proto` with a checksum behind it, in a file that is written whole and fsynced.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError

from h3stream.errors import PhaseError, ResumeError
from h3stream.v1 import records_pb2, video_pb2
from services.common.files import fsync_directory as fsync_directory
from services.common.files import remove, write_whole

log = logging.getLogger(__name__)

RECORD_NAME = "job.binpb"
"""How a job was taken; it never changes."""
END_NAME = "end.binpb"
"""How a job ended; where it is, the job has."""
LOG_NAME = "events.log"
INCOMING_NAME = ".incoming"
"""Folder, beside the jobs' directories, of those that are being made. A start removes what is hidden there."""

_SEAL = b"\x7a\x20"
"""Before the checksum: tag and length of a field 15 of 32 bytes, so that what is in the file stays a message."""
_SEAL_BYTES = len(_SEAL) + hashlib.sha256().digest_size

Record = TypeVar("Record", records_pb2.JobRecord, records_pb2.JobEnd)


def write_job_record(directory: Path, record: records_pb2.JobRecord) -> None:
    """Writes how a job was taken. Raises PhaseError if it cannot be written."""
    _write(directory / RECORD_NAME, record)


def read_job_record(directory: Path) -> records_pb2.JobRecord:
    """How the job of a directory was taken. Raises ResumeError if there is no record, or not that of this job."""
    record = _read(directory / RECORD_NAME, records_pb2.JobRecord)
    if record is None:
        raise ResumeError(f"{RECORD_NAME} of job {directory.name} is not there")
    if record.job_id != directory.name:
        raise ResumeError(f"{RECORD_NAME} of job {directory.name} is that of job {record.job_id!r}")
    return record


def write_job_end(directory: Path, end: records_pb2.JobEnd) -> None:
    """Writes how a job ended, in place of what was written before. Raises PhaseError if it cannot be written."""
    _write(directory / END_NAME, end)


def read_job_end(directory: Path) -> records_pb2.JobEnd | None:
    """How the job of a directory ended; None: it has not. Raises ResumeError if that cannot be read."""
    end = _read(directory / END_NAME, records_pb2.JobEnd)
    if end is not None and end.job.job_id != directory.name:
        raise ResumeError(f"{END_NAME} of job {directory.name} is that of job {end.job.job_id!r}")
    return end


def request_digest(record: records_pb2.JobRecord) -> str:
    """SHA-256 in hexadecimal of what a job's caller asked for, whatever it named the request; an upload counts too."""
    request: video_pb2.GenerateRequest | video_pb2.RefineHeader
    if record.WhichOneof("request") == "refinement":
        request = video_pb2.RefineHeader.FromString(record.refinement.SerializeToString())
    else:
        request = video_pb2.GenerateRequest.FromString(record.generation.SerializeToString())
    request.idempotency_key = ""
    digest = hashlib.sha256(request.SerializeToString(deterministic=True))
    if record.HasField("source") and not record.source.job_id:
        digest.update(record.source.latents_sha256.encode())
    return digest.hexdigest()


def move_into_place(prepared: Path, directory: Path) -> None:
    """Gives a job's directory, whose files are on the disk, its name: from then on there is the job. Raises OSError."""
    fsync_directory(prepared)
    prepared.rename(directory)
    fsync_directory(directory.parent)


def remove_job(directory: Path) -> None:
    """Removes a job's directory, all at once for whoever starts after a crash. Raises OSError if it stays.

    Readers of its files keep them open.
    """
    leaving = directory.with_name(f".{directory.name}.removed")
    try:
        directory.rename(leaving)
        fsync_directory(directory.parent)
    except FileNotFoundError:  # somebody has removed it
        return
    shutil.rmtree(leaving, ignore_errors=True)


def sweep(directory: Path, job: video_pb2.Job) -> None:
    """Removes of an ended job's directory what is neither a record of it nor an artifact that it lists: inputs, scratch
    and what was never completed. What cannot be removed stays, which is logged."""
    kept = {RECORD_NAME, END_NAME, LOG_NAME, *(artifact.name for artifact in job.artifacts)}
    for path in directory.glob("*"):
        if path.name in kept:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            remove(path)


def _write(path: Path, record: Record) -> None:
    data = record.SerializeToString(deterministic=True)
    try:
        write_whole(path, data + _SEAL + hashlib.sha256(data).digest())
    except OSError as error:
        raise PhaseError(f"{path.name} of the job cannot be written: {error.strerror}") from error


def _read(path: Path, kind: type[Record]) -> Record | None:
    """The record in a file; None if there is no file. Raises ResumeError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResumeError(f"{path.name} of job {path.parent.name} cannot be read: {error.strerror}") from error
    data, seal = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
    damaged = ResumeError(f"{path.name} of job {path.parent.name} is damaged")
    if seal != _SEAL + hashlib.sha256(data).digest():
        raise damaged
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise damaged from error
