"""Levels and distances of sounds whose right values are known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from core.geometry import SAMPLE_RATE
from services.vae.spectrogram import Spectrogram, log_mel_distance

NUM_SAMPLES = 29_600
NOISE = np.random.default_rng(0).normal(0, 0.1, (2, NUM_SAMPLES)).astype(np.float32)


def tone(hertz: float, level: float = 1.0) -> npt.NDArray[np.float32]:
    times = np.arange(NUM_SAMPLES) / SAMPLE_RATE
    return (level * np.sin(2 * np.pi * hertz * times)).astype(np.float32)[None].repeat(2, 0)


def spectrogram(pcm: npt.NDArray[np.float32], *cuts: int) -> Spectrogram:
    made = Spectrogram()
    for piece in np.split(pcm, cuts, axis=1):
        made.add(piece)
    made.finish()
    return made


@pytest.mark.parametrize(("hertz", "level_db"), [(1000, 0), (4000, -20), (15_000, -60)])
def test_a_tone_has_its_level_at_its_frequency(hertz: int, level_db: int) -> None:
    levels = spectrogram(tone(hertz, 10 ** (level_db / 20))).drawn[5:-5]
    assert levels.shape[1] == 256
    assert set(levels.argmax(axis=1)) == {hertz * 256 // 16_000}
    assert levels.max() == pytest.approx(level_db, abs=0.1)
    far = np.delete(levels, range(hertz * 256 // 16_000 - 3, hertz * 256 // 16_000 + 4), axis=1)
    assert far.max() < level_db - 35, "nothing where there is nothing"


def test_a_frame_stands_for_every_ten_milliseconds() -> None:
    made = spectrogram(NOISE)
    assert made.mel.shape == (2, NUM_SAMPLES // 320 + 1, 64)
    assert made.drawn.shape == (NUM_SAMPLES // 320 + 1, 256)
    click = np.zeros((2, NUM_SAMPLES), np.float32)
    click[:, 16_000] = 1  # at half a second
    assert spectrogram(click).mel.mean(axis=(0, 2)).argmax() == 50


def test_pieces_make_no_difference() -> None:
    whole, cut = spectrogram(NOISE), spectrogram(NOISE, 0, 1, 320, 321, 5000, 22_400, 22_400, NUM_SAMPLES)
    np.testing.assert_allclose(cut.mel, whole.mel, atol=1e-4)
    np.testing.assert_allclose(cut.drawn, whole.drawn, atol=1e-4)


def test_silence_lies_at_the_floor() -> None:
    assert set(spectrogram(np.zeros((2, 5000), np.float32)).mel.ravel()) == {-100.0}


@pytest.mark.parametrize(("factor", "distance_db"), [(1, 0), (0.5, 6.0206), (10, 20)])
def test_louder_noise_lies_as_far_as_it_is_louder(factor: float, distance_db: float) -> None:
    first, second = spectrogram(NOISE), spectrogram(np.float32(factor) * NOISE)
    assert log_mel_distance(first, second) == pytest.approx(distance_db, abs=1e-3)
    assert log_mel_distance(second, first) == pytest.approx(distance_db, abs=1e-3)


def test_every_mel_band_counts_and_only_those_that_differ() -> None:
    """A tone that is 40 dB above silence's floor raises its bands alone."""
    low, high = tone(200, 1e-3), tone(8000, 1e-3)
    silence = spectrogram(np.zeros_like(low))
    assert 0 < log_mel_distance(spectrogram(low), silence) < 40 * 20 / 64
    bands = [(spectrogram(pcm).mel[:, 10:-10] > -99).any(axis=(0, 1)).nonzero()[0] for pcm in (low, high)]
    assert bands[0].max() < bands[1].min()
