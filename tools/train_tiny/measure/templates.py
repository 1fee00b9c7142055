"""The outlines that objects can have, tabled once, so that they can be drawn anywhere and looked for everywhere."""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny.picture import coverage, signed_distance
from tools.train_tiny.world import RADII, SHAPES

REACH = 32
"""No object is seen further than this from its centre, pixels."""
APPEARANCES: tuple[tuple[int, int], ...] = tuple(
    (shape, size) for shape in range(len(SHAPES)) for size in range(len(RADII))
)
_STEP = 0.5
"""Of the tables, pixels."""


@cache
def template(shape: int, size: int, scale: int) -> Tensor:
    """How much of each cell an object covers whose centre is the corner that four cells share, `[2R, 2R]`.

    scale: side of a cell, pixels; R is REACH // scale.
    """
    at = torch.arange(-REACH, REACH) + 0.5
    mask = coverage(shape, at, at[:, None], RADII[size])
    return F.avg_pool2d(mask[None, None], scale)[0, 0]


def reach(size: int) -> int:
    """No object of a size is seen further than this from its centre, pixels."""
    return math.ceil(REACH * RADII[size] / max(RADII))


@cache
def area(shape: int, size: int) -> float:
    """What an object covers, pixels."""
    return float(template(shape, size, 1).sum())


@cache
def outline(shape: int, size: int) -> Tensor:
    """Signed distance to the outline and its slope in x and y, `[1, 3, N, N]` around the centre."""
    at = torch.arange(-REACH, REACH + _STEP / 2, _STEP)
    distance = signed_distance(shape, at, at[:, None], RADII[size])
    along_y, along_x = torch.gradient(distance, spacing=_STEP)
    return torch.stack((distance, along_x, along_y))[None]


def distances(shape: int, size: int, x: Tensor, y: Tensor) -> Tensor:
    """`outline` at places from the centre, `[F, 3, H, W]`.  x: `[F, W]`, y: `[F, H]` pixels."""
    grid = torch.stack(torch.broadcast_tensors(x[:, None, :], y[:, :, None]), -1) / REACH
    table = outline(shape, size).expand(len(x), -1, -1, -1)
    return F.grid_sample(table, grid, padding_mode="border", align_corners=True)


def find(shape: int, size: int, scale: int, mask: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Where an object explains a mask best: (misfit `[F]` in cells, centre `[F, 2]` in pixels from the canvas's).

    mask, valid: `[F, h, w]` in [0, 1], of cells of `scale` pixels; what is not valid, or off the canvas, may be
    anything. The misfit is the sum of squares over what is valid.
    """
    reach = REACH // scale
    height, width = mask.shape[1:]
    padded = (height + 2 * reach, width + 2 * reach)
    drawn = template(shape, size, scale)
    kernels = torch.fft.rfft2(torch.stack((drawn, drawn**2)), s=padded).conj()
    pictures = torch.stack((mask * valid, valid))  # [2, F, h, w]
    spectra = torch.fft.rfft2(F.pad(pictures, (reach, reach, reach, reach)))
    crossed = -2 * spectra[0] * kernels[0] + spectra[1] * kernels[1]
    # Cyclic, so a centre above or left of the canvas comes at the end; what meets there is off the canvas.
    misfit = torch.fft.irfft2(crossed, s=padded)
    best, index = misfit.flatten(1).min(dim=1)
    row, column = index // padded[1], index % padded[1]
    centre_x = _unwound(column, width, reach) + _vertex(misfit, row, column, (0, 1)) - width / 2
    centre_y = _unwound(row, height, reach) + _vertex(misfit, row, column, (1, 0)) - height / 2
    return best + (mask**2 * valid).sum(dim=(1, 2)), torch.stack((centre_x, centre_y), -1) * scale


def _unwound(index: Tensor, length: int, reach: int) -> Tensor:
    return torch.where(index < length + reach, index, index - length - 2 * reach)


def _vertex(values: Tensor, row: Tensor, column: Tensor, step: tuple[int, int]) -> Tensor:
    """How far the lowest point of a parabola through a cell and its two neighbours lies from the cell, `[F]`."""
    frames = torch.arange(len(values))
    height, width = values.shape[1:]

    def at(sign: int) -> Tensor:
        return values[frames, (row + sign * step[0]) % height, (column + sign * step[1]) % width]

    before, middle, after = at(-1), at(0), at(1)
    curve = (before - 2 * middle + after).clamp(min=1e-6)
    return ((before - after) / (2 * curve)).clamp(-0.5, 0.5)
