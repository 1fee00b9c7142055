"""Latents to rows of the transformer and back, and where the rows of a chunk lie in space and time.

A chunk's rows are its audio (all of left, then all of right), then its video (latent, patch row, patch column); those
of a clip sampled at once are its text, then the same of the whole clip.
Source: docs/reference/raven-streaming.md §2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.geometry import (
    AUDIO_CHANNELS,
    PATCH,
    UNITS_PER_FRAME,
    Chunk,
    chunk_positions,
    dense_positions,
    spatial_axis,
)


@dataclass(frozen=True)
class ChunkLatents:
    """One chunk or a whole clip of both streams, or a quantity of the same shape (noise, velocity)."""

    video: Tensor
    """`[1, 24, T, H, W]` float32."""
    audio: Tensor
    """`[1, 32, 2, A]` float32."""

    def of(self, chunk: Chunk) -> ChunkLatents:
        """A chunk of a whole clip's latents, as views."""
        return self.span(chunk, chunk)

    def span(self, first: Chunk, last: Chunk) -> ChunkLatents:
        """The chunks from `first` to `last` of a whole clip's latents, as views."""
        return ChunkLatents(
            self.video[:, :, first.video_start : last.video_stop],
            self.audio[..., first.audio_start : last.audio_stop],
        )


def joined(parts: Sequence[ChunkLatents]) -> ChunkLatents:
    """Latents one after the other in time, in memory of their own."""
    return ChunkLatents(torch.cat([part.video for part in parts], 2), torch.cat([part.audio for part in parts], 3))


def on_device(latents: ChunkLatents, device: torch.device) -> ChunkLatents:
    """The same on a device: the very tensors where they are there."""
    return ChunkLatents(latents.video.to(device), latents.audio.to(device))


def middle_frame(latents: ChunkLatents) -> Tensor:
    """The latent frame in the middle of the video, `[24, H, W]`: a view."""
    return latents.video[0, :, latents.video.shape[2] // 2]


def audio_rows(audio: Tensor) -> Tensor:
    """`[1, 32, 2, A]` to `[2 A, 32]`."""
    return audio[0].permute(1, 2, 0).flatten(0, 1)


def rows_to_audio(rows: Tensor) -> Tensor:
    """`[2 A, 32]` to `[1, 32, 2, A]`."""
    audio: Tensor = rows.unflatten(0, (AUDIO_CHANNELS, -1)).permute(2, 0, 1)[None]
    return audio


def video_rows(video: Tensor) -> Tensor:
    """`[1, 24, T, H, W]` to `[T H/2 W/2, 96]`; features run channel, patch row, patch column."""
    _, channels, latents, height, width = video.shape
    patches = video[0].reshape(channels, latents, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(1, 2, 4, 0, 3, 5).reshape(-1, channels * PATCH * PATCH)


def rows_to_video(rows: Tensor, latents: int, height: int, width: int) -> Tensor:
    """`[T H/2 W/2, 96]` to `[1, 24, T, H, W]`; `height` and `width` count latents."""
    patches = rows.reshape(latents, height // PATCH, width // PATCH, -1, PATCH, PATCH)
    return patches.permute(3, 0, 1, 4, 2, 5).reshape(1, -1, latents, height, width)


def chunk_position_ids(chunk: Chunk, num_tokens: int, height: int, width: int) -> Tensor:
    """(t, h, w) of a chunk's rows, `[N, 3]` float64 on the host; `height` and `width` count latents."""
    return torch.tensor(chunk_positions(chunk, num_tokens, height, width), dtype=torch.float64)


def dense_position_ids(num_frames: int, num_tokens: int, height: int, width: int) -> Tensor:
    """(t, h, w) of a dense clip's rows, `[E + N, 3]` float64 on the host; `height` and `width` count latents."""
    return torch.tensor(dense_positions(num_frames, num_tokens, height, width), dtype=torch.float64)


def keyframe_position_ids(frame: int, num_tokens: int, height: int, width: int) -> Tensor:
    """(t, h, w) of the rows of a keyframe at a pixel frame, `[H/2 W/2, 3]` float64; it moves no other row."""
    t = num_tokens + UNITS_PER_FRAME * frame
    h_axis, w_axis = spatial_axis(height, height, width), spatial_axis(width, height, width)
    return torch.tensor([(t, h, w) for h in h_axis for w in w_axis], dtype=torch.float64)
