"""Sigma grids and the timesteps fed to the model.

Source: docs/reference/raven-streaming.md §4.
"""

from __future__ import annotations

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
        u = 1 - i / steps
        grid.append(shift * u / (1 + (shift - 1) * u))
    return tuple(grid)


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
