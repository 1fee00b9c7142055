"""h3stream: a prompt in, video with sound out while it is being sampled.

    from h3stream import Client

    with Client("127.0.0.1:50051") as client, open("clip.mp4", "wb") as clip:
        for event in client.generate("a red kite over the sea", num_frames=39):
            clip.write(event.media)

`h3stream serve --model DIR` starts a server at that address. The file is playable from the first fragment on.
"""

from h3stream.adapters import AdapterChoice, AdapterUse
from h3stream.aio import AsyncClient, AsyncGeneration
from h3stream.client import Client, Generation
from h3stream.errors import (
    ArtifactNotFoundError,
    BrokenStreamError,
    DeadlineError,
    DeviceMemoryError,
    FieldViolation,
    GenerationError,
    InvalidRequestError,
    JobCancelledError,
    JobNotFoundError,
    ModelLoadingError,
    MuxError,
    NotReadyError,
    OffGridError,
    OverloadedError,
    PhaseError,
    UnsupportedError,
    WorkerLostError,
)
from h3stream.events import (
    Accepted,
    Artifact,
    AudioDistance,
    AudioHealth,
    ChunkPlan,
    Completed,
    Event,
    Fragment,
    InitSegment,
    JobWarning,
    PhaseChange,
    Plan,
    PlanWarning,
    Preview,
    Progress,
    RefinedAudio,
    RefinedFragment,
    RefinedInitSegment,
    RefineFailed,
    RefineProgress,
    RefineStarted,
    StreamComplete,
    Timings,
)
from h3stream.job import AdapterInfo, Job, JobError, ModelPart, RemovedArtifact, ServerInfo
from h3stream.refine import FrozenCacheSpec, RefineSpec, TimeRange
from h3stream.request import ClipSpec, GenerateRequest, PreviewSpec

__all__ = [
    "Accepted",
    "AdapterChoice",
    "AdapterInfo",
    "AdapterUse",
    "Artifact",
    "ArtifactNotFoundError",
    "AsyncClient",
    "AsyncGeneration",
    "AudioDistance",
    "AudioHealth",
    "BrokenStreamError",
    "ChunkPlan",
    "Client",
    "ClipSpec",
    "Completed",
    "DeadlineError",
    "DeviceMemoryError",
    "Event",
    "FieldViolation",
    "Fragment",
    "FrozenCacheSpec",
    "GenerateRequest",
    "Generation",
    "GenerationError",
    "InitSegment",
    "InvalidRequestError",
    "Job",
    "JobCancelledError",
    "JobError",
    "JobNotFoundError",
    "JobWarning",
    "ModelLoadingError",
    "ModelPart",
    "MuxError",
    "NotReadyError",
    "OffGridError",
    "OverloadedError",
    "PhaseChange",
    "PhaseError",
    "Plan",
    "PlanWarning",
    "Preview",
    "PreviewSpec",
    "Progress",
    "RefineFailed",
    "RefineProgress",
    "RefineSpec",
    "RefineStarted",
    "RefinedAudio",
    "RefinedFragment",
    "RefinedInitSegment",
    "RemovedArtifact",
    "ServerInfo",
    "StreamComplete",
    "TimeRange",
    "Timings",
    "UnsupportedError",
    "WorkerLostError",
]
