"""How much a clip changes from frame to frame, where chunks meet, where latents meet and elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.geometry import FRAMES_PER_CHUNK

BLENDED_FRAMES = 5
"""First frames of a chunk, in which it is blended with the end of the one before."""
LATENT_FRAMES = 4
"""Frames of every latent of a chunk but its first, which has one."""
KINDS = ("cut", "blend", "border", "elsewhere")
"""Of a step from one frame to the next: into a chunk's first frame, into another of its blended frames, out of a
latent's last frame, any other.
"""


@dataclass(frozen=True)
class Changes:
    """Mean absolute change from frame to frame, in 8-bit levels, by the kind of step."""

    total: Tensor
    """Sum of the changes of each kind, `[4]` float64."""
    count: Tensor
    """Number of steps of each kind, `[4]` float64."""

    def __add__(self, other: Changes) -> Changes:
        return Changes(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> Tensor:
        """Of each kind, `[4]`; NaN where there is no such step."""
        return self.total / self.count

    @property
    def ratio(self) -> Tensor:
        """Of each kind's mean to the mean elsewhere, `[4]`."""
        return self.mean / self.mean[KINDS.index("elsewhere")]


def changes(frames: Tensor) -> Changes:
    """The changes of a clip `[F, H, W, 3]` uint8."""
    levels = frames.short()
    steps = (levels[1:] - levels[:-1]).abs().float().mean(dim=(1, 2, 3)).double()  # [F - 1]
    kinds = torch.tensor([_kind(frame) for frame in range(1, len(frames))])
    total, count = (torch.zeros(len(KINDS), dtype=torch.float64) for _ in range(2))
    return Changes(total.index_add(0, kinds, steps), count.index_add(0, kinds, torch.ones_like(steps)))


def _kind(frame: int) -> int:
    """Of the step into a frame, an index into `KINDS`."""
    within = frame % FRAMES_PER_CHUNK
    if frame >= FRAMES_PER_CHUNK and within == 0:
        return KINDS.index("cut")
    if frame > FRAMES_PER_CHUNK and within < BLENDED_FRAMES:
        return KINDS.index("blend")
    return KINDS.index("border" if within % LATENT_FRAMES == 1 else "elsewhere")
