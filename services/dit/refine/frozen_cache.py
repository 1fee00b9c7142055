"""The cache of the rows that a refinement freezes: when it is built and used, and what blocks write to it and read.

A build is an ordinary forward that also stores what attention needs of the frozen rows: their normed, modulated input,
or their K and V. A cached forward computes the live rows alone, and attends over both. What a block's frozen rows would
become is never needed: the cache holds what goes into the attention of every block.
Source: docs/reference/audio-refine.md §5, §8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.geometry import AUDIO_CHANNELS, num_audio_latents, num_clip_rows
from h3stream.refine import CacheContents, StepMode
from h3stream.request import ClipSpec
from services.dit.attention import Rotary, attention_over, self_attention
from services.dit.model import DenseLayout

if TYPE_CHECKING:
    from services.dit.refine.stores import Store

NO_CACHE = "no cache yet"
LAYOUT_CHANGED = "layout changed"
REFRESH = "refresh_interval reached"
SAME_SIGMA = 1e-9
"""Forwards whose noise levels lie this close belong to one step."""
NUM_TENSORS = {"hidden": 1, "kv": 2}
"""Tensors stored of each block, by contents."""

Span = tuple[int, int]


@dataclass(frozen=True)
class RowSplit:
    """Which rows of a dense forward are live, computed in every step, and which are frozen."""

    num_text: int
    num_cond: int
    """Of keyframes, which are always frozen."""
    num_audio: int
    """Always live."""
    num_video: int
    """Always frozen."""
    is_text_live: bool

    @classmethod
    def of_clip(cls, clip: ClipSpec, num_tokens: int, *, is_text_live: bool, num_cond: int = 0) -> RowSplit:
        """That of a clip and a prompt of so many tokens."""
        num_audio = AUDIO_CHANNELS * num_audio_latents(clip.num_frames)
        num_video = num_clip_rows(clip.num_frames, clip.width, clip.height) - num_audio
        return cls(num_tokens, num_cond, num_audio, num_video, is_text_live)

    @classmethod
    def of_layout(cls, layout: DenseLayout, *, is_text_live: bool) -> RowSplit:
        """That of the rows of a forward."""
        return cls(
            layout.num_text_rows, layout.num_cond_rows, layout.num_audio_rows, layout.num_video_rows, is_text_live
        )

    @property
    def num_rows(self) -> int:
        """Of a full forward."""
        return self.num_text + self.num_cond + self.num_audio + self.num_video

    @property
    def num_live(self) -> int:
        """Rows that a cached forward computes."""
        return self.num_audio + (self.num_text if self.is_text_live else 0)

    @property
    def num_frozen(self) -> int:
        """Rows that the cache stores."""
        return self.num_rows - self.num_live

    @property
    def live(self) -> tuple[Span, ...]:
        """Where the live rows lie in a full forward."""
        audio_start = self.num_text + self.num_cond
        audio = (audio_start, audio_start + self.num_audio)
        return ((0, self.num_text), audio) if self.is_text_live else (audio,)

    @property
    def frozen(self) -> tuple[Span, ...]:
        """Where the frozen rows lie in a full forward."""
        audio_start = self.num_text + self.num_cond
        head = (self.num_text if self.is_text_live else 0, audio_start)
        video = (audio_start + self.num_audio, self.num_rows)
        return (head, video) if head[0] < head[1] else (video,)


@dataclass(frozen=True)
class CacheMark:
    """Where a cache stands between two steps."""

    num_builds: int
    sigma: float
    num_cached_steps: int


class FrozenCache:
    """The frozen rows of one branch of guidance, over the steps of a refinement, or of several."""

    def __init__(
        self,
        new_store: Callable[[int], Store],
        *,
        contents: CacheContents,
        is_text_live: bool,
        refresh_interval: int = 0,
    ) -> None:
        """new_store: makes a store of so many rows; called at the first build, and where their number has changed.

        refresh_interval: of the first refinement, as in `begin_refinement`.
        """
        self.contents = contents
        self.is_text_live = is_text_live
        self._new_store = new_store
        self._store: Store | None = None
        self._split: RowSplit | None = None
        """Of the store's rows, once a build is complete."""
        self._reason = NO_CACHE
        self._num_builds = 0
        self._num_stored_rows = 0
        self._moved_before = 0
        """Bytes moved by the stores before this one."""
        self.begin_refinement(refresh_interval)

    def begin_refinement(self, refresh_interval: int) -> None:
        """The steps to come are another refinement's, whose cached steps count from 0.

        refresh_interval: cached steps after which it is built anew; 0 builds it once.
        """
        self._refresh_interval = refresh_interval
        self._sigma = math.inf
        """Noise level of the last forward; none was run at this one."""
        self._num_cached_steps = 0
        """Since the refinement began, or since the build."""

    @property
    def is_valid(self) -> bool:
        """Whether there is something to use."""
        return self._split is not None

    @property
    def num_bytes(self) -> int:
        """Its size; 0 before a build."""
        return 0 if self._store is None else self._store.stats.num_bytes

    @property
    def num_bytes_moved(self) -> int:
        """Bytes that went between the device and where it lives so far."""
        return self._moved_before + (0 if self._store is None else _num_bytes_moved(self._store))

    def decide(self, split: RowSplit, sigma: float) -> tuple[StepMode, str]:
        """Whether the next forward builds or uses it, and why it builds.  sigma: the forward's noise level."""
        if self._split is None:
            return "build", self._reason
        if self._split != split:
            return "build", LAYOUT_CHANGED
        is_new = abs(sigma - self._sigma) > SAME_SIGMA
        if is_new and 0 < self._refresh_interval <= self._num_cached_steps:
            return "build", REFRESH
        return "cached", ""

    def begin_build(self, split: RowSplit) -> Store:
        """A store for the frozen rows; until the build is complete there is nothing to use."""
        self._split = None
        self._reason = NO_CACHE
        self._num_builds += 1
        if self._store is None or self._num_stored_rows != split.num_frozen:
            self.free()
            self._store = self._new_store(split.num_frozen)
            self._num_stored_rows = split.num_frozen
        return self._store

    def complete_build(self, split: RowSplit, sigma: float) -> None:
        """Every block is stored."""
        assert self._store is not None, "no build has begun"
        self._store.seal()
        self._split = split
        self._sigma = sigma
        self._num_cached_steps = 0

    def begin_use(self) -> Store:
        """The store, about to be read from the first block to the last."""
        assert self._store is not None, "nothing has been built"
        assert self.is_valid, "the build is not complete"
        self._store.start()
        return self._store

    def complete_use(self, sigma: float) -> None:
        """A forward has used it."""
        if abs(sigma - self._sigma) > SAME_SIGMA:
            self._num_cached_steps += 1
            self._sigma = sigma

    def mark(self) -> CacheMark:
        """Where it stands, for `rewind`."""
        return CacheMark(self._num_builds, self._sigma, self._num_cached_steps)

    def rewind(self, mark: CacheMark) -> None:
        """Goes back to where it stood. What was built since goes; what that build replaced does not return."""
        if self._num_builds == mark.num_builds:
            self._sigma, self._num_cached_steps = mark.sigma, mark.num_cached_steps
        else:
            self.free()

    def invalidate(self, reason: str) -> None:
        """Forgets what is stored; the next build tells the reason. A cache without a build keeps its own."""
        if self.is_valid:
            self._split = None
            self._reason = reason

    def park(self) -> None:
        """Keeps what is stored, and gives back what only its use needs on the device."""
        if self._store is not None:
            self._store.park()

    def free(self) -> None:
        """Forgets what is stored, a half build too, and gives its memory back. Twice changes nothing."""
        self._split = None
        self._reason = NO_CACHE
        if self._store is not None:
            self._moved_before += _num_bytes_moved(self._store)
            self._store.free()
            self._store = None


class CacheRows:
    """How the rows of one branch meet its cache; owns the buffers that rows are decoded into, block after block."""

    def __init__(
        self, contents: CacheContents, split: RowSplit, layout: DenseLayout, buffers: tuple[Tensor, ...]
    ) -> None:
        """buffers: from `cache_buffers`; branches that run one after the other share them."""
        self.split = split
        self._contents = contents
        self._rotary = layout.rotary
        self._live_rotary = self._gather_rotary(split.live)
        # Cached forwards attend to the frozen rows first, then to the live ones: attention knows no order of its keys.
        self._key_rotary = self._gather_rotary(split.frozen + split.live) if contents == "hidden" else self._rotary
        self._buffers = tuple(buffer[: split.num_rows] for buffer in buffers)

    def building(self, store: Store) -> Callable[[int, Any, Tensor], Tensor]:
        """Attention of a full forward that stores its frozen rows; its result is that of any full forward."""

        def hidden(layer: int, attn: Any, normed: Tensor) -> Tensor:
            store.write(layer, 0, self._frozen(normed))
            return self_attention(attn, normed, self._rotary, dense=True)

        def kept(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            store.write(layer, 0, self._frozen(key.flatten(1)))
            store.write(layer, 1, self._frozen(value.flatten(1)))
            return key, value

        def kv(layer: int, attn: Any, normed: Tensor) -> Tensor:
            return self_attention(attn, normed, self._rotary, partial(kept, layer), dense=True)

        return hidden if self._contents == "hidden" else kv

    def cached(self, store: Store) -> Callable[[int, Any, Tensor], Tensor]:
        """Attention of live rows over the stored ones and themselves."""
        num_frozen = self.split.num_frozen

        def hidden(layer: int, attn: Any, normed: Tensor) -> Tensor:
            (rows,) = self._buffers
            store.read(layer, 0, rows[:num_frozen])
            rows[num_frozen:].copy_(normed)
            return attention_over(attn, normed, self._live_rotary, rows, self._key_rotary)

        def joined(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            for tensor, (buffer, live) in enumerate(zip(self._buffers, (key, value), strict=True)):
                store.read(layer, tensor, buffer[:num_frozen])
                buffer[num_frozen:].copy_(live.flatten(1))
            keys, values = (buffer.unflatten(1, key.shape[1:]) for buffer in self._buffers)
            return keys, values

        def kv(layer: int, attn: Any, normed: Tensor) -> Tensor:
            return self_attention(attn, normed, self._live_rotary, partial(joined, layer), dense=True)

        return hidden if self._contents == "hidden" else kv

    def _frozen(self, rows: Tensor) -> Tensor:
        """The frozen ones of rows `[S, width]`, contiguous: a view where they lie together."""
        return gather_spans(rows, self.split.frozen, self._buffers[0])

    def _gather_rotary(self, spans: Sequence[Span]) -> Rotary:
        cos, sin = (gather_spans(angles, spans) for angles in self._rotary)
        return cos, sin


def cache_buffers(
    contents: CacheContents, num_rows: int, hidden: int, inner: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Memory for the rows that the attention of a cached forward reads, `[num_rows, hidden]` or twice that of K and V.

    num_rows: of the longest branch.  inner: channels of all heads.
    """
    width = hidden if contents == "hidden" else inner
    return tuple(torch.empty(num_rows, width, dtype=dtype, device=device) for _ in range(NUM_TENSORS[contents]))


def _num_bytes_moved(store: Store) -> int:
    """By its builds and its passes."""
    stats = store.stats
    return stats.num_bytes_written + stats.num_bytes_moved


def gather_spans(rows: Tensor, spans: Sequence[Span], buffer: Tensor | None = None) -> Tensor:
    """The rows of all spans, one behind the other: a view of one span, else a copy, in the buffer's first rows."""
    parts = [rows[start:stop] for start, stop in spans]
    if len(parts) == 1:
        return parts[0]
    if buffer is None:
        return torch.cat(parts)
    return torch.cat(parts, out=buffer[: sum(len(part) for part in parts)])
