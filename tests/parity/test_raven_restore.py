"""Rollouts that go on from restored chunks against undisturbed ones: no tolerance, every bit is the same.

Every recorded case and variant of the RAVEN vectors, cut at every boundary between chunks.
"""

import dataclasses
from functools import cache

import pytest
import torch

from core.geometry import chunk_table
from h3stream.request import KV_STORAGES
from services.dit.adapters import AdapterBank
from services.dit.model import H3Dit
from services.dit.rollout import Rollout
from services.dit.weights import load_transformer
from tests.raven_vectors import (
    case_clip,
    case_text,
    extra_adapter,
    raven_adapter,
    relative_l2,
    settings,
    tensors,
    write_transformer,
)

CPU = torch.device("cpu")
STRENGTHS = settings()["cases"]["a"]["variants"]
RAVEN = ("raven", STRENGTHS["lora"]["lora"]["strength"])
EXTRA = ("extra", STRENGTHS["lora_extra"]["extra_strength"])
VARIANTS = {
    "a": ("a", "float32", ()),
    "b": ("b", "float32", ()),
    "c": ("c", "float32", ()),
    "a.bf16": ("a", "bfloat16", ()),
    "a.lora": ("a", "float32", (RAVEN,)),
    "a.lora_bf16": ("a", "bfloat16", (RAVEN,)),
    "a.lora_extra": ("a", "float32", (RAVEN, EXTRA)),
}
"""Case, precision and adapters, by the names of the recorded files."""
BF16_L2 = 1e-2
RETENTIONS = ((1, 0), (1, 1), (2, 1), (1, None))


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The model in a precision and its adapters."""
    directory = tmp_path_factory.mktemp("raven") / "transformer"
    write_transformer(directory)

    @cache
    def get(dtype):
        transformer = load_transformer(directory, dtype)
        adapters = {"raven": raven_adapter(transformer), "extra": extra_adapter(transformer)}
        return H3Dit(transformer), AdapterBank(transformer, adapters)

    return get


@pytest.fixture(scope="module")
def undisturbed(parts):
    """A clip's chunks and what its cache holds in the end, sampled from the beginning to the end."""

    @cache
    def get(variant, clip):
        rollout = opened(parts, variant, clip)
        return go_on(rollout, 0), held(rollout)

    return get


def opened(parts, variant, clip):
    case, dtype, mix = VARIANTS[variant]
    context, tags = case_text(case)
    rollout = Rollout(*parts(dtype), mix, clip, len(context), CPU)
    rollout.prefill(context, tags)
    return rollout


def go_on(rollout, first):
    """The chunks from `first` on, sampled."""
    chunks = chunk_table(rollout.clip.num_frames)
    latents = []
    for chunk in chunks[first:]:
        latents.append(rollout.sample(chunk.index, lambda step: None, lambda: False))
        if not chunk.is_tail:
            rollout.commit(chunk.index)
    return latents


def held(rollout):
    """What the cache holds; what was moved to get there may differ."""
    stats = rollout.cache.stats()
    return stats.storage, stats.num_committed, stats.retained, stats.retained_rows


def check(parts, undisturbed, variant, clip):
    whole, cached = undisturbed(variant, clip)
    for boundary in range(1, len(whole) + 1):
        rollout = opened(parts, variant, clip)
        for index, latents in enumerate(whole[:boundary]):
            rollout.restore(index, latents)
            if index < len(whole) - 1:
                rollout.commit(index)
        rest = go_on(rollout, boundary)
        assert len(rest) == len(whole) - boundary
        for ours, theirs in zip(rest, whole[boundary:], strict=True):
            assert torch.equal(ours.video, theirs.video)
            assert torch.equal(ours.audio, theirs.audio)
        assert held(rollout) == cached
        assert rollout.num_noise_forwards == clip.steps * len(rest)
    return whole


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_recorded_variant_goes_on_bit_for_bit_from_every_boundary(parts, undisturbed, variant):
    whole = check(parts, undisturbed, variant, case_clip(VARIANTS[variant][0]))
    recorded = tensors(f"a.expected.{variant[2:]}" if "." in variant else f"{variant}.expected")
    assert relative_l2(whole[0].video, recorded["x0.chunk0.video"]) <= BF16_L2  # the clip is the recorded one


@pytest.mark.parametrize("storage", KV_STORAGES)
@pytest.mark.parametrize(("sink", "window"), RETENTIONS)
def test_every_storage_and_retention_goes_on_bit_for_bit(parts, undisturbed, storage, sink, window):
    clip = dataclasses.replace(case_clip("a"), num_frames=73, sink=sink, window=window, kv_storage=storage)
    check(parts, undisturbed, "a.lora_extra", clip)
