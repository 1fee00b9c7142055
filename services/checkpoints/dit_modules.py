"""The modules of the DiT: official and published (diffusers) names, shapes, and how the layouts order their rows.

Source: docs/reference/h3-model.md §2.2, §3, §3.1; docs/reference/raven-streaming.md §8.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from core.geometry import AUDIO_LATENT_CHANNELS, PATCH, VIDEO_LATENT_CHANNELS
from services.checkpoints.key_map import Rows, Rule, Shape, identity

DitLayout = Literal["diffusers", "official", "comfyui"]

QKV = "attn.qkv_proj"
"""Fused projection; three modules in the published class."""
FC1 = "mlp.fc1"
"""First feed-forward matrix, gate rows first; the published class has them second."""
INV_FREQ = "rope.inv_freq"
"""Rotary frequencies, which the official names store and the published class computes."""

_BLOCK_LINEARS: dict[str, tuple[str, ...]] = {
    QKV: ("attn.to_q", "attn.to_k", "attn.to_v"),
    "attn.out_proj": ("attn.to_out.0",),
    FC1: ("ff.net.0.proj",),
    "mlp.fc2": ("ff.net.2",),
}
_BLOCK_NORMS = {"attn.q_norm": "attn.norm_q", "attn.k_norm": "attn.norm_k", "norm1": "norm1", "norm2": "norm2"}
_ADALN = "adaln_proj.linear"
_OUTER_LINEARS = {
    "video_patch_proj": "proj_in",
    "audio_patch_proj": "audio_proj_in",
    "condition_proj": "context_embedder",
    "time_embedder.proj_in": "time_embedder.linear_1",
    "time_embedder.proj_out": "time_embedder.linear_2",
    "final_layer.adaln_proj.linear": "norm_out.linear",
    "final_layer.video_out": "proj_out",
    "final_layer.audio_out": "audio_proj_out",
}
_OUTER_NORMS = {"token_refiner.final_norm": "token_refiner.final_norm", "final_layer.norm": "norm_out.norm"}


@dataclass(frozen=True)
class Architecture:
    """Sizes of a DiT under the names of the published class's arguments; the defaults are the published model's."""

    num_layers: int = 50
    num_refiner_layers: int = 2
    num_attention_heads: int = 56
    attention_head_dim: int = 128
    hidden_size: int = 5376
    ffn_dim: int = 14336
    in_channels: int = VIDEO_LATENT_CHANNELS
    audio_in_channels: int = AUDIO_LATENT_CHANNELS
    patch_size: tuple[int, int, int] = (1, PATCH, PATCH)
    text_dim: int = 5120
    freq_dim: int = 256
    time_embed_hidden_dim: int = 5376
    time_embed_dim: int = 2688
    rope_freq_dim: int = 16
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm_eps: float = 1e-5
    final_norm_eps: float = 1e-5

    @property
    def patch_dim(self) -> int:
        """Width of a video row."""
        return self.in_channels * math.prod(self.patch_size)

    def inv_freq(self) -> tuple[float, ...]:
        """Rotary frequencies of an axis."""
        return tuple(self.rope_theta ** (-index / self.rope_freq_dim) for index in range(self.rope_freq_dim))


def official_modules(num_layers: int, num_refiner_layers: int) -> dict[str, tuple[str, ...]]:
    """Every linear module by its official name, with the published modules that hold its rows, in order.

    266 names for the real model's 50 blocks and 2 refiner blocks.
    """
    modules: dict[str, tuple[str, ...]] = {official: (ours,) for official, ours in _OUTER_LINEARS.items()}
    for official_prefix, prefix in _blocks(num_layers, num_refiner_layers):
        for official, parts in _BLOCK_LINEARS.items():
            modules[f"{official_prefix}.{official}"] = tuple(f"{prefix}.{part}" for part in parts)
    for i in range(num_layers):
        modules[f"blocks.{i}.{_ADALN}"] = (f"transformer_blocks.{i}.{_ADALN}",)
    return modules


def module_rows(official: str, layout: DitLayout) -> Rows:
    """How a layout, or an adapter trained on it, orders the output rows of an official linear module."""
    if official.endswith(QKV):
        return Rows.PER_HEAD if layout == "official" else Rows.STACKED
    return Rows.SWAPPED_HALVES if official.endswith(FC1) else Rows.SAME


def key_map(
    layout: DitLayout, num_layers: int, num_refiner_layers: int, num_heads: int, prefix: str = ""
) -> dict[str, Rule]:
    """What each tensor of a layout becomes.

    num_heads: only the official layout's order of rows depends on it.  prefix: what stands before every key.
    """
    modules = official_modules(num_layers, num_refiner_layers) | _norms(num_layers, num_refiner_layers)
    rules = {}
    for official, published in modules.items():
        rows = module_rows(official, layout)
        for kind in ("weight", "bias") if _has_bias(official) else ("weight",):
            targets = tuple(f"{name}.{kind}" for name in published)
            rules[f"{prefix}{official}.{kind}"] = Rule(targets, rows, num_heads if rows is Rows.PER_HEAD else 1)
    if layout == "diffusers":
        return identity(f"{prefix}{target}" for rule in rules.values() for target in rule.targets)
    return rules | {f"{prefix}{INV_FREQ}": Rule(())}


def parameter_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Shape of every parameter of the published class."""
    a = architecture
    hidden, inner = a.hidden_size, a.num_attention_heads * a.attention_head_dim
    block: dict[str, Shape] = {
        "norm1.weight": (hidden,),
        "attn.to_q.weight": (inner, hidden),
        "attn.to_k.weight": (inner, hidden),
        "attn.to_v.weight": (inner, hidden),
        "attn.norm_q.weight": (a.attention_head_dim,),
        "attn.norm_k.weight": (a.attention_head_dim,),
        "attn.to_out.0.weight": (hidden, inner),
        "norm2.weight": (hidden,),
        "ff.net.0.proj.weight": (2 * a.ffn_dim, hidden),  # gate and value
        "ff.net.2.weight": (hidden, a.ffn_dim),
    }
    modulation = _linear(_ADALN, 3 * 6 * hidden, a.time_embed_dim)  # six vectors for each of three modalities
    shapes: dict[str, Shape] = {
        **_linear("proj_in", hidden, a.patch_dim),
        **_linear("audio_proj_in", hidden, a.audio_in_channels),
        **_linear("context_embedder", hidden, a.text_dim),
        **_linear("time_embedder.linear_1", a.time_embed_hidden_dim, a.freq_dim),
        **_linear("time_embedder.linear_2", a.time_embed_dim, a.time_embed_hidden_dim),
        "token_refiner.final_norm.weight": (hidden,),
        "norm_out.norm.weight": (hidden,),
        **_linear("norm_out.linear", 2 * hidden, a.time_embed_dim),  # shift and scale
        **_linear("proj_out", a.patch_dim, hidden),
        **_linear("audio_proj_out", a.audio_in_channels, hidden),
    }
    for i in range(a.num_refiner_layers):
        shapes |= {f"token_refiner.refiner_blocks.{i}.{name}": shape for name, shape in block.items()}
    for i in range(a.num_layers):
        shapes |= {f"transformer_blocks.{i}.{name}": shape for name, shape in (block | modulation).items()}
    return shapes


def _linear(name: str, outputs: int, inputs: int) -> dict[str, Shape]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norms(num_layers: int, num_refiner_layers: int) -> dict[str, tuple[str, ...]]:
    norms: dict[str, tuple[str, ...]] = {official: (ours,) for official, ours in _OUTER_NORMS.items()}
    for official_prefix, prefix in _blocks(num_layers, num_refiner_layers):
        norms |= {f"{official_prefix}.{official}": (f"{prefix}.{ours}",) for official, ours in _BLOCK_NORMS.items()}
    return norms


def _blocks(num_layers: int, num_refiner_layers: int) -> Iterator[tuple[str, str]]:
    """Official and published name of every block."""
    for i in range(num_layers):
        yield f"blocks.{i}", f"transformer_blocks.{i}"
    for i in range(num_refiner_layers):
        yield f"token_refiner.blocks.{i}", f"token_refiner.refiner_blocks.{i}"


def _has_bias(official: str) -> bool:
    return official in _OUTER_LINEARS or official.endswith(_ADALN)
