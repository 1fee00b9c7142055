"""Where sound lands: an impulse in the waveform comes back at its place, in the stream and in the final file."""

from __future__ import annotations

import numpy as np
import pytest

from core.geometry import SAMPLE_RATE, num_samples
from tests.unit.services.vae.harness import decode_pictures, decode_sound, mux_clip

NUM_FRAMES = 39
SIZE = 64
IMPULSES = (160, 976, 16_000, 22_660, 30_000, 45_333, 51_500)
"""Samples: near the start and the end, inside, and beside the ends of chunks."""
FLASH_FRAMES = (0, 16, 17, 33, 34, 38)


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A stream and a final file with impulses at IMPULSES and white pictures at FLASH_FRAMES."""
    pcm = np.zeros((2, num_samples(NUM_FRAMES)), np.float32)
    pcm[:, IMPULSES] = 0.9
    clip = mux_clip(
        NUM_FRAMES,
        SIZE,
        SIZE,
        lambda i: np.full((SIZE, SIZE, 3), 255 if i in FLASH_FRAMES else 0, np.uint8),
        pcm,
        tmp_path_factory.mktemp("final"),
    )
    return {"stream": clip.stream, "final file": clip.final_file}


@pytest.mark.parametrize("kind", ["stream", "final file"])
def test_an_impulse_comes_back_within_a_millisecond(media: dict[str, bytes], kind: str) -> None:
    sound = np.abs(decode_sound(media[kind])).max(axis=0)
    for impulse in IMPULSES:
        start = max(0, impulse - 400)
        found = start + int(sound[start : impulse + 400].argmax())
        assert abs(found - impulse) <= SAMPLE_RATE // 1000, f"impulse at {impulse} came back at {found}"
        assert sound[found] > 0.1


@pytest.mark.parametrize("kind", ["stream", "final file"])
def test_a_white_picture_comes_back_at_its_frame(media: dict[str, bytes], kind: str) -> None:
    levels = [float(picture[:SIZE].mean()) for picture in decode_pictures(media[kind])]
    assert tuple(i for i, level in enumerate(levels) if level > 128) == FLASH_FRAMES


def test_the_first_millisecond_is_not_lost(media: dict[str, bytes]) -> None:
    """Priming that is dropped instead of hidden would silence the first 32 ms."""
    sound = np.abs(decode_sound(media["stream"])).max(axis=0)
    assert sound[100:220].max() > 0.1
