"""What a caller asks for, and what the server resolves it to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KvStorage = Literal["gpu", "cpu", "cpu_pinned"]
KV_STORAGES: tuple[KvStorage, ...] = ("gpu", "cpu", "cpu_pinned")


@dataclass(frozen=True)
class ClipSpec:
    """Everything that decides a streaming clip apart from prompt and weights; all values final."""

    num_frames: int
    """Frames at 24 per second: 17k + 5, k from 1 to 21."""
    width: int
    """Canvas width in pixels, a multiple of 32."""
    height: int
    """Canvas height in pixels, a multiple of 32."""
    steps: int
    """Noise forwards per chunk (NFE)."""
    video_shift: float
    """Shift of the video sigma grid."""
    audio_shift: float
    """Shift of the audio sigma grid."""
    sink: int
    """First KV cache entries kept for the whole clip; the text is entry 0 and counts."""
    window: int | None
    """Most recent chunks kept beside the sink; None keeps every chunk."""
    kv_storage: KvStorage
    """Where the KV cache lives."""
    seed: int
    """Seed of the clip's only random generator."""
