"""A clip's bytes as frames and samples, and its frames as a sheet to look at."""

from __future__ import annotations

from io import BytesIO

import av
import torch
from torch import Tensor

from core.geometry import AUDIO_CHANNELS


def decoded(data: bytes) -> tuple[Tensor, Tensor]:
    """Frames `[F, H, W, 3]` uint8 and sound `[2, S]` float32 of a file, every sample at its true place."""
    with av.open(BytesIO(data)) as file:
        frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in file.decode(video=0)]
    return torch.stack(frames), decoded_sound(data)


def decoded_sound(data: bytes) -> Tensor:
    """The sound of a file, `[2, S]` float32; what comes before its first instant is left out."""
    pieces = []
    with av.open(BytesIO(data)) as file:
        for frame in file.decode(audio=0):
            assert frame.pts is not None
            pieces.append((frame.pts, torch.from_numpy(frame.to_ndarray())))
    sound = torch.zeros(AUDIO_CHANNELS, max(start + piece.shape[1] for start, piece in pieces))
    for start, piece in pieces:
        sound[:, max(start, 0) : start + piece.shape[1]] = piece[:, max(-start, 0) :]
    return sound


def contact_sheet(frames: Tensor, num_columns: int, num_rows: int) -> Tensor:
    """Frames at even distances, in reading order, `[rows * H, columns * W, 3]` uint8."""
    picked = frames[torch.linspace(0, len(frames) - 1, num_columns * num_rows).round().long()]
    height, width = frames.shape[1:3]
    grid = picked.view(num_rows, num_columns, height, width, 3).transpose(1, 2)
    return grid.reshape(num_rows * height, num_columns * width, 3)
