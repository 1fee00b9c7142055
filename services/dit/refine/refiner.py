"""The pass that refines a clip's sound: from finished latents, put back to a noise level, to new ones, step by step.

It is made of parts that know nothing of each other: masks say what may move, a sampler how a step is made, a cache per
branch of guidance which rows need not be computed again. With masks that leave a cache nothing, or without one, every
step is exact.
Source: docs/reference/audio-refine.md §1, §4, §5.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.geometry import latent_size, num_video_latents
from core.refine import refine_sigmas
from h3stream.errors import PhaseError
from h3stream.refine import RefineSpec, StepMode
from h3stream.request import ClipSpec
from services.common.verbs import Cancelled, poll
from services.dit.adaln import Modulation, Modulations
from services.dit.adapters import AdapterBank, AdapterMix
from services.dit.model import BlockAttention, DenseLayout, H3Dit, SegmentLabels, finish_forward
from services.dit.noise import refine_noise
from services.dit.refine.frozen_cache import CacheRows, FrozenCache, RowSplit, cache_buffers, gather_spans
from services.dit.refine.masks import MaskedStreams, Masks, audio_range_mask, renoised, uniform_video_mask
from services.dit.refine.samplers import SAMPLERS, Streams
from services.dit.rows import ChunkLatents, on_device, video_rows

NOT_FINITE = "the model's answer was not finite in the build, so the cache was discarded and the step run exactly"


@dataclass(frozen=True, eq=False)
class Branch:
    """A text that the model is evaluated for."""

    context: Tensor
    """Hidden states of the text encoder, `[E, text_dim]`."""
    token_tags: Tensor
    """Modality of each token, `[E]` int64."""
    cache: FrozenCache | None = None
    """Of this branch alone."""


@dataclass(frozen=True, eq=False)
class Keyframes:
    """Frames that the clip was conditioned on."""

    frames: Sequence[int]
    """Pixel frame of each."""
    rows: Tensor
    """Their patch rows as the model is fed them, `[K H/2 W/2, 96]` float32."""


@dataclass
class StepReport:
    """What a step did."""

    mode: StepMode = "exact"
    """"build" if any forward built a cache, "cached" if any other used one."""
    reason: str = ""
    """Why it was built, or is exact."""
    num_forwards: int = 0
    num_blocks: dict[StepMode, int] = field(default_factory=lambda: {"exact": 0, "build": 0, "cached": 0})
    """Blocks of all forwards, by what they did."""
    num_query_rows: int = 0
    """Rows projected to queries, over all blocks and forwards."""
    num_key_rows: int = 0
    """Rows projected to keys, and as many to values."""
    num_fed_rows: int = 0
    """Rows fed forward."""
    num_bytes_moved: int = 0
    """Bytes of caches moved between host and device."""
    cache_bytes: int = 0
    """Size of all caches."""
    block_s: float = 0.0
    """Seconds in the blocks, of work done and not of work queued."""
    outside_s: float = 0.0
    """Seconds of the rest."""

    def note(self, mode: StepMode, reason: str) -> None:
        """A forward has done its part."""
        self.mode = max(self.mode, mode, key=_PRECEDENCE.index)
        self.reason = self.reason or reason


_PRECEDENCE: tuple[StepMode, ...] = ("exact", "cached", "build")


class Refiner:
    """One refinement. A step that fails or is cancelled changes nothing, and can be repeated to the same result."""

    def __init__(
        self,
        model: H3Dit,
        adapters: AdapterBank,
        mix: AdapterMix,
        clip: ClipSpec,
        spec: RefineSpec,
        latents: ChunkLatents,
        branches: Sequence[Branch],
        device: torch.device,
        *,
        exact_reason: str = "",
        noise: ChunkLatents | None = None,
        masks: Masks | None = None,
        keyframes: Keyframes | None = None,
    ) -> None:
        """Draws the noise and refines the texts. The weights must be on the device.

        latents: of the finished clip, float32.  branches: the prompt's; with `cfg` above 1, that of the negative prompt
        too.  exact_reason: why steps are exact where no branch has a cache.  noise: None: that of the seed.
        masks: None: what the spec says.  Raises torch.OutOfMemoryError.
        """
        assert len(branches) == (1 if spec.cfg == 1 else 2), f"{len(branches)} branches at cfg {spec.cfg}"
        self.num_done = 0
        self._model = model
        self._adapters = adapters
        self._mix = mix
        self._cfg = spec.cfg
        self._device = device
        self._source = latents
        self._sigmas = refine_sigmas(spec.steps, spec.audio_denoise, clip.video_shift, clip.audio_shift, spec.scheduler)
        masks = masks or spec_masks(clip, spec)
        self._exact_reason = masks.closed_reason or exact_reason
        if noise is None:
            noise = refine_noise(clip.seed if spec.seed is None else spec.seed, clip, device)
        clean, noise = on_device(latents, device), on_device(noise, device)
        self._masked = MaskedStreams(masks, clean, noise)
        self._keyframes = None if keyframes is None else keyframes.rows.to(device)
        self._modulations = Modulations(model.transformer)
        self._frozen_rows = None if self._masked.moves_video else video_rows(self._masked.feed(clean).video)
        self._streams = self._start(clean, noise)
        self._sampler = SAMPLERS[spec.sampler](self._sigmas if self._masked.moves_video else self._audio_sigmas())
        frames = () if keyframes is None else keyframes.frames
        with adapters.using(mix):
            self._branches = [self._branch(branch, clip, frames, masks) for branch in branches]
        self._share_buffers()
        finish_forward(device)

    @property
    def num_steps(self) -> int:
        """Steps in all."""
        return len(self._sigmas) - 1

    @property
    def latents(self) -> ChunkLatents:
        """Where the clip stands. A frozen video is the tensor that was given."""
        *video, audio = self._streams
        return ChunkLatents(video[0] if video else self._source.video, audio)

    def step(self, cancelled: Cancelled = lambda: False) -> StepReport:
        """Runs the next step.  cancelled: polled before every forward; VerbCancelled is raised if it is true.

        Raises PhaseError for an answer of the model that is not finite, whatever a store raises, and
        torch.OutOfMemoryError.
        """
        assert self.num_done < self.num_steps, f"all {self.num_steps} steps are done"
        began = time.perf_counter()
        report = StepReport(reason=self._exact_reason)
        caches = [branch.cache for branch in self._branches if branch.cache is not None]
        moved_before = sum(cache.num_bytes_moved for cache in caches)
        evaluate = partial(self._evaluate, report, cancelled)
        with self._adapters.using(self._mix), counted_rows(self._model, report), self._undone_on_failure():
            streams = self._sampler.step(self._streams, self.num_done, evaluate)
            finish_forward(self._device)
        self._streams = streams
        self.num_done += 1
        report.num_bytes_moved = sum(cache.num_bytes_moved for cache in caches) - moved_before
        report.cache_bytes = sum(cache.num_bytes for cache in caches)
        report.outside_s = time.perf_counter() - began - report.block_s
        return report

    def give_up_caches(self, reason: str) -> None:
        """Frees the caches; the steps to come are exact, and tell the reason."""
        for branch in self._branches:
            if branch.cache is not None:
                branch.cache.free()
            branch.cache = branch.cache_rows = None
        self._exact_reason = reason

    def _audio_sigmas(self) -> tuple[tuple[float], ...]:
        return tuple((audio,) for _, audio in self._sigmas)

    def _start(self, clean: ChunkLatents, noise: ChunkLatents) -> Streams:
        """The streams that move, put back to the first noise level: video and audio, or audio alone."""
        video_sigma, audio_sigma = self._sigmas[0]
        audio = renoised(clean.audio, noise.audio, audio_sigma)
        if not self._masked.moves_video:
            return (audio,)
        return renoised(clean.video, noise.video, video_sigma), audio

    def _branch(self, branch: Branch, clip: ClipSpec, keyframes: Sequence[int], masks: Masks) -> _BranchRows:
        size = (latent_size(clip.height), latent_size(clip.width))
        layout = self._model.dense_layout(clip.num_frames, branch.token_tags.to(self._device), *size, keyframes)
        text = self._model.refine_text(branch.context.to(self._device), dense=True)
        return _BranchRows(text, layout, None if masks.closed_reason else branch.cache)

    def _share_buffers(self) -> None:
        """Takes the memory that cached forwards decode into, once for all branches: they run one after the other."""
        cached = [(branch, branch.cache) for branch in self._branches if branch.cache is not None]
        if not cached:
            return
        contents = cached[0][1].contents
        size = self._model.size
        num_rows = max(branch.layout.num_rows for branch, _ in cached)
        inner = size.num_heads * size.head_dim
        buffers = cache_buffers(contents, num_rows, size.hidden, inner, self._model.dtype, self._device)
        for branch, cache in cached:
            split = RowSplit.of_layout(branch.layout, is_text_live=cache.is_text_live)
            branch.cache_rows = CacheRows(cache.contents, split, branch.layout, buffers)

    def _evaluate(self, report: StepReport, cancelled: Cancelled, streams: Streams, point: int) -> Streams:
        """The clean estimates of the streams at a grid point, guided."""
        *video, audio = streams
        sigmas = self._sigmas[point]
        fed = self._masked.feed(ChunkLatents(video[0] if video else self._source.video, audio))
        labels = self._masked.labels(sigmas, with_keyframes=self._keyframes is not None)
        forward = _Forward(sigmas[0], fed, labels, self._modulations[labels.timesteps])
        velocity, *unguided = (self._velocity(branch, forward, report, cancelled) for branch in self._branches)
        if unguided:
            velocity = tuple(
                torch.lerp(away, towards, self._cfg) for away, towards in zip(unguided[0], velocity, strict=True)
            )
        x0_audio = self._masked.denoised_audio(fed.audio, velocity[-1], sigmas[1])
        if not video:
            return (x0_audio,)
        return self._masked.denoised_video(fed.video, velocity[0], sigmas[0]), x0_audio

    def _velocity(self, branch: _BranchRows, forward: _Forward, report: StepReport, cancelled: Cancelled) -> Streams:
        """One branch's velocity of the streams that move, exactly or by its cache."""
        poll(cancelled)
        cache, rows = branch.cache, branch.cache_rows
        if cache is None or rows is None:
            velocity = self._full(branch, forward, report, "exact", self._model.dense_attention(branch.layout))
            report.note("exact", self._exact_reason)
        else:
            mode, reason = cache.decide(rows.split, forward.sigma)
            if mode == "build":
                velocity = self._build(branch, cache, rows, forward, report, reason)
            else:
                velocity = self._cached(branch, cache, rows, forward, report)
        if not _is_finite(velocity):
            if cache is not None:
                cache.free()
            raise PhaseError("the model's answer is not finite")
        return velocity

    def _build(
        self,
        branch: _BranchRows,
        cache: FrozenCache,
        rows: CacheRows,
        forward: _Forward,
        report: StepReport,
        reason: str,
    ) -> Streams:
        attention = rows.building(cache.begin_build(rows.split))
        velocity = self._full(branch, forward, report, "build", attention)
        if _is_finite(velocity):
            cache.complete_build(rows.split, forward.sigma)
            report.note("build", reason)
            return velocity
        cache.free()
        report.note("exact", NOT_FINITE)
        return self._full(branch, forward, report, "exact", self._model.dense_attention(branch.layout))

    def _cached(
        self, branch: _BranchRows, cache: FrozenCache, rows: CacheRows, forward: _Forward, report: StepReport
    ) -> Streams:
        """Of the live rows alone."""
        live = rows.split.live
        text = [branch.text] if rows.split.is_text_live else []
        hidden = torch.cat((*text, self._model.embed_audio(forward.fed.audio)))
        table_rows = gather_spans(self._model.block_rows(forward.labels, branch.layout, forward.modulation), live)
        try:
            attention = rows.cached(cache.begin_use())
            self._run_blocks(hidden, table_rows, forward, report, "cached", attention)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # what could not be read now will not be right later
            cache.free()
            raise
        cache.complete_use(forward.sigma)
        report.note("cached", "")
        audio = hidden[-rows.split.num_audio :]
        return (self._model.audio_velocity(audio, forward.labels.audio, forward.modulation),)

    def _full(
        self, branch: _BranchRows, forward: _Forward, report: StepReport, mode: StepMode, attention: BlockAttention
    ) -> Streams:
        """Of all rows; the video head runs where the video moves."""
        layout, labels, modulation = branch.layout, forward.labels, forward.modulation
        video = video_rows(forward.fed.video) if self._frozen_rows is None else self._frozen_rows
        keyframes = [] if self._keyframes is None else [self._model.embed_video(self._keyframes)]
        hidden = torch.cat(
            (branch.text, *keyframes, self._model.embed_audio(forward.fed.audio), self._model.embed_video(video))
        )
        self._run_blocks(hidden, self._model.block_rows(labels, layout, modulation), forward, report, mode, attention)
        media = hidden[layout.audio_start :]
        if self._frozen_rows is not None:
            return (self._model.audio_velocity(media[: layout.num_audio_rows], labels.audio, modulation),)
        velocity = self._model.velocity(
            media, labels.audio, labels.video, layout.num_audio_rows, modulation, forward.fed.video.shape[2:]
        )
        return velocity.video, velocity.audio

    def _run_blocks(
        self,
        hidden: Tensor,
        table_rows: Tensor,
        forward: _Forward,
        report: StepReport,
        mode: StepMode,
        attention: BlockAttention,
    ) -> None:
        """All blocks, counted and timed."""

        def counted(layer: int, attn: Any, normed: Tensor) -> Tensor:
            branch = attention(layer, attn, normed)
            report.num_blocks[mode] += 1
            return branch

        finish_forward(self._device)
        began = time.perf_counter()
        self._model.run_blocks(hidden, table_rows, forward.modulation, counted)
        finish_forward(self._device)
        report.block_s += time.perf_counter() - began
        report.num_forwards += 1

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        """Takes back what a step that fails did to the caches: builds of this step go, half ones too; counts return."""
        caches = [branch.cache for branch in self._branches if branch.cache is not None]
        marks = [cache.mark() for cache in caches]
        try:
            yield
        except BaseException:
            for cache, mark in zip(caches, marks, strict=True):
                cache.rewind(mark)
            raise


def spec_masks(clip: ClipSpec, spec: RefineSpec) -> Masks:
    """The masks of a request: a video that moves as far as it says, and the sound or a part of it."""
    size = (num_video_latents(clip.num_frames), latent_size(clip.height), latent_size(clip.width))
    span = spec.audio_range
    return Masks(
        video=uniform_video_mask(spec.video_denoise, size),
        audio=None if span is None else audio_range_mask(clip.num_frames, span.start_s, span.end_s),
    )


@contextmanager
def counted_rows(model: H3Dit, report: StepReport) -> Iterator[None]:
    """Counts the rows that the blocks' modules are called with, whoever calls them."""
    with ExitStack() as hooks:
        for block in model.transformer.transformer_blocks:
            for module, name in (
                (block.attn.to_q, "num_query_rows"),
                (block.attn.to_k, "num_key_rows"),
                (block.ff, "num_fed_rows"),
            ):
                hooks.callback(module.register_forward_hook(partial(_count, report, name)).remove)
        yield


def _is_finite(streams: Streams) -> bool:
    return all(bool(torch.isfinite(stream).all()) for stream in streams)


def _count(report: StepReport, name: str, module: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
    setattr(report, name, getattr(report, name) + len(args[0]))


@dataclass(eq=False)
class _BranchRows:
    """A branch as its forwards need it."""

    text: Tensor
    """`[E, hidden]` of `refine_text`."""
    layout: DenseLayout
    cache: FrozenCache | None
    cache_rows: CacheRows | None = None
    """Where there is a cache."""


@dataclass(frozen=True, eq=False)
class _Forward:
    """What the branches' forwards at one grid point share."""

    sigma: float
    """Noise level of the video."""
    fed: ChunkLatents
    labels: SegmentLabels
    modulation: Modulation
