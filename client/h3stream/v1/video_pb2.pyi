import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from h3stream.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobPriority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_PRIORITY_UNSPECIFIED: _ClassVar[JobPriority]
    JOB_PRIORITY_LOW: _ClassVar[JobPriority]
    JOB_PRIORITY_NORMAL: _ClassVar[JobPriority]
    JOB_PRIORITY_HIGH: _ClassVar[JobPriority]

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_QUEUED: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_SUCCEEDED: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_CANCELLED: _ClassVar[JobState]
JOB_PRIORITY_UNSPECIFIED: JobPriority
JOB_PRIORITY_LOW: JobPriority
JOB_PRIORITY_NORMAL: JobPriority
JOB_PRIORITY_HIGH: JobPriority
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_QUEUED: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_SUCCEEDED: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_CANCELLED: JobState

class GenerateRequest(_message.Message):
    __slots__ = ("prompt", "num_frames", "width", "height", "steps", "video_shift", "audio_shift", "sink", "window", "unlimited_window", "kv_storage", "seed", "cancel_on_disconnect", "mode", "adapters", "preview", "artifacts", "refine_audio", "branch", "priority", "deadline_s", "idempotency_key")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_SHIFT_FIELD_NUMBER: _ClassVar[int]
    AUDIO_SHIFT_FIELD_NUMBER: _ClassVar[int]
    SINK_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    UNLIMITED_WINDOW_FIELD_NUMBER: _ClassVar[int]
    KV_STORAGE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CANCEL_ON_DISCONNECT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    REFINE_AUDIO_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    num_frames: int
    width: int
    height: int
    steps: int
    video_shift: float
    audio_shift: float
    sink: int
    window: int
    unlimited_window: bool
    kv_storage: _types_pb2.KvStorage
    seed: int
    cancel_on_disconnect: bool
    mode: _types_pb2.SamplingMode
    adapters: _containers.RepeatedCompositeFieldContainer[_types_pb2.AdapterChoice]
    preview: _types_pb2.PreviewSpec
    artifacts: _containers.RepeatedScalarFieldContainer[str]
    refine_audio: _types_pb2.RefineSpec
    branch: Branch
    priority: JobPriority
    deadline_s: float
    idempotency_key: str
    def __init__(self, prompt: _Optional[str] = ..., num_frames: _Optional[int] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., steps: _Optional[int] = ..., video_shift: _Optional[float] = ..., audio_shift: _Optional[float] = ..., sink: _Optional[int] = ..., window: _Optional[int] = ..., unlimited_window: _Optional[bool] = ..., kv_storage: _Optional[_Union[_types_pb2.KvStorage, str]] = ..., seed: _Optional[int] = ..., cancel_on_disconnect: _Optional[bool] = ..., mode: _Optional[_Union[_types_pb2.SamplingMode, str]] = ..., adapters: _Optional[_Iterable[_Union[_types_pb2.AdapterChoice, _Mapping]]] = ..., preview: _Optional[_Union[_types_pb2.PreviewSpec, _Mapping]] = ..., artifacts: _Optional[_Iterable[str]] = ..., refine_audio: _Optional[_Union[_types_pb2.RefineSpec, _Mapping]] = ..., branch: _Optional[_Union[Branch, _Mapping]] = ..., priority: _Optional[_Union[JobPriority, str]] = ..., deadline_s: _Optional[float] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("job_id", "from_chunk", "prompt", "seed")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_CHUNK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    from_chunk: int
    prompt: str
    seed: int
    def __init__(self, job_id: _Optional[str] = ..., from_chunk: _Optional[int] = ..., prompt: _Optional[str] = ..., seed: _Optional[int] = ...) -> None: ...

class LatentsUpload(_message.Message):
    __slots__ = ("prompt", "size_bytes", "sha256")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    size_bytes: int
    sha256: str
    def __init__(self, prompt: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class RefineHeader(_message.Message):
    __slots__ = ("job_id", "upload", "spec", "cancel_on_disconnect", "priority", "deadline_s", "idempotency_key")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CANCEL_ON_DISCONNECT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    upload: LatentsUpload
    spec: _types_pb2.RefineSpec
    cancel_on_disconnect: bool
    priority: JobPriority
    deadline_s: float
    idempotency_key: str
    def __init__(self, job_id: _Optional[str] = ..., upload: _Optional[_Union[LatentsUpload, _Mapping]] = ..., spec: _Optional[_Union[_types_pb2.RefineSpec, _Mapping]] = ..., cancel_on_disconnect: _Optional[bool] = ..., priority: _Optional[_Union[JobPriority, str]] = ..., deadline_s: _Optional[float] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class RefineAudioRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: RefineHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[RefineHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class RefineAudioResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: Event
    def __init__(self, event: _Optional[_Union[Event, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: Event
    def __init__(self, event: _Optional[_Union[Event, _Mapping]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("seq", "job_id", "media_time_ticks", "accepted", "phase", "progress", "init_segment", "fragment", "warning", "stream_complete", "completed", "preview", "refine_started", "refine_progress", "refined_init_segment", "refined_fragment", "refined_audio", "refine_failed", "elapsed_s")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TIME_TICKS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    INIT_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    STREAM_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    REFINE_STARTED_FIELD_NUMBER: _ClassVar[int]
    REFINE_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    REFINED_INIT_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    REFINED_FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    REFINED_AUDIO_FIELD_NUMBER: _ClassVar[int]
    REFINE_FAILED_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    seq: int
    job_id: str
    media_time_ticks: int
    accepted: Accepted
    phase: PhaseChange
    progress: Progress
    init_segment: _types_pb2.InitSegment
    fragment: _types_pb2.Fragment
    warning: Warning
    stream_complete: StreamComplete
    completed: Completed
    preview: _types_pb2.Preview
    refine_started: _types_pb2.RefineStarted
    refine_progress: _types_pb2.RefineProgress
    refined_init_segment: _types_pb2.InitSegment
    refined_fragment: _types_pb2.Fragment
    refined_audio: _types_pb2.RefinedAudio
    refine_failed: _types_pb2.RefineFailed
    elapsed_s: float
    def __init__(self, seq: _Optional[int] = ..., job_id: _Optional[str] = ..., media_time_ticks: _Optional[int] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., phase: _Optional[_Union[PhaseChange, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., init_segment: _Optional[_Union[_types_pb2.InitSegment, _Mapping]] = ..., fragment: _Optional[_Union[_types_pb2.Fragment, _Mapping]] = ..., warning: _Optional[_Union[Warning, _Mapping]] = ..., stream_complete: _Optional[_Union[StreamComplete, _Mapping]] = ..., completed: _Optional[_Union[Completed, _Mapping]] = ..., preview: _Optional[_Union[_types_pb2.Preview, _Mapping]] = ..., refine_started: _Optional[_Union[_types_pb2.RefineStarted, _Mapping]] = ..., refine_progress: _Optional[_Union[_types_pb2.RefineProgress, _Mapping]] = ..., refined_init_segment: _Optional[_Union[_types_pb2.InitSegment, _Mapping]] = ..., refined_fragment: _Optional[_Union[_types_pb2.Fragment, _Mapping]] = ..., refined_audio: _Optional[_Union[_types_pb2.RefinedAudio, _Mapping]] = ..., refine_failed: _Optional[_Union[_types_pb2.RefineFailed, _Mapping]] = ..., elapsed_s: _Optional[float] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ...) -> None: ...

class PhaseChange(_message.Message):
    __slots__ = ("phase", "chunk_index")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    phase: _types_pb2.Phase
    chunk_index: int
    def __init__(self, phase: _Optional[_Union[_types_pb2.Phase, str]] = ..., chunk_index: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("phase", "chunk_index", "num_chunks", "step", "num_steps", "num_frames_emitted", "queue_position", "is_heartbeat")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_EMITTED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    IS_HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    phase: _types_pb2.Phase
    chunk_index: int
    num_chunks: int
    step: int
    num_steps: int
    num_frames_emitted: int
    queue_position: int
    is_heartbeat: bool
    def __init__(self, phase: _Optional[_Union[_types_pb2.Phase, str]] = ..., chunk_index: _Optional[int] = ..., num_chunks: _Optional[int] = ..., step: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_frames_emitted: _Optional[int] = ..., queue_position: _Optional[int] = ..., is_heartbeat: _Optional[bool] = ...) -> None: ...

class Warning(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class StreamComplete(_message.Message):
    __slots__ = ("num_fragments", "num_bytes", "num_frames", "num_samples")
    NUM_FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    num_fragments: int
    num_bytes: int
    num_frames: int
    num_samples: int
    def __init__(self, num_fragments: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_frames: _Optional[int] = ..., num_samples: _Optional[int] = ...) -> None: ...

class Completed(_message.Message):
    __slots__ = ("artifacts", "latents_sha256", "audio_health", "timings")
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    LATENTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    AUDIO_HEALTH_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    artifacts: _containers.RepeatedCompositeFieldContainer[_types_pb2.Artifact]
    latents_sha256: str
    audio_health: _types_pb2.AudioHealth
    timings: Timings
    def __init__(self, artifacts: _Optional[_Iterable[_Union[_types_pb2.Artifact, _Mapping]]] = ..., latents_sha256: _Optional[str] = ..., audio_health: _Optional[_Union[_types_pb2.AudioHealth, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("first_fragment_s", "sampling_s", "total_s", "num_frames_before_sampling_end")
    FIRST_FRAGMENT_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_BEFORE_SAMPLING_END_FIELD_NUMBER: _ClassVar[int]
    first_fragment_s: float
    sampling_s: float
    total_s: float
    num_frames_before_sampling_end: int
    def __init__(self, first_fragment_s: _Optional[float] = ..., sampling_s: _Optional[float] = ..., total_s: _Optional[float] = ..., num_frames_before_sampling_end: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("clip", "chunks", "num_video_latents", "num_audio_latents", "num_samples", "num_noise_forwards", "num_clean_forwards", "expected_stream_bytes", "warnings", "preview", "artifacts", "refine_audio", "branch")
    CLIP_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_VIDEO_LATENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_AUDIO_LATENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_NOISE_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CLEAN_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_STREAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    REFINE_AUDIO_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    clip: _types_pb2.ClipSpec
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkPlan]
    num_video_latents: int
    num_audio_latents: int
    num_samples: int
    num_noise_forwards: int
    num_clean_forwards: int
    expected_stream_bytes: int
    warnings: _containers.RepeatedCompositeFieldContainer[Warning]
    preview: _types_pb2.PreviewSpec
    artifacts: _containers.RepeatedScalarFieldContainer[str]
    refine_audio: _types_pb2.RefineSpec
    branch: Branch
    def __init__(self, clip: _Optional[_Union[_types_pb2.ClipSpec, _Mapping]] = ..., chunks: _Optional[_Iterable[_Union[ChunkPlan, _Mapping]]] = ..., num_video_latents: _Optional[int] = ..., num_audio_latents: _Optional[int] = ..., num_samples: _Optional[int] = ..., num_noise_forwards: _Optional[int] = ..., num_clean_forwards: _Optional[int] = ..., expected_stream_bytes: _Optional[int] = ..., warnings: _Optional[_Iterable[_Union[Warning, _Mapping]]] = ..., preview: _Optional[_Union[_types_pb2.PreviewSpec, _Mapping]] = ..., artifacts: _Optional[_Iterable[str]] = ..., refine_audio: _Optional[_Union[_types_pb2.RefineSpec, _Mapping]] = ..., branch: _Optional[_Union[Branch, _Mapping]] = ...) -> None: ...

class ChunkPlan(_message.Message):
    __slots__ = ("video_start", "video_stop", "audio_start", "audio_stop", "num_frames_emitted")
    VIDEO_START_FIELD_NUMBER: _ClassVar[int]
    VIDEO_STOP_FIELD_NUMBER: _ClassVar[int]
    AUDIO_START_FIELD_NUMBER: _ClassVar[int]
    AUDIO_STOP_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_EMITTED_FIELD_NUMBER: _ClassVar[int]
    video_start: int
    video_stop: int
    audio_start: int
    audio_stop: int
    num_frames_emitted: int
    def __init__(self, video_start: _Optional[int] = ..., video_stop: _Optional[int] = ..., audio_start: _Optional[int] = ..., audio_stop: _Optional[int] = ..., num_frames_emitted: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("job_id", "from_seq", "from_chunk", "live")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
    FROM_CHUNK_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    from_seq: int
    from_chunk: int
    live: bool
    def __init__(self, job_id: _Optional[str] = ..., from_seq: _Optional[int] = ..., from_chunk: _Optional[int] = ..., live: _Optional[bool] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: Event
    def __init__(self, event: _Optional[_Union[Event, _Mapping]] = ...) -> None: ...

class DownloadArtifactRequest(_message.Message):
    __slots__ = ("job_id", "name", "offset_bytes")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    name: str
    offset_bytes: int
    def __init__(self, job_id: _Optional[str] = ..., name: _Optional[str] = ..., offset_bytes: _Optional[int] = ...) -> None: ...

class DownloadArtifactResponse(_message.Message):
    __slots__ = ("artifact", "data")
    ARTIFACT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    artifact: _types_pb2.Artifact
    data: bytes
    def __init__(self, artifact: _Optional[_Union[_types_pb2.Artifact, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class CancelJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class CancelJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "states", "all_tenants")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    ALL_TENANTS_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    states: _containers.RepeatedScalarFieldContainer[JobState]
    all_tenants: bool
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., states: _Optional[_Iterable[_Union[JobState, str]]] = ..., all_tenants: _Optional[bool] = ...) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs", "next_page_token")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    next_page_token: str
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class DeleteJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class DeleteJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class GetJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("job_id", "state", "plan", "num_events", "num_frames_emitted", "create_time", "end_time", "error", "artifacts", "removed_artifacts", "source_job_id", "tenant", "prompt", "priority", "queue_position", "num_resumes")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    NUM_EVENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_EMITTED_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    END_TIME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUMES_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    state: JobState
    plan: Plan
    num_events: int
    num_frames_emitted: int
    create_time: _timestamp_pb2.Timestamp
    end_time: _timestamp_pb2.Timestamp
    error: JobError
    artifacts: _containers.RepeatedCompositeFieldContainer[_types_pb2.Artifact]
    removed_artifacts: _containers.RepeatedCompositeFieldContainer[RemovedArtifact]
    source_job_id: str
    tenant: str
    prompt: str
    priority: JobPriority
    queue_position: int
    num_resumes: int
    def __init__(self, job_id: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., num_events: _Optional[int] = ..., num_frames_emitted: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., error: _Optional[_Union[JobError, _Mapping]] = ..., artifacts: _Optional[_Iterable[_Union[_types_pb2.Artifact, _Mapping]]] = ..., removed_artifacts: _Optional[_Iterable[_Union[RemovedArtifact, _Mapping]]] = ..., source_job_id: _Optional[str] = ..., tenant: _Optional[str] = ..., prompt: _Optional[str] = ..., priority: _Optional[_Union[JobPriority, str]] = ..., queue_position: _Optional[int] = ..., num_resumes: _Optional[int] = ...) -> None: ...

class RemovedArtifact(_message.Message):
    __slots__ = ("name", "remove_time", "message")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REMOVE_TIME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    remove_time: _timestamp_pb2.Timestamp
    message: str
    def __init__(self, name: _Optional[str] = ..., remove_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., message: _Optional[str] = ...) -> None: ...

class JobError(_message.Message):
    __slots__ = ("reason", "message", "phase", "chunk_index")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    phase: _types_pb2.Phase
    chunk_index: int
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., phase: _Optional[_Union[_types_pb2.Phase, str]] = ..., chunk_index: _Optional[int] = ...) -> None: ...

class PlanGenerationRequest(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: GenerateRequest
    def __init__(self, generation: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class PlanGenerationResponse(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[_types_pb2.AdapterInfo]
    def __init__(self, adapters: _Optional[_Iterable[_Union[_types_pb2.AdapterInfo, _Mapping]]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("server_version", "library_versions", "model_name", "weight_digests", "default_clip", "valid_num_frames", "max_canvas_pixels", "max_prompt_bytes", "max_message_bytes", "max_queued_jobs", "num_lanes", "settings", "default_dense_clip", "parts", "adapters", "default_preview", "artifacts", "default_artifacts", "caller", "examples")
    class LibraryVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class WeightDigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_CLIP_FIELD_NUMBER: _ClassVar[int]
    VALID_NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_CANVAS_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_JOBS_FIELD_NUMBER: _ClassVar[int]
    NUM_LANES_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_DENSE_CLIP_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_PREVIEW_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    library_versions: _containers.ScalarMap[str, str]
    model_name: str
    weight_digests: _containers.ScalarMap[str, str]
    default_clip: _types_pb2.ClipSpec
    valid_num_frames: _containers.RepeatedScalarFieldContainer[int]
    max_canvas_pixels: int
    max_prompt_bytes: int
    max_message_bytes: int
    max_queued_jobs: int
    num_lanes: int
    settings: _containers.ScalarMap[str, str]
    default_dense_clip: _types_pb2.ClipSpec
    parts: _containers.RepeatedCompositeFieldContainer[_types_pb2.ModelPart]
    adapters: _containers.RepeatedCompositeFieldContainer[_types_pb2.AdapterInfo]
    default_preview: _types_pb2.PreviewSpec
    artifacts: _containers.RepeatedScalarFieldContainer[str]
    default_artifacts: _containers.RepeatedScalarFieldContainer[str]
    caller: Caller
    examples: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, server_version: _Optional[str] = ..., library_versions: _Optional[_Mapping[str, str]] = ..., model_name: _Optional[str] = ..., weight_digests: _Optional[_Mapping[str, str]] = ..., default_clip: _Optional[_Union[_types_pb2.ClipSpec, _Mapping]] = ..., valid_num_frames: _Optional[_Iterable[int]] = ..., max_canvas_pixels: _Optional[int] = ..., max_prompt_bytes: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_queued_jobs: _Optional[int] = ..., num_lanes: _Optional[int] = ..., settings: _Optional[_Mapping[str, str]] = ..., default_dense_clip: _Optional[_Union[_types_pb2.ClipSpec, _Mapping]] = ..., parts: _Optional[_Iterable[_Union[_types_pb2.ModelPart, _Mapping]]] = ..., adapters: _Optional[_Iterable[_Union[_types_pb2.AdapterInfo, _Mapping]]] = ..., default_preview: _Optional[_Union[_types_pb2.PreviewSpec, _Mapping]] = ..., artifacts: _Optional[_Iterable[str]] = ..., default_artifacts: _Optional[_Iterable[str]] = ..., caller: _Optional[_Union[Caller, _Mapping]] = ..., examples: _Optional[_Iterable[str]] = ...) -> None: ...

class Caller(_message.Message):
    __slots__ = ("tenant", "scopes", "limits", "usage")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SCOPES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    scopes: _containers.RepeatedScalarFieldContainer[str]
    limits: TenantLimits
    usage: TenantUsage
    def __init__(self, tenant: _Optional[str] = ..., scopes: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[TenantLimits, _Mapping]] = ..., usage: _Optional[_Union[TenantUsage, _Mapping]] = ...) -> None: ...

class TenantLimits(_message.Message):
    __slots__ = ("max_running_jobs", "max_queued_jobs", "max_pending_frames", "max_stored_bytes")
    MAX_RUNNING_JOBS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_JOBS_FIELD_NUMBER: _ClassVar[int]
    MAX_PENDING_FRAMES_FIELD_NUMBER: _ClassVar[int]
    MAX_STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_running_jobs: int
    max_queued_jobs: int
    max_pending_frames: int
    max_stored_bytes: int
    def __init__(self, max_running_jobs: _Optional[int] = ..., max_queued_jobs: _Optional[int] = ..., max_pending_frames: _Optional[int] = ..., max_stored_bytes: _Optional[int] = ...) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("num_running_jobs", "num_queued_jobs", "num_pending_frames", "num_stored_bytes")
    NUM_RUNNING_JOBS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_JOBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_FRAMES_FIELD_NUMBER: _ClassVar[int]
    NUM_STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_running_jobs: int
    num_queued_jobs: int
    num_pending_frames: int
    num_stored_bytes: int
    def __init__(self, num_running_jobs: _Optional[int] = ..., num_queued_jobs: _Optional[int] = ..., num_pending_frames: _Optional[int] = ..., num_stored_bytes: _Optional[int] = ...) -> None: ...
