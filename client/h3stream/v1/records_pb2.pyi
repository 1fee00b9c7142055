import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from h3stream.v1 import types_pb2 as _types_pb2
from h3stream.v1 import video_pb2 as _video_pb2
from h3stream.v1 import workers_pb2 as _workers_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobRecord(_message.Message):
    __slots__ = ("job_id", "tenant", "prompt", "plan", "generation", "refinement", "source", "noise", "create_time")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REFINEMENT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    tenant: str
    prompt: str
    plan: _video_pb2.Plan
    generation: _video_pb2.GenerateRequest
    refinement: _video_pb2.RefineHeader
    source: RefineSourceRecord
    noise: _containers.RepeatedCompositeFieldContainer[_workers_pb2.NoiseSegment]
    create_time: _timestamp_pb2.Timestamp
    def __init__(self, job_id: _Optional[str] = ..., tenant: _Optional[str] = ..., prompt: _Optional[str] = ..., plan: _Optional[_Union[_video_pb2.Plan, _Mapping]] = ..., generation: _Optional[_Union[_video_pb2.GenerateRequest, _Mapping]] = ..., refinement: _Optional[_Union[_video_pb2.RefineHeader, _Mapping]] = ..., source: _Optional[_Union[RefineSourceRecord, _Mapping]] = ..., noise: _Optional[_Iterable[_Union[_workers_pb2.NoiseSegment, _Mapping]]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RefineSourceRecord(_message.Message):
    __slots__ = ("job_id", "latents_sha256", "has_video")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    LATENTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    HAS_VIDEO_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    latents_sha256: str
    has_video: bool
    def __init__(self, job_id: _Optional[str] = ..., latents_sha256: _Optional[str] = ..., has_video: _Optional[bool] = ...) -> None: ...

class JobEnd(_message.Message):
    __slots__ = ("job", "failure")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    job: _video_pb2.Job
    failure: JobFailure
    def __init__(self, job: _Optional[_Union[_video_pb2.Job, _Mapping]] = ..., failure: _Optional[_Union[JobFailure, _Mapping]] = ...) -> None: ...

class JobFailure(_message.Message):
    __slots__ = ("reason", "message", "phase", "chunk_index")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    phase: str
    chunk_index: int
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., phase: _Optional[str] = ..., chunk_index: _Optional[int] = ...) -> None: ...
