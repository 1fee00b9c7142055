"""The streaming rollout of one clip: text into the cache, then chunk by chunk from noise to latents to context.

Source: docs/reference/raven-streaming.md §4-§5.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.budget import kv_rows
from core.geometry import Chunk, chunk_table, latent_size, num_rows
from core.schedule import context_timestep, renoise_coefficient, shifted_sigmas
from h3stream.errors import InvalidRequestError, UnsupportedError
from h3stream.request import ClipSpec
from services.common.verbs import Cancelled, poll
from services.dit.adaln import clip_timesteps, distinct, modulation_table
from services.dit.adapters import AdapterBank, AdapterMix
from services.dit.kv_cache import KvCache
from services.dit.kv_storage import KvShape
from services.dit.model import ChunkLayout, H3Dit, finish_forward
from services.dit.noise import ClipNoise, NoiseSegment
from services.dit.rows import ChunkLatents, middle_frame, on_device


class Rollout:
    """One clip in progress. Chunk c is sampled once c chunks are committed, and committed once it is sampled."""

    def __init__(
        self,
        model: H3Dit,
        adapters: AdapterBank,
        mix: AdapterMix,
        clip: ClipSpec,
        num_tokens: int,
        device: torch.device,
        noise: tuple[NoiseSegment, ...] = (),
    ) -> None:
        """Makes the clip's first draws, computes its modulation table and takes the memory of its KV cache.

        noise: seeds of its noise; none: the clip's own throughout.
        The weights must be on the device. Raises torch.OutOfMemoryError.
        """
        self.clip = clip
        self.noise = noise
        self.num_noise_forwards = 0
        self.num_clean_forwards = 0
        self._model = model
        self._adapters = adapters
        self._mix = mix
        self._num_tokens = num_tokens
        self._device = device
        self._chunks = chunk_table(clip.num_frames)
        self._sigmas = tuple(
            zip(*(_with_zero(clip.steps, s) for s in (clip.video_shift, clip.audio_shift)), strict=True)
        )
        self._timesteps = clip_timesteps(clip.steps, clip.video_shift, clip.audio_shift)
        self._noise = ClipNoise(clip, device, noise)
        context = (context_timestep(), context_timestep())  # of the text and of every clean forward
        with adapters.using(mix):
            self._modulation = modulation_table(model.transformer, (*self._timesteps, context))
        chunk_rows = [num_rows(chunk, clip.width, clip.height) for chunk in self._chunks]
        shape = KvShape(
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            head_dim=model.head_dim,
            dtype=model.dtype,
            device=device,
            slot_rows=kv_rows(clip, num_tokens).widest_attention,
            chunk_rows=max(chunk_rows),
        )
        self.cache = KvCache(
            shape, (num_tokens, *chunk_rows), sink=clip.sink, window=clip.window, storage=clip.kv_storage
        )
        self._sampled_index = -1
        self._sampled: ChunkLatents | None = None
        self._layout: ChunkLayout | None = None
        self._estimate: ChunkLatents | None = None

    def prefill(self, context: Tensor, token_tags: Tensor) -> None:
        """Puts the text into the cache as entry 0.  context: `[E, text_dim]`.  token_tags: `[E]`."""
        if self.cache.num_committed:
            raise UnsupportedError("the text is in the cache already")
        modulation = self._modulation[distinct(context_timestep())]
        self._stage_and_commit(
            lambda: self._model.prefill_text(
                context.to(self._device), token_tags.to(self._device), modulation, self.cache
            )
        )

    @property
    def num_committed_chunks(self) -> int:
        """Chunks in the cache; its first entry is the text."""
        return self.cache.num_committed - 1

    def sampled(self, index: int) -> ChunkLatents | None:
        """The final latents of a chunk if it is the one sampled last."""
        return self._sampled if index == self._sampled_index else None

    def is_committed(self, index: int) -> bool:
        """Whether a chunk is the one committed last."""
        return 0 <= index == self.num_committed_chunks - 1

    def sample(self, index: int, on_step: Callable[[int], None], cancelled: Cancelled) -> ChunkLatents:
        """Samples the next chunk in `clip.steps` noise forwards; returns its final latents, float32 on the device.

        on_step: told the number of forwards done, after each.  cancelled: polled around every forward; VerbCancelled is
        raised if it is true. A chunk that was cancelled or failed can be sampled again, to the same latents.
        """
        chunk = self._take_up(index)
        before = self._noise.state(chunk)
        try:
            latents = self._sample(chunk, on_step, cancelled)
        except BaseException:
            self._noise.restore(chunk, before)
            raise
        self._sampled_index, self._sampled = index, latents
        return latents

    def restore(self, index: int, latents: ChunkLatents) -> None:
        """Takes the next chunk's latents as if it had been sampled here. Restoring the last one again changes nothing.

        latents: as `sample` returned them, on any device.
        Raises InvalidRequestError if the chunk stands with other latents, UnsupportedError out of order.
        """
        latents = on_device(latents, self._device)
        standing = self.sampled(index)
        if standing is not None:
            if not (torch.equal(latents.video, standing.video) and torch.equal(latents.audio, standing.audio)):
                raise InvalidRequestError(f"chunk {index} stands with other latents, which are not replaced")
            return
        chunk = self._take_up(index)
        for _ in self._timesteps:
            self._noise.step(chunk)  # later chunks share the stream
        self._sampled_index, self._sampled = index, latents

    def middle_estimate(self) -> Tensor:
        """The middle latent frame of the chunk as the last noise forward estimates it, `[24, H, W]`: a view."""
        assert self._estimate is not None, "no noise forward has been run"
        return middle_frame(self._estimate)

    def commit(self, index: int) -> None:
        """Runs the clean forward of the chunk sampled last and commits it."""
        latents = self.sampled(index)
        if latents is None or index != self.num_committed_chunks:
            raise UnsupportedError(f"chunk {index} cannot be committed: it is not a chunk just sampled")
        chunk = self._chunks[index]
        if chunk.is_tail:
            raise UnsupportedError(f"chunk {index} is the last of the clip, which is never committed")
        t = context_timestep()
        assert self._layout is not None
        layout = self._layout
        context = renoised(latents, self._noise.context(chunk))
        self._stage_and_commit(
            lambda: self._model.forward_chunk(
                context, (t, t), layout, self._modulation[distinct(t)], self.cache, stage=True
            )
        )
        self.num_clean_forwards += 1

    def chunk(self, index: int) -> Chunk:
        """A chunk of the clip. Raises InvalidRequestError for one that does not exist."""
        if not 0 <= index < len(self._chunks):
            raise InvalidRequestError(f"chunk {index} does not exist; the clip has chunks 0 to {len(self._chunks) - 1}")
        return self._chunks[index]

    def _take_up(self, index: int) -> Chunk:
        """Makes a chunk the current one. Raises InvalidRequestError, UnsupportedError if it is not the next."""
        chunk = self.chunk(index)
        if index != self.num_committed_chunks:
            raise UnsupportedError(
                f"chunk {index} cannot be sampled or restored now: the next one is chunk {self.num_committed_chunks}"
            )
        height, width = latent_size(self.clip.height), latent_size(self.clip.width)
        self._layout = self._model.chunk_layout(chunk, self._num_tokens, height, width)
        return chunk

    def _sample(self, chunk: Chunk, on_step: Callable[[int], None], cancelled: Cancelled) -> ChunkLatents:
        layout = self._layout
        assert layout is not None
        x_t = x0 = self._noise.initial(chunk)
        for step, timesteps in enumerate(self._timesteps):
            poll(cancelled)
            with self._adapters.using(self._mix):
                velocity = self._model.forward_chunk(
                    x_t, timesteps, layout, self._modulation[distinct(*timesteps)], self.cache, stage=False
                )
            self.num_noise_forwards += 1
            eps = self._noise.step(chunk)
            x0, x_t = transition(x_t, velocity, eps, self._sigmas[step], self._sigmas[step + 1])
            self._estimate = x0
            finish_forward(self._device)
            on_step(step + 1)
        poll(cancelled)
        return x0

    def _stage_and_commit(self, forward: Callable[[], object]) -> None:
        try:
            with self._adapters.using(self._mix):
                forward()
            self.cache.commit()
            finish_forward(self._device)
        except BaseException:
            self.cache.discard()
            raise


def transition(
    x_t: ChunkLatents,
    velocity: ChunkLatents,
    eps: ChunkLatents,
    sigma: tuple[float, float],
    next_sigma: tuple[float, float],
) -> tuple[ChunkLatents, ChunkLatents]:
    """One step, in float32: the clean estimate `x_t + sigma v` and the next, less noisy latents.

    velocity: `x0 - eps`.  sigma, next_sigma: (video, audio), in double.
    """
    video0, video = _transition(x_t.video, velocity.video, eps.video, sigma[0], next_sigma[0])
    audio0, audio = _transition(x_t.audio, velocity.audio, eps.audio, sigma[1], next_sigma[1])
    return ChunkLatents(video0, audio0), ChunkLatents(video, audio)


def _transition(x_t: Tensor, velocity: Tensor, eps: Tensor, sigma: float, next_sigma: float) -> tuple[Tensor, Tensor]:
    x0 = x_t + sigma * velocity
    return x0, (1 - next_sigma) * x0 + next_sigma * eps


def renoised(latents: ChunkLatents, eps: ChunkLatents) -> ChunkLatents:
    """Finished latents as the clean forward reads them: at t = 0.999, mixed in float32 with the pre-drawn noise."""
    t, rest = context_timestep(), renoise_coefficient()
    return ChunkLatents(t * latents.video + rest * eps.video, t * latents.audio + rest * eps.audio)


def _with_zero(steps: int, shift: float) -> tuple[float, ...]:
    return (*shifted_sigmas(steps, shift), 0.0)
