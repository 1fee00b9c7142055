"""What a stream of events yields: one frozen dataclass for each kind of event, and what the events hold.

Every event has `seq`, `job_id`, `media_time_ticks` and `media`. The bytes of `media`, joined in order, are a playable
fragmented MP4 at every moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from h3stream.refine import CacheBackend, RefineSpec, StepMode
from h3stream.request import Branch, ClipSpec, PreviewSpec

TICKS_PER_SECOND = 96_000
"""Media time counts in these: a frame is 4000 of them, an audio sample 3."""

Phase = Literal["queued", "encode", "prefill", "denoise", "commit", "decode", "finish", "refine", "unknown"]
"""What a generation is doing; "unknown" stands for a phase that a newer server has and this version has not."""


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk of a plan. Ranges are half-open."""

    video_start: int
    """First video latent."""
    video_stop: int
    """End of the video latents."""
    audio_start: int
    """First audio latent."""
    audio_stop: int
    """End of the audio latents."""
    num_frames_emitted: int
    """Frames that have left once this chunk is decoded."""


@dataclass(frozen=True)
class PlanWarning:
    """Something a caller should know before starting."""

    reason: str
    """Stable name in UPPER_SNAKE_CASE."""
    message: str
    """What it means, in a sentence."""


@dataclass(frozen=True)
class Plan:
    """What a request makes, in full."""

    clip: ClipSpec
    """The request with every default filled in."""
    chunks: tuple[ChunkPlan, ...]
    """The chunks, in order."""
    num_video_latents: int
    """Latent time steps of the video."""
    num_audio_latents: int
    """Latent time steps of the audio."""
    num_samples: int
    """Samples of each audio channel at 32 kHz."""
    num_noise_forwards: int
    """Noise forwards in all."""
    num_clean_forwards: int
    """Clean forwards in all; none in dense mode."""
    expected_stream_bytes: int
    """What the stream will weigh, roughly."""
    warnings: tuple[PlanWarning, ...]
    """What the caller should know before starting."""
    preview: PreviewSpec
    """Stills that will be made on the way."""
    artifacts: tuple[str, ...]
    """Names of the artifacts that will be kept."""
    refine_audio: RefineSpec | None = None
    """How the sound will be refined; None: it will not be."""
    branch: Branch | None = None
    """What the clip goes on from, prompt and seed filled in; None: it begins at its beginning."""


@dataclass(frozen=True)
class AudioDistance:
    """How far two sounds lie apart."""

    latents: float
    """Relative L2 distance of the latents."""
    log_mel_db: float
    """Mean absolute distance of the log-mel spectrograms, in dB."""
    rms_ratio: float
    """RMS of the one over that of the other."""


@dataclass(frozen=True)
class Artifact:
    """A file that a finished job left in the server's data directory."""

    name: str
    """What it is, e.g. "final.mp4"."""
    media_type: str
    """Its media type."""
    size_bytes: int
    """Its size."""
    sha256: str
    """SHA-256 of its bytes, lower-case hexadecimal."""
    relative_path: str
    """Path below the server's data directory."""


@dataclass(frozen=True)
class AudioHealth:
    """What was measured on the whole soundtrack before any normalisation."""

    std: float
    """Standard deviation over channels and samples."""
    peak: float
    """Largest magnitude; full scale is 1."""
    dc_offset: float
    """Mean of all samples."""
    num_clipped_samples: int
    """Samples at full scale."""
    normalisation_divisor: float
    """What final.mp4 divides the waveform by; the streamed sound is not divided."""


@dataclass(frozen=True)
class Timings:
    """How long a job took, in seconds from its admission to the lane."""

    first_fragment_s: float
    """Until the first fragment was emitted."""
    sampling_s: float
    """Until the last chunk was sampled."""
    total_s: float
    """Until everything was done."""
    num_frames_before_sampling_end: int
    """Frames emitted before the last chunk was sampled."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a job. An event of a kind that this version does not know arrives as a plain Event."""

    seq: int
    """Position in the job's events, from 0 without gaps."""
    job_id: str
    """The job."""
    media_time_ticks: int
    """End of the last frame emitted so far, in ticks of 1/96000 s."""
    elapsed_s: float = 0.0
    """Seconds since the job was accepted."""

    @property
    def media(self) -> bytes:
        """The next bytes of the media stream: those of an InitSegment or a Fragment, none for other events."""
        return b""

    @property
    def refined_media(self) -> bytes:
        """The next bytes of the refined rendition, a media stream of its own; none for other events."""
        return b""


@dataclass(frozen=True, kw_only=True)
class Accepted(Event):
    """The request was accepted; always event 0."""

    plan: Plan
    """What will be made."""


@dataclass(frozen=True, kw_only=True)
class PhaseChange(Event):
    """The job entered another phase."""

    phase: Phase
    """The phase."""
    chunk_index: int
    """The chunk it concerns; -1 where it concerns none."""


@dataclass(frozen=True, kw_only=True)
class Progress(Event):
    """The job is alive and this far."""

    phase: Phase
    """The phase."""
    chunk_index: int
    """The chunk being worked on; -1 where there is none, as while a dense clip is sampled."""
    num_chunks: int
    """Chunks in all."""
    step: int
    """Noise forwards of this chunk that are done, or of the whole clip in dense mode."""
    num_steps: int
    """Noise forwards of a chunk, or of the whole clip in dense mode."""
    num_frames_emitted: int
    """Frames emitted so far."""
    queue_position: int
    """Jobs ahead of this one while it is queued."""
    is_heartbeat: bool
    """True when nothing has moved since the event before."""


@dataclass(frozen=True, kw_only=True)
class _InitSegmentFields:
    """`ftyp` and `moov` of a rendition."""

    data: bytes
    """The bytes."""
    mime_type: str
    """MIME type with the codecs string."""
    video_encoder: str
    """Name of the H.264 encoder in use; empty where there are no pictures."""
    audio_encoder: str
    """Name of the AAC encoder in use."""


@dataclass(frozen=True, kw_only=True)
class _FragmentFields:
    """One `moof` and its `mdat`."""

    data: bytes
    """The bytes."""
    fragment_index: int
    """Position among the rendition's fragments, from 0."""
    chunk_index: int
    """The chunk whose latents completed these frames; -1 where there are no pictures."""
    start_ticks: int
    """Where it begins, in ticks of 1/96000 s."""
    duration_ticks: int
    """How long it lasts, in ticks of 1/96000 s."""
    first_frame: int
    """First frame, counted from 0."""
    num_frames: int
    """Number of frames; 0 where there are no pictures."""
    num_samples_total: int
    """Audio samples of each channel from the start of the stream to the end of this fragment."""
    is_keyframe: bool
    """Whether decoding can start here."""


@dataclass(frozen=True, kw_only=True)
class InitSegment(_InitSegmentFields, Event):
    """Start of the media stream: `ftyp` and `moov`. Comes once, before any fragment."""

    @property
    def media(self) -> bytes:
        """The bytes of the segment."""
        return self.data


@dataclass(frozen=True, kw_only=True)
class Fragment(_FragmentFields, Event):
    """Next piece of the media stream: one `moof` and its `mdat`."""

    @property
    def media(self) -> bytes:
        """The bytes of the fragment."""
        return self.data


@dataclass(frozen=True, kw_only=True)
class Preview(Event):
    """A still of what is being sampled: coarse, and replaced by the next."""

    data: bytes
    """The encoded picture; no part of the media stream."""
    media_type: str
    """Its media type, e.g. "image/jpeg"."""
    width: int
    """Its width in pixels."""
    height: int
    """Its height in pixels."""
    chunk_index: int
    """The chunk; -1 in dense mode."""
    step: int
    """Noise forwards of the chunk, or of the dense clip, that are done."""
    num_steps: int
    """Noise forwards of the chunk, or of the dense clip."""


@dataclass(frozen=True, kw_only=True)
class JobWarning(Event):
    """Something the caller should know that does not stop the job."""

    reason: str
    """Stable name in UPPER_SNAKE_CASE."""
    message: str
    """What it means, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class StreamComplete(Event):
    """The media stream is whole: init segment and every fragment have come."""

    num_fragments: int
    """Fragments sent."""
    num_bytes: int
    """Bytes of the init segment and all fragments."""
    num_frames: int
    """Frames sent."""
    num_samples: int
    """Audio samples sent, each channel."""


@dataclass(frozen=True, kw_only=True)
class Completed(Event):
    """The job succeeded; the last event."""

    artifacts: tuple[Artifact, ...]
    """Files it left on the server."""
    latents_sha256: str
    """SHA-256 over the bytes of all latents; equal for equal requests."""
    audio_health: AudioHealth
    """What was measured on the soundtrack."""
    timings: Timings
    """How long things took."""


@dataclass(frozen=True, kw_only=True)
class RefineStarted(Event):
    """The sound is about to be refined; what was delivered before stays as it is."""

    spec: RefineSpec
    """The request with every default filled in."""
    num_rows: int
    """Rows of a full forward: text, sound and video."""
    num_live_rows: int
    """Rows that a cached step computes."""
    num_blocks: int
    """Blocks of the model."""
    has_cache: bool
    """Whether there is a cache; without, every step is exact."""
    backend: CacheBackend
    """Where it lives."""
    reason: str
    """Why there, or why every step is exact, in a sentence."""
    cache_bytes: int
    """Size of the cache as computed beforehand; 0 where there is none."""
    transient_bytes: int
    """Device memory that a build takes beside it."""


@dataclass(frozen=True, kw_only=True)
class RefineProgress(Event):
    """A step of the refinement is done."""

    step: int
    """Steps done so far."""
    num_steps: int
    """Steps in all."""
    mode: StepMode
    """Whether it computed everything, and wrote the cache, or used it."""
    reason: str
    """Why it was built, or is exact; empty for a cached step."""
    num_forwards: int
    """Forwards of this step: one for each evaluation and branch."""
    num_blocks_cached: int
    """Blocks that used the cache, over all forwards of the step."""
    num_blocks_built: int
    """Blocks that wrote it."""
    num_blocks_exact: int
    """Blocks that did neither."""
    num_query_rows: int
    """Rows projected to queries, over all blocks and forwards."""
    num_key_rows: int
    """Rows projected to keys and values."""
    num_fed_rows: int
    """Rows fed forward."""
    num_bytes_moved: int
    """Bytes of the cache moved between host and device."""
    block_s: float
    """Seconds in the blocks."""
    outside_s: float
    """Seconds outside of them."""
    cache_bytes: int
    """Size of the cache as measured; 0 where there is none."""


@dataclass(frozen=True, kw_only=True)
class RefinedInitSegment(_InitSegmentFields, Event):
    """Start of the refined rendition: `ftyp` and `moov`. Comes once, before any of its fragments."""

    @property
    def refined_media(self) -> bytes:
        """The bytes of the segment."""
        return self.data


@dataclass(frozen=True, kw_only=True)
class RefinedFragment(_FragmentFields, Event):
    """Next piece of the refined rendition: the sound, with pictures where the video is not the source's."""

    @property
    def refined_media(self) -> bytes:
        """The bytes of the fragment."""
        return self.data


@dataclass(frozen=True, kw_only=True)
class RefinedAudio(Event):
    """The sound is refined; its rendition is whole."""

    latents_sha256: str
    """SHA-256 over the bytes of its latents."""
    num_samples: int
    """Samples of each channel: as many as before."""
    audio_health: AudioHealth
    """What was measured on it before any normalisation."""
    audio_health_before: AudioHealth
    """What was measured on the sound before."""
    change: AudioDistance
    """How far it lies from the sound before; `rms_ratio` is refined over before."""
    against_exact: AudioDistance | None = None
    """Where asked to compare: how far it lies from the exact result; `rms_ratio` is this over exact."""
    speed_ratio: float
    """Where asked to compare: seconds of the exact steps over seconds of these; else 0."""
    sampling_s: float
    """Seconds of the steps."""
    is_warm: bool
    """Whether the first step used the cache of an earlier refinement."""


@dataclass(frozen=True, kw_only=True)
class RefineFailed(Event):
    """The sound could not be refined; what was delivered before stays as it is, and the job succeeds."""

    reason: str
    """Stable name in UPPER_SNAKE_CASE."""
    message: str
    """What happened, in a sentence."""
