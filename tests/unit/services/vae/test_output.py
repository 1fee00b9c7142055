from __future__ import annotations

import numpy as np
import torch

from services.vae.output import to_pcm, to_rgb8


def test_pixels_go_to_the_nearest_level_and_are_clamped() -> None:
    values = torch.tensor([-0.1, 0.0, 0.49 / 255, 0.5 / 255, 1 / 255, 254.5 / 255, 1.0, 1.7])
    frames = values.view(1, 1, 1, 1, 8).expand(1, 3, 1, 1, 8)
    assert to_rgb8(frames)[0, 0, :, 0].tolist() == [0, 0, 0, 1, 1, 255, 255, 255]


def test_frames_become_height_width_colour() -> None:
    frames = torch.zeros(1, 3, 2, 4, 6)
    frames[0, 2, 1, 3, 5] = 1  # blue, second frame, last pixel
    rgb = to_rgb8(frames)
    assert rgb.shape == (2, 4, 6, 3)
    assert rgb.dtype == np.uint8
    assert rgb[1, 3, 5].tolist() == [0, 0, 255]
    assert rgb.sum() == 255


def test_samples_keep_their_values() -> None:
    waveform = torch.randn(2, 5)
    pcm = to_pcm(waveform)
    assert pcm.dtype == np.float32
    np.testing.assert_array_equal(pcm, waveform.numpy())
