"""What a shared cache was built of: everything that went into its rows, by exact digests.

The sound is not part of it: a cache that is taken over was built beside another sound, which is what sharing means.
Source: docs/reference/audio-refine.md §8.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h3stream.refine import FrozenCacheSpec
from h3stream.request import ClipSpec
from services.dit.adapters import AdapterMix
from services.dit.refine.frozen_cache import RowSplit
from services.dit.rows import ChunkLatents

VIDEO_CHANGED = "video latent changed"
CONDITIONING_CHANGED = "conditioning changed"


@dataclass(frozen=True)
class CacheKind:
    """What two refinements must have in common for one's cache to be rebuilt for the other."""

    branch: str
    """Of guidance: two texts of one shape must not evict each other at every step."""
    num_frames: int
    width: int
    height: int
    split: RowSplit
    contents: str
    precision: str

    @classmethod
    def of(cls, branch: str, clip: ClipSpec, split: RowSplit, spec: FrozenCacheSpec) -> CacheKind:
        """That of one branch of a refinement."""
        return cls(branch, clip.num_frames, clip.width, clip.height, split, spec.contents, spec.precision)


@dataclass(frozen=True)
class CacheContent:
    """What they must have in common for it to be used as it is: SHA-256 in hex of two halves."""

    video: str
    """The frozen video, and the noise that the model is fed it with."""
    conditioning: str
    """The text, and whatever else decides what the blocks make of the rows: weights, adapters, noise levels."""

    def change_to(self, wanted: CacheContent) -> str:
        """Why a cache of this content must be built anew for another; empty: it need not."""
        if self.video != wanted.video:
            return VIDEO_CHANGED
        return CONDITIONING_CHANGED if self.conditioning != wanted.conditioning else ""


def cache_content(
    clip: ClipSpec,
    video: ChunkLatents,
    noise: ChunkLatents,
    context: Tensor,
    token_tags: Tensor,
    *,
    first_sigmas: tuple[float, float],
    mix: AdapterMix,
    weight_digests: Mapping[str, str],
    compute_dtype: torch.dtype,
) -> CacheContent:
    """The content of a branch's cache.

    video, noise: of the clip, of which only the video counts.  context, token_tags: of the branch.  first_sigmas: noise
    levels of the build, at which the rows of the text are labelled.  weight_digests: of the model and its adapters.
    """
    facts = {
        "shifts": (clip.video_shift, clip.audio_shift),
        "sigmas": first_sigmas,
        "adapters": mix,
        "weights": dict(weight_digests),
        "dtype": str(compute_dtype),
    }
    return CacheContent(
        video=digest({}, {"latents": video.video, "noise": noise.video}),
        conditioning=digest(facts, {"context": context, "token_tags": token_tags}),
    )


def digest(facts: Any, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over facts, and over names, types, shapes and bytes of tensors; blind to where their bytes lie."""
    sha256 = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        sha256.update(json.dumps((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        sha256.update(data.data)
    return sha256.hexdigest()
