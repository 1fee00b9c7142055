"""The jobs that a server finds when it starts: makes the journal and the jobs' directories agree, whatever the server
before was interrupted in. What is damaged or missing is made anew (`orchestrator/salvage.py`).

A directory under its own name is a job that was accepted, perhaps a moment before its caller was told. One whose
journal row is missing is entered again, so that the journal can be lost.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from h3stream.errors import PhaseError, ResumeError, StartupError
from h3stream.v1 import records_pb2, video_pb2
from orchestrator.caller import DEFAULT_TENANT
from orchestrator.job_files import (
    END_NAME,
    LOG_NAME,
    RECORD_NAME,
    read_job_end,
    read_job_record,
    remove_job,
    request_digest,
    sweep,
    write_job_end,
    write_job_record,
)
from orchestrator.journal import JobRow, Journal, State
from orchestrator.salvage import STATE_TO_PROTO, History, end_from, read_history, record_from

log = logging.getLogger(__name__)

STATE_FROM_PROTO = {number: state for state, number in STATE_TO_PROTO.items()}
OF_ONE_JOB = (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EACCES, errno.EPERM, errno.ELOOP)
"""What is wrong with one job's directory and not with the disk."""
T = TypeVar("T")


def row_of(record: records_pb2.JobRecord) -> JobRow:
    """The journal's row of a job that has just been taken."""
    request = record.refinement if record.WhichOneof("request") == "refinement" else record.generation
    return JobRow(
        job_id=record.job_id,
        tenant=record.tenant,
        state="queued",
        priority=request.priority or video_pb2.JOB_PRIORITY_NORMAL,
        idempotency_key=request.idempotency_key,
        request_digest=request_digest(record),
        num_frames=record.plan.clip.num_frames,
        created_s=record.create_time.ToNanoseconds() / 1e9,
    )


def enter_end(journal: Journal, directory: Path, end: records_pb2.JobEnd) -> None:
    """Writes down that a job has ended, and sweeps its directory. Raises PhaseError if it cannot be written."""
    write_end_making_room(directory, end)
    journal.set_ended(*_swept(directory, end.job))


def write_end_making_room(directory: Path, end: records_pb2.JobEnd) -> None:
    """Writes how a job ended; where the disk takes no more, once what the job needs no longer is gone. Raises
    PhaseError."""
    try:
        write_job_end(directory, end)
    except PhaseError:
        sweep(directory, end.job)
        write_job_end(directory, end)


def remove(journal: Journal, directory: Path) -> None:
    """Removes a job that has ended. Raises PhaseError if it stays.

    Its directory goes first: one without a row is entered again by the next start.
    """
    try:
        remove_job(directory)
    except OSError as error:
        raise PhaseError(f"job {directory.name} cannot be removed: {error.strerror}") from error
    journal.remove(directory.name)


def stored_bytes(directory: Path, job: video_pb2.Job) -> tuple[int, int]:
    """Bytes of an ended job's events and artifacts, and of the artifacts alone."""
    of_artifacts = sum(artifact.size_bytes for artifact in job.artifacts)
    try:
        return of_artifacts + (directory / LOG_NAME).stat().st_size, of_artifacts
    except OSError:  # somebody has removed it
        return of_artifacts, of_artifacts


def take_stock(journal: Journal, jobs_directory: Path) -> None:
    """Makes the journal and the jobs' directories agree, and ends the jobs that have ended or cannot go on.

    Afterwards the live rows are those of jobs that can. To be called before anything else is done with the journal.
    Raises StartupError if the disk does not allow it.
    """
    try:
        jobs_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.scandir(jobs_directory) as entries:
            names = {entry.name for entry in entries if entry.is_dir()}
        hidden = {name for name in names if name.startswith(".")}
        for name in hidden:  # being made or removed
            shutil.rmtree(jobs_directory / name, ignore_errors=True)
        with journal.at_once():
            _match(journal, jobs_directory, names - hidden)
            _settle(journal, jobs_directory)
    except OSError as error:
        raise StartupError(f"the jobs in {jobs_directory} cannot be taken up: {error.strerror}") from error
    except PhaseError as error:
        raise StartupError(f"the jobs in {jobs_directory} cannot be taken up: {error.message}") from error


def load_job(directory: Path, row: JobRow) -> tuple[records_pb2.JobRecord, records_pb2.JobEnd | None]:
    """What a job's directory says of how the job was taken and how it ended; None for one that can go on.

    What is damaged or missing is made anew from what is left, and written. Raises PhaseError if that fails.
    """
    record, end, _ = _load(directory, row)
    return record, end


def _load(directory: Path, row: JobRow) -> tuple[records_pb2.JobRecord, records_pb2.JobEnd | None, History]:
    """What `load_job` returns, and what the log tells where the records alone do not say all."""
    record, damage_of_record = _try(read_job_record, directory)
    end, damage_of_end = _try(read_job_end, directory)
    if record is not None and end is not None:
        return record, end, History(row.created_s)
    history = read_history(directory / LOG_NAME)
    if not (directory / RECORD_NAME).exists():
        damage_of_record = ""  # an older server made none
    damage = damage_of_record or damage_of_end
    if record is not None and not damage and row.ended_s is None and history.completed is None:
        return record, None, history
    if damage:
        log.error("%s: it is made anew from what is left of the job", damage)
    if record is None:
        record = record_from(directory, row.tenant, row.created_s, history, end)
        write_job_record(directory, record)
    if end is None:
        end = end_from(directory, row, record, history, damage)
        write_job_end(directory, end)
    return record, end, history


def _match(journal: Journal, jobs_directory: Path, names: set[str]) -> None:
    """Forgets jobs without a directory, whose removal was not finished, and enters directories without a row."""
    known = {row.job_id for row in journal.rows()}
    for job_id in known - names:
        journal.remove(job_id)
    for row in sorted(_found(jobs_directory, names - known), key=lambda row: (row.created_s, row.job_id)):
        log.warning("job %s is not in the journal and is entered again", row.job_id)
        is_key_free = not row.idempotency_key or journal.find_key(row.tenant, row.idempotency_key) is None
        journal.add(row if is_key_free else dataclasses.replace(row, idempotency_key=""))


def _settle(journal: Journal, jobs_directory: Path) -> None:
    """Enters what the files of jobs that are said to be live know better: that they have ended, cannot go on, or have
    been on a lane."""
    ended = []
    for row in journal.live():
        directory = jobs_directory / row.job_id
        try:
            _, end, history = _load(directory, row)
        except PhaseError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in OF_ONE_JOB:
                raise
            log.error("job %s is left as it is, and cannot be asked for: %s", row.job_id, error.message)
            journal.remove(row.job_id)
            continue
        if end is not None:
            ended.append(_swept(directory, end.job))
        elif history.has_run and row.state == "queued":
            journal.set_running(row.job_id, history.num_resumes)
    for values in sorted(ended, key=lambda values: values[2]):
        journal.set_ended(*values)


def _swept(directory: Path, job: video_pb2.Job) -> tuple[str, State, float, int, int]:
    """What the journal is told of a job whose end is written; its directory is swept first."""
    sweep(directory, job)
    ended_s = job.end_time.ToNanoseconds() / 1e9
    return directory.name, STATE_FROM_PROTO[job.state], ended_s, *stored_bytes(directory, job)


def _found(jobs_directory: Path, names: set[str]) -> Iterator[JobRow]:
    """Rows of the jobs in directories without one."""
    for name in names:
        directory = jobs_directory / name
        if not any((directory / known).exists() for known in (RECORD_NAME, END_NAME, LOG_NAME)):
            log.warning("%s is no job's directory, and is left alone", directory)
            continue
        history = read_history(directory / LOG_NAME)
        record, _ = _try(read_job_record, directory)
        if record is None:
            end, _ = _try(read_job_end, directory)
            # Nobody's, where it cannot be told whose it is: other tenants must not see it.
            tenant = "" if (directory / RECORD_NAME).exists() else DEFAULT_TENANT
            record = record_from(directory, tenant, history.ended_s, history, end)
        state: State = "running" if history.has_run else "queued"
        yield dataclasses.replace(row_of(record), state=state, num_resumes=history.num_resumes)


def _try(read: Callable[[Path], T], directory: Path) -> tuple[T | None, str]:
    """What a record holds, and what is wrong with it."""
    try:
        return read(directory), ""
    except ResumeError as error:
        return None, error.message
