"""The seeded generator of a clip and the order of its draws, which streaming and dense clips, and refinements, do not
share.

Drawn on the CPU, so a seed means the same clip on every device; torch's CPU generator uses the low 32 bits of it. The
global generator is neither read nor written.
Source: docs/reference/raven-streaming.md §5.2 (streaming), docs/reference/h3-model.md §7 (dense).
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.geometry import (
    AUDIO_CHANNELS,
    AUDIO_LATENT_CHANNELS,
    VIDEO_LATENT_CHANNELS,
    Chunk,
    latent_size,
    num_audio_latents,
    num_video_latents,
)
from h3stream.request import ClipSpec
from services.dit.rows import ChunkLatents, rows_to_audio


class ClipNoise:
    """Every draw of a streaming clip: initial noise, context noise, then two draws a step."""

    def __init__(self, clip: ClipSpec, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(clip.seed)
        self._device = device
        self._canvas = (latent_size(clip.height), latent_size(clip.width))
        # The order of the four matters, and so does drawing the whole clip at once: all later draws share the stream.
        whole = (num_video_latents(clip.num_frames), num_audio_latents(clip.num_frames))
        self._initial = self._draw(*whole)
        self._context = self._draw(*whole)

    def initial(self, chunk: Chunk) -> ChunkLatents:
        """What a chunk's first step starts from."""
        return self._initial.of(chunk)

    def context(self, chunk: Chunk) -> ChunkLatents:
        """What a finished chunk is re-noised with in its clean forward."""
        return self._context.of(chunk)

    def step(self, chunk: Chunk) -> ChunkLatents:
        """Fresh noise of a chunk's next step. Drawn even when the next sigma is 0: later chunks share the stream."""
        return self._draw(chunk.num_video_latents, chunk.num_audio_latents)

    def state(self) -> Tensor:
        """Where the stream stands."""
        return self._generator.get_state()

    def restore(self, state: Tensor) -> None:
        """Goes back to where the stream stood."""
        self._generator.set_state(state)

    def _draw(self, video_latents: int, audio_latents: int) -> ChunkLatents:
        video = self._normal(1, VIDEO_LATENT_CHANNELS, video_latents, *self._canvas)
        audio = self._normal(1, AUDIO_LATENT_CHANNELS, AUDIO_CHANNELS, audio_latents)
        return ChunkLatents(video, audio)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float32).to(self._device)


def dense_noise(clip: ClipSpec, device: torch.device) -> ChunkLatents:
    """The only draws of a dense clip: its video as latents `[1, 24, T, H, W]`, then its audio as rows `[2 A, 32]`.

    Order and shapes are those of diffusers' pipeline: a CPU generator with the same seed gives it the same noise.
    """
    generator = torch.Generator().manual_seed(clip.seed)
    canvas = (latent_size(clip.height), latent_size(clip.width))
    video = torch.randn((1, VIDEO_LATENT_CHANNELS, num_video_latents(clip.num_frames), *canvas), generator=generator)
    rows = torch.randn(
        (AUDIO_CHANNELS * num_audio_latents(clip.num_frames), AUDIO_LATENT_CHANNELS), generator=generator
    )
    return ChunkLatents(video.to(device), rows_to_audio(rows).contiguous().to(device))


def refine_noise(seed: int, clip: ClipSpec, device: torch.device) -> ChunkLatents:
    """The draws of a refinement: its video, then its audio, both as latents. The audio's depend on the video's size.

    Source: docs/reference/audio-refine.md §3.
    """
    generator = torch.Generator().manual_seed(seed)
    canvas = (latent_size(clip.height), latent_size(clip.width))
    video = torch.randn((1, VIDEO_LATENT_CHANNELS, num_video_latents(clip.num_frames), *canvas), generator=generator)
    audio = torch.randn(
        (1, AUDIO_LATENT_CHANNELS, AUDIO_CHANNELS, num_audio_latents(clip.num_frames)), generator=generator
    )
    return ChunkLatents(video.to(device), audio.to(device))
