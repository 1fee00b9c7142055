"""Which motion a track follows, and when a bouncing object touched the ground, from positions alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.train_tiny.world import (
    BOUNCE_FRAMES,
    BOUNCE_HEIGHT,
    GROUND,
    LAP_FRAMES,
    LAP_X,
    LAP_Y,
    MOTIONS,
    ORBIT_FRAMES,
    ORBIT_RADIUS,
    RADII,
    on_lap,
)

OUTLIER = 8.0
"""A frame that is further off counts as this far off, pixels."""
UNREADABLE = 5.0
"""A track that is further from every motion, in the root mean square, follows none; pixels."""
_PHASES = 120
"""Phases tried of a motion that repeats."""
_STARTS = 120
"""Places along a mover's lap from which it is tried to begin."""
_TOUCH_REACH = 9
"""Frames before and after a touch that say when it was."""


@dataclass(frozen=True)
class Fit:
    """A motion that explains a track."""

    motion: int
    error: float
    """Root mean square, pixels, with what is beyond `OUTLIER` cut off there."""
    track: Tensor
    """Where it says that the object is, `[F, 2]`."""


def best_fit(track: Tensor, weight: Tensor, size: int) -> Fit:
    """The motion that comes closest.  track: `[F, 2]` pixels; weight: `[F]`, not all 0."""
    return min(fits(track, weight, size), key=lambda fit: fit.error)


def fits(track: Tensor, weight: Tensor, size: int) -> list[Fit]:
    """Every motion, as close to the track as it can be."""
    t = torch.arange(len(track), dtype=track.dtype)
    still = torch.zeros(1, len(t), 2, dtype=track.dtype)
    lap = torch.arange(_STARTS, dtype=track.dtype)[:, None] / _STARTS + t / LAP_FRAMES
    sideways, upright = (on_lap(torch.stack(way, -1)) for way in ((LAP_X * lap, 0 * lap), (0 * lap, LAP_Y * lap)))
    phase = torch.arange(_PHASES, dtype=track.dtype)[:, None] / _PHASES
    hop = GROUND - RADII[size] - BOUNCE_HEIGHT * (math.pi * (t / BOUNCE_FRAMES + phase)).sin().abs()
    turn = 2 * math.pi * (t / ORBIT_FRAMES + phase)
    curves = {
        "still": still,
        "right": sideways,
        "left": -sideways,
        "up": -upright,
        "down": upright,
        "bounce": torch.stack((0 * hop, hop), -1),
        "orbit": ORBIT_RADIUS * torch.stack((turn.cos(), turn.sin()), -1),
    }
    return [_fit(motion, curves[name], track, weight) for motion, name in enumerate(MOTIONS)]


def _fit(motion: int, curves: Tensor, track: Tensor, weight: Tensor) -> Fit:
    """The best of some curves `[N, F, 2]`, each moved to where the track is."""
    off = track - curves
    placed = torch.stack([_median(off[..., axis], weight) for axis in range(2)], -1)
    match MOTIONS[motion]:
        case "bounce":
            placed[:, 1] = 0.0  # the ground is where it is
        case "right" | "left":
            placed[:, 0].clamp_(-LAP_X / _STARTS, LAP_X / _STARTS)  # where it comes back in is where it is
        case "up" | "down":
            placed[:, 1].clamp_(-LAP_Y / _STARTS, LAP_Y / _STARTS)
    square = (off - placed[:, None]).square().sum(-1).clamp(max=OUTLIER**2)
    errors = ((square * weight).sum(-1) / weight.sum()).sqrt()
    best = int(errors.argmin())
    return Fit(motion, float(errors[best]), curves[best] + placed[best])


def _median(values: Tensor, weight: Tensor) -> Tensor:
    """Weighted median over the frames, `[N]`.  values: `[N, F]`."""
    order = values.argsort(dim=1)
    summed = weight[order].cumsum(dim=1)
    index = (summed < 0.5 * weight.sum()).sum(dim=1).clamp(max=len(weight) - 1)
    return values.gather(1, order.gather(1, index[:, None]))[:, 0]


def touches(track: Tensor, visible: Tensor) -> list[float]:
    """Instants, in frames, at which a bouncing object is lowest: of each hop's end, from the frames around it.

    track: `[F, 2]`; visible: `[F]` bool, which frames can be relied on.
    """
    y = track[:, 1]
    found: list[float] = []
    for frame in range(2, len(y) - 2):
        first, stop = max(0, frame - _TOUCH_REACH), min(len(y), frame + _TOUCH_REACH + 1)
        around = y[first:stop]
        if not bool(visible[first:stop].all()) or float(y[frame]) < float(around.max()) or _is_flat(around):
            continue
        if found and frame - found[-1] < _TOUCH_REACH:
            continue
        found.append(_lowest(around, first, frame))
    return found


def _is_flat(y: Tensor) -> bool:
    return float(y.max() - y.min()) < BOUNCE_HEIGHT / 4


def _lowest(y: Tensor, first: int, frame: int) -> float:
    """Where the cusp of a hop of the world's height and time fits best, within a frame and a half of `frame`."""
    t = torch.arange(len(y), dtype=y.dtype) + first
    instants = frame + torch.arange(-1.5, 1.51, 0.02, dtype=y.dtype)
    curves = -BOUNCE_HEIGHT * (math.pi * (t - instants[:, None]) / BOUNCE_FRAMES).sin().abs()
    off = y - curves
    return float(instants[(off - off.mean(dim=1, keepdim=True)).square().sum(dim=1).argmin()])
