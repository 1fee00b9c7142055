"""Where torch ends: decoded tensors to what the encoders read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def to_rgb8(frames: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Frames `[1, 3, F, height, width]` float in [0, 1] as `[F, height, width, 3]` uint8 on the host.

    Clamped, times 255, plus a half, truncated: to the nearest level.
    """
    levels = (frames[0].clamp(0, 1) * 255 + 0.5).to(torch.uint8)  # a byte a value crosses the bus, not four
    return levels.permute(1, 2, 3, 0).contiguous().cpu().numpy()


def to_pcm(waveform: torch.Tensor) -> npt.NDArray[np.float32]:
    """A waveform `[2, S]` as float32 in numpy."""
    return waveform.float().cpu().numpy()


def to_array(latents: torch.Tensor) -> npt.NDArray[np.float32]:
    """Latents as float32 in numpy."""
    return latents.float().cpu().numpy()
