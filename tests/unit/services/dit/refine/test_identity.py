from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from h3stream.refine import FrozenCacheSpec
from services.dit.refine.frozen_cache import RowSplit
from services.dit.refine.identity import CONDITIONING_CHANGED, VIDEO_CHANGED, CacheContent, CacheKind, cache_content
from services.dit.rows import ChunkLatents
from tests import refine_vectors
from tests.refine_vectors import CLIP

SPLIT = RowSplit.of_clip(CLIP, 9, is_text_live=True)


def content(**changes: Any) -> CacheContent:
    context, token_tags = refine_vectors.text()
    facts: dict[str, Any] = {
        "clip": CLIP,
        "video": refine_vectors.latents(),
        "noise": refine_vectors.noise(),
        "context": context,
        "token_tags": token_tags,
        "first_sigmas": (0.9, 0.7),
        "mix": (("style", 0.5),),
        "weight_digests": {"dit": "a", "adapters/style": "b"},
        "compute_dtype": torch.float32,
    }
    return cache_content(**facts | changes)


def swapped_frames(latents: ChunkLatents) -> ChunkLatents:
    return ChunkLatents(latents.video.flip(2), latents.audio)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"video": ChunkLatents(refine_vectors.latents().video.clone(), torch.zeros(1))}, ""),
        ({"context": refine_vectors.text()[0].clone(), "weight_digests": {"adapters/style": "b", "dit": "a"}}, ""),
        ({"video": swapped_frames(refine_vectors.latents())}, VIDEO_CHANGED),
        ({"noise": swapped_frames(refine_vectors.noise())}, VIDEO_CHANGED),
        ({"context": refine_vectors.text()[0].flip(0)}, CONDITIONING_CHANGED),
        ({"context": refine_vectors.text()[0].bfloat16()}, CONDITIONING_CHANGED),
        ({"token_tags": refine_vectors.text()[1] * 0}, CONDITIONING_CHANGED),
        ({"first_sigmas": (0.9, 0.8)}, CONDITIONING_CHANGED),
        ({"mix": ()}, CONDITIONING_CHANGED),
        ({"mix": (("style", 0.25),)}, CONDITIONING_CHANGED),
        ({"weight_digests": {"dit": "c", "adapters/style": "b"}}, CONDITIONING_CHANGED),
        ({"clip": dataclasses.replace(CLIP, video_shift=6.0)}, CONDITIONING_CHANGED),
        ({"clip": dataclasses.replace(CLIP, audio_shift=2.0)}, CONDITIONING_CHANGED),
        ({"compute_dtype": torch.bfloat16}, CONDITIONING_CHANGED),
        ({"clip": dataclasses.replace(CLIP, seed=8, steps=3)}, ""),
    ],
)
def test_content_is_told_by_its_bytes_and_by_nothing_else(changes: dict[str, Any], reason: str) -> None:
    assert content().change_to(content(**changes)) == reason


def test_a_smallest_change_of_one_value_is_seen() -> None:
    latents = refine_vectors.latents()
    video = latents.video.clone()
    video.view(-1)[17] = torch.nextafter(video.view(-1)[17], torch.tensor(torch.inf))
    assert content().change_to(content(video=ChunkLatents(video, latents.audio))) == VIDEO_CHANGED


@pytest.mark.parametrize(
    ("branch", "clip", "split", "spec"),
    [
        ("negative", CLIP, SPLIT, FrozenCacheSpec()),
        ("prompt", dataclasses.replace(CLIP, width=32, height=128), SPLIT, FrozenCacheSpec()),
        ("prompt", CLIP, dataclasses.replace(SPLIT, num_text=8), FrozenCacheSpec()),
        ("prompt", CLIP, dataclasses.replace(SPLIT, is_text_live=False), FrozenCacheSpec()),
        ("prompt", CLIP, SPLIT, FrozenCacheSpec(contents="kv")),
        ("prompt", CLIP, SPLIT, FrozenCacheSpec(precision="fp8")),
    ],
)
def test_caches_of_other_rows_or_another_form_are_of_another_kind(
    branch: str, clip: Any, split: RowSplit, spec: FrozenCacheSpec
) -> None:
    ours = CacheKind.of("prompt", CLIP, SPLIT, FrozenCacheSpec())
    assert CacheKind.of("prompt", CLIP, SPLIT, FrozenCacheSpec(refresh_interval=2, backend="ram")) == ours
    assert CacheKind.of(branch, clip, split, spec) != ours
