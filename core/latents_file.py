"""What a file of a clip's latents says: the format of `latents.safetensors`, apart from its bytes."""

from __future__ import annotations

from core.geometry import (
    AUDIO_CHANNELS,
    AUDIO_LATENT_CHANNELS,
    VIDEO_LATENT_CHANNELS,
    latent_size,
    num_audio_latents,
    num_video_latents,
)
from core.request import ClipValues

FORMAT = "h3stream-latents-1"
"""Says how `video` `[1, 24, T, H, W]` and `audio` `[1, 32, 2, A]` are to be read: float32, normalised, final."""
SHIFTS = ("video_shift", "audio_shift")
"""Names in its metadata of the shifts that the clip was sampled with, as Python writes floats; they may be missing."""
FLOAT_BYTES = 4
TIME_AXES = {"video": 2, "audio": 3}
"""The axis of each tensor that counts latents."""


def latent_shapes(clip: ClipValues) -> dict[str, tuple[int, ...]]:
    """Shapes of a valid clip's latents by their names in the file."""
    size = latent_size(clip.height), latent_size(clip.width)
    return {
        "video": (1, VIDEO_LATENT_CHANNELS, num_video_latents(clip.num_frames), *size),
        "audio": (1, AUDIO_LATENT_CHANNELS, AUDIO_CHANNELS, num_audio_latents(clip.num_frames)),
    }
