"""The comparison picture: every sound on the same scales, with its labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from h3stream.errors import PhaseError
from services.vae.artifacts.comparison_file import ComparisonFile

PLOT = slice(34, 290), slice(62, 1062)
"""Rows and columns of the first panel's plot."""
PANEL_HEIGHT = 336


def levels(num_frames: int = 93) -> npt.NDArray[np.float32]:
    """Quiet but for a bright line at 4 kHz in the first half."""
    made = np.full((num_frames, 256), -100, np.float32)
    made[: num_frames // 2, 64] = -20
    return made


def draw(directory: Path, *panels: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    made = ComparisonFile(directory, 0.925, 16.0)
    for index, panel in enumerate(panels):
        made.add_spectrogram(f"Sound {index}", panel)
    assert made.finish(1.0).media_type == "image/png"
    with Image.open(directory / "refine-compare.png") as image:
        assert image.mode == "RGB"
        return np.asarray(image)


def test_a_panel_for_each_sound(tmp_path: Path) -> None:
    for count in (1, 2, 3):
        assert draw(tmp_path, *[levels()] * count).shape == (count * PANEL_HEIGHT, 1170, 3)


def test_time_goes_right_and_frequency_up(tmp_path: Path) -> None:
    plot = draw(tmp_path, levels())[PLOT].sum(axis=2, dtype=int)
    rows, columns = (plot > 400).nonzero()
    assert set(rows) == {255 - 64}
    assert (columns.min(), columns.max()) == (0, pytest.approx(46 / 93 * 1000, abs=2))


def test_the_same_level_has_the_same_colour_in_every_panel(tmp_path: Path) -> None:
    loud = levels() + 20
    picture = draw(tmp_path, levels(), loud)
    first, second = picture[PLOT], picture[PANEL_HEIGHT:][PLOT]
    line = 255 - 64
    assert first[line, 100].sum() < second[line, 100].sum(), "20 dB apart, they must look so"
    assert (draw(tmp_path, loud, loud)[PLOT] == second).all()


def test_every_panel_is_labelled(tmp_path: Path) -> None:
    """Dark ink for the title, both axes and the scale of levels."""
    picture = draw(tmp_path, levels(), levels())
    for top in (0, PANEL_HEIGHT):
        panel = picture[top : top + PANEL_HEIGHT].max(axis=2) < 128
        for place in ((slice(8, 32), slice(62, 140)), (PLOT[0], slice(0, 60)), (slice(292, 330), PLOT[1]),
                      (slice(292, 330), slice(1066, 1170)), (PLOT[0], slice(1095, 1170))):  # fmt: skip
            assert panel[place].any()


def test_a_full_disk_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / ".refine-compare.png.part").symlink_to("/dev/full")
    made = ComparisonFile(tmp_path, 0.925, 16.0)
    made.add_spectrogram("Sound", levels())
    with pytest.raises(PhaseError, match=r"refine-compare\.png cannot be written: No space left on device"):
        made.finish(1.0)
    made.discard()
    assert list(tmp_path.iterdir()) == []
