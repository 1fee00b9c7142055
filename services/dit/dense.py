"""The dense sampler: the whole clip, text and sound included, in one bidirectional forward per step.

`steps` counts forwards; they run on `steps + 1` noise levels, the last of them 0. Latents and steps are float32,
whatever the model computes in. From the same text, the same seed of a CPU generator and `steps + 1` grid points,
diffusers' own pipeline makes the same clip; on a CPU, bit for bit.
Source: docs/reference/h3-model.md §7.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.geometry import chunk_table, latent_size
from core.schedule import dense_sigmas, float32, timestep
from h3stream.errors import InvalidRequestError, UnsupportedError
from h3stream.request import ClipSpec
from services.common.verbs import Cancelled, poll
from services.dit.adaln import Modulation, Modulations, Timesteps, modulation_table
from services.dit.adapters import AdapterBank, AdapterMix
from services.dit.model import H3Dit, finish_forward
from services.dit.noise import dense_noise
from services.dit.refine.masks import MaskedStreams, Masks, StreamMask, denoised, renoised
from services.dit.rows import ChunkLatents, middle_frame, on_device

Grid = tuple[tuple[float, float], ...]
"""Noise levels of video and audio, falling to (0, 0)."""


class DenseSampler:
    """The steps of one clip. All its memory on the device is taken at once; a forward adds only what it frees again."""

    def __init__(
        self,
        model: H3Dit,
        adapters: AdapterBank,
        mix: AdapterMix,
        clip: ClipSpec,
        context: Tensor,
        token_tags: Tensor,
        device: torch.device,
        *,
        start: ChunkLatents | None = None,
        sigmas: Grid | None = None,
        noise: ChunkLatents | None = None,
        masks: Masks | None = None,
    ) -> None:
        """Draws the noise, refines the text and computes the modulation table. The weights must be on the device.

        context: `[E, text_dim]`.  token_tags: `[E]` modality of each token. Raises torch.OutOfMemoryError.
        start: clean latents that are put back to the first noise level. None: the clip starts from noise alone.
        sigmas: noise levels of video and audio, falling to (0, 0). None: those of the clip.
        noise: None: that of the clip's seed.  masks: what of `start` may move. None: all of it.
        """
        assert start is not None or masks is None, "a mask needs latents that its frozen parts keep"
        self.clip = clip
        self.num_done = 0
        noise = dense_noise(clip, device) if noise is None else on_device(noise, device)
        start = None if start is None else on_device(start, device)
        self._sigmas = sigmas or clip_sigmas(clip)
        self._streams = MaskedStreams(masks or Masks(), noise if start is None else start, noise)
        self.latents = self._start(start, noise)
        self._next = ChunkLatents(
            torch.empty_like(self.latents.video) if self._streams.moves_video else self.latents.video,
            torch.empty_like(self.latents.audio),
        )
        self._model = model
        self._adapters = adapters
        self._mix = mix
        self._device = device
        self._layout = model.dense_layout(
            clip.num_frames, token_tags.to(device), latent_size(clip.height), latent_size(clip.width)
        )
        with adapters.using(mix):
            self._text = model.refine_text(context.to(device), dense=True)
            self._modulation: Modulations | dict[Timesteps, Modulation]
            if masks is None:
                pairs = [(timestep(video), timestep(audio)) for video, audio in self._sigmas[:-1]]
                self._modulation = modulation_table(model.transformer, pairs)
            else:  # a mask may put its rows at hundreds of timesteps
                self._modulation = Modulations(model.transformer)
        finish_forward(device)

    @property
    def num_steps(self) -> int:
        """Forwards of the clip."""
        return len(self._sigmas) - 1

    def step(self) -> None:
        """Runs one forward and moves the latents on. One that fails changes nothing."""
        sigmas, next_sigmas = self._sigmas[self.num_done], self._sigmas[self.num_done + 1]
        fed, labels = self._streams.feed(self.latents), self._streams.labels(sigmas)
        with self._adapters.using(self._mix):
            velocity = self._model.forward_packed(
                self._text, fed, labels, self._layout, self._modulation[labels.timesteps]
            )
        masks, now, out = self._streams, self.latents, self._next
        if masks.moves_video:
            _move(masks.video, now.video, fed.video, velocity.video, sigmas[0], next_sigmas[0], out=out.video)
        _move(masks.audio, now.audio, fed.audio, velocity.audio, sigmas[1], next_sigmas[1], out=out.audio)
        finish_forward(self._device)
        self.latents, self._next = self._next, self.latents
        self.num_done += 1

    def _start(self, clean: ChunkLatents | None, noise: ChunkLatents) -> ChunkLatents:
        """What the steps, which overwrite it, start from; a frozen video stays the tensor that it is."""
        if clean is None:
            return ChunkLatents(noise.video.clone(), noise.audio.clone())
        video, audio = self._sigmas[0]
        return ChunkLatents(
            renoised(clean.video, noise.video, video) if self._streams.moves_video else clean.video,
            renoised(clean.audio, noise.audio, audio),
        )

    def middle_estimate(self) -> Tensor:
        """The middle latent frame of the clip as the last forward estimates it, `[24, H, W]`.

        Taken back from the latents before and after the step, which are `r x_t + (1 - r) x0`: so a step keeps nothing.
        """
        (sigma, _), (next_sigma, _) = self._sigmas[self.num_done - 1 : self.num_done + 1]
        ratio = next_sigma / sigma
        estimate: Tensor = (middle_frame(self.latents) - ratio * middle_frame(self._next)) / (1 - ratio)
        return estimate


class DenseSession:
    """One dense clip: sampled as a whole, then handed out chunk by chunk like a streaming one."""

    def __init__(self, sampler: DenseSampler) -> None:
        self.clip = sampler.clip
        self.num_noise_forwards = 0
        self._num_steps = sampler.num_steps
        self._chunks = chunk_table(sampler.clip.num_frames)
        self._sampler: DenseSampler | None = sampler
        self._latents: ChunkLatents | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether the clip is there; its chunks then need neither weights nor device."""
        return self._latents is not None

    def middle_estimate(self) -> Tensor:
        """The middle latent frame of the clip as the last forward estimates it, `[24, H, W]`; while it is sampled."""
        assert self._sampler is not None, "the clip has been sampled"
        return self._sampler.middle_estimate()

    def sample(self, on_step: Callable[[int], None], cancelled: Cancelled) -> None:
        """Samples the clip in its forwards; does nothing if it is there.

        on_step: told the number of forwards done, after each.  cancelled: polled around every forward; VerbCancelled is
        raised if it is true. A clip that was cancelled or failed goes on from the last forward done, to the same clip.
        """
        if self._sampler is None:
            return
        while self.num_noise_forwards < self._num_steps:
            poll(cancelled)
            self._sampler.step()
            self.num_noise_forwards = self._sampler.num_done
            on_step(self.num_noise_forwards)
        self._latents = ChunkLatents(self._sampler.latents.video.cpu(), self._sampler.latents.audio.cpu())
        self._sampler = None  # the decoder needs its memory
        poll(cancelled)

    def chunk(self, index: int) -> ChunkLatents:
        """A chunk of the finished clip, float32 on the host: any chunk, as often as asked.

        Raises InvalidRequestError for a chunk that does not exist, UnsupportedError before the clip is sampled.
        """
        if not 0 <= index < len(self._chunks):
            raise InvalidRequestError(f"chunk {index} does not exist; the clip has chunks 0 to {len(self._chunks) - 1}")
        if self._latents is None:
            raise UnsupportedError(f"chunk {index} is not there yet: sample the dense clip first, as a whole")
        return self._latents.of(self._chunks[index])


def clip_sigmas(clip: ClipSpec) -> Grid:
    """Noise levels of video and audio between which a dense clip's forwards lie."""
    video, audio = (dense_sigmas(clip.steps, shift) for shift in (clip.video_shift, clip.audio_shift))
    return tuple(zip(video, audio, strict=True))


def euler_step(x_t: Tensor, velocity: Tensor, sigma: float, next_sigma: float, *, out: Tensor) -> None:
    """Writes `r x_t + (1 - r) x0` to `out`, with `x0 = x_t + sigma v` and `r = next_sigma / sigma`, all in float32.

    velocity: `x0 - eps`; overwritten.  sigma, next_sigma: float32 values.
    With the sigma of `denoised`, and the blend in place of `x_t + (sigma - next_sigma) v`, the bits on a CPU are those
    of diffusers' scheduler.
    """
    blend(x_t, denoised(x_t, velocity, sigma), sigma, next_sigma, out=out)


def blend(x_t: Tensor, x0: Tensor, sigma: float, next_sigma: float, *, out: Tensor) -> None:
    """Writes `r x_t + (1 - r) x0` with `r = next_sigma / sigma` to `out`.  x0: overwritten."""
    ratio = float32(next_sigma / sigma)
    torch.mul(x_t, ratio, out=out).add_(x0.mul_(float32(1 - ratio)))


def _move(
    mask: StreamMask | None,
    x_t: Tensor,
    fed: Tensor,
    velocity: Tensor,
    sigma: float,
    next_sigma: float,
    *,
    out: Tensor,
) -> None:
    """One stream's step, from what the model was `fed` and answered."""
    if mask is None:
        euler_step(x_t, velocity, sigma, next_sigma, out=out)
    else:
        blend(x_t, mask.denoised(fed, velocity, sigma), sigma, next_sigma, out=out)
