"""What every trained stage shares: steps whose data depend on their number alone, and checkpoints to go on from.

A run that was stopped and one that was not end with the same bits: a checkpoint holds all that a step reads.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

CHECKPOINT_EVERY_S = 60.0
"""Least time between two checkpoints of a stage, seconds."""
_REPORT_EVERY_S = 10.0
_MUON_RATE = 0.02


class Stateful(Protocol):
    """What a checkpoint keeps: a module, an optimiser, a running average."""

    def state_dict(self) -> Any:
        """All of it."""

    def load_state_dict(self, state: Any) -> Any:
        """Takes it back."""


def generator(seed: int, *names: object) -> torch.Generator:
    """A random generator of its own for every (seed, names), such as a stage and the number of a step."""
    digest = hashlib.sha256("/".join(map(str, (seed, *names))).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))  # torch's reads 32 bits


def run_steps(
    name: str,
    num_steps: int,
    step: Callable[[int], Mapping[str, float]],
    state: Mapping[str, Stateful],
    checkpoint: Path,
) -> None:
    """Calls `step(0)` to `step(num_steps - 1)`, from the last checkpoint on, and prints progress to stderr.

    step: returns what is worth showing, such as losses.  state: everything that steps change.
    checkpoint: the file; written whole or not at all.
    """
    first = 0
    if checkpoint.exists():
        kept = torch.load(checkpoint, weights_only=True)
        for key, stateful in state.items():
            stateful.load_state_dict(kept[key])
        first = kept["step"]
    started = saved = reported = time.monotonic()
    for number in range(first, num_steps):
        with torch.enable_grad():
            shown = step(number)
        now = time.monotonic()
        is_last = number + 1 == num_steps
        if is_last or now - reported >= _REPORT_EVERY_S:
            left = (now - started) / (number + 1 - first) * (num_steps - number - 1)
            figures = "  ".join(f"{key} {value:.4g}" for key, value in shown.items())
            print(f"{name}: step {number + 1} of {num_steps}, {left / 60:.1f} min left  {figures}", file=sys.stderr)
            reported = now
        if is_last or now - saved >= CHECKPOINT_EVERY_S:
            _write(checkpoint, {"step": number + 1, **{key: kept.state_dict() for key, kept in state.items()}})
            saved = now


def learning_rate(step: int, num_steps: int) -> float:
    """Share of the full learning rate: it rises over the first steps and falls linearly over the last half."""
    return min(1.0, (step + 1) / 30, 2.0 * (1.0 - step / num_steps))


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of all of an optimiser's parameters."""
    for group in optimiser.param_groups:
        group["lr"] = rate


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser of the matrices between hidden rows: orthogonal updates with momentum."""
    return torch.optim.Muon(parameters, momentum=0.95, weight_decay=0.01, ns_steps=4)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser of everything else."""
    return torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.0)


Optimisers = tuple[torch.optim.Optimizer, torch.optim.Optimizer]
"""That of the matrices between hidden rows, and that of everything else."""


def optimisers(module: nn.Module, blocks: tuple[str, ...]) -> Optimisers:
    """Of a module's parameters that are trained.

    blocks: beginnings of the names within which matrices lie between hidden rows, but for those of AdaLN.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    matrices = [p for name, p in trained.items() if p.ndim == 2 and name.startswith(blocks) and "adaln" not in name]
    taken = {id(p) for p in matrices}
    return muon(matrices), adam([p for p in trained.values() if id(p) not in taken])


def update(loss: Tensor, both: Optimisers, share: float, adam_rate: float) -> None:
    """One step of both optimisers at a share of their full learning rates.  adam_rate: the second one's."""
    orthogonal, adamw = both
    set_learning_rate(orthogonal, _MUON_RATE * share)
    set_learning_rate(adamw, adam_rate * share)
    for optimiser in both:
        optimiser.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(adamw.param_groups[0]["params"], 1.0)
    for optimiser in both:
        optimiser.step()


class WeightAverage:
    """Exponential average of a module's parameters over the steps: what is kept of a training."""

    def __init__(self, module: nn.Module, decay: float = 0.98) -> None:
        self._parameters: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        self._average = [p.detach().clone() for p in self._parameters]
        self._decay = decay

    @torch.no_grad()
    def update(self) -> None:
        """Takes the parameters as they are now in."""
        torch._foreach_lerp_(self._average, self._parameters, 1.0 - self._decay)

    @torch.no_grad()
    def apply(self) -> None:
        """Sets the parameters to their average."""
        for parameter, average in zip(self._parameters, self._average, strict=True):
            parameter.copy_(average)

    def state_dict(self) -> Any:
        """The averages."""
        return self._average

    @torch.no_grad()
    def load_state_dict(self, state: Any) -> None:
        """Takes averages back."""
        for average, kept in zip(self._average, state, strict=True):
            average.copy_(kept)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".part")
    torch.save(content, scratch)
    os.replace(scratch, path)
