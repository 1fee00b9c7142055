"""Short-time spectra of a sound, gathered as it is decoded: what two sounds are compared by, and what is drawn of them.

A frame is a Hann window of 1024 samples (32 ms) around every 320th sample (10 ms), with silence before and behind the
sound. Levels are in dB; a sine at full scale has 0 dB at its frequency, and nothing lies below the floor of -100 dB.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from core.geometry import AUDIO_CHANNELS, SAMPLE_RATE

Array = npt.NDArray[np.float32]

WINDOW_SAMPLES = 1024
HOP_SAMPLES = 320
NUM_MEL_BANDS = 64
"""Triangles, evenly spaced on the mel scale from 0 Hz to half the sample rate, each as high as it is at its peak."""
NUM_DRAWN_BANDS = 256
"""Rows of the drawn spectrogram, evenly spaced from 0 Hz to half the sample rate."""
FLOOR_DB = -100.0
_FLOOR_POWER = 10 ** (FLOOR_DB / 10)
_BLOCK_FRAMES = 256
"""Frames transformed at a time: a few megabytes, however much sound comes at once."""


class Spectrogram:
    """The spectra of one sound, in the making."""

    def __init__(self) -> None:
        self._waiting = np.zeros((AUDIO_CHANNELS, WINDOW_SAMPLES // 2), np.float32)
        self._mel: list[Array] = []
        self._drawn: list[Array] = []

    def add(self, pcm: Array) -> None:
        """Takes the next samples, `[2, S]`."""
        self._waiting = np.concatenate([self._waiting, pcm], axis=1)
        while (num_frames := self._num_complete()) > 0:
            num_frames = min(num_frames, _BLOCK_FRAMES)
            stop = (num_frames - 1) * HOP_SAMPLES + WINDOW_SAMPLES
            views = np.lib.stride_tricks.sliding_window_view(self._waiting[:, :stop], WINDOW_SAMPLES, axis=1)
            self._transform(views[:, ::HOP_SAMPLES])
            self._waiting = self._waiting[:, num_frames * HOP_SAMPLES :].copy()

    def finish(self) -> None:
        """Completes the frames around the last samples; nothing can be added any more."""
        self.add(np.zeros((AUDIO_CHANNELS, WINDOW_SAMPLES // 2), np.float32))

    @property
    def mel(self) -> Array:
        """Levels by mel band, dB `[2, frames, 64]`."""
        return np.concatenate(self._mel, axis=1)

    @property
    def drawn(self) -> Array:
        """Levels by frequency, averaged over both channels, dB `[frames, 256]`."""
        return np.concatenate(self._drawn)

    def _num_complete(self) -> int:
        return (self._waiting.shape[1] - WINDOW_SAMPLES) // HOP_SAMPLES + 1

    def _transform(self, frames: Array) -> None:
        window = _window()
        amplitude = np.abs(np.fft.rfft(frames * window, axis=2)) * (2 / float(window.sum()))  # [2, frames, 513]
        power = np.square(amplitude).astype(np.float32)
        self._mel.append(_decibels(power @ _mel_weights().T))
        pairs = power[..., :-1].mean(axis=0).reshape(-1, NUM_DRAWN_BANDS, WINDOW_SAMPLES // 2 // NUM_DRAWN_BANDS)
        self._drawn.append(_decibels(pairs.max(axis=2)))


def log_mel_distance(first: Spectrogram, second: Spectrogram) -> float:
    """Mean absolute distance of two sounds of one length over channels, frames and mel bands, in dB."""
    return float(np.abs(first.mel - second.mel).mean(dtype=np.float64))


def _decibels(power: Array) -> Array:
    levels: Array = 10 * np.log10(np.maximum(power, np.float32(_FLOOR_POWER)))
    levels = levels.clip(FLOOR_DB)  # rounding must not lead below
    return levels


@functools.cache
def _window() -> Array:
    """A periodic Hann window."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW_SAMPLES) / WINDOW_SAMPLES)).astype(np.float32)


@functools.cache
def _mel_weights() -> Array:
    """Weights of the frequencies in each mel band, `[64, 513]`. Source of the scale: HTK Book 3.4, §5.4."""
    frequencies = np.fft.rfftfreq(WINDOW_SAMPLES, 1 / SAMPLE_RATE)
    top = 2595 * np.log10(1 + SAMPLE_RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, NUM_MEL_BANDS + 2) / 2595) - 1)
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (frequencies - low) / (centre - low), (high - frequencies) / (high - centre)
    weights = np.minimum(rising, falling).clip(0).astype(np.float32)
    assert weights.any(axis=1).all(), "a mel band is narrower than the spectrum is fine"
    return weights
