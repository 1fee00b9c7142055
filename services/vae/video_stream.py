"""Video latents in, final frames out, chunk by chunk, equal to a whole-clip decode bit for bit.

A decode looks at seven latents, five of its own and two of lookahead, and its last five frames are blended into the
first five of the next decode. This object carries the lookahead and those five frames; nothing else is kept.
Source: docs/reference/raven-streaming.md §10, docs/reference/h3-model.md §4.3.
"""

from __future__ import annotations

from typing import Any

import torch

from core.geometry import FRAMES_PER_CHUNK, LATENTS_PER_CHUNK, TAIL_FRAMES, TAIL_LATENTS
from h3stream.errors import PhaseError
from services.vae.weights import LatentStatistics

WINDOW_LATENTS = LATENTS_PER_CHUNK + TAIL_LATENTS
"""Latents of one decode. Positions are relative to the window, so no other size gives the same picture."""

PIXEL_MEAN = (0.485, 0.456, 0.406)
PIXEL_STD = (0.229, 0.224, 0.225)
"""ImageNet statistics, in which the decoder's pixels are normalised (published pipeline of MiniMax H3)."""


class VideoStream:
    """The incremental video decoder of one clip."""

    def __init__(self, vae: Any, statistics: LatentStatistics, device: torch.device) -> None:
        """vae: the published video VAE, on `device` whenever latents are pushed."""
        self._vae = vae
        # The dtype of the first module that reads the latents is the one they are de-normalised in.
        dtype: torch.dtype = self._vae.post_quant_conv.weight.dtype
        self._mean = _per_channel(statistics.mean, device, dtype)
        self._std = _per_channel(statistics.std, device, dtype)
        self._pixel_mean = _per_channel(PIXEL_MEAN, device, torch.float32)
        self._pixel_std = _per_channel(PIXEL_STD, device, torch.float32)
        self._latents: torch.Tensor | None = None  # [1, 24, < 7, H, W], not yet decoded
        self._overlap: torch.Tensor | None = None  # [1, 3, 5, height, width], raw: blended before it is finalised

    @torch.inference_mode()
    def push(self, latents: torch.Tensor) -> list[torch.Tensor]:
        """Frames that become final with these latents: `[1, 3, 17, height, width]` float32 in [0, 1], one per decode.

        latents: `[1, 24, t, H, W]` float32, normalised, the next ones of the clip.
        Raises PhaseError if the decoder returns anything that is not a number.
        """
        pending = latents if self._latents is None else torch.cat([self._latents, latents], dim=2)
        finals = []
        while pending.shape[2] >= WINDOW_LATENTS:
            finals.append(self._decode(pending[:, :, :WINDOW_LATENTS]))
            pending = pending[:, :, LATENTS_PER_CHUNK:]
        self._latents = pending.clone()  # a slice would keep the whole push alive
        return finals

    @torch.inference_mode()
    def flush(self) -> torch.Tensor:
        """The last five frames, `[1, 3, 5, height, width]`, once every latent has been pushed."""
        assert self._latents is not None, "flush before the first push"
        assert self._latents.shape[2] == TAIL_LATENTS, f"{self._latents.shape[2]} latents left, expected {TAIL_LATENTS}"
        assert self._overlap is not None, "flush before the first decode"
        overlap, self._overlap = self._overlap, None
        return self._finalise(overlap)

    def _decode(self, window: torch.Tensor) -> torch.Tensor:
        z = window.to(self._mean)  # device and dtype first, then the arithmetic in that dtype
        raw = self._vae.decode(z * self._std + self._mean).sample  # [1, 3, 22, height, width]: 17 and the overlap of 5
        if not torch.isfinite(raw).all():
            raise PhaseError("the video decoder returned values that are not numbers")
        frames = raw[:, :, :FRAMES_PER_CHUNK]
        if self._overlap is not None:
            fade_in = torch.arange(TAIL_FRAMES, device=raw.device, dtype=raw.dtype)[:, None, None] / TAIL_FRAMES
            blended = self._overlap * (1 - fade_in) + frames[:, :, :TAIL_FRAMES] * fade_in
            frames = torch.cat([blended, frames[:, :, TAIL_FRAMES:]], dim=2)
        self._overlap = raw[:, :, FRAMES_PER_CHUNK:].clone()
        return self._finalise(frames)

    def _finalise(self, raw: torch.Tensor) -> torch.Tensor:
        return (raw.float() * self._pixel_std + self._pixel_mean).clamp_(0, 1)


def _per_channel(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1, 1).to(device, dtype)
