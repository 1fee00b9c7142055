"""What a server tells about a job and about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from h3stream.events import Phase, Plan
from h3stream.request import ClipSpec

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled", "unknown"]
"""State of a job; "unknown" stands for one that a newer server has and this version has not."""


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


@dataclass(frozen=True)
class ServerInfo:
    """A server's versions, model, limits, defaults and settings."""

    server_version: str
    """Version of the server."""
    library_versions: Mapping[str, str]
    """Versions of the libraries that decide results."""
    model_name: str
    """Name of the model directory."""
    weight_digests: Mapping[str, str]
    """Weights and adapters, name to digest."""
    default_clip: ClipSpec
    """Values that a request's omitted fields take."""
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
