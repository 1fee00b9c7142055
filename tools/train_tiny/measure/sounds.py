"""What a clip sounds like: pitch, rhythm, loudness of every partial, and when it clicks, from its samples alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.geometry import FPS, SAMPLE_RATE, SAMPLES_PER_AUDIO_LATENT
from tools.train_tiny.world import FUNDAMENTALS, PARTIALS, PULSE_DECAY, PULSE_PERIODS

PITCH_TOLERANCE = 0.01
"""How far a frequency may lie from a pitch's, relative."""
SILENCE = 0.02
"""A line of the spectrum below this amplitude is no tone, of full scale."""
_LOWEST_HZ, _HIGHEST_HZ = 100.0, 1100.0
"""Where a fundamental is looked for."""
_PADDED = 1 << 19
"""Points of the spectrum, at least; 0.06 Hz apart."""
_HELD = 0.65
"""Mean loudness, relative to the loudest nearby, above which a tone is held: strokes have 0.42 or less."""
_RHYTHM_MATCH = 0.7
"""Least correlation with a rhythm's strokes."""
_LOUD = 0.15
"""Of the loudest: what is below says nothing about the rhythm."""
_CLICK_BAND_HZ = (2800.0, 7000.0)
"""Above every partial."""
_CLICK_SAMPLES = SAMPLE_RATE // 500
"""About as long as a click is loud, 2 ms."""
_CLICK_LEVEL = 0.05
"""Least root mean square of a click over that time in its band, both channels together, of full scale."""


@dataclass(frozen=True)
class Sound:
    """What is heard."""

    pitch: int | None
    """0 for silence; None for a tone that is none of the world's."""
    frequency: float
    """Of the fundamental, Hz; 0 for silence."""
    rhythm: int | None
    """0 for silence; None where the strokes follow none."""
    amplitudes: Tensor
    """Of every partial in every audio latent, `[7, 2, A]` of full scale, as `world.tone_amplitudes`."""
    clicks: tuple[float, ...]
    """Instants at which clicks begin, in frames."""

    @property
    def pitch_error(self) -> float:
        """How far the frequency is from the nearest pitch's, relative; 0 for silence."""
        return min(abs(self.frequency / f - 1) for f in FUNDAMENTALS[1:]) if self.frequency else 0.0


def read_sound(waveform: Tensor) -> Sound:
    """What the waveform `[2, S]`, at 32 kHz, sounds like."""
    both = waveform.double().sum(dim=0)
    frequency = _fundamental(both)
    amplitudes = _amplitudes(waveform.double())
    pitch: int | None = 0
    rhythm: int | None = 0
    if frequency:
        near = [i for i, f in enumerate(FUNDAMENTALS) if f and abs(frequency / f - 1) <= PITCH_TOLERANCE]
        pitch = near[0] if near else None
        rhythm = _rhythm(amplitudes.sum(dim=(0, 1)))
    return Sound(pitch, frequency, rhythm, amplitudes, _clicks(both))


def loudness(sound: Sound) -> Tensor:
    """Loudness of all partials together in each channel and audio latent, `[2, A]`."""
    return sound.amplitudes.square().sum(dim=0).sqrt()


def _fundamental(both: Tensor) -> float:
    """Frequency of the strongest line where fundamentals are, Hz; 0 where none is a tone."""
    window = torch.hann_window(len(both), dtype=both.dtype)
    points = max(_PADDED, 1 << math.ceil(math.log2(len(both))))
    lines = 2 * torch.fft.rfft(both * window, n=points).abs() / window.sum()
    spacing = SAMPLE_RATE / points
    first = int(_LOWEST_HZ / spacing)
    peak = first + int(lines[first : int(_HIGHEST_HZ / spacing)].argmax())
    if lines[peak] < SILENCE:
        return 0.0
    before, middle, after = (float(lines[peak + i].log()) for i in (-1, 0, 1))
    return spacing * (peak + 0.5 * (before - after) / (before - 2 * middle + after))


def _amplitudes(waveform: Tensor) -> Tensor:
    """Amplitude of every partial in every audio latent, each a whole number of turns long, `[7, 2, A]`."""
    blocks = waveform.shape[1] // SAMPLES_PER_AUDIO_LATENT
    cut = waveform[:, : blocks * SAMPLES_PER_AUDIO_LATENT].view(2, blocks, SAMPLES_PER_AUDIO_LATENT)
    turns = 2 * math.pi * torch.arange(SAMPLES_PER_AUDIO_LATENT, dtype=waveform.dtype) / SAMPLE_RATE
    angle = turns[:, None] * torch.tensor(PARTIALS, dtype=waveform.dtype)
    found = torch.complex(cut @ angle.cos(), cut @ angle.sin()).abs() * (2 / SAMPLES_PER_AUDIO_LATENT)  # [2, A, 7]
    return found.permute(2, 0, 1)


def _rhythm(envelope: Tensor) -> int | None:
    """The rhythm of a loudness over audio latents `[A]`; how it swells and fades with the place does not matter."""
    period = max(PULSE_PERIODS)
    around = F.max_pool1d(envelope[None, None], period + 1, stride=1, padding=period // 2)[0, 0]
    is_loud = around > _LOUD * envelope.max()
    relative = (envelope / around.clamp(min=1e-9))[is_loud]
    if float(relative.mean()) > _HELD:
        return 0
    index = torch.arange(len(envelope), dtype=envelope.dtype)[is_loud]
    matches = {
        rhythm: _correlation(relative, torch.exp(-torch.remainder(index, every) / PULSE_DECAY))
        for rhythm, every in enumerate(PULSE_PERIODS)
        if every
    }
    best = max(matches, key=lambda rhythm: matches[rhythm])
    return best if matches[best] >= _RHYTHM_MATCH else None


def _correlation(a: Tensor, b: Tensor) -> float:
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-9))


def _clicks(both: Tensor) -> tuple[float, ...]:
    """Where the energy above the tones has its peaks, less half of what it was smoothed over, in frames."""
    spectrum = torch.fft.rfft(both)
    hz = torch.fft.rfftfreq(len(both), 1 / SAMPLE_RATE)
    spectrum[(hz < _CLICK_BAND_HZ[0]) | (hz > _CLICK_BAND_HZ[1])] = 0
    energy = torch.fft.irfft(spectrum, n=len(both)).square()
    half = _CLICK_SAMPLES // 2
    level = F.avg_pool1d(energy[None, None], 2 * half + 1, stride=1, padding=half)[0, 0].sqrt()
    found = []
    while float(level.max()) >= _CLICK_LEVEL:
        peak = int(level.argmax())
        found.append((peak - half) / SAMPLE_RATE * FPS)
        level[max(0, peak - SAMPLES_PER_AUDIO_LATENT) : peak + SAMPLES_PER_AUDIO_LATENT] = 0
    return tuple(sorted(found))
