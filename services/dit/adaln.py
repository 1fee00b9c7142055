"""The modulation of every block, computed once per set of timesteps instead of once per forward.

A forward's rows lie at one or two distinct timesteps, and a clip uses few such sets: one per step, and the context's.
Each is computed from exactly the rows that a forward would compute it from, so the table changes no bit; a batch over
all timesteps would let the matrix kernels round differently.
Source: docs/reference/raven-streaming.md §2.2, §4.2, §7.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import silu

from core.schedule import shifted_sigmas, timestep

if TYPE_CHECKING:
    from diffusers import MiniMaxH3Transformer3DModel

VIDEO_TAG, TEXT_TAG, AUDIO_TAG = 0, 1, 2
"""Modalities in the order in which the checkpoint's AdaLN projections hold them."""
NUM_TAGS = 3

Timesteps = tuple[float, ...]
"""Distinct float32 timesteps of one forward, ascending."""


@dataclass(frozen=True, eq=False)
class Labels:
    """The timesteps of a segment's rows."""

    values: Timesteps
    """In any order."""
    which: Tensor | None = None
    """The value of each row, `[N]` int64; None where there is one value for all."""


@dataclass(frozen=True)
class BlockModulation:
    """What one block is modulated by, each `[3 M, hidden]` in the compute dtype: a row per (timestep, tag)."""

    attn_shift: Tensor
    attn_scale: Tensor
    """1 + scale, rounded as the sum is."""
    attn_gate: Tensor
    ffn_shift: Tensor
    ffn_scale: Tensor
    """1 + scale."""
    ffn_gate: Tensor


@dataclass(frozen=True)
class Modulation:
    """What a whole forward is modulated by."""

    timesteps: Timesteps
    """The M timesteps."""
    blocks: tuple[BlockModulation, ...]
    """One per block."""
    final_shift: Tensor
    """Of the final norm, `[M, hidden]`: a row per timestep, no tag."""
    final_scale: Tensor
    """1 + scale."""

    def timestep_row(self, value: float) -> int:
        """Row of a timestep in the final norm's table."""
        return self.timesteps.index(value)

    def row(self, value: float, tag: int) -> int:
        """Row of a (timestep, tag) in the blocks' tables."""
        return NUM_TAGS * self.timestep_row(value) + tag

    def timestep_rows(self, labels: Labels, num_rows: int, device: torch.device) -> Tensor:
        """Row of every row's timestep in the final norm's table, `[num_rows]` int64."""
        rows = [self.timestep_row(value) for value in labels.values]
        if labels.which is None:
            return torch.full((num_rows,), rows[0], dtype=torch.int64, device=device)
        return torch.tensor(rows, device=device).index_select(0, labels.which)


def distinct(*values: float) -> Timesteps:
    """The timesteps of a forward, each once, ascending."""
    return tuple(sorted(set(values)))


def clip_timesteps(steps: int, video_shift: float, audio_shift: float) -> tuple[tuple[float, float], ...]:
    """Video and audio timestep of every noise forward of a chunk."""
    grids = (shifted_sigmas(steps, video_shift), shifted_sigmas(steps, audio_shift))
    return tuple((timestep(video), timestep(audio)) for video, audio in zip(*grids, strict=True))


def modulation_table(
    transformer: MiniMaxH3Transformer3DModel, forwards: Iterable[tuple[float, float]]
) -> dict[Timesteps, Modulation]:
    """The modulation of every forward of a clip.  forwards: video and audio timestep of each."""
    sets = {distinct(*pair) for pair in forwards}
    return {timesteps: modulation(transformer, timesteps) for timesteps in sorted(sets)}


def modulation(transformer: MiniMaxH3Transformer3DModel, timesteps: Timesteps) -> Modulation:
    """The modulation of a forward whose rows lie at these timesteps.

    SiLU runs once on the float32 embedding, its result is rounded once, and only the projections run per block.
    """
    embedding = time_embedding(transformer, timesteps)  # [M, time_embed_dim] float32
    condition = silu(embedding).to(transformer.norm_out.linear.weight.dtype)
    blocks = []
    for block in transformer.transformer_blocks:
        # [M, 18 hidden] -> [3 M, 6 hidden]: the three tags of a timestep follow each other
        table = block.adaln_proj.linear(condition).view(NUM_TAGS * len(timesteps), -1)
        attn_shift, attn_scale, attn_gate, ffn_shift, ffn_scale, ffn_gate = table.chunk(6, dim=-1)
        # In place: the six are views of one table, which a second copy of the scales would outlive.
        attn_scale.add_(1)
        ffn_scale.add_(1)
        blocks.append(BlockModulation(attn_shift, attn_scale, attn_gate, ffn_shift, ffn_scale, ffn_gate))
    final_shift, final_scale = transformer.norm_out.linear(condition).chunk(2, dim=-1)
    return Modulation(timesteps, tuple(blocks), final_shift, final_scale.add_(1))


class Modulations:
    """The modulation of any forward, computed when it is asked for; that of the last two sets of timesteps is kept."""

    def __init__(self, transformer: MiniMaxH3Transformer3DModel) -> None:
        self._transformer = transformer
        self._kept: dict[Timesteps, Modulation] = {}

    def __getitem__(self, timesteps: Timesteps) -> Modulation:
        """Of rows at these timesteps."""
        if timesteps not in self._kept:
            while len(self._kept) > 1:
                self._kept.pop(next(iter(self._kept)))
            self._kept[timesteps] = modulation(self._transformer, timesteps)
        return self._kept[timesteps]


def time_embedding(transformer: MiniMaxH3Transformer3DModel, timesteps: Timesteps) -> Tensor:
    """Float32 embedding of timesteps in [0, 1], `[M, time_embed_dim]`: cosines, then sines, then the time MLP."""
    device = transformer.time_embedder.linear_1.weight.device
    values = torch.tensor(timesteps, dtype=torch.float32, device=device)
    embedding: Tensor = transformer.time_embedder(transformer.time_proj(values))
    return embedding


def modulate(normed: Tensor, shift: Tensor, scale: Tensor, rows: Tensor) -> Tensor:
    """`normed * (1 + scale) + shift` with the table row of each row; product and sum are each rounded.

    normed: `[N, hidden]`.  shift, scale: tables, `scale` with its 1 added.  rows: `[N]` table rows.
    """
    return normed * scale.index_select(0, rows) + shift.index_select(0, rows)


def add_gated(hidden: Tensor, branch: Tensor, gate: Tensor, rows: Tensor) -> None:
    """Adds `gate * branch` to `hidden` in place, with the table row of each row; the product is rounded first."""
    hidden.add_(gate.index_select(0, rows).mul_(branch))
