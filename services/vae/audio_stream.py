"""Audio latents in, final samples out, as early as the decoder's receptive field allows.

The decoder is not causal, so each decode takes a margin of latents on both sides of what it keeps (overlap-save). This
object keeps the latents that a later decode still needs, and measures the soundtrack as it passes.
Source: docs/reference/raven-streaming.md §11, docs/reference/h3-model.md §5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from core.clock import AUDIO_MARGIN_LATENTS, audio_window, final_audio_latents
from h3stream.errors import PhaseError
from services.vae.weights import LatentStatistics

LOUDNESS_FACTOR = 5.0
"""The waveform is divided by this many standard deviations where that exceeds 1 (RAVEN's final normalisation)."""


@dataclass(frozen=True)
class SoundReport:
    """Measurements of the whole soundtrack before any normalisation."""

    std: float
    """Standard deviation over channels and samples."""
    peak: float
    """Largest magnitude."""
    dc_offset: float
    """Mean of all samples."""
    num_clipped_samples: int
    """Samples at full scale."""
    normalisation_divisor: float
    """What the normalised file divides the waveform by."""


@dataclass
class SoundStatistics:
    """Running measurements of a waveform, in float64."""

    count: int = 0
    """Samples of all channels so far."""
    total: float = 0.0
    """Their sum."""
    total_squares: float = 0.0
    """Sum of their squares."""
    peak: float = 0.0
    """Largest magnitude."""
    num_clipped: int = 0
    """Samples at or beyond full scale."""

    def add(self, waveform: torch.Tensor) -> None:
        """Takes the next piece, `[2, S]` on the host."""
        wide = waveform.double()
        self.count += waveform.numel()
        self.total += float(wide.sum())
        self.total_squares += float(wide.square().sum())
        magnitude = waveform.abs()
        self.peak = max(self.peak, float(magnitude.max()))
        self.num_clipped += int((magnitude >= 1).sum())

    @property
    def mean(self) -> float:
        """Mean of all samples: the DC offset."""
        return self.total / self.count

    @property
    def std(self) -> float:
        """Unbiased standard deviation over channels and samples."""
        centred = self.total_squares - self.total * self.total / self.count
        return math.sqrt(max(centred, 0.0) / (self.count - 1))

    @property
    def rms(self) -> float:
        """Root of the mean square of all samples."""
        return math.sqrt(self.total_squares / self.count)

    @property
    def divisor(self) -> float:
        """What the finished waveform is divided by: max(1, 5 std)."""
        return max(1.0, LOUDNESS_FACTOR * self.std)

    def report(self) -> SoundReport:
        """What was measured so far."""
        return SoundReport(
            std=self.std,
            peak=self.peak,
            dc_offset=self.mean,
            num_clipped_samples=self.num_clipped,
            normalisation_divisor=self.divisor,
        )


class AudioStream:
    """The incremental audio decoder of one clip."""

    def __init__(self, vae: Any, statistics: LatentStatistics, device: torch.device, total_latents: int) -> None:
        """vae: the published audio VAE, on `device` whenever latents are pushed.  total_latents: A of the clip."""
        self._vae = vae
        self._mean = torch.tensor(statistics.mean, device=device).view(1, -1, 1)
        self._std = torch.tensor(statistics.std, device=device).view(1, -1, 1)
        self._total = total_latents
        self._available = 0
        self._final = 0
        self._kept_from = 0
        self._latents: torch.Tensor | None = None  # [2, 32, available - kept_from]: stereo is two batch items
        self.statistics = SoundStatistics()

    @torch.inference_mode()
    def push(self, latents: torch.Tensor) -> torch.Tensor:
        """Samples that become final with these latents, `[2, S]` float32 on the host, S a multiple of 800, maybe 0.

        latents: `[1, 32, 2, a]` float32, normalised, the next ones of the clip; the last ones release everything.
        Raises PhaseError if the decoder returns anything that is not a number.
        """
        rows = latents[0].transpose(0, 1).to(self._mean.device)  # [2, 32, a]
        kept = rows if self._latents is None else torch.cat([self._latents, rows], dim=2)
        self._available += latents.shape[3]
        assert self._available <= self._total, f"{self._available} audio latents of {self._total}"
        final = final_audio_latents(self._available, self._total)
        waveform = self._decode(kept, self._final, final) if final > self._final else torch.empty(2, 0)
        self._final = final
        needed_from = max(0, final - AUDIO_MARGIN_LATENTS)
        self._latents = kept[:, :, needed_from - self._kept_from :].clone()
        self._kept_from = needed_from
        return waveform

    def _decode(self, kept: torch.Tensor, keep_start: int, keep_stop: int) -> torch.Tensor:
        window = audio_window(keep_start, keep_stop, self._total)
        z = kept[:, :, window.decode_start - self._kept_from : window.decode_stop - self._kept_from]
        decoded: torch.Tensor = self._vae.decode(z * self._std + self._mean).sample[:, 0].cpu()  # [2, 800 per latent]
        waveform: torch.Tensor = decoded[:, window.skip_samples : window.skip_samples + window.num_samples].clone()
        if not torch.isfinite(waveform).all():
            raise PhaseError("the audio decoder returned values that are not numbers")
        self.statistics.add(waveform)
        return waveform
