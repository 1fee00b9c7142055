"""The seeded generator of a clip and the order of its draws, which streaming and dense clips, and refinements, do not
share.

Drawn on the CPU, so a seed means the same clip on every device; torch's CPU generator uses the low 32 bits of it. The
global generator is neither read nor written.
Source: docs/reference/raven-streaming.md §5.2 (streaming), docs/reference/h3-model.md §7 (dense).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.geometry import (
    AUDIO_CHANNELS,
    AUDIO_LATENT_CHANNELS,
    VIDEO_LATENT_CHANNELS,
    Chunk,
    chunk_table,
    latent_size,
    num_audio_latents,
    num_video_latents,
)
from h3stream.request import ClipSpec
from services.dit.rows import ChunkLatents, joined, on_device, rows_to_audio


@dataclass(frozen=True)
class NoiseSegment:
    """A seed and where it begins to hold."""

    first_chunk: int
    """The first chunk."""
    seed: int
    """The seed."""


class ClipNoise:
    """Every draw of a streaming clip: initial noise, context noise, then two draws a step.

    Of a clip of several seeds, each chunk's draws are those of a clip made with its seed from the beginning.
    """

    def __init__(self, clip: ClipSpec, device: torch.device, segments: Sequence[NoiseSegment] = ()) -> None:
        """segments: the first from chunk 0, ascending, each within the clip; none: the clip's own seed throughout."""
        self._device = device
        self._canvas = (latent_size(clip.height), latent_size(clip.width))
        chunks = chunk_table(clip.num_frames)
        segments = segments or (NoiseSegment(0, clip.seed),)
        stops = (*(segment.first_chunk for segment in segments[1:]), len(chunks))
        self._generators: list[torch.Generator] = []
        """Of each chunk: one generator for all chunks of a segment."""
        initial, context = [], []
        for segment, stop in zip(segments, stops, strict=True):
            generator = torch.Generator().manual_seed(segment.seed)
            own = chunks[segment.first_chunk : stop]
            # The order of the four matters, and so does drawing the whole clip at once: all later draws share the
            # stream.
            whole = num_video_latents(clip.num_frames), num_audio_latents(clip.num_frames)
            initial.append(self._draw(generator, *whole).span(own[0], own[-1]))
            context.append(self._draw(generator, *whole).span(own[0], own[-1]))
            for chunk in chunks[: segment.first_chunk]:
                for _ in range(clip.steps):  # what the seed's own clip would have drawn by then
                    self._draw(generator, chunk.num_video_latents, chunk.num_audio_latents)
            self._generators += [generator] * len(own)
        self._initial = on_device(joined(initial), device)
        self._context = on_device(joined(context), device)

    def initial(self, chunk: Chunk) -> ChunkLatents:
        """What a chunk's first step starts from."""
        return self._initial.of(chunk)

    def context(self, chunk: Chunk) -> ChunkLatents:
        """What a finished chunk is re-noised with in its clean forward."""
        return self._context.of(chunk)

    def step(self, chunk: Chunk) -> ChunkLatents:
        """Fresh noise of a chunk's next step. Drawn even when the next sigma is 0: later chunks share the stream."""
        drawn = self._draw(self._generators[chunk.index], chunk.num_video_latents, chunk.num_audio_latents)
        return on_device(drawn, self._device)

    def state(self, chunk: Chunk) -> Tensor:
        """Where the stream that a chunk's steps draw from stands."""
        return self._generators[chunk.index].get_state()

    def restore(self, chunk: Chunk, state: Tensor) -> None:
        """Takes that stream back to where it stood."""
        self._generators[chunk.index].set_state(state)

    def _draw(self, generator: torch.Generator, video_latents: int, audio_latents: int) -> ChunkLatents:
        video = torch.randn((1, VIDEO_LATENT_CHANNELS, video_latents, *self._canvas), generator=generator)
        audio = torch.randn((1, AUDIO_LATENT_CHANNELS, AUDIO_CHANNELS, audio_latents), generator=generator)
        return ChunkLatents(video, audio)


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
