"""Jobs as they are written down, for tests that need no more of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from h3stream.codec import clip_spec_to_proto
from h3stream.v1 import records_pb2, types_pb2, video_pb2
from orchestrator.job_files import LOG_NAME, write_job_record
from orchestrator.job_log import JobLog
from tests.service.conftest import CLIP

FIELD_OF = {
    "h3stream.v1.Accepted": "accepted",
    "h3stream.v1.PhaseChange": "phase",
    "h3stream.v1.Warning": "warning",
    "h3stream.v1.Fragment": "fragment",
    "h3stream.v1.Completed": "completed",
}
CREATED_S = 1_700_000_000.0


def record_of(job_id: str, *, tenant: str = "default", prompt: str = "a fox", key: str = "") -> records_pb2.JobRecord:
    """A job that makes a clip, accepted at CREATED_S."""
    record = records_pb2.JobRecord(
        job_id=job_id,
        tenant=tenant,
        prompt=prompt,
        plan=video_pb2.Plan(clip=clip_spec_to_proto(CLIP)),
        generation=video_pb2.GenerateRequest(prompt=prompt, idempotency_key=key),
    )
    record.create_time.FromNanoseconds(int(CREATED_S * 1e9))
    return record


def end_of(
    record: records_pb2.JobRecord,
    state: video_pb2.JobState = video_pb2.JOB_STATE_SUCCEEDED,
    *,
    ended_s: float = CREATED_S + 1,
    artifacts: Mapping[str, int] | None = None,
) -> records_pb2.JobEnd:
    """The end of a job that leaves artifacts of these sizes."""
    job = video_pb2.Job(
        job_id=record.job_id,
        state=state,
        tenant=record.tenant,
        prompt=record.prompt,
        plan=record.plan,
        create_time=record.create_time,
        artifacts=[types_pb2.Artifact(name=name, size_bytes=size) for name, size in (artifacts or {}).items()],
    )
    job.end_time.FromNanoseconds(int(ended_s * 1e9))
    end = records_pb2.JobEnd(job=job)
    if state != video_pb2.JOB_STATE_SUCCEEDED:
        end.failure.reason, end.failure.message, end.failure.chunk_index = "PHASE_FAILED", "it broke", -1
    return end


def make_directory(jobs_directory: Path, record: records_pb2.JobRecord, *payloads: Any) -> Path:
    """The directory of a job that has told `accepted` and these."""
    directory = jobs_directory / record.job_id
    directory.mkdir(parents=True)
    write_job_record(directory, record)
    log = JobLog(directory / LOG_NAME)
    for seq, payload in enumerate((video_pb2.Accepted(plan=record.plan), *payloads)):
        event = video_pb2.Event(seq=seq, job_id=record.job_id)
        getattr(event, FIELD_OF[payload.DESCRIPTOR.full_name]).CopyFrom(payload)
        log.append(event)
    return directory
