"""What a server tells about a job and about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, get_args

from h3stream.events import Artifact, Phase, Plan
from h3stream.request import ClipSpec, JobPriority, PreviewSpec

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled", "unknown"]
"""State of a job; "unknown" stands for one that a newer server has and this version has not."""
JOB_STATES: tuple[JobState, ...] = tuple(state for state in get_args(JobState) if state != "unknown")


@dataclass(frozen=True)
class JobError:
    """Why a job failed."""

    reason: str
    """Stable name in UPPER_SNAKE_CASE."""
    message: str
    """What happened, in a sentence."""
    phase: Phase
    """The phase it happened in."""
    chunk_index: int
    """The chunk it happened in; -1 where there was none."""


@dataclass(frozen=True)
class RemovedArtifact:
    """An artifact that has been removed to make room."""

    name: str
    """Its name."""
    remove_time: datetime
    """When it was removed, in UTC."""
    message: str
    """Which limit removed it, in a sentence."""


@dataclass(frozen=True)
class Job:
    """What is known of a job."""

    job_id: str
    """The job."""
    state: JobState
    """Its state."""
    plan: Plan
    """What it makes."""
    num_events: int
    """Events so far."""
    num_frames_emitted: int
    """Frames emitted so far."""
    create_time: datetime
    """When it was accepted, in UTC."""
    end_time: datetime | None = None
    """When it ended, in UTC."""
    error: JobError | None = None
    """Why it failed."""
    artifacts: tuple[Artifact, ...] = ()
    """Artifacts that can be downloaded."""
    removed_artifacts: tuple[RemovedArtifact, ...] = ()
    """Artifacts that there were and that have been removed to make room."""
    source_job_id: str = ""
    """The job whose clip this one refines; empty for a job that makes a clip, or refines an upload."""
    tenant: str = ""
    """Whose job it is."""
    prompt: str = ""
    """What it shows and sounds like."""
    priority: JobPriority = "normal"
    """Which of its tenant's jobs come first."""
    queue_position: int = 0
    """Jobs ahead of it while it is queued."""
    num_resumes: int = 0
    """How often it was taken up again after a worker or the server was lost."""


@dataclass(frozen=True)
class JobPage:
    """Some jobs of a list."""

    jobs: tuple[Job, ...]
    """The newest first."""
    next_page_token: str
    """What asks for the next page; empty: this is the last."""


@dataclass(frozen=True)
class TenantLimits:
    """What a tenant may have at a time; 0: no limit but the server's own."""

    max_running_jobs: int = 0
    """Jobs on lanes."""
    max_queued_jobs: int = 0
    """Jobs that wait."""
    max_pending_frames: int = 0
    """Frames of all clips that wait or are being made."""
    max_stored_bytes: int = 0
    """Bytes of the events and artifacts of jobs that have ended."""


@dataclass(frozen=True)
class TenantUsage:
    """What a tenant has."""

    num_running_jobs: int = 0
    """Jobs on lanes."""
    num_queued_jobs: int = 0
    """Jobs that wait."""
    num_pending_frames: int = 0
    """Frames of all clips that wait or are being made."""
    num_stored_bytes: int = 0
    """Bytes of the events and artifacts of jobs that have ended."""


@dataclass(frozen=True)
class Caller:
    """Who a caller is, and what it may do."""

    tenant: str
    """The tenant whose jobs it makes; "default" where callers are not authenticated."""
    scopes: tuple[str, ...]
    """What its key allows: "generate", "read_own", "read_all", "admin"."""
    limits: TenantLimits
    """What its tenant may have at a time."""
    usage: TenantUsage
    """What its tenant has now."""


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter of a server's registry, as its file describes it."""

    name: str
    """What requests call it."""
    file_name: str
    """Name of its file, with its folder's where the file is called as PEFT calls all of them."""
    sha256: str
    """SHA-256 of its bytes; empty while the model is being loaded."""
    format: str
    """Format of its keys: "raven", "comfyui", "bare", "musubi-tuner", "diffusers", "peft", "lightx2v" or
    "diffsynth"."""
    min_rank: int
    """Smallest rank of its modules."""
    max_rank: int
    """Largest rank of its modules."""
    min_alpha: float
    """Smallest alpha of its modules; the update is `alpha / rank * up @ down`."""
    max_alpha: float
    """Largest alpha of its modules."""
    num_bound_modules: int
    """Modules of the DiT that it changes, counted as the file names them; 0 while the model is being loaded."""
    num_modules: int
    """Modules that the file names."""
    num_parameters: int
    """Weights in the file."""
    default_strength: float
    """Strength it has where a request does not say."""
    is_streaming: bool
    """Whether it is the adapter that streaming needs."""
    partition: str
    """DiT weights it was trained on, "fl2va" or "ref2va"; empty if unknown."""
    trained_steps: int | None = None
    """Noise forwards it was trained for; None if unknown."""
    trained_video_shift: float | None = None
    """Shift of the video sigma grid it was trained with; None if unknown."""
    trained_audio_shift: float | None = None
    """Shift of the audio sigma grid it was trained with; None if unknown."""


@dataclass(frozen=True)
class ModelPart:
    """One part of a server's model, as its files describe it."""

    component: str
    """"dit", "video_vae", "audio_vae" or "text_encoder"."""
    layout: str
    """Layout of the files: "diffusers", "official", "comfyui" or "transformers"."""
    source: str
    """Name of the file or folder."""
    data_types: str
    """Element types of the stored weights that are read, most bytes first, e.g. "BF16, F32"."""
    num_parameters: int
    """Weights that are read."""
    num_bytes: int
    """Bytes of the weights that are read."""


@dataclass(frozen=True)
class ServerInfo:
    """A server's versions, model, limits, defaults and settings."""

    server_version: str
    """Version of the server."""
    library_versions: Mapping[str, str]
    """Versions of the libraries that decide results."""
    model_name: str
    """Name of the model directory, or of the DiT's file or folder where there is none."""
    weight_digests: Mapping[str, str]
    """Weights and adapters, name to digest."""
    default_clip: ClipSpec
    """Values that a request's omitted fields take when it is streamed."""
    valid_num_frames: tuple[int, ...]
    """Frame counts that are accepted."""
    max_canvas_pixels: int
    """Largest width times height."""
    max_prompt_bytes: int
    """Largest prompt."""
    max_message_bytes: int
    """Largest message the server sends or takes."""
    max_queued_jobs: int
    """Jobs that may wait for a lane."""
    num_lanes: int
    """Lanes, each one GPU (or one slot of the host where there is none)."""
    settings: Mapping[str, str]
    """The server's settings by name, without secrets."""
    default_dense_clip: ClipSpec
    """Values that a request's omitted fields take in dense mode."""
    parts: tuple[ModelPart, ...]
    """Parts of the model, as their files describe them; empty while the model is being loaded."""
    adapters: tuple[AdapterInfo, ...]
    """Adapters that requests may name."""
    default_preview: PreviewSpec
    """Stills of a request that says nothing about them."""
    artifacts: tuple[str, ...]
    """Artifacts that a request may name."""
    default_artifacts: tuple[str, ...]
    """Those that are kept where a request names none."""
    caller: Caller | None = None
    """Who the caller is, and what it may do; None: the server is older than this client."""
    examples: tuple[str, ...] = ()
    """Prompts that the model's maker suggests, to try it with."""
