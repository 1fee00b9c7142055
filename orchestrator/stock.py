"""The jobs that a server finds when it starts: makes the journal and the jobs' directories agree, whatever the server
before was interrupted in, and makes anew what is damaged or missing from what is left.

A directory under its own name is a job that was accepted, perhaps a moment before its caller was told. One whose
journal row is missing is entered again, so that the journal can be lost.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from core.artifacts import ARTIFACTS, PROVENANCE, REFINED_ARTIFACTS
from h3stream.errors import JobCancelledError, PhaseError, ResumeError, StartupError
from h3stream.v1 import records_pb2, types_pb2, video_pb2
from orchestrator.caller import DEFAULT_TENANT
from orchestrator.job import RESUMED
from orchestrator.job_files import (
    END_NAME,
    INCOMING_NAME,
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
from orchestrator.job_log import JobLog
from orchestrator.journal import JobRow, Journal, State

log = logging.getLogger(__name__)

INTERRUPTED = "INTERRUPTED"
"""Reason of jobs of servers that kept no records to go on from."""
_STATE_TO_PROTO: dict[State, video_pb2.JobState] = {
    "queued": video_pb2.JOB_STATE_QUEUED,
    "running": video_pb2.JOB_STATE_RUNNING,
    "succeeded": video_pb2.JOB_STATE_SUCCEEDED,
    "failed": video_pb2.JOB_STATE_FAILED,
    "cancelled": video_pb2.JOB_STATE_CANCELLED,
}
STATE_FROM_PROTO = {number: state for state, number in _STATE_TO_PROTO.items()}
T = TypeVar("T")
_PROVENANCE_BYTES = 4 * 1024 * 1024
"""More than a provenance.json has."""


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
    try:
        write_job_end(directory, end)
    except PhaseError:  # the disk may be full of what the job needs no longer
        sweep(directory, end.job)
        write_job_end(directory, end)
    journal.set_ended(*_swept(directory, end.job))


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
        shutil.rmtree(jobs_directory / INCOMING_NAME, ignore_errors=True)
        with os.scandir(jobs_directory) as entries:
            names = {entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")}
        with journal.at_once():
            _match(journal, jobs_directory, names)
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


@dataclass
class _History:
    """What a job's log tells of it."""

    ended_s: float
    """When the last event was written; wall clock."""
    plan: video_pb2.Plan = field(default_factory=video_pb2.Plan)
    """What it makes; empty if the log does not begin as it should."""
    num_events: int = 0
    """Events that are whole."""
    num_frames: int = 0
    """Frames emitted."""
    num_resumes: int = 0
    """How often it was taken up again."""
    has_run: bool = False
    """Whether it has been on a lane."""
    phase: video_pb2.PhaseChange = field(
        default_factory=lambda: video_pb2.PhaseChange(phase=types_pb2.PHASE_QUEUED, chunk_index=-1)
    )
    """The phase it was in."""
    completed: video_pb2.Completed | None = None
    """Its last event, if it succeeded."""


def _load(directory: Path, row: JobRow) -> tuple[records_pb2.JobRecord, records_pb2.JobEnd | None, _History]:
    """What `load_job` returns, and what the log tells where the records alone do not say all."""
    record, damage_of_record = _try(read_job_record, directory)
    end, damage_of_end = _try(read_job_end, directory)
    if record is not None and end is not None:
        return record, end, _History(row.created_s)
    history = _read_history(directory / LOG_NAME)
    if not (directory / RECORD_NAME).exists():
        damage_of_record = ""  # an older server made none
    damage = damage_of_record or damage_of_end
    if record is not None and not damage and row.ended_s is None and history.completed is None:
        return record, None, history
    if damage:
        log.error("%s: it is made anew from what is left of the job", damage)
    if record is None:
        record = _record_from(directory, row.tenant, row.created_s, history, end)
        write_job_record(directory, record)
    if end is None:
        end = _end_from(directory, row, record, history, damage)
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
        _, end, history = _load(directory, row)
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
        history = _read_history(directory / LOG_NAME)
        record, _ = _try(read_job_record, directory)
        if record is None:
            end, _ = _try(read_job_end, directory)
            # Nobody's, where it cannot be told whose it is: other tenants must not see it.
            tenant = "" if (directory / RECORD_NAME).exists() else DEFAULT_TENANT
            record = _record_from(directory, tenant, history.ended_s, history, end)
        state: State = "running" if history.has_run else "queued"
        yield dataclasses.replace(row_of(record), state=state, num_resumes=history.num_resumes)


def _try(read: Callable[[Path], T], directory: Path) -> tuple[T | None, str]:
    """What a record holds, and what is wrong with it."""
    try:
        return read(directory), ""
    except ResumeError as error:
        return None, error.message


def _read_history(path: Path) -> _History:
    """What is left of a log; the rest is cut off."""
    history = _History(time.time())
    try:
        history.ended_s = path.stat().st_mtime
        for event in JobLog.recover(path)[1]:
            history.num_events += 1
            match event.WhichOneof("payload"):
                case "accepted":
                    history.plan = event.accepted.plan
                case "phase":
                    history.phase = event.phase
                    history.has_run = True
                case "warning":
                    warning = cast(video_pb2.Warning, event.warning)  # which the stubs take for Python's own class
                    history.num_resumes += warning.reason == RESUMED
                case "fragment":
                    history.num_frames += event.fragment.num_frames
                case "completed":
                    history.completed = event.completed
    except (OSError, PhaseError) as error:
        log.warning("%s cannot be read: %s", path, error)
    return history


def _record_from(
    directory: Path, tenant: str, created_s: float, history: _History, end: records_pb2.JobEnd | None
) -> records_pb2.JobRecord:
    """A record without a request, in place of one that cannot be read or that an older server did not make."""
    if end is not None:
        return records_pb2.JobRecord(
            job_id=directory.name,
            tenant=end.job.tenant,
            prompt=end.job.prompt,
            plan=end.job.plan,
            create_time=end.job.create_time,
        )
    record = records_pb2.JobRecord(
        job_id=directory.name, tenant=tenant, prompt=_prompt_in(directory), plan=history.plan
    )
    record.create_time.FromNanoseconds(int(created_s * 1e9))
    return record


def _prompt_in(directory: Path) -> str:
    """The prompt, where a job's provenance tells it."""
    try:
        with (directory / PROVENANCE).open("rb") as file:
            prompt = json.loads(file.read(_PROVENANCE_BYTES))["prompt"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return prompt if isinstance(prompt, str) else ""


def _end_from(
    directory: Path, row: JobRow, record: records_pb2.JobRecord, history: _History, damage: str
) -> records_pb2.JobEnd:
    """The end of a job of which there is no readable record."""
    state: State = row.state
    if row.ended_s is None:
        state = "failed" if history.completed is None else "succeeded"
    job = video_pb2.Job(
        job_id=directory.name,
        state=_STATE_TO_PROTO[state],
        plan=record.plan,
        num_events=history.num_events,
        num_frames_emitted=history.num_frames,
        create_time=record.create_time,
        source_job_id=record.source.job_id,
        tenant=record.tenant,
        prompt=record.prompt,
        priority=cast(video_pb2.JobPriority, row.priority),
        num_resumes=row.num_resumes,
    )
    job.end_time.FromNanoseconds(int((history.ended_s if row.ended_s is None else row.ended_s) * 1e9))
    _list_artifacts(directory, job, history.completed)
    end = records_pb2.JobEnd(job=job)
    if state != "succeeded":
        _explain(end, history.phase, damage)
    return end


def _list_artifacts(directory: Path, job: video_pb2.Job, completed: video_pb2.Completed | None) -> None:
    """Lists the files that are there as the job left them, and those that are not."""
    if completed is None:
        job.artifacts.extend(_artifacts_in(directory))
        return
    for artifact in completed.artifacts:
        if _size(directory / artifact.name) == artifact.size_bytes:
            job.artifacts.append(artifact)
        else:
            gone = job.removed_artifacts.add(name=artifact.name, message="it was not found as the job had left it")
            gone.remove_time.CopyFrom(job.end_time)


def _artifacts_in(directory: Path) -> Iterator[types_pb2.Artifact]:
    """The artifacts in a directory: what has the name of one is whole."""
    for name, media_type in (ARTIFACTS | REFINED_ARTIFACTS).items():
        try:
            with (directory / name).open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                size_bytes = file.tell()
        except OSError:
            continue
        yield types_pb2.Artifact(
            name=name,
            media_type=media_type,
            size_bytes=size_bytes,
            sha256=sha256,
            relative_path=f"jobs/{directory.name}/{name}",
        )


def _size(path: Path) -> int:
    """Bytes of a file; -1 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _explain(end: records_pb2.JobEnd, phase: video_pb2.PhaseChange, damage: str) -> None:
    """Adds why a job did not succeed, as far as that is known."""
    name = types_pb2.Phase.Name(phase.phase).removeprefix("PHASE_").lower()
    if end.job.state == video_pb2.JOB_STATE_CANCELLED:
        reason, message = JobCancelledError.reason, "the job was cancelled"
    elif damage:
        reason, message = ResumeError.reason, f"the job cannot be taken up again: {damage}"
    else:
        reason, message = INTERRUPTED, "the job had not completed when its server stopped, which kept no records"
    end.failure.CopyFrom(
        records_pb2.JobFailure(reason=reason, message=message, phase=name, chunk_index=phase.chunk_index)
    )
    if end.job.state == video_pb2.JOB_STATE_FAILED:
        end.job.error.CopyFrom(
            video_pb2.JobError(reason=reason, message=message, phase=phase.phase, chunk_index=phase.chunk_index)
        )
