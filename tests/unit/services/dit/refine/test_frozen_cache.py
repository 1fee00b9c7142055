"""The cache must skip work, and not only be right: what runs is counted by the tests' own hooks."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from h3stream.errors import PhaseError
from h3stream.refine import FrozenCacheSpec
from services.dit import attention
from services.dit.refine.frozen_cache import LAYOUT_CHANGED, NO_CACHE, FrozenCache, RowSplit, cache_buffers
from services.dit.refine.masks import Masks, uniform_video_mask
from services.dit.refine.refiner import NOT_FINITE, Branch, Refiner
from tests import refine_vectors
from tests.refine_vectors import CLIP

EXACT = "exact.s4_d0.5"
ROWS, TEXT, AUDIO, LAYERS = 111, 9, 74, 3
CONTENTS = ("hidden", "kv")
TEXTS = ("live", "kept")
SPLIT = RowSplit(num_text=5, num_cond=0, num_audio=6, num_video=9, is_text_live=True)
POLICY = json.loads((refine_vectors.FIXTURES / "policy.json").read_text())


@dataclasses.dataclass
class Stats:
    num_bytes: int = 1000
    num_bytes_written: int = 0
    num_bytes_moved: int = 0


class FakeStore:
    """Counts what is done with it."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.stats = Stats()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*args: object) -> None:
            self.calls[name] += 1

        return call


def fake_cache(refresh_interval: int = 0) -> tuple[FrozenCache, list[FakeStore]]:
    stores: list[FakeStore] = []

    def new_store(rows: int) -> Any:
        stores.append(FakeStore())
        return stores[-1]

    cache = FrozenCache(new_store, contents="hidden", is_text_live=True, refresh_interval=refresh_interval)
    return cache, stores


def call(cache: FrozenCache, sigma: float, split: RowSplit = SPLIT, *, interrupt: bool = False) -> str:
    """One forward, as the vectors' sequences name what it does."""
    mode, reason = cache.decide(split, sigma)
    if mode == "cached":
        cache.begin_use()
        cache.complete_use(sigma)
        return "cached"
    cache.begin_build(split)
    if interrupt:
        cache.free()
        return "discarded"
    cache.complete_build(split, sigma)
    return f"build: {reason}"


OF_ONE_CACHE = [
    case
    for case in POLICY["lifecycle"]
    if all(name.split("!")[0].split("/")[0] == "A" for name in case["calls"]) and "stock" not in case["expect"]
]


@pytest.mark.parametrize("case", OF_ONE_CACHE, ids=lambda case: str(case["name"]))
def test_the_recorded_sequences_of_calls_build_and_use_it_as_recorded(case: dict[str, Any]) -> None:
    """Whoever hands the cache on tells it what changed."""
    cache, stores = fake_cache(case["refresh_interval"])
    seen: list[str] = []
    content = ""
    for number, name in enumerate(case["calls"]):
        _, _, now = name.partition("/")
        now = "" if now == "realloc" else now
        if number and now != content:
            cache.invalidate(f"{'video latent' if 'video' in now else 'conditioning'} changed")
        content = now
        seen.append(call(cache, 1 - 0.1 * number, interrupt="!interrupt" in name))
    assert seen == case["expect"]
    assert len(stores) == 1 + seen.count("discarded")


def test_forwards_at_one_noise_level_are_one_step() -> None:
    cache, _ = fake_cache(refresh_interval=1)
    seen = [call(cache, sigma) for sigma in (0.9, 0.9, 0.9 + 1e-10, 0.8, 0.8, 0.7, 0.7, 0.6, 0.5)]
    rebuilt = "build: refresh_interval reached"
    assert seen == [f"build: {NO_CACHE}", *["cached"] * 4, rebuilt, "cached", "cached", rebuilt]


def test_another_layout_is_built_anew_in_a_store_of_its_size() -> None:
    cache, stores = fake_cache()
    call(cache, 0.9)
    other = dataclasses.replace(SPLIT, num_text=7, num_video=11)
    assert call(cache, 0.8, other) == f"build: {LAYOUT_CHANGED}"
    assert [store.calls["free"] for store in stores] == [1, 0]
    assert call(cache, 0.7, other) == "cached"
    live_text_only = dataclasses.replace(other, num_text=8)  # as many frozen rows
    assert call(cache, 0.6, live_text_only) == f"build: {LAYOUT_CHANGED}"
    assert len(stores) == 2


def test_a_cache_is_freed_once_and_can_be_built_again() -> None:
    cache, stores = fake_cache()
    call(cache, 0.9)
    assert cache.num_bytes == 1000
    cache.free()
    cache.free()
    assert stores[0].calls["free"] == 1
    assert (cache.num_bytes, cache.is_valid) == (0, False)
    assert call(cache, 0.8) == f"build: {NO_CACHE}"


def test_bytes_moved_add_up_over_stores() -> None:
    cache, stores = fake_cache()
    call(cache, 0.9)
    stores[0].stats.num_bytes_written, stores[0].stats.num_bytes_moved = 200, 30
    cache.free()
    call(cache, 0.8)
    stores[1].stats.num_bytes_moved = 4
    assert cache.num_bytes_moved == 234


def test_a_step_taken_back_leaves_the_cache_as_it_was() -> None:
    cache, _ = fake_cache(refresh_interval=2)
    call(cache, 0.9)
    mark = cache.mark()
    call(cache, 0.8)
    cache.rewind(mark)
    assert [call(cache, sigma) for sigma in (0.8, 0.7)] == ["cached", "cached"]
    mark = cache.mark()
    assert call(cache, 0.6) == "build: refresh_interval reached"
    cache.rewind(mark)
    assert call(cache, 0.6) == f"build: {NO_CACHE}"


def test_rows_of_the_full_model_split_as_the_reference_counts_them() -> None:
    clip = dataclasses.replace(CLIP, num_frames=243, width=1376, height=768)
    live = RowSplit.of_clip(clip, 102, is_text_live=True)
    kept = RowSplit.of_clip(clip, 102, is_text_live=False)
    assert live.num_rows == kept.num_rows == 75_216
    assert (live.num_live, live.num_frozen) == (912, 74_304)
    assert (kept.num_live, kept.num_frozen) == (810, 74_406)
    assert live.live == ((0, 102), (102, 912))
    assert live.frozen == ((912, 75_216),)
    assert kept.frozen == ((0, 102), (912, 75_216))
    with_keyframe = RowSplit.of_clip(clip, 102, is_text_live=True, num_cond=1032)
    assert with_keyframe.frozen == ((102, 1134), (1944, 76_248))
    meta = torch.device("meta")
    assert [t.nbytes for t in cache_buffers("hidden", 75_216, 5376, 7168, torch.bfloat16, meta)] == [75_216 * 5376 * 2]
    assert [t.nbytes for t in cache_buffers("kv", 75_216, 5376, 7168, torch.bfloat16, meta)] == [75_216 * 7168 * 2] * 2


def cache_spec(**values: Any) -> FrozenCacheSpec:
    return FrozenCacheSpec(**{"precision": "bf16"} | values)


def cached_pass(spec: FrozenCacheSpec, **values: Any) -> tuple[Refiner, FrozenCache]:
    cache = refine_vectors.frozen_cache(spec)
    return refine_vectors.refiner(EXACT, cache, **values), cache


@contextmanager
def calls_of_modules() -> Iterator[Counter[str]]:
    """Rows that modules are called with, by the last parts of their names."""
    counts: Counter[str] = Counter()
    hooks = []
    for name, module in refine_vectors.transformer().named_modules():
        if name and not isinstance(module, torch.nn.ModuleList):

            def count(module: Any, args: tuple[Any, ...], out: Any, name: str = name) -> None:
                counts[name] += len(args[0])

            hooks.append(module.register_forward_hook(count))
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def of_blocks(counts: Counter[str], name: str) -> list[int]:
    return [counts[f"transformer_blocks.{layer}.{name}"] for layer in range(LAYERS)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("contents", CONTENTS)
def test_a_cached_step_computes_the_live_rows_and_nothing_else(contents: Any, text: Any) -> None:
    refiner, cache = cached_pass(cache_spec(contents=contents, text=text))
    live = AUDIO + (TEXT if text == "live" else 0)
    reports, seen = [], []
    for _ in range(4):
        with calls_of_modules() as counts:
            reports.append(refiner.step())
        seen.append(counts)
    assert [report.mode for report in reports] == ["build", "cached", "cached", "cached"]
    assert [report.reason for report in reports] == [NO_CACHE, "", "", ""]
    assert reports[0].num_blocks == {"exact": 0, "build": LAYERS, "cached": 0}
    assert reports[0].cache_bytes == cache.num_bytes > 0
    for name in ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff"):
        assert of_blocks(seen[0], name) == [ROWS] * LAYERS
    key_rows = ROWS if contents == "hidden" else live
    for report, counts in zip(reports[1:], seen[1:], strict=True):
        assert report.num_blocks == {"exact": 0, "build": 0, "cached": LAYERS}
        for name in ("norm1", "attn.to_q", "attn.norm_q", "attn.to_out.0", "norm2", "ff"):
            assert of_blocks(counts, name) == [live] * LAYERS
        for name in ("attn.to_k", "attn.norm_k", "attn.to_v"):
            assert of_blocks(counts, name) == [key_rows] * LAYERS
        assert counts["audio_proj_in"] == counts["audio_proj_out"] == counts["norm_out.norm"] == AUDIO
        for idle in ("proj_in", "proj_out", "context_embedder", "token_refiner"):
            assert not any(counts[name] for name in counts if name.startswith(idle))
    for report, counts in zip(reports, seen, strict=True):
        assert report.num_query_rows == sum(of_blocks(counts, "attn.to_q"))
        assert report.num_key_rows == sum(of_blocks(counts, "attn.to_k"))
        assert report.num_fed_rows == sum(of_blocks(counts, "ff"))
        assert report.num_forwards == 1


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("layout", ["plain", "keyframe"])
def test_only_frozen_rows_are_stored(contents: Any, text: Any, layout: str) -> None:
    spec = cache_spec(contents=contents, text=text)
    cache = refine_vectors.frozen_cache(spec)
    refiner = refine_vectors.refiner(EXACT if layout == "plain" else "exact_keyframe.s4_d0.5", cache)
    refiner.step()
    frozen = 28 + (4 if layout == "keyframe" else 0) + (TEXT if text == "kept" else 0)
    tensors = 1 if contents == "hidden" else 2
    assert cache.num_bytes == LAYERS * tensors * frozen * 256 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("precision", ["bf16", "fp8", "int4"])
def test_a_build_has_the_bits_of_the_exact_step(contents: Any, precision: Any, dtype: torch.dtype) -> None:
    model = refine_vectors.transformer() if dtype == torch.float32 else refine_vectors.half_transformer()
    exact = refine_vectors.refiner(EXACT, model=model)
    exact.step()
    for text in TEXTS:
        refiner, _ = cached_pass(FrozenCacheSpec(contents=contents, precision=precision, text=text), model=model)
        assert refiner.step().mode == "build"
        assert torch.equal(refiner.latents.audio, exact.latents.audio)
        refiner.step()
        assert torch.isfinite(refiner.latents.audio).all()


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 1e-3), ("fp8", 1e-2), ("int4", 5e-2)])
@pytest.mark.parametrize("contents", CONTENTS)
def test_where_nothing_has_moved_only_the_codec_tells(contents: Any, precision: Any, bound: float) -> None:
    """The first step again, from the cache that it built: the step's own move is what is compared."""
    spec = FrozenCacheSpec(contents=contents, precision=precision)
    built, cache = cached_pass(spec)
    start = built.latents.audio
    built.step()
    again = refine_vectors.refiner(EXACT, cache)
    assert again.step().mode == "cached"
    deviation = refine_vectors.relative_l2(again.latents.audio - start, built.latents.audio - start)
    assert 0 < deviation <= bound


@pytest.mark.parametrize("contents", CONTENTS)
def test_where_it_lives_changes_no_bit(contents: Any, tmp_path: Path) -> None:
    spec = FrozenCacheSpec(contents=contents, precision="int4", refresh_interval=1)
    sounds = []
    for backend in ("vram", "ram", "disk"):
        cache = refine_vectors.frozen_cache(spec, backend, tmp_path)
        refiner = refine_vectors.refiner(EXACT, cache)
        for _ in range(4):
            report = refiner.step()
        assert (report.num_bytes_moved > 0) == (backend != "vram")
        sounds.append(refiner.latents.audio)
        cache.free()
    assert torch.equal(sounds[0], sounds[1])
    assert torch.equal(sounds[0], sounds[2])
    assert not list(tmp_path.rglob("*.bin"))


@pytest.mark.parametrize("contents", CONTENTS)
def test_rows_are_decoded_into_buffers_that_were_taken_once(contents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refiner, cache = cached_pass(cache_spec(contents=contents))
    refiner.step()
    store = cache.begin_use()
    read, places = store.read, set()

    def noted(layer: int, tensor: int, out: torch.Tensor) -> None:
        places.add((tensor, out.data_ptr()))
        read(layer, tensor, out)

    monkeypatch.setattr(store, "read", noted)
    for _ in range(3):
        refiner.step()
    assert len(places) == (1 if contents == "hidden" else 2)


@pytest.mark.parametrize("contents", CONTENTS)
def test_every_step_attends_with_the_kernel_that_holds_no_weights(
    contents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int, bool]] = []
    attend = attention.attend

    def noted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, fused: bool = False) -> torch.Tensor:
        calls.append((len(query), len(key), fused))
        return attend(query, key, value, fused=fused)

    refiner, _ = cached_pass(cache_spec(contents=contents))
    monkeypatch.setattr(attention, "attend", noted)
    refiner.step()
    refiner.step()
    assert calls == [(ROWS, ROWS, True)] * LAYERS + [(AUDIO + TEXT, ROWS, True)] * LAYERS


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("block", range(LAYERS))
@pytest.mark.parametrize("at", ["attn.to_out.0", "ff"])
@pytest.mark.parametrize("contents", CONTENTS)
def test_an_interrupted_build_leaves_nothing_and_can_be_repeated(contents: Any, at: str, block: int) -> None:
    spec = cache_spec(contents=contents, precision="int4")
    expected, _ = cached_pass(spec)
    refiner, cache = cached_pass(spec)
    module = refine_vectors.transformer().get_submodule(f"transformer_blocks.{block}.{at}")

    def interrupt(*args: object) -> None:
        raise Interrupted

    hook = module.register_forward_hook(interrupt)
    start = refiner.latents.audio
    with pytest.raises(Interrupted):
        refiner.step()
    hook.remove()
    assert not cache.is_valid
    assert cache.num_bytes == 0
    assert refiner.num_done == 0
    assert refiner.latents.audio is start
    for mode in ("build", "cached", "cached", "cached"):
        expected.step()
        assert refiner.step().mode == mode
    assert torch.equal(refiner.latents.audio, expected.latents.audio)


def nan_once(out: torch.Tensor, left: list[int]) -> torch.Tensor:
    if left:
        left.pop()
        return torch.full_like(out, torch.nan)
    return out


def test_a_build_whose_sound_is_not_finite_is_discarded_and_the_step_is_exact() -> None:
    exact = refine_vectors.refiner(EXACT)
    refiner, cache = cached_pass(cache_spec())
    left = [0]
    head = refine_vectors.transformer().audio_proj_out
    hook = head.register_forward_hook(lambda module, args, out: nan_once(out, left))
    try:
        report = refiner.step()
    finally:
        hook.remove()
    exact.step()
    assert (report.mode, report.reason) == ("exact", NOT_FINITE)
    assert report.num_blocks == {"exact": LAYERS, "build": LAYERS, "cached": 0}
    assert report.num_forwards == 2
    assert not cache.is_valid
    assert cache.num_bytes == report.cache_bytes == 0
    assert torch.equal(refiner.latents.audio, exact.latents.audio)
    assert [refiner.step().mode for _ in range(3)] == ["build", "cached", "cached"]


@pytest.mark.parametrize("num_done", [0, 1])
def test_a_sound_that_stays_not_finite_is_an_error_and_leaves_no_cache(num_done: int) -> None:
    refiner, cache = cached_pass(cache_spec())
    for _ in range(num_done):
        refiner.step()
    head = refine_vectors.transformer().audio_proj_out
    hook = head.register_forward_hook(lambda module, args, out: torch.full_like(out, torch.inf))
    try:
        with pytest.raises(PhaseError, match="not finite"):
            refiner.step()
    finally:
        hook.remove()
    assert not cache.is_valid
    assert refiner.num_done == num_done
    assert torch.isfinite(refiner.latents.audio).all()


def test_a_store_that_cannot_be_read_is_an_error_and_never_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    refiner, cache = cached_pass(cache_spec())
    refiner.step()
    store = cache.begin_use()

    def broken(layer: int, tensor: int, out: torch.Tensor) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(store, "read", broken)
    with pytest.raises(OSError, match="Input/output"):
        refiner.step()
    assert not cache.is_valid
    assert refiner.step().mode == "build"


def test_a_cached_step_that_found_no_memory_is_the_same_when_repeated() -> None:
    spec = cache_spec(refresh_interval=2)
    expected, _ = cached_pass(spec)
    refiner, cache = cached_pass(spec)
    refiner.step()

    def no_memory(*args: object) -> None:
        raise torch.OutOfMemoryError

    hook = refine_vectors.transformer().transformer_blocks[1].ff.register_forward_hook(no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        refiner.step()
    hook.remove()
    assert cache.is_valid
    assert [refiner.step().mode for _ in range(3)] == ["cached", "cached", "build"]
    for _ in range(4):
        expected.step()
    assert torch.equal(refiner.latents.audio, expected.latents.audio)


def test_a_cache_of_another_prompt_length_is_built_anew() -> None:
    cache = refine_vectors.frozen_cache(cache_spec(text="kept"))
    refine_vectors.refiner(EXACT, cache).step()
    context, tags = refine_vectors.text()
    shorter = refine_vectors.refiner(EXACT, cache, branches=[Branch(context[:-1], tags[:-1], cache)])
    assert shorter.step().reason == LAYOUT_CHANGED


@pytest.mark.parametrize(
    ("masks", "reason"),
    [
        (Masks(), "the whole video may move"),
        (Masks(video=uniform_video_mask(0.3, (7, 4, 4))), "the video may move: its mask reaches 0.3"),
        (Masks(video=uniform_video_mask(0.0, (7, 4, 4)), audio=torch.zeros(2, 37)), "the sound is frozen too"),
    ],
    ids=["no_mask", "video_mask_0.3", "audio_mask_0"],
)
def test_what_is_no_refinement_of_the_sound_passes_by_the_cache(masks: Masks, reason: str) -> None:
    """Bit for bit, and without a store or a buffer; the next refinement finds no cache."""

    def no_store(rows: int) -> Any:
        raise AssertionError("a store was made")

    cache = FrozenCache(no_store, contents="kv", is_text_live=True)
    with_cache, without = (refine_vectors.refiner(EXACT, one, masks=masks) for one in (cache, None))
    for _ in range(2):
        report = with_cache.step()
        without.step()
        assert (report.mode, report.reason) == ("exact", reason)
        assert report.num_blocks == {"exact": LAYERS, "build": 0, "cached": 0}
    assert torch.equal(with_cache.latents.audio, without.latents.audio)
    assert torch.equal(with_cache.latents.video, without.latents.video)
    assert cache.decide(SPLIT, 0.5) == ("build", NO_CACHE)


def test_the_sound_beside_a_range_keeps_its_bits_with_a_cache_too() -> None:
    """And the range itself is refined: by cached steps, which a mask of the sound does not rule out."""
    before = refine_vectors.latents().audio
    audio = torch.zeros(2, 37)
    audio[:, 10:20] = 1
    masks = Masks(video=uniform_video_mask(0.0, (7, 4, 4)), audio=audio)
    cached, _ = cached_pass(cache_spec(), masks=masks)
    exact = refine_vectors.refiner(EXACT, masks=masks)
    modes = [cached.step().mode for _ in range(4)]
    for _ in range(4):
        exact.step()
    assert modes == ["build", "cached", "cached", "cached"]
    for refined in (cached.latents.audio, exact.latents.audio):
        assert torch.equal(refined[..., :10], before[..., :10])
        assert torch.equal(refined[..., 20:], before[..., 20:])
        assert refine_vectors.relative_l2(refined[..., 10:20], before[..., 10:20]) > 0.01
    deviation = refine_vectors.relative_l2(cached.latents.audio[..., 10:20], exact.latents.audio[..., 10:20])
    assert 1e-3 < deviation < 0.1
