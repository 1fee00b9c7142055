from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvStorage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_STORAGE_UNSPECIFIED: _ClassVar[KvStorage]
    KV_STORAGE_GPU: _ClassVar[KvStorage]
    KV_STORAGE_CPU: _ClassVar[KvStorage]
    KV_STORAGE_CPU_PINNED: _ClassVar[KvStorage]

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
    DATA_TYPE_INT64: _ClassVar[DataType]

class SamplingMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SAMPLING_MODE_UNSPECIFIED: _ClassVar[SamplingMode]
    SAMPLING_MODE_STREAMING: _ClassVar[SamplingMode]
    SAMPLING_MODE_DENSE: _ClassVar[SamplingMode]

class CacheContents(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_CONTENTS_UNSPECIFIED: _ClassVar[CacheContents]
    CACHE_CONTENTS_HIDDEN: _ClassVar[CacheContents]
    CACHE_CONTENTS_KV: _ClassVar[CacheContents]

class CachePrecision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_PRECISION_UNSPECIFIED: _ClassVar[CachePrecision]
    CACHE_PRECISION_INT4: _ClassVar[CachePrecision]
    CACHE_PRECISION_FP8: _ClassVar[CachePrecision]
    CACHE_PRECISION_BF16: _ClassVar[CachePrecision]

class CacheText(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_TEXT_UNSPECIFIED: _ClassVar[CacheText]
    CACHE_TEXT_LIVE: _ClassVar[CacheText]
    CACHE_TEXT_KEPT: _ClassVar[CacheText]

class CacheBackend(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_BACKEND_UNSPECIFIED: _ClassVar[CacheBackend]
    CACHE_BACKEND_AUTO: _ClassVar[CacheBackend]
    CACHE_BACKEND_VRAM: _ClassVar[CacheBackend]
    CACHE_BACKEND_RAM: _ClassVar[CacheBackend]
    CACHE_BACKEND_DISK: _ClassVar[CacheBackend]

class OnNoRoom(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ON_NO_ROOM_UNSPECIFIED: _ClassVar[OnNoRoom]
    ON_NO_ROOM_ERROR: _ClassVar[OnNoRoom]
    ON_NO_ROOM_EXACT: _ClassVar[OnNoRoom]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_QUEUED: _ClassVar[Phase]
    PHASE_ENCODE: _ClassVar[Phase]
    PHASE_PREFILL: _ClassVar[Phase]
    PHASE_DENOISE: _ClassVar[Phase]
    PHASE_COMMIT: _ClassVar[Phase]
    PHASE_DECODE: _ClassVar[Phase]
    PHASE_FINISH: _ClassVar[Phase]
    PHASE_REFINE: _ClassVar[Phase]
KV_STORAGE_UNSPECIFIED: KvStorage
KV_STORAGE_GPU: KvStorage
KV_STORAGE_CPU: KvStorage
KV_STORAGE_CPU_PINNED: KvStorage
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_BFLOAT16: DataType
DATA_TYPE_INT64: DataType
SAMPLING_MODE_UNSPECIFIED: SamplingMode
SAMPLING_MODE_STREAMING: SamplingMode
SAMPLING_MODE_DENSE: SamplingMode
CACHE_CONTENTS_UNSPECIFIED: CacheContents
CACHE_CONTENTS_HIDDEN: CacheContents
CACHE_CONTENTS_KV: CacheContents
CACHE_PRECISION_UNSPECIFIED: CachePrecision
CACHE_PRECISION_INT4: CachePrecision
CACHE_PRECISION_FP8: CachePrecision
CACHE_PRECISION_BF16: CachePrecision
CACHE_TEXT_UNSPECIFIED: CacheText
CACHE_TEXT_LIVE: CacheText
CACHE_TEXT_KEPT: CacheText
CACHE_BACKEND_UNSPECIFIED: CacheBackend
CACHE_BACKEND_AUTO: CacheBackend
CACHE_BACKEND_VRAM: CacheBackend
CACHE_BACKEND_RAM: CacheBackend
CACHE_BACKEND_DISK: CacheBackend
ON_NO_ROOM_UNSPECIFIED: OnNoRoom
ON_NO_ROOM_ERROR: OnNoRoom
ON_NO_ROOM_EXACT: OnNoRoom
PHASE_UNSPECIFIED: Phase
PHASE_QUEUED: Phase
PHASE_ENCODE: Phase
PHASE_PREFILL: Phase
PHASE_DENOISE: Phase
PHASE_COMMIT: Phase
PHASE_DECODE: Phase
PHASE_FINISH: Phase
PHASE_REFINE: Phase

class TensorPart(_message.Message):
    __slots__ = ("name", "data_type", "shape", "offset_bytes", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    data_type: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset_bytes: int
    data: bytes
    def __init__(self, name: _Optional[str] = ..., data_type: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., offset_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class AdapterUse(_message.Message):
    __slots__ = ("name", "strength")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STRENGTH_FIELD_NUMBER: _ClassVar[int]
    name: str
    strength: float
    def __init__(self, name: _Optional[str] = ..., strength: _Optional[float] = ...) -> None: ...

class AdapterChoice(_message.Message):
    __slots__ = ("name", "strength")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STRENGTH_FIELD_NUMBER: _ClassVar[int]
    name: str
    strength: float
    def __init__(self, name: _Optional[str] = ..., strength: _Optional[float] = ...) -> None: ...

class ClipSpec(_message.Message):
    __slots__ = ("num_frames", "width", "height", "steps", "video_shift", "audio_shift", "sink", "window", "kv_storage", "seed", "mode", "adapters")
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_SHIFT_FIELD_NUMBER: _ClassVar[int]
    AUDIO_SHIFT_FIELD_NUMBER: _ClassVar[int]
    SINK_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    KV_STORAGE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    num_frames: int
    width: int
    height: int
    steps: int
    video_shift: float
    audio_shift: float
    sink: int
    window: int
    kv_storage: KvStorage
    seed: int
    mode: SamplingMode
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterUse]
    def __init__(self, num_frames: _Optional[int] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., steps: _Optional[int] = ..., video_shift: _Optional[float] = ..., audio_shift: _Optional[float] = ..., sink: _Optional[int] = ..., window: _Optional[int] = ..., kv_storage: _Optional[_Union[KvStorage, str]] = ..., seed: _Optional[int] = ..., mode: _Optional[_Union[SamplingMode, str]] = ..., adapters: _Optional[_Iterable[_Union[AdapterUse, _Mapping]]] = ...) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("name", "file_name", "sha256", "format", "min_rank", "max_rank", "min_alpha", "max_alpha", "num_bound_modules", "num_modules", "num_parameters", "default_strength", "is_streaming", "partition", "trained_steps", "trained_video_shift", "trained_audio_shift")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    MIN_RANK_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    MIN_ALPHA_FIELD_NUMBER: _ClassVar[int]
    MAX_ALPHA_FIELD_NUMBER: _ClassVar[int]
    NUM_BOUND_MODULES_FIELD_NUMBER: _ClassVar[int]
    NUM_MODULES_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_STRENGTH_FIELD_NUMBER: _ClassVar[int]
    IS_STREAMING_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TRAINED_STEPS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_VIDEO_SHIFT_FIELD_NUMBER: _ClassVar[int]
    TRAINED_AUDIO_SHIFT_FIELD_NUMBER: _ClassVar[int]
    name: str
    file_name: str
    sha256: str
    format: str
    min_rank: int
    max_rank: int
    min_alpha: float
    max_alpha: float
    num_bound_modules: int
    num_modules: int
    num_parameters: int
    default_strength: float
    is_streaming: bool
    partition: str
    trained_steps: int
    trained_video_shift: float
    trained_audio_shift: float
    def __init__(self, name: _Optional[str] = ..., file_name: _Optional[str] = ..., sha256: _Optional[str] = ..., format: _Optional[str] = ..., min_rank: _Optional[int] = ..., max_rank: _Optional[int] = ..., min_alpha: _Optional[float] = ..., max_alpha: _Optional[float] = ..., num_bound_modules: _Optional[int] = ..., num_modules: _Optional[int] = ..., num_parameters: _Optional[int] = ..., default_strength: _Optional[float] = ..., is_streaming: _Optional[bool] = ..., partition: _Optional[str] = ..., trained_steps: _Optional[int] = ..., trained_video_shift: _Optional[float] = ..., trained_audio_shift: _Optional[float] = ...) -> None: ...

class ModelPart(_message.Message):
    __slots__ = ("component", "layout", "source", "data_types", "num_parameters", "num_bytes")
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPES_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    component: str
    layout: str
    source: str
    data_types: str
    num_parameters: int
    num_bytes: int
    def __init__(self, component: _Optional[str] = ..., layout: _Optional[str] = ..., source: _Optional[str] = ..., data_types: _Optional[str] = ..., num_parameters: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class TimeRange(_message.Message):
    __slots__ = ("start_s", "end_s")
    START_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    start_s: float
    end_s: float
    def __init__(self, start_s: _Optional[float] = ..., end_s: _Optional[float] = ...) -> None: ...

class FrozenCacheSpec(_message.Message):
    __slots__ = ("enabled", "contents", "precision", "text", "refresh_interval", "backend", "allow_disk", "vram_margin_gb", "shared", "on_no_room")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REFRESH_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ALLOW_DISK_FIELD_NUMBER: _ClassVar[int]
    VRAM_MARGIN_GB_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    ON_NO_ROOM_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    contents: CacheContents
    precision: CachePrecision
    text: CacheText
    refresh_interval: int
    backend: CacheBackend
    allow_disk: bool
    vram_margin_gb: float
    shared: bool
    on_no_room: OnNoRoom
    def __init__(self, enabled: _Optional[bool] = ..., contents: _Optional[_Union[CacheContents, str]] = ..., precision: _Optional[_Union[CachePrecision, str]] = ..., text: _Optional[_Union[CacheText, str]] = ..., refresh_interval: _Optional[int] = ..., backend: _Optional[_Union[CacheBackend, str]] = ..., allow_disk: _Optional[bool] = ..., vram_margin_gb: _Optional[float] = ..., shared: _Optional[bool] = ..., on_no_room: _Optional[_Union[OnNoRoom, str]] = ...) -> None: ...

class RefineSpec(_message.Message):
    __slots__ = ("steps", "audio_denoise", "video_denoise", "sampler", "scheduler", "cfg", "negative_prompt", "seed", "adapters", "audio_range", "cache", "compare")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    AUDIO_DENOISE_FIELD_NUMBER: _ClassVar[int]
    VIDEO_DENOISE_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    CFG_FIELD_NUMBER: _ClassVar[int]
    NEGATIVE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    AUDIO_RANGE_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    COMPARE_FIELD_NUMBER: _ClassVar[int]
    steps: int
    audio_denoise: float
    video_denoise: float
    sampler: str
    scheduler: str
    cfg: float
    negative_prompt: str
    seed: int
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterChoice]
    audio_range: TimeRange
    cache: FrozenCacheSpec
    compare: bool
    def __init__(self, steps: _Optional[int] = ..., audio_denoise: _Optional[float] = ..., video_denoise: _Optional[float] = ..., sampler: _Optional[str] = ..., scheduler: _Optional[str] = ..., cfg: _Optional[float] = ..., negative_prompt: _Optional[str] = ..., seed: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[AdapterChoice, _Mapping]]] = ..., audio_range: _Optional[_Union[TimeRange, _Mapping]] = ..., cache: _Optional[_Union[FrozenCacheSpec, _Mapping]] = ..., compare: _Optional[bool] = ...) -> None: ...

class RefineStarted(_message.Message):
    __slots__ = ("spec", "num_rows", "num_live_rows", "num_blocks", "backend", "reason", "cache_bytes", "transient_bytes", "has_cache")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_LIVE_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSIENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAS_CACHE_FIELD_NUMBER: _ClassVar[int]
    spec: RefineSpec
    num_rows: int
    num_live_rows: int
    num_blocks: int
    backend: CacheBackend
    reason: str
    cache_bytes: int
    transient_bytes: int
    has_cache: bool
    def __init__(self, spec: _Optional[_Union[RefineSpec, _Mapping]] = ..., num_rows: _Optional[int] = ..., num_live_rows: _Optional[int] = ..., num_blocks: _Optional[int] = ..., backend: _Optional[_Union[CacheBackend, str]] = ..., reason: _Optional[str] = ..., cache_bytes: _Optional[int] = ..., transient_bytes: _Optional[int] = ..., has_cache: _Optional[bool] = ...) -> None: ...

class RefineProgress(_message.Message):
    __slots__ = ("step", "num_steps", "mode", "reason", "num_forwards", "num_blocks_cached", "num_blocks_built", "num_blocks_exact", "num_query_rows", "num_key_rows", "num_fed_rows", "num_bytes_moved", "block_s", "outside_s", "cache_bytes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_BUILT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_EXACT_FIELD_NUMBER: _ClassVar[int]
    NUM_QUERY_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEY_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_FED_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_S_FIELD_NUMBER: _ClassVar[int]
    OUTSIDE_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    step: int
    num_steps: int
    mode: str
    reason: str
    num_forwards: int
    num_blocks_cached: int
    num_blocks_built: int
    num_blocks_exact: int
    num_query_rows: int
    num_key_rows: int
    num_fed_rows: int
    num_bytes_moved: int
    block_s: float
    outside_s: float
    cache_bytes: int
    def __init__(self, step: _Optional[int] = ..., num_steps: _Optional[int] = ..., mode: _Optional[str] = ..., reason: _Optional[str] = ..., num_forwards: _Optional[int] = ..., num_blocks_cached: _Optional[int] = ..., num_blocks_built: _Optional[int] = ..., num_blocks_exact: _Optional[int] = ..., num_query_rows: _Optional[int] = ..., num_key_rows: _Optional[int] = ..., num_fed_rows: _Optional[int] = ..., num_bytes_moved: _Optional[int] = ..., block_s: _Optional[float] = ..., outside_s: _Optional[float] = ..., cache_bytes: _Optional[int] = ...) -> None: ...

class AudioDistance(_message.Message):
    __slots__ = ("latents", "log_mel_db", "rms_ratio")
    LATENTS_FIELD_NUMBER: _ClassVar[int]
    LOG_MEL_DB_FIELD_NUMBER: _ClassVar[int]
    RMS_RATIO_FIELD_NUMBER: _ClassVar[int]
    latents: float
    log_mel_db: float
    rms_ratio: float
    def __init__(self, latents: _Optional[float] = ..., log_mel_db: _Optional[float] = ..., rms_ratio: _Optional[float] = ...) -> None: ...

class RefinedAudio(_message.Message):
    __slots__ = ("latents_sha256", "num_samples", "audio_health", "audio_health_before", "change", "against_exact", "speed_ratio", "sampling_s", "is_warm")
    LATENTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    AUDIO_HEALTH_FIELD_NUMBER: _ClassVar[int]
    AUDIO_HEALTH_BEFORE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    AGAINST_EXACT_FIELD_NUMBER: _ClassVar[int]
    SPEED_RATIO_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_S_FIELD_NUMBER: _ClassVar[int]
    IS_WARM_FIELD_NUMBER: _ClassVar[int]
    latents_sha256: str
    num_samples: int
    audio_health: AudioHealth
    audio_health_before: AudioHealth
    change: AudioDistance
    against_exact: AudioDistance
    speed_ratio: float
    sampling_s: float
    is_warm: bool
    def __init__(self, latents_sha256: _Optional[str] = ..., num_samples: _Optional[int] = ..., audio_health: _Optional[_Union[AudioHealth, _Mapping]] = ..., audio_health_before: _Optional[_Union[AudioHealth, _Mapping]] = ..., change: _Optional[_Union[AudioDistance, _Mapping]] = ..., against_exact: _Optional[_Union[AudioDistance, _Mapping]] = ..., speed_ratio: _Optional[float] = ..., sampling_s: _Optional[float] = ..., is_warm: _Optional[bool] = ...) -> None: ...

class RefineFailed(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class InitSegment(_message.Message):
    __slots__ = ("data", "mime_type", "video_encoder", "audio_encoder")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MIME_TYPE_FIELD_NUMBER: _ClassVar[int]
    VIDEO_ENCODER_FIELD_NUMBER: _ClassVar[int]
    AUDIO_ENCODER_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    mime_type: str
    video_encoder: str
    audio_encoder: str
    def __init__(self, data: _Optional[bytes] = ..., mime_type: _Optional[str] = ..., video_encoder: _Optional[str] = ..., audio_encoder: _Optional[str] = ...) -> None: ...

class Fragment(_message.Message):
    __slots__ = ("data", "fragment_index", "chunk_index", "start_ticks", "duration_ticks", "first_frame", "num_frames", "num_samples_total", "is_keyframe")
    DATA_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    START_TICKS_FIELD_NUMBER: _ClassVar[int]
    DURATION_TICKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FRAME_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    IS_KEYFRAME_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    fragment_index: int
    chunk_index: int
    start_ticks: int
    duration_ticks: int
    first_frame: int
    num_frames: int
    num_samples_total: int
    is_keyframe: bool
    def __init__(self, data: _Optional[bytes] = ..., fragment_index: _Optional[int] = ..., chunk_index: _Optional[int] = ..., start_ticks: _Optional[int] = ..., duration_ticks: _Optional[int] = ..., first_frame: _Optional[int] = ..., num_frames: _Optional[int] = ..., num_samples_total: _Optional[int] = ..., is_keyframe: _Optional[bool] = ...) -> None: ...

class PreviewSpec(_message.Message):
    __slots__ = ("max_side", "every_steps")
    MAX_SIDE_FIELD_NUMBER: _ClassVar[int]
    EVERY_STEPS_FIELD_NUMBER: _ClassVar[int]
    max_side: int
    every_steps: int
    def __init__(self, max_side: _Optional[int] = ..., every_steps: _Optional[int] = ...) -> None: ...

class Preview(_message.Message):
    __slots__ = ("data", "media_type", "width", "height", "chunk_index", "step", "num_steps")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    media_type: str
    width: int
    height: int
    chunk_index: int
    step: int
    num_steps: int
    def __init__(self, data: _Optional[bytes] = ..., media_type: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., chunk_index: _Optional[int] = ..., step: _Optional[int] = ..., num_steps: _Optional[int] = ...) -> None: ...

class PreviewMap(_message.Message):
    __slots__ = ("weights", "bias")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    bias: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, weights: _Optional[_Iterable[float]] = ..., bias: _Optional[_Iterable[float]] = ...) -> None: ...

class Artifact(_message.Message):
    __slots__ = ("name", "media_type", "size_bytes", "sha256", "relative_path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    media_type: str
    size_bytes: int
    sha256: str
    relative_path: str
    def __init__(self, name: _Optional[str] = ..., media_type: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., relative_path: _Optional[str] = ...) -> None: ...

class AudioHealth(_message.Message):
    __slots__ = ("std", "peak", "dc_offset", "num_clipped_samples", "normalisation_divisor")
    STD_FIELD_NUMBER: _ClassVar[int]
    PEAK_FIELD_NUMBER: _ClassVar[int]
    DC_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_CLIPPED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NORMALISATION_DIVISOR_FIELD_NUMBER: _ClassVar[int]
    std: float
    peak: float
    dc_offset: float
    num_clipped_samples: int
    normalisation_divisor: float
    def __init__(self, std: _Optional[float] = ..., peak: _Optional[float] = ..., dc_offset: _Optional[float] = ..., num_clipped_samples: _Optional[int] = ..., normalisation_divisor: _Optional[float] = ...) -> None: ...
