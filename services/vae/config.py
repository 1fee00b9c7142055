"""The settings of the VAE worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from core.budget import VIDEO_BIT_RATE
from h3stream.errors import ConfigError
from services.common.config import WorkerConfig

VIDEO_DTYPES = ("auto", "float32", "float16")


@dataclass(frozen=True)
class VaeConfig(WorkerConfig):
    """Where the VAEs compute, and how their output is encoded."""

    video_dtype: str = "auto"
    """Compute dtype of the video decoder: "float32", "float16", or "auto": float16 on a GPU, float32 on a CPU, where
    float16 is a hundred times slower. Sound is always decoded in float32: lower precision is audibly worse."""
    video_bit_rate: int = VIDEO_BIT_RATE
    """Bits per second of the H.264 track, on average and at most over the encoder's buffer."""
    video_encoder: str | None = None
    """Name of the only H.264 encoder to use; without it, the first that works here."""
    video_vae: Path | None = None
    """File or folder of the video VAE in any published layout, in place of the model directory's."""
    audio_vae: Path | None = None
    """File or folder of the audio VAE in any published layout, in place of the model directory's."""
    preview_map_cache: Path | None = None
    """Directory that keeps the map which stills are made with, for the next start; made if need be."""
    artifact_root: Path | None = None
    """Folder below which callers may have artifacts written and read; without it, wherever this process may itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.video_dtype not in VIDEO_DTYPES:
            raise ConfigError(f"video_dtype is {self.video_dtype!r}; it must be one of {', '.join(VIDEO_DTYPES)}")
        if not 100_000 <= self.video_bit_rate <= 100_000_000:
            raise ConfigError(f"video_bit_rate is {self.video_bit_rate}; it must be 100000 to 100000000 bits a second")
        self._require("video_vae")
        self._require("audio_vae")
