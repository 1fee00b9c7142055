"""`vae/`: the video autoencoder with narrow encoder levels and two decoder blocks, real compression factors."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from diffusers import AutoencoderKLMiniMaxH3

from tools.tiny.fill import Normal, fan_in, fill

CONFIG = {
    "block_out_channels": (8, 8, 16, 16, 16, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "decoder_num_layers": 2,
    "decoder_num_attention_heads": 2,
    "decoder_attention_head_dim": 64,
}
"""What differs from the published configuration, which is the class's default (docs/reference/h3-model.md §4)."""

_LATENT_CHANNELS = 24
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_PIXEL_STD = 0.14
"""Of decoded pixels around mid-grey, in units of full scale: the limits are 3.5 deviations away."""
_PATCH = (4, 16, 16)
"""Frames, rows and columns that one latent decodes to."""


def write_video_vae(directory: Path, seed: int) -> None:
    """Writes the component."""
    normal = Normal(seed, "vae")
    # Statistics far from 0 and 1, so a decode that forgets them shows.
    mean = normal("latents_mean", (_LATENT_CHANNELS,), 0.3)
    std = torch.exp(normal("latents_std", (_LATENT_CHANNELS,), 0.3))
    model = AutoencoderKLMiniMaxH3(**CONFIG, latents_mean=mean.tolist(), latents_std=std.tolist())

    def rule(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        if name == "decoder.proj_out.weight":
            return _smooth_patches(normal, parameter.shape[1])
        if name == "decoder.proj_out.bias":
            grey = [(0.5 - m) / s for m, s in zip(_IMAGENET_MEAN, _IMAGENET_STD, strict=True)]
            return torch.tensor(grey).repeat_interleave(math.prod(_PATCH))
        if name.endswith(("scale1", "scale2")):
            return normal(name, parameter.shape, 0.5)
        if name.endswith("register_tokens"):
            return normal(name, parameter.shape)
        if parameter.ndim == 1:
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            return around + normal(name, parameter.shape, 0.05)
        return normal(name, parameter.shape, fan_in(parameter) ** -0.5)

    fill(model, rule)
    model.save_pretrained(directory)


def _smooth_patches(normal: Normal, width: int) -> torch.Tensor:
    """Weight `[3 * 4 * 16 * 16, width]` of the output projection: every patch is a random mix of low spatial and
    temporal frequencies, so a clip is drifting clouds of colour and not pixel noise, which no video encoder likes.
    """
    frames, rows, columns = (_cosines(length, count) for length, count in zip(_PATCH, (2, 3, 3), strict=True))
    waves = torch.einsum("at,by,cx->abctyx", frames, rows, columns).reshape(-1, math.prod(_PATCH))  # [18, 1024]
    order = torch.tensor([a + b + c for a in range(2) for b in range(3) for c in range(3)])
    amplitude = 1.0 / (1.0 + order)
    amplitude *= _PIXEL_STD / torch.linalg.vector_norm(amplitude)
    mix = normal("decoder.proj_out.weight", (3, len(order), width), width**-0.5)
    mix *= amplitude[None, :, None] / torch.tensor(_IMAGENET_STD)[:, None, None]
    return torch.einsum("kp,ckd->cpd", waves, mix).reshape(-1, width)


def _cosines(length: int, count: int) -> torch.Tensor:
    """The first `count` cosine waves over `length` points, each of mean square 1: `[count, length]`."""
    points = (torch.arange(length) + 0.5) / length
    waves = torch.cos(math.pi * torch.arange(count)[:, None] * points)
    return waves / waves.square().mean(dim=1, keepdim=True).sqrt()
