"""Steps of one or two streams from noise level to noise level, each stream on its own schedule.

The streams are coupled by the model alone: an evaluation takes all of them at one grid point. A step works on clean
estimates x0 and leaves its input as it is, so that one that fails can be repeated.
Source: docs/reference/audio-refine.md §3; DPM-Solver++(2M): Lu et al. 2022, arXiv 2211.01095, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from core.schedule import float32

Streams = tuple[Tensor, ...]
"""Latents of every stream that moves, or a quantity of the same shapes; float32."""
Grid = tuple[tuple[float, ...], ...]
"""Noise levels of the streams at every grid point, falling."""
Evaluate = Callable[[Streams, int], Streams]
"""Clean estimates of the streams where they stand at a grid point."""


class Sampler(Protocol):
    """Walks along a grid."""

    def step(self, streams: Streams, point: int, evaluate: Evaluate) -> Streams:
        """The streams at grid point `point + 1`, from those at `point`."""


class Euler:
    """First order, one evaluation a step."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def step(self, streams: Streams, point: int, evaluate: Evaluate) -> Streams:
        """See Sampler."""
        return _blended(streams, evaluate(streams, point), self._grid, point)


class Heun:
    """Second order: the trapezoid of the slopes at both ends of a step, so that the model sees grid points only.

    Two evaluations a step; one where the step ends at 0, where there is no slope.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def step(self, streams: Streams, point: int, evaluate: Evaluate) -> Streams:
        """See Sampler."""
        sigmas, next_sigmas = self._grid[point : point + 2]
        x0 = evaluate(streams, point)
        ahead = _blended(streams, x0, self._grid, point)
        if not all(next_sigmas):
            return ahead
        x0_ahead = evaluate(ahead, point + 1)
        moved = []
        for stream, at, there, then, sigma, following in zip(
            streams, x0, ahead, x0_ahead, sigmas, next_sigmas, strict=True
        ):
            slope = (stream - at) / sigma + (there - then) / following
            moved.append(stream + (following - sigma) / 2 * slope)
        return tuple(moved)


class DpmPlusPlus2M:
    """Second order with one evaluation a step: the last two clean estimates, extrapolated in log-SNR.

    The first step has no estimate before it, the last one ends at an infinite log-SNR: both are of first order.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._before: Streams | None = None
        """Estimates of the last step."""

    def step(self, streams: Streams, point: int, evaluate: Evaluate) -> Streams:
        """See Sampler."""
        x0 = evaluate(streams, point)
        moved = _blended(streams, self._extrapolated(x0, point), self._grid, point)
        self._before = x0
        return moved

    def _extrapolated(self, x0: Streams, point: int) -> Streams:
        if self._before is None or not all(self._grid[point + 1]):
            return x0
        levels = zip(*self._grid[point - 1 : point + 2], strict=True)
        return tuple(
            torch.lerp(before, now, 1 + _growth(*sigmas))
            for before, now, sigmas in zip(self._before, x0, levels, strict=True)
        )


SAMPLERS: dict[str, Callable[[Grid], Sampler]] = {"euler": Euler, "heun": Heun, "dpmpp_2m": DpmPlusPlus2M}
"""By the names of core.refine.SAMPLERS."""


def _blended(streams: Streams, x0: Streams, grid: Grid, point: int) -> Streams:
    """`r x + (1 - r) x0` with `r = next_sigma / sigma`: exact where x0 does not change. At 0 it is x0 itself."""
    moved = []
    for stream, estimate, sigma, following in zip(streams, x0, grid[point], grid[point + 1], strict=True):
        ratio = float32(following / sigma)
        moved.append(ratio * stream + (1 - ratio) * estimate)
    return tuple(moved)


def _growth(before: float, now: float, following: float) -> float:
    """Half the step to come over the step before, in log-SNR."""
    return (_log_snr(following) - _log_snr(now)) / (2 * (_log_snr(now) - _log_snr(before)))


def _log_snr(sigma: float) -> float:
    return math.log((1 - sigma) / sigma) if sigma < 1 else -math.inf
