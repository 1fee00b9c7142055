"""`audio_vae/`: an audio autoencoder of the real class whose decoder is an additive synthesiser, built by formula.

A latent holds eight amplitudes: of the world's seven partials, and of the click that begins with the latent. The first
upsampler draws them at 200 Hz as (in phase, quadrature) of every partial, the second overlap-adds waveforms of 9 ms,
and the other five put samples in order. The residual blocks add nothing and the activations are straight lines, so the
decoder is linear.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import torch
from diffusers import AutoencoderKLMiniMaxH3Audio
from torch import Tensor, nn

from core.geometry import AUDIO_LATENT_CHANNELS, AUDIO_LATENTS_PER_SECOND, SAMPLE_RATE, num_audio_latents
from tools.tiny.fill import Normal, fan_in, fill
from tools.train_tiny.world import (
    CLICK_LEVEL,
    FUNDAMENTALS,
    HARMONICS,
    PARTIALS,
    TONE_LEVEL,
    Scenes,
    click_amplitudes,
    tone_amplitudes,
)

CONFIG = {
    "encoder_dim": 2,
    "latent_dim": 32,
    # Halved seven times: 128 is the least that leaves a channel at the last level, and 32 channels for the 32 samples
    # of a millisecond after the second.
    "decoder_dim": 128,
    "resblock_kernel_sizes": (1,),
    "resblock_dilation_sizes": ((1,),),
}
"""What differs from the published configuration, which is the class's default (docs/reference/h3-model.md §5)."""

NUM_AMPLITUDES = len(PARTIALS) + 1
"""Of every partial, then of the click."""
_SPREAD = AUDIO_LATENT_CHANNELS // NUM_AMPLITUDES
"""Latent channels that carry one amplitude: the decoder reads their mean, in which errors average out."""
_RATE = 5
"""Of both first upsamplers; their kernels have nine taps, of which tap 2 is the first that lies in the input's step."""
_TAPS, _FIRST = 9, 2
_MILLISECOND = SAMPLE_RATE // 1000
"""Samples after the second upsampler's step."""
_STEP = _RATE * _MILLISECOND
"""Samples from one of the overlap-added waveforms to the next."""
_CLICK_TONES = (3100.0, 4100.0, 5300.0)
"""Frequencies of a click, Hz: between the partials and 6 kHz."""
_CLICK_ATTACK_S, _CLICK_DECAY_S = 0.0002, 0.0015
_LINEAR = 20.0
"""Log beta of an activation: it adds at most exp(-20) to its input."""


def audio_latents(scenes: Scenes, num_frames: int) -> Tensor:
    """The sound of the scenes as normalised latents, `[B, 32, 2, A]` float32."""
    num_latents = num_audio_latents(num_frames)
    tones = tone_amplitudes(scenes, num_latents)  # [B, 7, 2, A]
    clicks = click_amplitudes(scenes, num_frames, num_latents)  # [B, 2, A]
    amplitudes = torch.cat((tones, clicks[:, None]), dim=1)
    mean, std = (value[:, None, None] for value in _amplitude_statistics())
    return ((amplitudes - mean) / std).repeat_interleave(_SPREAD, dim=1).float()


def write_audio_vae(directory: Path, seed: int) -> None:
    """Writes the component.  seed: of the encoder, which is random and does not match the decoder."""
    normal = Normal(seed, "audio_vae")
    mean, std = (value.repeat_interleave(_SPREAD) / _SPREAD**0.5 for value in _amplitude_statistics())
    with warnings.catch_warnings():
        # The published key names are those of torch's older weight norm, which the class must therefore use.
        warnings.filterwarnings("ignore", message=".*weight_norm.* is deprecated", category=FutureWarning)
        model = AutoencoderKLMiniMaxH3Audio(**CONFIG, latents_mean=mean.tolist(), latents_std=std.tolist())

    def rule(name: str, parameter: nn.Parameter) -> Tensor:
        """Random; in the decoder, everything zero but the activations."""
        if name.startswith("decoder.") and not name.endswith("weight_v"):
            return torch.full(parameter.shape, _LINEAR if name.endswith("beta") else 0.0)
        if name.endswith(("weight_g", "alpha")) or (parameter.ndim == 1 and "norm" in name and "weight" in name):
            return torch.ones(parameter.shape)
        if parameter.ndim == 1:
            return torch.zeros(parameter.shape)
        return normal(name, parameter.shape, fan_in(parameter) ** -0.5)

    fill(model, rule)
    _build_decoder(model)
    model.save_pretrained(directory)


def _build_decoder(model: AutoencoderKLMiniMaxH3Audio) -> None:
    """Sets every convolution on the way from latents to samples."""
    decoder = model.decoder
    index = torch.arange(NUM_AMPLITUDES)
    gather = torch.zeros(model.dec_in_proj.weight.shape)  # [32, 32, 1]
    gather[:NUM_AMPLITUDES, :, 0] = torch.eye(NUM_AMPLITUDES).repeat_interleave(_SPREAD, dim=1) / _SPREAD**0.5
    with torch.no_grad():
        model.dec_in_proj.weight.copy_(gather)
        model.dec_in_proj.bias.zero_()

    passed_on = torch.zeros(decoder.conv_pre.weight_v.shape)  # [128, 32, 7]
    passed_on[index, index, 3] = 1.0
    _set_kernel(decoder.conv_pre, passed_on)

    upsamplers = [stage[0] for stage in decoder.ups]
    _set_kernel(upsamplers[0], _phasors())
    _set_kernel(upsamplers[1], _waveforms())
    for upsampler in upsamplers[2:]:
        in_order = torch.zeros(upsampler.weight_v.shape)  # [2 half, half, 4]
        half = in_order.shape[1]
        for channel in range(2 * half):  # the earlier half of the samples, then the later
            in_order[channel, channel % half, 1 + channel // half] = 1.0
        _set_kernel(upsampler, in_order)

    last = torch.zeros(decoder.conv_post.weight_v.shape)  # [1, 1, 7]
    last[0, 0, 3] = 1.0
    _set_kernel(decoder.conv_post, last)


@torch.no_grad()
def _set_kernel(convolution: nn.Module, kernel: Tensor) -> None:
    """Gives a weight-normalised convolution this kernel: a direction and a length for every first index."""
    length = kernel.flatten(1).norm(dim=1)[:, None, None]
    parameters = dict(convolution.named_parameters())
    parameters["weight_g"].copy_(length)
    parameters["weight_v"].copy_(torch.where(length > 0, kernel, 1.0))  # a direction must not be 0


def _phasors() -> Tensor:
    """Kernel `[128, 64, 9]` from amplitudes at 40 Hz to every partial's (in phase, quadrature) and the click at 200 Hz.

    An amplitude rises and falls linearly from one latent's middle to the next; a click is in the first step alone.
    """
    kernel = torch.zeros(128, 64, _TAPS)
    step = torch.arange(_TAPS) - _FIRST
    ramp = 1.0 - (step - _FIRST).abs() / _RATE
    for k, frequency in enumerate(PARTIALS):
        phase = 2 * math.pi * frequency * step / (_RATE * AUDIO_LATENTS_PER_SECOND)
        kernel[k, 2 * k] = ramp * torch.cos(phase)
        kernel[k, 2 * k + 1] = ramp * torch.sin(phase)
    kernel[len(PARTIALS), 2 * len(PARTIALS), _FIRST] = 1.0
    return kernel


def _waveforms() -> Tensor:
    """Kernel `[64, 32, 9]` from values at 200 Hz to the 32 samples of every millisecond, from 2 ms before the step on.

    A partial's waveform fades in and out over 4 ms, so the waveforms of consecutive steps add up to a steady sine.
    """
    length = _TAPS * _MILLISECOND
    sample = torch.arange(length, dtype=torch.float64)
    second = (sample - _FIRST * _MILLISECOND) / SAMPLE_RATE
    fade = (torch.minimum(sample + 0.5, length - 0.5 - sample) / (length - _STEP)).clamp(max=1.0)
    waveforms = torch.zeros(64, length, dtype=torch.float64)
    for k, frequency in enumerate(PARTIALS):
        turn = 2 * math.pi * frequency * second
        waveforms[2 * k] = fade * torch.sin(turn)
        waveforms[2 * k + 1] = fade * torch.cos(turn)
    waveforms[2 * len(PARTIALS), _FIRST * _MILLISECOND :] = click_waveform()
    return waveforms.view(64, _TAPS, _MILLISECOND).transpose(1, 2).float()


def click_waveform() -> Tensor:
    """A click of amplitude 1, `[224]` float64 samples: a knock that dies away within 7 ms, with a peak of 1.

    It has nothing in common with a constant or a partial.
    """
    second = torch.arange((_TAPS - _FIRST) * _MILLISECOND, dtype=torch.float64) / SAMPLE_RATE
    turns = 2 * math.pi * second[:, None]
    fade = (1.0 - (second / second[-1]) ** 4) * (1.0 - torch.exp(-second / _CLICK_ATTACK_S))
    tones = torch.sin(turns * torch.tensor(_CLICK_TONES, dtype=torch.float64)).sum(dim=1)
    knock = fade * torch.exp(-second / _CLICK_DECAY_S) * tones
    turns = turns * torch.tensor((0.0, *PARTIALS), dtype=torch.float64)
    others = torch.cat((torch.cos(turns), torch.sin(turns[:, 1:])), dim=1)  # [224, 15]
    faded = fade[:, None] * others
    knock -= faded @ torch.linalg.solve(others.T @ faded, others.T @ knock)
    click: Tensor = knock / knock.abs().max()
    return click


def _amplitude_statistics() -> tuple[Tensor, Tensor]:
    """What a normalised 0 means and what a 1 adds to it, `[8]` float64 each, of full scale.

    A partial or a click at its loudest, in the middle of the picture, is 2 above silence. The mean of a partial over
    the world is about 0.15 of that loudness; clicks are too rare to have one.
    """
    relative = [
        max(
            amplitude
            for fundamental in FUNDAMENTALS
            for harmonic, amplitude in enumerate(HARMONICS, start=1)
            if harmonic * fundamental == partial
        )
        for partial in PARTIALS
    ]
    loudest = 0.5 * torch.tensor([*(TONE_LEVEL * share for share in relative), CLICK_LEVEL], dtype=torch.float64)
    share = torch.tensor([0.15] * len(PARTIALS) + [0.0], dtype=torch.float64)
    return share * loudest, 0.5 * loudest
