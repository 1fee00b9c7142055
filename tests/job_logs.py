"""What a job has logged, and the files beside its artifacts, for tests that look into them."""

from __future__ import annotations

from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

from h3stream.v1 import video_pb2
from orchestrator.job_files import END_NAME, LOG_NAME, RECORD_NAME
from orchestrator.job_log import JobLog

JOB_FILES = {RECORD_NAME, END_NAME, LOG_NAME}
"""Of a job that has ended, beside its artifacts."""


def read_log(log: JobLog) -> list[video_pb2.Event]:
    """The events in the file of a job: fields that a message without any does not know."""
    fields = UnknownFieldSet(Empty.FromString(log.path.read_bytes()))
    assert {field.field_number for field in fields} <= {1}
    return [video_pb2.Event.FromString(field.data) for field in fields]
