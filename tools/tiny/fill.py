"""Random weights that depend on a seed and a parameter's name alone, so adding one parameter changes no other."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import nn


class Normal:
    """Normal random tensors of one component."""

    def __init__(self, seed: int, component: str) -> None:
        self._prefix = f"{seed}/{component}/"

    def __call__(self, name: str, shape: torch.Size | tuple[int, ...], std: float = 1.0) -> torch.Tensor:
        """float32 values for a parameter `name`, with the standard deviation `std`."""
        digest = hashlib.sha256((self._prefix + name).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randn(tuple(shape), generator=generator) * std


def fan_in(parameter: torch.Tensor) -> int:
    """Inputs that one output of a linear or convolution weight `[out, in, ...]` adds up."""
    return math.prod(parameter.shape[1:])


@torch.no_grad()
def fill(module: nn.Module, rule: Callable[[str, nn.Parameter], torch.Tensor]) -> None:
    """Sets every parameter to `rule(name, parameter)`, rounded to the parameter's dtype."""
    for name, parameter in module.named_parameters():
        parameter.copy_(rule(name, parameter))
