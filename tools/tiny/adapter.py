"""`adapters/raven.safetensors`: a RAVEN adapter for the tiny DiT, of the published file's form.

Keys, shapes and metadata: docs/reference/raven-streaming.md §8.1.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import save_file

from tools.tiny.fill import Normal

RANK = 4
_STRENGTH = 0.3
"""Size of the residual against the output that it is added to: plain to see, small enough to keep the clip in range."""


def write_raven_adapter(path: Path, model: MiniMaxH3Transformer3DModel, seed: int) -> None:
    """Writes the adapter; its rank equals its alpha, as published."""
    normal = Normal(seed, "adapter")
    tensors: dict[str, torch.Tensor] = {}
    for module, (out_features, in_features) in official_modules(model).items():
        a, b = (f"base_model.model.dit.{module}.lora_{side}.weight" for side in "AB")
        tensors[a] = normal(a, (RANK, in_features), in_features**-0.5)
        tensors[b] = normal(b, (out_features, RANK), _STRENGTH * RANK**-0.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"lora_alpha": str(RANK)})


def official_modules(model: MiniMaxH3Transformer3DModel) -> dict[str, tuple[int, int]]:
    """The modules that a RAVEN adapter covers, by official name, with their `[out, in]`.

    The official layout fuses what the class keeps apart: `qkv_proj` stands for the three attention inputs.
    """
    shapes: dict[str, tuple[int, int]] = {
        "video_patch_proj": _shape(model.proj_in),
        "audio_patch_proj": _shape(model.audio_proj_in),
        "condition_proj": _shape(model.context_embedder),
        "time_embedder.proj_in": _shape(model.time_embedder.linear_1),
        "time_embedder.proj_out": _shape(model.time_embedder.linear_2),
        "final_layer.adaln_proj.linear": _shape(model.norm_out.linear),
        "final_layer.video_out": _shape(model.proj_out),
        "final_layer.audio_out": _shape(model.audio_proj_out),
    }
    stacks = (
        ("blocks", model.transformer_blocks),
        ("token_refiner.blocks", model.token_refiner.refiner_blocks),
    )
    for prefix, blocks in stacks:
        for index, block in enumerate(blocks):
            inner, hidden = _shape(block.attn.to_q)
            shapes[f"{prefix}.{index}.attn.qkv_proj"] = (3 * inner, hidden)
            shapes[f"{prefix}.{index}.attn.out_proj"] = _shape(block.attn.to_out[0])
            shapes[f"{prefix}.{index}.mlp.fc1"] = _shape(block.ff.net[0].proj)
            shapes[f"{prefix}.{index}.mlp.fc2"] = _shape(block.ff.net[2])
            if prefix == "blocks":
                shapes[f"{prefix}.{index}.adaln_proj.linear"] = _shape(block.adaln_proj.linear)
    return shapes


def _shape(linear: torch.nn.Linear) -> tuple[int, int]:
    return linear.out_features, linear.in_features
