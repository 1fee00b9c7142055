"""What a refinement is about to do, known before its first step: rows, sizes, and why there is no cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.budget import ModelSize
from core.cache_policy import Choice, bytes_per_row, transient_bytes
from h3stream.refine import FrozenCacheSpec, RefineSpec
from h3stream.request import ClipSpec
from services.dit.refine.frozen_cache import RowSplit
from services.dit.refine.refiner import spec_masks
from services.dit.refine.room import CacheSizes


@dataclass(frozen=True)
class RefinePlan:
    """What is told before the first step."""

    spec: RefineSpec
    """The request with every default filled in."""
    splits: tuple[RowSplit, ...]
    """Rows of each branch, the prompt's first."""
    num_blocks: int
    backend: str
    """Where the cache lives; empty: there is none."""
    reason: str
    """Why there, or why every step is exact."""
    cache_bytes: int
    """Of all branches; 0 without a cache."""
    transient_bytes: int
    """Device memory that a full forward takes beside it."""

    @property
    def has_cache(self) -> bool:
        """Whether any step may be cached."""
        return bool(self.backend)

    @property
    def num_rows(self) -> int:
        """Of a full forward of the prompt."""
        return self.splits[0].num_rows

    @property
    def num_live_rows(self) -> int:
        """Of a step that is not a build: all of them where every step is exact."""
        return self.splits[0].num_live if self.has_cache else self.num_rows

    def placed(self, choice: Choice, cache_bytes: int) -> RefinePlan:
        """The same with caches of so many bytes in all."""
        return RefinePlan(
            self.spec, self.splits, self.num_blocks, choice.backend, choice.reason, cache_bytes, self.transient_bytes
        )


def exact_plan(
    clip: ClipSpec, spec: RefineSpec, num_tokens: Sequence[int], model: ModelSize, reason: str
) -> RefinePlan:
    """A plan without a cache.  num_tokens: of each branch's text."""
    splits = tuple(RowSplit.of_clip(clip, tokens, is_text_live=spec.cache.text == "live") for tokens in num_tokens)
    transient = max(transient_bytes(split.num_rows, model) for split in splits)
    return RefinePlan(spec, splits, model.num_layers, "", reason, 0, transient)


def exact_reason(clip: ClipSpec, spec: RefineSpec) -> str:
    """Why a refinement can have no cache, or none that serves it; empty: it can."""
    if not spec.cache.enabled:
        return "the cache is switched off"
    if reason := spec_masks(clip, spec).closed_reason:
        return reason
    if spec.steps == 1 and not spec.cache.shared:
        return "there is a single step, and no other to use what it would store"
    return ""


def cache_sizes(
    splits: Sequence[RowSplit], num_transient_bytes: int, spec: FrozenCacheSpec, model: ModelSize
) -> CacheSizes:
    """What the caches of branches with these rows need."""
    num_rows = sum(split.num_frozen for split in splits)
    return CacheSizes(
        cache_bytes=num_rows * bytes_per_row(spec.contents, spec.precision, model),
        smallest_bytes=num_rows * bytes_per_row("hidden", "int4", model),
        transient_bytes=num_transient_bytes,
    )
