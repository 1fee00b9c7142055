from __future__ import annotations

import itertools
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.schedule import context_timestep, dense_sigmas, float32, renoise_coefficient, shifted_sigmas, timestep

DENSE_GRIDS = Path(__file__).parents[2] / "fixtures" / "h3" / "sigma_grids.json"


def test_one_step_starts_and_ends_at_pure_noise() -> None:
    assert shifted_sigmas(1, 12.0) == (1.0,)
    assert timestep(1.0) == 0.0


def test_every_golden_grid_is_equal_bit_for_bit(layout: Any) -> None:
    assert len(layout["sigmas"]) == 24
    for key, golden in layout["sigmas"].items():
        steps, shift = key.split(":")
        grid = shifted_sigmas(int(steps), float(shift))
        assert list(grid) == golden["float64"], key
        assert [timestep(sigma) for sigma in grid] == golden["fp32_t_h3"], key


def test_default_grids_are_those_of_the_reference() -> None:
    video = [timestep(sigma) for sigma in shifted_sigmas(4, 12.0)]
    audio = [timestep(sigma) for sigma in shifted_sigmas(4, 3.0)]
    assert video == [0.0, 0.027027010917663574, 0.07692307233810425, 0.19999998807907104]
    assert audio == [0.0, 0.10000002384185791, 0.25, 0.5]


def test_timestep_is_subtracted_in_float32() -> None:
    assert timestep(0.9) == 0.10000002384185791
    assert float32(1 - 0.9) == 0.10000000149011612


def test_context_constants_are_those_of_the_reference(layout: Any) -> None:
    assert context_timestep() == layout["clean"]["t"] == 0.9990000128746033
    assert renoise_coefficient() == layout["clean"]["one_minus_t"] == 0.0009999871253967285


@given(st.integers(1, 100), st.floats(0.01, 100))
def test_sigmas_fall_strictly_from_one(steps: int, shift: float) -> None:
    grid = shifted_sigmas(steps, shift)
    assert len(grid) == steps
    assert grid[0] == 1.0
    assert all(a > b > 0 for a, b in itertools.pairwise(grid))


@given(st.integers(1, 100))
def test_shift_one_is_an_even_grid(steps: int) -> None:
    assert shifted_sigmas(steps, 1.0) == pytest.approx([1 - i / steps for i in range(steps)], abs=1e-15)


@pytest.mark.parametrize(("steps", "shift"), [(0, 3.0), (-1, 3.0), (4, 0.0), (4, -1.0), (4, math.nan), (4, math.inf)])
def test_values_outside_the_domain_are_refused(steps: int, shift: float) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        shifted_sigmas(steps, shift)


@given(st.floats(width=32, allow_nan=False))
def test_float32_keeps_what_float32_can_hold(value: float) -> None:
    assert struct.pack("<d", float32(value)) == struct.pack("<d", value)


def test_every_golden_dense_grid_is_equal_bit_for_bit() -> None:
    grids = json.loads(DENSE_GRIDS.read_text())
    assert len(grids) == 8
    for key, golden in grids.items():
        shift, points = key.removeprefix("shift").split(".grid")
        assert list(dense_sigmas(int(points) - 1, float(shift))) == golden, key


def test_four_dense_forwards_are_those_of_the_reference() -> None:
    assert [round(sigma, 6) for sigma in dense_sigmas(4, 12.0)] == [1.0, 0.972973, 0.923077, 0.8, 0.0]
    assert [round(sigma, 6) for sigma in dense_sigmas(4, 3.0)] == [1.0, 0.9, 0.75, 0.5, 0.0]


def test_one_dense_forward_goes_from_pure_noise_to_the_clip() -> None:
    assert dense_sigmas(1, 12.0) == (1.0, 0.0)


@given(st.integers(1, 100), st.floats(0.01, 100))
def test_dense_sigmas_of_every_request_fall_to_zero_and_stay_apart(steps: int, shift: float) -> None:
    sigmas = dense_sigmas(steps, shift)
    assert len(sigmas) == steps + 1
    assert sigmas[0] == pytest.approx(1.0, abs=3e-6)
    assert sigmas[-1] == 0.0
    assert all(a - b > 1e-4 for a, b in itertools.pairwise(sigmas))
    assert all(float32(sigma) == sigma for sigma in sigmas)


def test_dense_sigmas_that_float32_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(ValueError, match=r"100 steps at shift 1000000\.0 lie too close together for float32"):
        dense_sigmas(100, 1e6)


@pytest.mark.parametrize(("steps", "shift"), [(0, 3.0), (4, 0.0), (4, 1e-9), (4, 1e9), (4, math.nan), (4, math.inf)])
def test_dense_grids_outside_the_domain_are_refused(steps: int, shift: float) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        dense_sigmas(steps, shift)
