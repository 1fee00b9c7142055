"""`transformer/`: the DiT with few and narrow blocks, bf16 with the published float32 islands."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import MiniMaxH3Transformer3DModel

from tools.tiny.fill import Normal, fan_in, fill

CONFIG = {
    # Inner attention width above the hidden size, as in the published model.
    "num_attention_heads": 2,
    "attention_head_dim": 128,
    "hidden_size": 192,
    "num_layers": 4,
    "num_refiner_layers": 2,
    "ffn_dim": 512,
    "text_dim": 128,
    "time_embed_hidden_dim": 192,
    "time_embed_dim": 96,
}
"""What differs from the published configuration, which is the class's default (docs/reference/h3-model.md §2.1)."""

FLOAT32_ISLANDS = ("proj_in.", "audio_proj_in.", "time_embedder.", "proj_out.", "audio_proj_out.")
"""Prefixes of the parameters that the published files keep in float32 (docs/reference/h3-model.md §2.2)."""

_MODULATION_STD = 0.4
"""Of shift, scale and gate: every branch contributes, none dominates."""
_ATTENTION_FOCUS = 1.3
"""Weight of the query and key norms: rows attend to some rows more than to others, so prompt and history are felt."""
_ATTENTION_GAIN = 2.0
"""Of the attention's output, which averages over rows and so arrives small."""
_VELOCITY_STD = 0.6
"""Of the predicted velocity: the clip depends on prompt and history, and sampled latents stay near the noise's size."""


def write_transformer(directory: Path, seed: int) -> MiniMaxH3Transformer3DModel:
    """Writes the component and returns the model."""
    model = MiniMaxH3Transformer3DModel(**CONFIG)
    for name, parameter in model.named_parameters():
        dtype = torch.float32 if name.startswith(FLOAT32_ISLANDS) else torch.bfloat16
        parameter.data = parameter.data.to(dtype)
    normal = Normal(seed, "transformer")

    def rule(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        if "norm" in name and parameter.ndim == 1 and name.endswith("weight"):
            around = _ATTENTION_FOCUS if name.endswith(("norm_q.weight", "norm_k.weight")) else 1.0
            return around + normal(name, parameter.shape, 0.1)
        if "adaln_proj" in name or name.startswith("norm_out.linear"):
            # Half of the variance from the timestep; the embedding's SiLU has a mean square of about 0.2.
            std = _MODULATION_STD / 2**0.5
            return normal(name, parameter.shape, std if parameter.ndim == 1 else std / (0.2 * fan_in(parameter)) ** 0.5)
        if parameter.ndim == 1:
            return normal(name, parameter.shape, 0.02)
        gain = 1.0
        if name.startswith(("proj_out.", "audio_proj_out.")):
            gain = _VELOCITY_STD
        elif name.endswith("to_out.0.weight"):
            gain = _ATTENTION_GAIN
        return normal(name, parameter.shape, gain * fan_in(parameter) ** -0.5)

    fill(model, rule)
    model.save_pretrained(directory)
    return model
