"""`audio_vae/`: an audio autoencoder of the real class, built by formula: its decoder is an additive synthesiser.

A latent holds eight amplitudes: of the world's seven partials, and of the click that begins with the latent. The first
upsampler draws them at 200 Hz as (in phase, quadrature) of every partial, the second overlap-adds waveforms of 9 ms,
and the other five put samples in order. The residual blocks add nothing and the activations are straight lines, so the
decoder is linear. The encoder is its inverse for the world's own sounds.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import torch
from diffusers import AutoencoderKLMiniMaxH3Audio
from torch import Tensor, nn

from core.geometry import AUDIO_LATENT_CHANNELS, AUDIO_LATENTS_PER_SECOND, SAMPLE_RATE, num_audio_latents
from tools.tiny.fill import fill
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
_NUM_FEATURES = 2 * len(PARTIALS) + 1
"""(In phase, quadrature) of every partial, then the click: what the decoder and the encoder see at 200 Hz."""
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
_LOG_LINEAR = 20.0
"""Log beta of a decoder's activation: it adds at most exp(-20) to its input."""
_LINEAR = 1e-6
"""Alpha of an encoder's activation: it adds this times the square of its input."""
_CONSTANT = 100.0
"""Of two channels before the encoder's layer norm, one positive, one negative; amplitudes are below 1."""
_LOG_STD = -10.0
"""Of the posterior: an amplitude is certain."""


def audio_latents(scenes: Scenes, num_frames: int) -> Tensor:
    """The sound of the scenes as normalised latents, `[B, 32, 2, A]` float32."""
    num_latents = num_audio_latents(num_frames)
    tones = tone_amplitudes(scenes, num_latents)  # [B, 7, 2, A]
    clicks = click_amplitudes(scenes, num_frames, num_latents)  # [B, 2, A]
    amplitudes = torch.cat((tones, clicks[:, None]), dim=1)
    mean, std = (value[:, None, None] for value in _amplitude_statistics())
    return ((amplitudes - mean) / std).repeat_interleave(_SPREAD, dim=1).float()


def write_audio_vae(directory: Path) -> None:
    """Writes the component; nothing in it is random."""
    mean, std = (value.repeat_interleave(_SPREAD) / math.sqrt(_SPREAD) for value in _amplitude_statistics())
    with warnings.catch_warnings():
        # The published key names are those of torch's older weight norm, which the class must therefore use.
        warnings.filterwarnings("ignore", message=".*weight_norm.* is deprecated", category=FutureWarning)
        model = AutoencoderKLMiniMaxH3Audio(**CONFIG, latents_mean=mean.tolist(), latents_std=std.tolist())
    fill(model, _neutral)
    _build_decoder(model)
    _build_encoder(model)
    model.save_pretrained(directory)


def _neutral(name: str, parameter: nn.Parameter) -> Tensor:
    """A value with which a residual adds nothing and an activation is a straight line."""
    if name.endswith("beta"):
        return torch.full(parameter.shape, _LOG_LINEAR)
    if name.endswith("alpha") and name.startswith("encoder."):
        return torch.full(parameter.shape, _LINEAR)
    if name.endswith("weight_v") or (name.endswith("weight") and ".norm" in name):
        return torch.ones(parameter.shape)
    return torch.zeros(parameter.shape)


def _build_decoder(model: AutoencoderKLMiniMaxH3Audio) -> None:
    """Sets every convolution on the way from latents to samples."""
    decoder = model.decoder
    with torch.no_grad():
        model.dec_in_proj.weight[:NUM_AMPLITUDES, :, 0] = _spreading().T
    passed_on = torch.zeros(decoder.conv_pre.weight_v.shape)  # [128, 32, 7]
    passed_on[:NUM_AMPLITUDES, :NUM_AMPLITUDES, 3] = torch.eye(NUM_AMPLITUDES)
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
def _build_encoder(model: AutoencoderKLMiniMaxH3Audio) -> None:
    """Makes the encoder the decoder's inverse: for sounds of the world, not for others, and but for a clip's ends.

    The first three levels put the samples of a millisecond into the 16 channels that sounds of the world need, the
    fourth compares 7 ms with the decoder's waveforms, the last solves for the amplitudes.
    """
    first, *levels, _, last = model.encoder.block
    convolutions = [first, *(level.block[-1] for level in levels), last]
    kernels = [torch.zeros(convolution.weight_v.shape) for convolution in convolutions]
    kernels[0][0, 0, 3] = 1.0
    for sample in range(2):  # from here on the channels are samples in order
        kernels[1][sample, 0, 1 + sample] = 1.0
    for sample in range(8):
        kernels[2][sample, sample % 2, 2 + sample // 2] = 1.0

    steps = _waveforms()[:_NUM_FEATURES, :, _FIRST:]  # [15, 32, 7]: what a step sounds like, millisecond by millisecond
    pieces = steps.transpose(1, 2).reshape(-1, _MILLISECOND)
    _, _, directions = torch.linalg.svd(pieces, full_matrices=False)  # strongest first
    basis = directions[: len(kernels[3])]  # [16, 32]
    kernels[3][:, :, 2:6] = basis.view(-1, 4, 8).transpose(1, 2)
    kernels[4][:_NUM_FEATURES, :, 3:] = torch.einsum("fst,bs->fbt", steps, basis) / _STEP
    for convolution, kernel in zip(convolutions[:5], kernels[:5], strict=True):
        _set_kernel(convolution, kernel)

    kernels[5][:NUM_AMPLITUDES, :_NUM_FEATURES] = _solve_for_amplitudes(model)
    index = torch.arange(NUM_AMPLITUDES)
    kernels[6][index, index, 1] = 1.0
    kernels[6][NUM_AMPLITUDES + index, index, 1] = -1.0  # so that the mean is 0
    for convolution, kernel in zip(convolutions[5:], kernels[5:], strict=True):
        _set_kernel(convolution, kernel)
    # Two constants far above all amplitudes make what the layer norm divides by a constant too.
    last.bias[-2:] = torch.tensor([_CONSTANT, -_CONSTANT])
    scale = _CONSTANT * math.sqrt(2 / len(last.bias))
    model.pre_block.proj.weight[:, : 2 * NUM_AMPLITUDES] = torch.cat((_spreading(), -_spreading()), dim=1) * scale / 2
    model.mean_proj.weight[:, :, 0] = torch.eye(AUDIO_LATENT_CHANNELS)
    model.logs_proj.bias.fill_(_LOG_STD)


def _solve_for_amplitudes(model: AutoencoderKLMiniMaxH3Audio) -> Tensor:
    """Kernel `[8, 15, 10]` from features at 200 Hz to amplitudes at 40 Hz: the smallest that undoes the decoder."""
    num_latents, middle, level = 9, 4, 0.5
    latents = torch.zeros(NUM_AMPLITUDES, AUDIO_LATENT_CHANNELS, num_latents)
    latents[:, :, middle] = level * _spreading().T
    features = model.encoder.block[:5](model.decode(latents).sample)[:, :_NUM_FEATURES]  # [8, 15, 45]
    seen = nn.functional.pad(features, (3, 3)).unfold(2, 2 * _RATE, _RATE)  # [8, 15, 9, 10]: by the last level
    wanted = torch.zeros(NUM_AMPLITUDES, num_latents, NUM_AMPLITUDES)
    wanted[:, middle] = level * torch.eye(NUM_AMPLITUDES)
    inverse = torch.linalg.pinv(seen.transpose(1, 2).flatten(2).flatten(0, 1).double(), rtol=1e-5)  # [150, 72]
    solution: Tensor = inverse @ wanted.flatten(0, 1).double()  # [150, 8]
    return solution.T.reshape(NUM_AMPLITUDES, _NUM_FEATURES, 2 * _RATE).float()


def _spreading() -> Tensor:
    """Orthonormal `[32, 8]` from amplitudes to latent channels."""
    return torch.eye(NUM_AMPLITUDES).repeat_interleave(_SPREAD, dim=0) / math.sqrt(_SPREAD)


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
