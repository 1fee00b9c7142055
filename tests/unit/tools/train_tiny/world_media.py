"""True clips of the world, as the product would deliver them: rendered, sounded, encoded and decoded again."""

from __future__ import annotations

import io
import math

import av
import torch
import torch.nn.functional as F
from torch import Tensor

from core.budget import AAC_BIT_RATE, VIDEO_BIT_RATE
from core.geometry import FPS, SAMPLE_RATE, SAMPLES_PER_AUDIO_LATENT, num_audio_latents
from services.vae.media.encoders import H264Encoder
from tools.train_tiny.audio_vae import click_waveform
from tools.train_tiny.measure.media import decoded_sound
from tools.train_tiny.picture import render
from tools.train_tiny.world import HEIGHT, PARTIALS, WIDTH, Scenes, click_amplitudes, tone_amplitudes

SOFTNESS = 1.0
"""Standard deviation of the blur of a soft picture, pixels."""
NOISE = 0.02
"""Standard deviation of a soft picture's noise, of full scale."""


def pictures(scenes: Scenes, num_frames: int, generator: torch.Generator | None = None) -> Tensor:
    """Frames `[F, H, W, 3]` uint8 of one scene; with a generator blurred and noisy."""
    exact = render(scenes, torch.arange(num_frames))[0]
    if generator is not None:
        exact = _blurred(exact) + NOISE * torch.randn(exact.shape, generator=generator)
    return (255 * exact).round().clamp(0, 255).to(torch.uint8)


def _blurred(picture: Tensor) -> Tensor:
    kernel = torch.exp(-(torch.arange(-3, 4.0) ** 2) / (2 * SOFTNESS**2))
    kernel = kernel / kernel.sum()
    planes = picture.permute(0, 3, 1, 2).reshape(-1, 1, HEIGHT, WIDTH)
    planes = F.conv2d(F.pad(planes, (3, 3, 0, 0), mode="replicate"), kernel.view(1, 1, 1, 7))
    planes = F.conv2d(F.pad(planes, (0, 0, 3, 3), mode="replicate"), kernel.view(1, 1, 7, 1))
    return planes.view(len(picture), 3, HEIGHT, WIDTH).permute(0, 2, 3, 1)


def through_h264(frames: Tensor) -> Tensor:
    """The frames as the product's encoder leaves them."""
    encoder = H264Encoder("libx264", WIDTH, HEIGHT, VIDEO_BIT_RATE)
    decoder = av.CodecContext.create("h264", "r")
    decoder.extradata = encoder.decoder_configuration
    pictures = [p for frame in frames for p in decoder.decode(av.Packet(encoder.encode(frame.numpy()).data))]
    pictures += decoder.decode(None)
    return torch.stack([torch.from_numpy(picture.to_ndarray(format="rgb24")) for picture in pictures])


def waveform(scenes: Scenes, num_frames: int) -> Tensor:
    """Sound `[2, S]` float32 of one scene, its amplitudes changing linearly from latent to latent."""
    num_latents = num_audio_latents(num_frames)
    num_samples = num_latents * SAMPLES_PER_AUDIO_LATENT
    tones = tone_amplitudes(scenes, num_latents)[0]  # [7, 2, A]
    loudness = tones.repeat_interleave(SAMPLES_PER_AUDIO_LATENT, dim=-1)
    ramp = F.avg_pool1d(loudness, 161, stride=1, padding=80, count_include_pad=False)
    turns = 2 * math.pi * torch.arange(num_samples, dtype=torch.float64) / SAMPLE_RATE
    sound = (ramp * torch.sin(turns * torch.tensor(PARTIALS)[:, None])[:, None]).sum(dim=0)
    click = click_waveform()
    for channel, amplitudes in enumerate(click_amplitudes(scenes, num_frames, num_latents)[0]):
        for latent in amplitudes.nonzero()[:, 0].tolist():
            start = latent * SAMPLES_PER_AUDIO_LATENT
            stop = min(start + len(click), num_samples)
            sound[channel, start:stop] += amplitudes[latent] * click[: stop - start]
    return sound[:, : num_frames * SAMPLE_RATE // FPS].float()


def through_aac(sound: Tensor) -> Tensor:
    """The sound as an AAC file of the product's rate leaves it, as long as it was."""
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=SAMPLE_RATE, layout="stereo", bit_rate=AAC_BIT_RATE)
        frame = av.AudioFrame.from_ndarray(sound.contiguous().numpy(), format="fltp", layout="stereo")
        frame.sample_rate, frame.pts = SAMPLE_RATE, 0
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return decoded_sound(data.getvalue())[:, : sound.shape[1]]
