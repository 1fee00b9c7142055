"""Official module names of the H3 DiT and the published modules they stand for; adapters use the official ones.

Source: docs/reference/h3-model.md §3.1, docs/reference/raven-streaming.md §8.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

QKV = "attn.qkv_proj"
"""Fused projection, rows stacked [Q; K; V]; three modules here."""
FC1 = "mlp.fc1"
"""First feed-forward matrix, rows stacked [gate; up]; [up; gate] here."""

_BLOCK: dict[str, tuple[str, ...]] = {
    QKV: ("attn.to_q", "attn.to_k", "attn.to_v"),
    "attn.out_proj": ("attn.to_out.0",),
    FC1: ("ff.net.0.proj",),
    "mlp.fc2": ("ff.net.2",),
}
_ADALN = "adaln_proj.linear"
_OUTER = {
    "video_patch_proj": "proj_in",
    "audio_patch_proj": "audio_proj_in",
    "condition_proj": "context_embedder",
    "time_embedder.proj_in": "time_embedder.linear_1",
    "time_embedder.proj_out": "time_embedder.linear_2",
    "final_layer.adaln_proj.linear": "norm_out.linear",
    "final_layer.video_out": "proj_out",
    "final_layer.audio_out": "audio_proj_out",
}


def official_modules(num_layers: int, num_refiner_layers: int) -> dict[str, tuple[str, ...]]:
    """Every linear module by its official name, with the published modules that hold its rows, in order.

    266 names for the real model's 50 blocks and 2 refiner blocks.
    """
    modules: dict[str, tuple[str, ...]] = {official: (ours,) for official, ours in _OUTER.items()}
    for official_prefix, prefix, count in (
        ("blocks", "transformer_blocks", num_layers),
        ("token_refiner.blocks", "token_refiner.refiner_blocks", num_refiner_layers),
    ):
        for i in range(count):
            for official, ours in _BLOCK.items():
                modules[f"{official_prefix}.{i}.{official}"] = tuple(f"{prefix}.{i}.{name}" for name in ours)
    for i in range(num_layers):
        modules[f"blocks.{i}.{_ADALN}"] = (f"transformer_blocks.{i}.{_ADALN}",)
    return modules


def split_output_rows(official: str, rows: Tensor) -> tuple[Tensor, ...]:
    """The output rows `[out, ...]` of an official module, cut and ordered for the published modules it stands for."""
    if official.endswith(QKV):
        return rows.chunk(3)
    if official.endswith(FC1):
        gate, up = rows.chunk(2)
        return (torch.cat((up, gate)),)
    return (rows,)
