"""What can still be told of a job whose records are damaged or missing: from its log, its row and its files."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from core.artifacts import ARTIFACTS, PROVENANCE, REFINED_ARTIFACTS
from h3stream.errors import JobCancelledError, PhaseError, ResumeError
from h3stream.v1 import records_pb2, types_pb2, video_pb2
from orchestrator.job import RESUMED
from orchestrator.job_log import JobLog
from orchestrator.journal import JobRow, State

log = logging.getLogger(__name__)

INTERRUPTED = "INTERRUPTED"
"""Reason of jobs of servers that kept no records to go on from."""
STATE_TO_PROTO: dict[State, video_pb2.JobState] = {
    "queued": video_pb2.JOB_STATE_QUEUED,
    "running": video_pb2.JOB_STATE_RUNNING,
    "succeeded": video_pb2.JOB_STATE_SUCCEEDED,
    "failed": video_pb2.JOB_STATE_FAILED,
    "cancelled": video_pb2.JOB_STATE_CANCELLED,
}
_PROVENANCE_BYTES = 4 * 1024 * 1024
"""More than a provenance.json has."""


@dataclass
class History:
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


def read_history(path: Path) -> History:
    """What is left of a log; the rest is cut off."""
    history = History(time.time())
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


def record_from(
    directory: Path, tenant: str, created_s: float, history: History, end: records_pb2.JobEnd | None
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


def end_from(
    directory: Path, row: JobRow, record: records_pb2.JobRecord, history: History, damage: str
) -> records_pb2.JobEnd:
    """The end of a job of which there is no readable record."""
    state: State = row.state
    if row.ended_s is None:
        state = "failed" if history.completed is None else "succeeded"
    job = video_pb2.Job(
        job_id=directory.name,
        state=STATE_TO_PROTO[state],
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
