"""Order of convergence on fields whose solution is known, and what a step asks of the model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from core import refine
from core.refine import refine_sigmas
from services.dit.refine.samplers import SAMPLERS, Grid, Streams

Field = Callable[[torch.Tensor, float], torch.Tensor]
END = 0.02
"""Base noise level up to which convergence is measured; behind it every sampler ends with a step of first order."""
MEAN, DEVIATION = 0.7, 0.6
"""Of the data, one Gaussian."""


def shifted(base: float, shift: float) -> float:
    return shift * base / (1 + (shift - 1) * base)


def grid(num_steps: int) -> Grid:
    """Video and audio levels of an even base grid that ends before 0."""
    bases = [0.9 + (END - 0.9) * i / num_steps for i in range(num_steps + 1)]
    return tuple((shifted(base, 12.0), shifted(base, 3.0)) for base in bases)


def gaussian_mean(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """Clean estimate of Gaussian data."""
    alpha, variance = 1 - sigma, DEVIATION**2
    return MEAN + alpha * variance / (alpha**2 * variance + sigma**2) * (x - alpha * MEAN)


def gaussian_path(z: torch.Tensor, sigma: float) -> torch.Tensor:
    """Where the flow carries noise `z`, the solution of the field above."""
    alpha = 1 - sigma
    return alpha * MEAN + math.sqrt(alpha**2 * DEVIATION**2 + sigma**2) * z


def walk(name: str, sigmas: Grid, streams: Streams, evaluate: Callable[[Streams, int], Streams]) -> Streams:
    sampler = SAMPLERS[name](sigmas)
    for point in range(len(sigmas) - 1):
        streams = sampler.step(streams, point, evaluate)
    return streams


def orders(errors: list[float]) -> list[float]:
    """Observed orders, from errors whose number of steps doubles."""
    return [math.log2(before / after) for before, after in itertools.pairwise(errors)]


def noise(num: int = 200) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("heun", 2), ("dpmpp_2m", 2)])
def test_both_streams_converge_at_the_samplers_order(name: str, order: int, capsys: pytest.CaptureFixture[str]) -> None:
    z = noise()
    errors: tuple[list[float], list[float]] = ([], [])
    for num_steps in (256, 512, 1024):
        sigmas = grid(num_steps)

        def evaluate(streams: Streams, point: int, sigmas: Grid = sigmas) -> Streams:
            return tuple(gaussian_mean(x, sigma) for x, sigma in zip(streams, sigmas[point], strict=True))

        ends = walk(name, sigmas, tuple(gaussian_path(z, sigma) for sigma in sigmas[0]), evaluate)
        for stream, (end, sigma) in enumerate(zip(ends, sigmas[-1], strict=True)):
            errors[stream].append((end - gaussian_path(z, sigma)).abs().max().item())
    with capsys.disabled():
        print(f"\n{name}: orders {[[round(o, 2) for o in orders(stream)] for stream in errors]}")
    for stream_errors in errors:
        assert orders(stream_errors)[-1] == pytest.approx(order, abs=0.15)


@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("heun", 2), ("dpmpp_2m", 2)])
def test_streams_that_the_model_couples_converge_too(name: str, order: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Correlated Gaussian video and audio, each estimated from both, against the same walk in far smaller steps."""
    z = torch.stack((noise(), noise().flip(0)))
    covariance = torch.tensor([[1.0, 0.8], [0.8, 1.0]], dtype=torch.float64)

    def walked(name: str, num_steps: int) -> torch.Tensor:
        sigmas = grid(num_steps)

        def evaluate(streams: Streams, point: int) -> Streams:
            sigma = torch.tensor(sigmas[point], dtype=torch.float64)
            scaled = covariance * (1 - sigma)  # of the data with what is seen of it
            seen = (1 - sigma)[:, None] * scaled + torch.diag(sigma**2)
            video, audio = scaled @ torch.linalg.solve(seen, torch.stack(streams))
            return video, audio

        start = tuple(sigma * row for sigma, row in zip(sigmas[0], z, strict=True))
        return torch.stack(walk(name, sigmas, start, evaluate))

    truth = walked("heun", 4096)
    errors = [(walked(name, num_steps) - truth).abs().max().item() for num_steps in (128, 256, 512)]
    with capsys.disabled():
        print(f"\n{name}, coupled: orders {[round(o, 2) for o in orders(errors)]}")
    assert orders(errors)[-1] == pytest.approx(order, abs=0.15)


def test_the_samplers_are_those_that_a_request_may_name() -> None:
    assert tuple(SAMPLERS) == refine.SAMPLERS


def test_heun_asks_at_grid_points_alone_and_never_at_zero() -> None:
    sigmas = refine_sigmas(4, 0.5, 12.0, 3.0)
    asked: list[int] = []

    def evaluate(streams: Streams, point: int) -> Streams:
        asked.append(point)
        return streams

    walk("heun", sigmas, (torch.ones(3), torch.ones(3)), evaluate)
    assert asked == [0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("denoise", [0.5, 1.0])
def test_a_walk_ends_at_the_last_clean_estimate_itself(name: str, denoise: float) -> None:
    """Whatever came before: what a mask keeps of it, it keeps bit for bit."""
    estimates = iter(torch.randn(12, 50, generator=torch.Generator().manual_seed(2)))
    last: list[torch.Tensor] = []

    def evaluate(streams: Streams, point: int) -> Streams:
        last.append(next(estimates))
        return (last[-1],)

    sigmas = tuple(pair[1:] for pair in refine_sigmas(6, denoise, 12.0, 3.0))
    (end,) = walk(name, sigmas, (torch.ones(50),), evaluate)
    assert torch.isfinite(end).all()
    assert torch.equal(end, last[-1])


def test_dpmpp_2m_extrapolates_between_its_first_and_last_step_only() -> None:
    """Two estimates that differ: a step of first order is Euler's, one of second order is not."""
    sigmas = refine_sigmas(4, 0.5, 12.0, 3.0)
    draw = torch.Generator().manual_seed(3)
    estimates = [(torch.randn(20, generator=draw), torch.randn(20, generator=draw)) for _ in range(4)]
    start: Streams = (torch.ones(20), torch.zeros(20))
    sampler, streams = SAMPLERS["dpmpp_2m"](sigmas), start
    equal_to_euler = []
    for point in range(4):
        euler = SAMPLERS["euler"](sigmas).step(streams, point, lambda streams, point: estimates[point])
        streams = sampler.step(streams, point, lambda streams, point: estimates[point])
        equal_to_euler.append(all(torch.equal(one, other) for one, other in zip(streams, euler, strict=True)))
    assert equal_to_euler == [True, False, False, True]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_stream_moves_as_it_would_alone(name: str) -> None:
    sigmas = refine_sigmas(5, 0.6, 12.0, 3.0)
    draw = torch.Generator().manual_seed(4)
    start = (torch.randn(30, generator=draw), torch.randn(40, generator=draw))

    def evaluate(streams: Streams, point: int) -> Streams:
        return tuple(torch.tanh(stream) * (point + 1) for stream in streams)

    together = walk(name, sigmas, start, evaluate)
    for stream in (0, 1):
        alone = tuple((pair[stream],) for pair in sigmas)
        assert torch.equal(walk(name, alone, (start[stream],), evaluate)[0], together[stream])


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_step_that_fails_can_be_repeated_and_leaves_its_input_alone(name: str) -> None:
    sigmas = refine_sigmas(4, 0.5, 12.0, 3.0)
    start: Streams = (torch.ones(10), torch.full((10,), 2.0))

    def evaluate(streams: Streams, point: int) -> Streams:
        return tuple(torch.sin(stream) for stream in streams)

    def failing(streams: Streams, point: int) -> Streams:
        raise MemoryError

    expected = walk(name, sigmas, start, evaluate)
    sampler, streams = SAMPLERS[name](sigmas), start
    for point in range(4):
        before = [stream.clone() for stream in streams]
        with pytest.raises(MemoryError):
            sampler.step(streams, point, failing)
        moved = sampler.step(streams, point, evaluate)
        assert all(torch.equal(one, other) for one, other in zip(streams, before, strict=True))
        streams = moved
    assert all(torch.equal(one, other) for one, other in zip(streams, expected, strict=True))
