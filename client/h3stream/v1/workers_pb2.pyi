from h3stream.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("worker", "device", "weight_bytes", "device_weight_bytes", "weight_digests", "library_versions", "session_ids", "parts", "adapters", "preview_map", "kernels", "peak_host_bytes", "peak_device_bytes")
    class WeightDigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class LibraryVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_MAP_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    PEAK_HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker: str
    device: str
    weight_bytes: int
    device_weight_bytes: int
    weight_digests: _containers.ScalarMap[str, str]
    library_versions: _containers.ScalarMap[str, str]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    parts: _containers.RepeatedCompositeFieldContainer[_types_pb2.ModelPart]
    adapters: _containers.RepeatedCompositeFieldContainer[_types_pb2.AdapterInfo]
    preview_map: _types_pb2.PreviewMap
    kernels: str
    peak_host_bytes: int
    peak_device_bytes: int
    def __init__(self, worker: _Optional[str] = ..., device: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., device_weight_bytes: _Optional[int] = ..., weight_digests: _Optional[_Mapping[str, str]] = ..., library_versions: _Optional[_Mapping[str, str]] = ..., session_ids: _Optional[_Iterable[str]] = ..., parts: _Optional[_Iterable[_Union[_types_pb2.ModelPart, _Mapping]]] = ..., adapters: _Optional[_Iterable[_Union[_types_pb2.AdapterInfo, _Mapping]]] = ..., preview_map: _Optional[_Union[_types_pb2.PreviewMap, _Mapping]] = ..., kernels: _Optional[str] = ..., peak_host_bytes: _Optional[int] = ..., peak_device_bytes: _Optional[int] = ...) -> None: ...

class EnterPhaseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EnterPhaseResponse(_message.Message):
    __slots__ = ("device_weight_bytes",)
    DEVICE_WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    device_weight_bytes: int
    def __init__(self, device_weight_bytes: _Optional[int] = ...) -> None: ...

class LeavePhaseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeavePhaseResponse(_message.Message):
    __slots__ = ("device_weight_bytes", "device_free_bytes")
    DEVICE_WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    device_weight_bytes: int
    device_free_bytes: int
    def __init__(self, device_weight_bytes: _Optional[int] = ..., device_free_bytes: _Optional[int] = ...) -> None: ...

class LookupEmbeddingRequest(_message.Message):
    __slots__ = ("prompt",)
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    def __init__(self, prompt: _Optional[str] = ...) -> None: ...

class LookupEmbeddingResponse(_message.Message):
    __slots__ = ("header", "tensor")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    header: EmbeddingHeader
    tensor: _types_pb2.TensorPart
    def __init__(self, header: _Optional[_Union[EmbeddingHeader, _Mapping]] = ..., tensor: _Optional[_Union[_types_pb2.TensorPart, _Mapping]] = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("prompt",)
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    def __init__(self, prompt: _Optional[str] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("header", "tensor")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    header: EmbeddingHeader
    tensor: _types_pb2.TensorPart
    def __init__(self, header: _Optional[_Union[EmbeddingHeader, _Mapping]] = ..., tensor: _Optional[_Union[_types_pb2.TensorPart, _Mapping]] = ...) -> None: ...

class EmbeddingHeader(_message.Message):
    __slots__ = ("is_cached", "num_tokens")
    IS_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    is_cached: bool
    num_tokens: int
    def __init__(self, is_cached: _Optional[bool] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class DitServiceOpenSessionRequest(_message.Message):
    __slots__ = ("header", "tensor")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    header: DitSessionHeader
    tensor: _types_pb2.TensorPart
    def __init__(self, header: _Optional[_Union[DitSessionHeader, _Mapping]] = ..., tensor: _Optional[_Union[_types_pb2.TensorPart, _Mapping]] = ...) -> None: ...

class DitSessionHeader(_message.Message):
    __slots__ = ("session_id", "clip", "preview", "preview_map", "noise")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_MAP_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    clip: _types_pb2.ClipSpec
    preview: _types_pb2.PreviewSpec
    preview_map: _types_pb2.PreviewMap
    noise: _containers.RepeatedCompositeFieldContainer[NoiseSegment]
    def __init__(self, session_id: _Optional[str] = ..., clip: _Optional[_Union[_types_pb2.ClipSpec, _Mapping]] = ..., preview: _Optional[_Union[_types_pb2.PreviewSpec, _Mapping]] = ..., preview_map: _Optional[_Union[_types_pb2.PreviewMap, _Mapping]] = ..., noise: _Optional[_Iterable[_Union[NoiseSegment, _Mapping]]] = ...) -> None: ...

class NoiseSegment(_message.Message):
    __slots__ = ("first_chunk", "seed")
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    first_chunk: int
    seed: int
    def __init__(self, first_chunk: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class DitServiceOpenSessionResponse(_message.Message):
    __slots__ = ("kv_storage", "kv_storage_fallback_reason", "preview_unavailable_reason", "num_committed_chunks")
    KV_STORAGE_FIELD_NUMBER: _ClassVar[int]
    KV_STORAGE_FALLBACK_REASON_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_UNAVAILABLE_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_COMMITTED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    kv_storage: _types_pb2.KvStorage
    kv_storage_fallback_reason: str
    preview_unavailable_reason: str
    num_committed_chunks: int
    def __init__(self, kv_storage: _Optional[_Union[_types_pb2.KvStorage, str]] = ..., kv_storage_fallback_reason: _Optional[str] = ..., preview_unavailable_reason: _Optional[str] = ..., num_committed_chunks: _Optional[int] = ...) -> None: ...

class SampleChunkRequest(_message.Message):
    __slots__ = ("session_id", "chunk_index")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    chunk_index: int
    def __init__(self, session_id: _Optional[str] = ..., chunk_index: _Optional[int] = ...) -> None: ...

class SampleChunkResponse(_message.Message):
    __slots__ = ("step", "tensor", "preview")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    step: StepDone
    tensor: _types_pb2.TensorPart
    preview: _types_pb2.Preview
    def __init__(self, step: _Optional[_Union[StepDone, _Mapping]] = ..., tensor: _Optional[_Union[_types_pb2.TensorPart, _Mapping]] = ..., preview: _Optional[_Union[_types_pb2.Preview, _Mapping]] = ...) -> None: ...

class StepDone(_message.Message):
    __slots__ = ("step", "num_steps")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    step: int
    num_steps: int
    def __init__(self, step: _Optional[int] = ..., num_steps: _Optional[int] = ...) -> None: ...

class RestoreChunkRequest(_message.Message):
    __slots__ = ("header", "tensor")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    header: RestoreChunkHeader
    tensor: _types_pb2.TensorPart
    def __init__(self, header: _Optional[_Union[RestoreChunkHeader, _Mapping]] = ..., tensor: _Optional[_Union[_types_pb2.TensorPart, _Mapping]] = ...) -> None: ...

class RestoreChunkHeader(_message.Message):
    __slots__ = ("session_id", "chunk_index")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    chunk_index: int
    def __init__(self, session_id: _Optional[str] = ..., chunk_index: _Optional[int] = ...) -> None: ...

class RestoreChunkResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SampleDenseRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class SampleDenseResponse(_message.Message):
    __slots__ = ("step", "preview")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    step: StepDone
    preview: _types_pb2.Preview
    def __init__(self, step: _Optional[_Union[StepDone, _Mapping]] = ..., preview: _Optional[_Union[_types_pb2.Preview, _Mapping]] = ...) -> None: ...

class CommitChunkRequest(_message.Message):
    __slots__ = ("session_id", "chunk_index")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    chunk_index: int
    def __init__(self, session_id: _Optional[str] = ..., chunk_index: _Optional[int] = ...) -> None: ...

class CommitChunkResponse(_message.Message):
    __slots__ = ("num_committed", "retained_entries", "retained_rows")
    NUM_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    RETAINED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    RETAINED_ROWS_FIELD_NUMBER: _ClassVar[int]
    num_committed: int
    retained_entries: _containers.RepeatedScalarFieldContainer[int]
    retained_rows: int
    def __init__(self, num_committed: _Optional[int] = ..., retained_entries: _Optional[_Iterable[int]] = ..., retained_rows: _Optional[int] = ...) -> None: ...

class DitServiceRefineAudioRequest(_message.Message):
    __slots__ = ("header", "tensor")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    header: DitRefineHeader
    tensor: _types_pb2.TensorPart
    def __init__(self, header: _Optional[_Union[DitRefineHeader, _Mapping]] = ..., tensor: _Optional[_Union[_types_pb2.TensorPart, _Mapping]] = ...) -> None: ...

class DitRefineHeader(_message.Message):
    __slots__ = ("clip", "spec")
    CLIP_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    clip: _types_pb2.ClipSpec
    spec: _types_pb2.RefineSpec
    def __init__(self, clip: _Optional[_Union[_types_pb2.ClipSpec, _Mapping]] = ..., spec: _Optional[_Union[_types_pb2.RefineSpec, _Mapping]] = ...) -> None: ...

class DitServiceRefineAudioResponse(_message.Message):
    __slots__ = ("started", "progress", "summary", "tensor")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    started: _types_pb2.RefineStarted
    progress: _types_pb2.RefineProgress
    summary: RefineSummary
    tensor: _types_pb2.TensorPart
    def __init__(self, started: _Optional[_Union[_types_pb2.RefineStarted, _Mapping]] = ..., progress: _Optional[_Union[_types_pb2.RefineProgress, _Mapping]] = ..., summary: _Optional[_Union[RefineSummary, _Mapping]] = ..., tensor: _Optional[_Union[_types_pb2.TensorPart, _Mapping]] = ...) -> None: ...

class RefineSummary(_message.Message):
    __slots__ = ("change", "against_exact", "sampling_s", "exact_sampling_s", "is_warm")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    AGAINST_EXACT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_S_FIELD_NUMBER: _ClassVar[int]
    EXACT_SAMPLING_S_FIELD_NUMBER: _ClassVar[int]
    IS_WARM_FIELD_NUMBER: _ClassVar[int]
    change: float
    against_exact: float
    sampling_s: float
    exact_sampling_s: float
    is_warm: bool
    def __init__(self, change: _Optional[float] = ..., against_exact: _Optional[float] = ..., sampling_s: _Optional[float] = ..., exact_sampling_s: _Optional[float] = ..., is_warm: _Optional[bool] = ...) -> None: ...

class DitServiceCloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class DitServiceCloseSessionResponse(_message.Message):
    __slots__ = ("was_open", "num_noise_forwards", "num_clean_forwards", "peak_kv_bytes")
    WAS_OPEN_FIELD_NUMBER: _ClassVar[int]
    NUM_NOISE_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CLEAN_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    PEAK_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    was_open: bool
    num_noise_forwards: int
    num_clean_forwards: int
    peak_kv_bytes: int
    def __init__(self, was_open: _Optional[bool] = ..., num_noise_forwards: _Optional[int] = ..., num_clean_forwards: _Optional[int] = ..., peak_kv_bytes: _Optional[int] = ...) -> None: ...

class VaeServiceOpenSessionRequest(_message.Message):
    __slots__ = ("session_id", "clip", "artifact_directory", "artifacts")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    clip: _types_pb2.ClipSpec
    artifact_directory: str
    artifacts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., clip: _Optional[_Union[_types_pb2.ClipSpec, _Mapping]] = ..., artifact_directory: _Optional[str] = ..., artifacts: _Optional[_Iterable[str]] = ...) -> None: ...

class VaeServiceOpenSessionResponse(_message.Message):
    __slots__ = ("stream_failure", "num_decoded_chunks")
    STREAM_FAILURE_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    stream_failure: str
    num_decoded_chunks: int
    def __init__(self, stream_failure: _Optional[str] = ..., num_decoded_chunks: _Optional[int] = ...) -> None: ...

class DecodeChunkRequest(_message.Message):
    __slots__ = ("header", "tensor")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    header: DecodeChunkHeader
    tensor: _types_pb2.TensorPart
    def __init__(self, header: _Optional[_Union[DecodeChunkHeader, _Mapping]] = ..., tensor: _Optional[_Union[_types_pb2.TensorPart, _Mapping]] = ...) -> None: ...

class DecodeChunkHeader(_message.Message):
    __slots__ = ("session_id", "chunk_index")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    chunk_index: int
    def __init__(self, session_id: _Optional[str] = ..., chunk_index: _Optional[int] = ...) -> None: ...

class DecodeChunkResponse(_message.Message):
    __slots__ = ("init_segment", "fragment", "stream_failure")
    INIT_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    STREAM_FAILURE_FIELD_NUMBER: _ClassVar[int]
    init_segment: _types_pb2.InitSegment
    fragment: _types_pb2.Fragment
    stream_failure: str
    def __init__(self, init_segment: _Optional[_Union[_types_pb2.InitSegment, _Mapping]] = ..., fragment: _Optional[_Union[_types_pb2.Fragment, _Mapping]] = ..., stream_failure: _Optional[str] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class FinishResponse(_message.Message):
    __slots__ = ("artifacts", "audio_health", "failures")
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    AUDIO_HEALTH_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    artifacts: _containers.RepeatedCompositeFieldContainer[_types_pb2.Artifact]
    audio_health: _types_pb2.AudioHealth
    failures: _containers.RepeatedCompositeFieldContainer[ArtifactFailure]
    def __init__(self, artifacts: _Optional[_Iterable[_Union[_types_pb2.Artifact, _Mapping]]] = ..., audio_health: _Optional[_Union[_types_pb2.AudioHealth, _Mapping]] = ..., failures: _Optional[_Iterable[_Union[ArtifactFailure, _Mapping]]] = ...) -> None: ...

class DecodeAudioRequest(_message.Message):
    __slots__ = ("header", "tensor")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    header: DecodeAudioHeader
    tensor: _types_pb2.TensorPart
    def __init__(self, header: _Optional[_Union[DecodeAudioHeader, _Mapping]] = ..., tensor: _Optional[_Union[_types_pb2.TensorPart, _Mapping]] = ...) -> None: ...

class DecodeAudioHeader(_message.Message):
    __slots__ = ("clip", "artifact_directory", "artifacts", "video_file", "latents_file")
    CLIP_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FILE_FIELD_NUMBER: _ClassVar[int]
    LATENTS_FILE_FIELD_NUMBER: _ClassVar[int]
    clip: _types_pb2.ClipSpec
    artifact_directory: str
    artifacts: _containers.RepeatedScalarFieldContainer[str]
    video_file: str
    latents_file: str
    def __init__(self, clip: _Optional[_Union[_types_pb2.ClipSpec, _Mapping]] = ..., artifact_directory: _Optional[str] = ..., artifacts: _Optional[_Iterable[str]] = ..., video_file: _Optional[str] = ..., latents_file: _Optional[str] = ...) -> None: ...

class DecodeAudioResponse(_message.Message):
    __slots__ = ("init_segment", "fragment", "finished")
    INIT_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    init_segment: _types_pb2.InitSegment
    fragment: _types_pb2.Fragment
    finished: DecodeAudioFinished
    def __init__(self, init_segment: _Optional[_Union[_types_pb2.InitSegment, _Mapping]] = ..., fragment: _Optional[_Union[_types_pb2.Fragment, _Mapping]] = ..., finished: _Optional[_Union[DecodeAudioFinished, _Mapping]] = ...) -> None: ...

class DecodeAudioFinished(_message.Message):
    __slots__ = ("artifacts", "failures", "stream_failure", "audio_health", "audio_health_before", "change", "against_exact")
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    STREAM_FAILURE_FIELD_NUMBER: _ClassVar[int]
    AUDIO_HEALTH_FIELD_NUMBER: _ClassVar[int]
    AUDIO_HEALTH_BEFORE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    AGAINST_EXACT_FIELD_NUMBER: _ClassVar[int]
    artifacts: _containers.RepeatedCompositeFieldContainer[_types_pb2.Artifact]
    failures: _containers.RepeatedCompositeFieldContainer[ArtifactFailure]
    stream_failure: str
    audio_health: _types_pb2.AudioHealth
    audio_health_before: _types_pb2.AudioHealth
    change: _types_pb2.AudioDistance
    against_exact: _types_pb2.AudioDistance
    def __init__(self, artifacts: _Optional[_Iterable[_Union[_types_pb2.Artifact, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[ArtifactFailure, _Mapping]]] = ..., stream_failure: _Optional[str] = ..., audio_health: _Optional[_Union[_types_pb2.AudioHealth, _Mapping]] = ..., audio_health_before: _Optional[_Union[_types_pb2.AudioHealth, _Mapping]] = ..., change: _Optional[_Union[_types_pb2.AudioDistance, _Mapping]] = ..., against_exact: _Optional[_Union[_types_pb2.AudioDistance, _Mapping]] = ...) -> None: ...

class ArtifactFailure(_message.Message):
    __slots__ = ("name", "message")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    message: str
    def __init__(self, name: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class VaeServiceCloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class VaeServiceCloseSessionResponse(_message.Message):
    __slots__ = ("was_open",)
    WAS_OPEN_FIELD_NUMBER: _ClassVar[int]
    was_open: bool
    def __init__(self, was_open: _Optional[bool] = ...) -> None: ...
