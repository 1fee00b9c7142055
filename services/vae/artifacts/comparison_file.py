"""`refine-compare.png`: spectrograms of sounds one below the other, on the same scales."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from core.artifacts import COMPARISON
from services.vae.artifacts.base import Artifact

_Levels = npt.NDArray[np.float32]

_PLOT_WIDTH, _PLOT_HEIGHT = 1000, 256
_LEFT, _RIGHT, _TITLE, _BELOW = 62, 108, 34, 46
"""Pixels around a plot, for its labels."""
_BAR_WIDTH, _BAR_GAP = 16, 18
_TICK, _FONT_SIZE, _TITLE_SIZE = 5, 14, 17
_INK, _PAPER = (40, 40, 40), (255, 255, 255)
_RANGE_DB = 80
"""Levels drawn below the loudest."""
_LEVEL_STEP_DB, _FREQUENCY_STEP_KHZ = 20, 4
_TIME_STEPS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_MOST_TIMES = 10
_COLOURS = ((0, 0, 4), (40, 11, 84), (101, 21, 110), (159, 42, 99), (212, 72, 66), (245, 125, 21), (250, 193, 39),
            (252, 255, 164))  # fmt: skip
"""From quiet to loud, evenly spaced; lightness rises throughout, so the picture also reads without colour."""


class ComparisonFile(Artifact):
    """`refine-compare.png` of one refinement, in the making."""

    def __init__(self, directory: Path, duration_s: float, top_khz: float) -> None:
        """duration_s: of every sound.  top_khz: upper end of the spectrograms."""
        super().__init__(directory, COMPARISON)
        self._duration_s, self._top_khz = duration_s, top_khz
        self._panels: list[tuple[str, _Levels]] = []

    def add_spectrogram(self, title: str, levels: _Levels) -> None:
        """Takes the next panel."""
        self._panels.append((title, levels))

    def _complete(self, divisor: float) -> None:
        loudest = max(float(levels.max()) for _, levels in self._panels)
        top_db = int(-(-loudest // 10) * 10)
        height = _TITLE + _PLOT_HEIGHT + _BELOW
        image = Image.new("RGB", (_LEFT + _PLOT_WIDTH + _RIGHT, height * len(self._panels)), _PAPER)
        for index, (title, levels) in enumerate(self._panels):
            self._draw_panel(image, index * height + _TITLE, title, levels, top_db)
        image.save(self._part, "PNG")

    def _draw_panel(self, image: Image.Image, top: int, title: str, levels: _Levels, top_db: int) -> None:
        draw = ImageDraw.Draw(image)
        right, bottom = _LEFT + _PLOT_WIDTH, top + _PLOT_HEIGHT
        draw.text((_LEFT, top - 8), title, _INK, _font(_TITLE_SIZE), anchor="ls")
        upright = Image.fromarray(np.ascontiguousarray(levels.T[::-1]))
        stretched = np.asarray(upright.resize((_PLOT_WIDTH, _PLOT_HEIGHT), Image.Resampling.BOX))
        image.paste(Image.fromarray(_coloured(stretched, top_db)), (_LEFT, top))
        draw.rectangle((_LEFT - 1, top - 1, right, bottom), outline=_INK)
        for time_s in _times(self._duration_s):
            x = _LEFT + round(time_s / self._duration_s * _PLOT_WIDTH)
            draw.line((x, bottom, x, bottom + _TICK), _INK)
            draw.text((x, bottom + _TICK + 3), f"{time_s:g}", _INK, _font(_FONT_SIZE), anchor="ma")
        draw.text((right + 8, bottom + _TICK + 3), "seconds", _INK, _font(_FONT_SIZE), anchor="la")
        for khz in range(0, int(self._top_khz) + 1, _FREQUENCY_STEP_KHZ):
            y = bottom - round(khz / self._top_khz * _PLOT_HEIGHT)
            draw.line((_LEFT - 1 - _TICK, y, _LEFT - 1, y), _INK)
            draw.text((_LEFT - _TICK - 5, y), f"{khz}", _INK, _font(_FONT_SIZE), anchor="rm")
        draw.text((8, top + _PLOT_HEIGHT // 2), "kHz", _INK, _font(_FONT_SIZE), anchor="lm")
        self._draw_scale(image, draw, top, top_db)

    def _draw_scale(self, image: Image.Image, draw: ImageDraw.ImageDraw, top: int, top_db: int) -> None:
        """The colours with their levels, beside a plot."""
        left = _LEFT + _PLOT_WIDTH + _BAR_GAP
        falling = np.linspace(top_db, top_db - _RANGE_DB, _PLOT_HEIGHT, dtype=np.float32)
        bar = _coloured(falling[:, None].repeat(_BAR_WIDTH, 1), top_db)
        image.paste(Image.fromarray(bar), (left, top))
        for below in range(0, _RANGE_DB + 1, _LEVEL_STEP_DB):
            y = top + round(below / _RANGE_DB * _PLOT_HEIGHT)
            text = f"{top_db - below}" + (" dB" if below == 0 else "")
            draw.text((left + _BAR_WIDTH + 5, y), text, _INK, _font(_FONT_SIZE), anchor="lm")

    def _close(self) -> None:
        self._panels.clear()


def _coloured(levels: _Levels, top_db: float) -> npt.NDArray[np.uint8]:
    """Levels `[height, width]` in dB as colours `[height, width, 3]`."""
    place = np.clip((levels - top_db) / _RANGE_DB + 1, 0, 1) * (len(_COLOURS) - 1)
    channels = [np.interp(place, range(len(_COLOURS)), [colour[i] for colour in _COLOURS]) for i in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def _times(duration_s: float) -> list[float]:
    """Where the time axis is labelled, in seconds."""
    step = next((step for step in _TIME_STEPS_S if duration_s / step <= _MOST_TIMES), _TIME_STEPS_S[-1])
    return [i * step for i in range(int(duration_s / step) + 1)]


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
