"""Sigma grids and the timesteps fed to the model.

Source: docs/reference/raven-streaming.md §4 (streaming), docs/reference/h3-model.md §7 (dense).
"""

from __future__ import annotations

import itertools
import math
import struct

CONTEXT_TIMESTEP = 0.999
"""H3 time of text and committed chunks (its float32 value is what the model is fed)."""


def shifted_sigmas(steps: int, shift: float) -> tuple[float, ...]:
    """Noise levels at which one chunk is evaluated, noisiest first.

    steps: NFE, at least 1.  shift: above 0 and finite; 1.0 gives an even grid.
    Returns `steps` values, the first 1.0, strictly falling; the closing 0 is implied.
    Raises ValueError outside those ranges.
    """
    if steps < 1 or not 0 < shift < math.inf:
        raise ValueError(f"steps {steps} must be at least 1 and shift {shift} above 0 and finite")
    grid = [1.0]  # set, not computed: for a shift such as 0.01 the formula's own rounding misses 1
    for i in range(1, steps):
        grid.append(shifted(1 - i / steps, shift))
    return tuple(grid)


def shifted(base: float, shift: float) -> float:
    """The noise level at a shift of a point of the even grid from 1 to 0."""
    return shift * base / (1 + (shift - 1) * base)


def dense_sigmas(steps: int, shift: float) -> tuple[float, ...]:
    """Noise levels of a clip sampled at once, noisiest first: `steps + 1` float32 values, strictly falling to 0.

    steps: forwards, at least 1.  shift: from 1e-6 to 1e6; 1.0 gives an even grid.
    Every operation is rounded to float32, in the order of the reference, and the even grid is what torch's linspace
    computes on a CPU with fused multiply-add: the slope is rounded, each point once more, the upper half from 1, the
    lower from 0. So the values are the reference's bit for bit and depend on no machine. The first is 1 within 3e-6:
    for a shift such as 0.01 the formula's own rounding misses it.
    The reference drops a value that equals its predecessor, of each stream for itself, after which two streams are out
    of step. Values that coincide are refused here instead: ValueError, as for steps and shifts outside their ranges. No
    request comes near it: to 100 steps and shifts from 0.01 to 100 neighbours lie at least 1e-4 apart.
    """
    if steps < 1 or not 1e-6 <= shift <= 1e6:
        raise ValueError(f"steps {steps} must be at least 1 and shift {shift} from 1e-6 to 1e6")
    factor, excess = float32(shift), float32(shift - 1)
    sigmas = tuple(
        float32(float32(factor * base) / float32(1 + float32(excess * base))) for base in _falling_float32(steps)
    )
    if any(sigma <= following for sigma, following in itertools.pairwise(sigmas)):
        raise ValueError(f"{steps} steps at shift {shift} lie too close together for float32")
    return sigmas


def _falling_float32(steps: int) -> list[float]:
    """`steps + 1` float32 values from 1 to 0, evenly spaced."""
    slope = float32(-1 / steps)
    upper = (steps + 1) // 2
    return [float32(1 + slope * i) for i in range(upper)] + [
        float32(-slope * (steps - i)) for i in range(upper, steps + 1)
    ]


def float32(value: float) -> float:
    """The nearest float32, as a Python float."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def timestep(sigma: float) -> float:
    """H3 time `1 - sigma` as the model is fed it: subtracted in float32 from the float32 sigma.

    Subtracting in double and rounding afterwards gives other bits (0.1 instead of 0.10000002384185791).
    """
    return float32(1.0 - float32(sigma))


def context_timestep() -> float:
    """H3 time of text and committed chunks: the float32 value of 0.999."""
    return float32(CONTEXT_TIMESTEP)


def renoise_coefficient() -> float:
    """Weight of the noise in the clean forward: `1 - 0.999` in float32, 0.0009999871253967285 and not 0.001."""
    return float32(1.0 - context_timestep())
