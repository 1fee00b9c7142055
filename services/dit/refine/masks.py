"""Which parts of a clip a dense pass may move, and what the model is told of the others.

1 is free, 0 is frozen, and a stream that is free everywhere has no mask. A mask serves any dense pass, whatever its
sampler, schedule and weights; the refinement of a clip's sound is one of them.
Source: docs/reference/audio-refine.md §4, §5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from core.geometry import AUDIO_CHANNELS, AUDIO_LATENTS_PER_SECOND, PATCH, num_audio_latents
from core.refine import FROZEN
from core.schedule import context_timestep, float32, timestep
from h3stream.errors import InvalidRequestError
from services.dit.adaln import Labels
from services.dit.model import SegmentLabels
from services.dit.rows import ChunkLatents

Injection = Literal["augmented", "clean"]
FREE = 0.999
"""From here on, everywhere, a stream is free and has no mask."""
LEVELS = 256
"""The model is told a mask in this many steps, rounded up."""
VIDEO_NOISE = 0.001
"""Share of noise in the frozen video that the model is fed: that of a keyframe."""
_EDGE = 1e-6
"""Seconds times 40 that end this close to a whole latent end on it."""


@dataclass(frozen=True, eq=False)
class Masks:
    """How far each part of two streams may move.  Raises InvalidRequestError for values outside 0 to 1."""

    video: Tensor | None = None
    """Of every latent cell, `[T, H, W]` float32; None: it is free. One below 1e-3 everywhere counts as 0."""
    audio: Tensor | None = None
    """Of every latent of each channel, `[2, A]` float32; None: it is free."""
    injection: Injection = "augmented"
    """What stands for a frozen video: itself with 0.1 % of its noise, as keyframes do, or itself."""

    def __post_init__(self) -> None:
        for name in ("video", "audio"):
            mask = getattr(self, name)
            if mask is None:
                continue
            low, high = mask.aminmax()
            if not (low >= 0 and high <= 1):  # false for nan too
                raise InvalidRequestError(
                    f"the mask of the {name} lies between {low.item():g} and {high.item():g}; it must lie between 0 "
                    "and 1"
                )
            if low >= FREE:
                object.__setattr__(self, name, None)
        if (
            self.video is not None and self.freezes_video
        ):  # wholly: what its frozen rows are fed must not change from step to step
            object.__setattr__(self, "video", torch.zeros_like(self.video))

    @property
    def freezes_video(self) -> bool:
        """Whether none of the video moves."""
        return self.video is not None and self.video.max().item() < FROZEN

    @property
    def closed_reason(self) -> str:
        """Why these masks leave nothing that a cache of frozen rows could serve; empty: they leave some."""
        if self.video is None:
            return "the whole video may move"
        if not self.freezes_video:
            return f"the video may move: its mask reaches {self.video.max().item():g}"
        if self.audio is not None and self.audio.max().item() <= FROZEN:
            return "the sound is frozen too"
        return ""


def uniform_video_mask(denoise: float, size: tuple[int, int, int]) -> Tensor:
    """One value for all cells of a video of T, H and W latents."""
    return torch.full(size, denoise)


def audio_range_mask(num_frames: int, start_s: float, end_s: float) -> Tensor:
    """Frees the latents of a span of a clip's sound, `[2, A]`: every latent of 25 ms that the span touches."""
    num_latents = num_audio_latents(num_frames)
    mask = torch.zeros(AUDIO_CHANNELS, num_latents)
    start = math.floor(start_s * AUDIO_LATENTS_PER_SECOND + _EDGE)
    stop = math.ceil(end_s * AUDIO_LATENTS_PER_SECOND - _EDGE)
    mask[:, start : max(stop, start + 1)] = 1
    return mask


class StreamMask:
    """One stream's mask over its latents: what the model is fed and told, and what is made of its answer."""

    def __init__(self, mask: Tensor, levels: Tensor, rows: Tensor, clean: Tensor, injected: Tensor, pin: float) -> None:
        """All tensors on the device.

        mask, levels: as broadcast over the latents; `levels` is what the model is told.  rows: level of each row, `[N]`
        clean: latents that the frozen parts keep.  injected: what the model is fed of them.  pin: timestep of them.
        """
        self._mask = mask
        self._clean = clean
        self._injected = injected
        self._pin = pin
        distinct, which = torch.unique(rows, return_inverse=True)
        self._distinct: list[float] = distinct.tolist()
        self._which = which if len(distinct) > 1 else None
        self._levels = levels if len(distinct) > 1 else self._distinct[0]

    @property
    def is_frozen(self) -> bool:
        """Whether nothing of it moves; it is then fed the same in every forward."""
        return self._distinct == [0.0]

    def feed(self, latents: Tensor) -> Tensor:
        """What the model is fed where the sampler stands at `latents`."""
        if self.is_frozen:
            return self._injected
        return self._levels * latents + (1 - self._levels) * self._injected

    def labels(self, sigma: float) -> Labels:
        """Timesteps of its rows at a noise level."""
        highest = max(timestep(sigma), self._pin)
        values = tuple(min(timestep(level * sigma), highest) for level in self._distinct)
        return Labels(values, self._which)

    def denoised(self, fed: Tensor, velocity: Tensor, sigma: float) -> Tensor:
        """The clean estimate; the frozen parts stay what they are.

        fed: what the model answered to.  velocity: its answer, x0 - eps, which is scaled as the label was.
        """
        estimate = denoised(fed, self._levels * velocity, sigma)
        return self._mask * estimate + (1 - self._mask) * self._clean


class MaskedStreams:
    """Both streams of one clip under its masks."""

    def __init__(self, masks: Masks, latents: ChunkLatents, noise: ChunkLatents) -> None:
        """latents: what the frozen parts keep, on the device.  noise: what a frozen video is augmented with.

        Raises InvalidRequestError for a mask of another shape than its stream's, and for what are not the latents of
        one clip.
        """
        _check_latents(latents)
        self.video = None if masks.video is None else _video_stream(masks.video, masks.injection, latents, noise)
        self.audio = None if masks.audio is None else _audio_stream(masks.audio, latents)

    @property
    def moves_video(self) -> bool:
        """Whether a part of the video moves."""
        return self.video is None or not self.video.is_frozen

    def feed(self, latents: ChunkLatents) -> ChunkLatents:
        """What the model is fed where the sampler stands."""
        return ChunkLatents(
            latents.video if self.video is None else self.video.feed(latents.video),
            latents.audio if self.audio is None else self.audio.feed(latents.audio),
        )

    def labels(self, sigmas: tuple[float, float], *, with_keyframes: bool = False) -> SegmentLabels:
        """Timesteps of all rows at the noise levels of video and audio."""
        video, audio = sigmas
        text = timestep(video)
        return SegmentLabels(
            text=text,
            audio=Labels((timestep(audio),)) if self.audio is None else self.audio.labels(audio),
            video=Labels((text,)) if self.video is None else self.video.labels(video),
            cond=max(text, context_timestep()) if with_keyframes else None,
        )

    def denoised_video(self, fed: Tensor, velocity: Tensor, sigma: float) -> Tensor:
        """The clean estimate of the video.  velocity: x0 - eps; overwritten."""
        return denoised(fed, velocity, sigma) if self.video is None else self.video.denoised(fed, velocity, sigma)

    def denoised_audio(self, fed: Tensor, velocity: Tensor, sigma: float) -> Tensor:
        """The clean estimate of the audio, as `denoised_video`."""
        return denoised(fed, velocity, sigma) if self.audio is None else self.audio.denoised(fed, velocity, sigma)


def renoised(latents: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """Clean latents put back to a noise level."""
    return sigma * noise + (1 - sigma) * latents


def denoised(fed: Tensor, velocity: Tensor, sigma: float) -> Tensor:
    """The clean estimate `fed + sigma v` of a velocity `x0 - eps`, which is overwritten.

    The sigma is taken back from the timestep that the model was fed, `1 - (1 - sigma)`, which differs from the grid's
    by a rounding.
    """
    return velocity.mul_(float32(1 - timestep(sigma))).add_(fed)


def _video_stream(mask: Tensor, injection: Injection, latents: ChunkLatents, noise: ChunkLatents) -> StreamMask:
    clean = latents.video
    _check_shape("video", mask, clean)
    mask = mask.to(clean.device)
    pooled = _rounded_up(max_pool2d(mask[:, None], PATCH)[:, 0])  # [T, H/2, W/2]: a row is as free as its freest cell
    levels = pooled.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)
    injected = renoised(clean, noise.video, VIDEO_NOISE) if injection == "augmented" else clean
    return StreamMask(mask, levels, pooled.flatten(), clean, injected, context_timestep())


def _audio_stream(mask: Tensor, latents: ChunkLatents) -> StreamMask:
    clean = latents.audio
    _check_shape("audio", mask, clean)
    mask = mask.to(clean.device)
    levels = _rounded_up(mask)
    return StreamMask(mask, levels, levels.flatten(), clean, clean, 1.0)


def _rounded_up(mask: Tensor) -> Tensor:
    return (mask * LEVELS).ceil() / LEVELS


def _check_latents(latents: ChunkLatents) -> None:
    for name, tensor, num_axes in (("video", latents.video, 5), ("audio", latents.audio, 4)):
        if tensor.ndim != num_axes or len(tensor) != 1:
            raise InvalidRequestError(
                f"latents of the {name} have shape {list(tensor.shape)}; they must have {num_axes} axes, the first of "
                "length 1"
            )


def _check_shape(name: str, mask: Tensor, latents: Tensor) -> None:
    if mask.shape != latents.shape[2:]:
        raise InvalidRequestError(
            f"the mask of the {name} has shape {list(mask.shape)}; its latents have {list(latents.shape[2:])}"
        )
