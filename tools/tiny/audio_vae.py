"""`audio_vae/`: the audio autoencoder with narrow layers and the real rates, 800 samples a latent."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from diffusers import AutoencoderKLMiniMaxH3Audio

from tools.tiny.fill import Normal, fan_in, fill

CONFIG = {
    "encoder_dim": 4,
    "latent_dim": 64,
    # Halved seven times: 128 is the least that leaves a channel at the last level.
    "decoder_dim": 128,
    # Two thin stacks a level instead of three thick ones: the activations between their convolutions take the time.
    "resblock_kernel_sizes": (3, 7),
    "resblock_dilation_sizes": ((1, 3), (1, 3)),
}
"""What differs from the published configuration, which is the class's default (docs/reference/h3-model.md §5)."""

_LATENT_CHANNELS = 32
_RESIDUAL_GAIN = 0.25
"""Of each residual unit, so that the levels in a row neither fade nor explode."""
_OUTPUT_GAIN = 0.06
"""Of the last convolution: puts the waveform's standard deviation near 0.08 of full scale."""


def write_audio_vae(directory: Path, seed: int) -> None:
    """Writes the component."""
    normal = Normal(seed, "audio_vae")
    # Statistics far from 0 and 1, so a decode that forgets them shows.
    mean = normal("latents_mean", (_LATENT_CHANNELS,), 0.3)
    std = torch.exp(normal("latents_std", (_LATENT_CHANNELS,), 0.3))
    with warnings.catch_warnings():
        # The published key names are those of torch's older weight norm, which the class must therefore use.
        warnings.filterwarnings("ignore", message=".*weight_norm.* is deprecated", category=FutureWarning)
        model = AutoencoderKLMiniMaxH3Audio(**CONFIG, latents_mean=mean.tolist(), latents_std=std.tolist())

    def rule(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        if name.endswith("weight_g"):
            return torch.full(parameter.shape, _gain(name))
        if name.endswith("weight_v"):
            direction = normal(name, parameter.shape)
            # Taps that add up to 0: a steady level in the features makes no direct current in the sound.
            return direction - direction.mean(dim=2, keepdim=True) if "conv_post" in name else direction
        if name.startswith("encoder.") and name.endswith(".alpha"):
            return torch.ones(parameter.shape)
        if parameter.ndim == 1:
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            return around + normal(name, parameter.shape, 0.05)
        return normal(name, parameter.shape, fan_in(parameter) ** -0.5)

    fill(model, rule)
    model.save_pretrained(directory)


def _gain(name: str) -> float:
    """Norm of a weight-normalised kernel: what the layer multiplies the size of its input with."""
    if "conv_post" in name:
        return _OUTPUT_GAIN
    if "convs2" in name or (name.startswith("encoder.") and ".block.3." in name):
        return _RESIDUAL_GAIN
    # An upsampler by 5 adds two fifths of the terms that one by 2 does.
    return 2.5**0.5 if name.startswith(("decoder.ups.0.", "decoder.ups.1.")) else 1.0
