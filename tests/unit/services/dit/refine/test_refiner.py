from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch

from core.refine import refine_sigmas
from h3stream.errors import InvalidRequestError
from h3stream.refine import FrozenCacheSpec, RefineSpec, TimeRange
from services.common.verbs import VerbCancelled
from services.dit.adapters import Adapter, AdapterBank
from services.dit.noise import refine_noise
from services.dit.refine.frozen_cache import FrozenCache
from services.dit.refine.masks import Masks
from services.dit.refine.refiner import Branch, Refiner, StepReport
from services.dit.rows import ChunkLatents
from tests import refine_vectors
from tests.refine_vectors import CLIP, CPU

EXACT = "exact.s4_d0.5"
LAYERS = 3


def other_text(num_tokens: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(21)
    return torch.randn(num_tokens, 64, generator=draw), torch.ones(num_tokens, dtype=torch.int64)


def spec(**values: Any) -> RefineSpec:
    return RefineSpec(**{"steps": 4, "cache": FrozenCacheSpec(enabled=False)} | values)


def cache(**values: Any) -> FrozenCache:
    return refine_vectors.frozen_cache(FrozenCacheSpec(**{"precision": "int4"} | values))


def guided(spec: RefineSpec, caches: tuple[FrozenCache | None, FrozenCache | None] = (None, None)) -> Refiner:
    branches = [Branch(*refine_vectors.text(), caches[0]), Branch(*other_text(), caches[1])]
    return refine_vectors.refiner(EXACT, spec=spec, branches=branches)


def run(refiner: Refiner) -> list[StepReport]:
    return [refiner.step() for _ in range(refiner.num_steps - refiner.num_done)]


def test_the_noise_is_one_generators_video_first_then_audio() -> None:
    generator = torch.Generator().manual_seed(123)
    video = torch.randn(1, 24, 7, 4, 4, generator=generator)
    audio = torch.randn(1, 32, 2, 37, generator=generator)
    noise = refine_noise(123, CLIP, CPU)
    assert torch.equal(noise.video, video)
    assert torch.equal(noise.audio, audio)


def test_a_seed_stands_for_its_noise_and_without_one_the_clips_does() -> None:
    for seed, of in ((123, 123), (None, CLIP.seed)):
        by_seed = refine_vectors.refiner(EXACT, spec=spec(seed=seed), noise=None)
        by_noise = refine_vectors.refiner(EXACT, noise=refine_noise(of, CLIP, CPU))
        run(by_seed)
        run(by_noise)
        assert torch.equal(by_seed.latents.audio, by_noise.latents.audio)


def test_a_request_says_what_may_move() -> None:
    """`video_denoise` 0.3 is the recorded pass with that mask; a range of the sound is its mask."""
    name = "exact_video_open.s4_d0.5"
    moving = refine_vectors.refiner(name, spec=spec(video_denoise=0.3), masks=None)
    run(moving)
    assert refine_vectors.relative_l2(moving.latents.audio, refine_vectors.recorded(name)[3]) <= 1e-5
    video = refine_vectors.tensors("passes_exact")[f"{name}.video"]
    assert refine_vectors.relative_l2(moving.latents.video, video) <= 1e-5

    before = refine_vectors.latents().audio
    ranged = refine_vectors.refiner(EXACT, spec=spec(audio_range=TimeRange(0.25, 0.5)), masks=None)
    run(ranged)
    changed = (ranged.latents.audio != before).any(dim=1)[0]  # [2, A]
    assert changed[:, 10:20].all()
    assert not changed[:, :10].any()
    assert not changed[:, 20:].any()


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpmpp_2m"])
@pytest.mark.parametrize("with_cache", [False, True])
def test_a_frozen_video_is_returned_as_it_came(sampler: str, with_cache: bool) -> None:
    latents = refine_vectors.latents()
    video, audio = latents.video.clone(), latents.audio.clone()
    refiner = refine_vectors.refiner(EXACT, cache() if with_cache else None, spec=spec(sampler=sampler), masks=None)
    run(refiner)
    assert refiner.latents.video is latents.video
    assert torch.equal(latents.video, video)
    assert torch.equal(latents.audio, audio)
    assert torch.isfinite(refiner.latents.audio).all()


def test_samplers_come_to_different_sounds_and_agree_in_many_steps() -> None:
    ends: dict[int, dict[str, torch.Tensor]] = {}
    for steps in (3, 16):
        ends[steps] = {}
        for sampler in ("euler", "heun", "dpmpp_2m"):
            refiner = refine_vectors.refiner(EXACT, spec=spec(steps=steps, sampler=sampler))
            run(refiner)
            ends[steps][sampler] = refiner.latents.audio
    for sampler in ("heun", "dpmpp_2m"):
        few, many = (refine_vectors.relative_l2(ends[steps][sampler], ends[steps]["euler"]) for steps in (3, 16))
        assert 0.75 * few > many > 0


def test_each_scheduler_has_its_own_levels() -> None:
    for scheduler in ("simple", "native"):
        refiner = refine_vectors.refiner(EXACT, spec=spec(scheduler=scheduler))
        sigma = refine_sigmas(4, 0.5, 12.0, 3.0, scheduler)[0][1]
        expected = sigma * refine_vectors.noise().audio + (1 - sigma) * refine_vectors.latents().audio
        assert torch.equal(refiner.latents.audio, expected)


def test_heun_builds_once_and_counts_forwards_at_one_level_as_one_step() -> None:
    frozen = cache(refresh_interval=2)
    refiner = refine_vectors.refiner(EXACT, frozen, spec=spec(steps=5, sampler="heun"))
    reports = run(refiner)
    assert [report.num_forwards for report in reports] == [2, 2, 2, 2, 1]
    # New levels: 0 build, 1, 2, 3 build, 4. Level n is seen at the end of step n - 1 and at the start of step n.
    assert [report.mode for report in reports] == ["build", "cached", "build", "cached", "cached"]
    assert [report.reason for report in reports] == ["no cache yet", "", "refresh_interval reached", "", ""]
    assert reports[0].num_blocks == {"exact": 0, "build": LAYERS, "cached": LAYERS}
    assert reports[1].num_blocks == {"exact": 0, "build": 0, "cached": 2 * LAYERS}


def velocity(text: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """One branch's answer at the first step, from a step that it takes alone."""
    alone = refine_vectors.refiner(EXACT, branches=[Branch(*text)])
    before = alone.latents.audio
    alone.step()
    sigma, following = (pair[1] for pair in refine_sigmas(4, 0.5, 12.0, 3.0)[:2])
    return (alone.latents.audio - before) / (following - sigma)


@pytest.mark.parametrize("cfg", [2.5, 7.0])
def test_guidance_leads_away_from_the_negative_prompt(cfg: float) -> None:
    refiner = guided(spec(cfg=cfg))
    start = refiner.latents.audio
    report = refiner.step()
    assert report.num_forwards == 2
    towards, away = (velocity(text) for text in (refine_vectors.text(), other_text()))
    sigma, following = (pair[1] for pair in refine_sigmas(4, 0.5, 12.0, 3.0)[:2])
    expected = start + (following - sigma) * (away + cfg * (towards - away))
    assert refine_vectors.relative_l2(refiner.latents.audio, expected) <= 1e-5


def test_guidance_moves_the_video_too_where_it_may_move() -> None:
    branches = [Branch(*refine_vectors.text()), Branch(*other_text())]
    guided_spec = spec(video_denoise=0.5, cfg=3.0)
    refiner = refine_vectors.refiner(EXACT, spec=guided_spec, branches=branches, masks=None)
    plain = refine_vectors.refiner(EXACT, spec=spec(video_denoise=0.5), masks=None)
    run(refiner)
    run(plain)
    assert refine_vectors.relative_l2(refiner.latents.video, plain.latents.video) > 1e-3


def test_the_negative_prompt_is_given_exactly_where_guidance_asks_for_it() -> None:
    with pytest.raises(AssertionError, match="1 branches at cfg 2"):
        refine_vectors.refiner(EXACT, spec=spec(cfg=2.0))
    with pytest.raises(AssertionError, match="2 branches at cfg 1"):
        guided(spec(cfg=1.0))


@pytest.mark.parametrize("contents", ["hidden", "kv"])
def test_each_branch_has_its_own_cache(contents: Any) -> None:
    """Texts of different lengths, one set of buffers: as the two branches' velocities by themselves."""
    caches = (cache(contents=contents), cache(contents=contents))
    refiner = guided(spec(cfg=3.0), caches)
    reports = run(refiner)
    assert [report.mode for report in reports] == ["build", "cached", "cached", "cached"]
    assert [report.num_forwards for report in reports] == [2] * 4
    assert reports[0].num_blocks["build"] == reports[1].num_blocks["cached"] == 2 * LAYERS
    assert reports[0].cache_bytes == caches[0].num_bytes + caches[1].num_bytes
    live = 2 * 74 + 9 + 6
    assert reports[1].num_query_rows == reports[1].num_fed_rows == LAYERS * live
    exact = guided(spec(cfg=3.0))
    run(exact)
    assert 1e-4 < refine_vectors.relative_l2(refiner.latents.audio, exact.latents.audio) < 0.3
    same = [Branch(*refine_vectors.text(), cache(contents=contents)) for _ in range(2)]
    unmoved = refine_vectors.refiner(EXACT, spec=spec(cfg=3.0), branches=same)
    plain = refine_vectors.refiner(EXACT, cache(contents=contents))
    run(unmoved)
    run(plain)
    assert torch.equal(unmoved.latents.audio, plain.latents.audio)


@pytest.mark.parametrize("after", range(4))
def test_a_cancelled_step_changes_nothing_and_can_be_repeated(after: int) -> None:
    """Two branches of Heun's sampler: four forwards, each asked for before it runs."""
    expected = guided(spec(cfg=3.0, sampler="heun"), (cache(), cache()))
    caches = (cache(), cache())
    refiner = guided(spec(cfg=3.0, sampler="heun"), caches)
    start, polls = refiner.latents.audio, iter([False] * after + [True])
    with pytest.raises(VerbCancelled):
        refiner.step(lambda: next(polls))
    assert next(polls, None) is None
    assert (refiner.num_done, refiner.latents.audio is start) == (0, True)
    assert not any(one.is_valid for one in caches)
    assert [report.mode for report in run(refiner)] == [report.mode for report in run(expected)]
    assert torch.equal(refiner.latents.audio, expected.latents.audio)


def test_a_step_that_fails_in_its_second_branch_is_repeated_to_the_same_sound() -> None:
    expected = guided(spec(cfg=3.0), (cache(), cache()))
    refiner = guided(spec(cfg=3.0), (cache(), cache()))
    calls = []

    def fail_in_the_second(*args: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError

    hook = refine_vectors.transformer().transformer_blocks[0].attn.to_q.register_forward_hook(fail_in_the_second)
    with pytest.raises(torch.OutOfMemoryError):
        refiner.step()
    hook.remove()
    run(refiner)
    run(expected)
    assert torch.equal(refiner.latents.audio, expected.latents.audio)


def test_caches_can_be_given_up_midway() -> None:
    frozen = cache()
    refiner = refine_vectors.refiner(EXACT, frozen)
    refiner.step()
    refiner.step()
    refiner.give_up_caches("no room")
    report = refiner.step()
    assert (report.mode, report.reason, report.cache_bytes) == ("exact", "no room", 0)
    assert not frozen.is_valid


def test_an_exact_pass_says_why() -> None:
    report = refine_vectors.refiner(EXACT, exact_reason="the cache is switched off").step()
    assert (report.mode, report.reason) == ("exact", "the cache is switched off")
    rows = 111 * LAYERS
    assert (report.num_query_rows, report.num_key_rows, report.num_fed_rows) == (rows, rows, rows)
    assert report.block_s > 0
    assert report.outside_s > 0


def adapted() -> tuple[Any, AdapterBank, Any]:
    """The vectors' model with an adapter on every linear module, and one that has it merged."""
    base, merged = (copy.deepcopy(refine_vectors.transformer()) for _ in range(2))
    adapter, draw = Adapter(()), torch.Generator().manual_seed(11)
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.Linear):
            num_out, num_in = module.weight.shape
            down, up = (torch.randn(size, generator=draw) * 0.05 for size in ((4, num_in), (num_out, 4)))
            adapter.residuals[name] = (down, up, 1.0)
            merged.get_submodule(name).weight += up @ down
    return base, AdapterBank(base, {"one": adapter}), merged


@pytest.mark.parametrize("contents", ["hidden", "kv"])
def test_adapters_apply_to_every_module_of_every_kind_of_step(contents: Any) -> None:
    base, bank, merged = adapted()
    precision = {"contents": contents, "precision": "bf16"}
    with_adapter = refine_vectors.refiner(EXACT, cache(**precision), base, adapters=bank, mix=(("one", 1.0),))
    by_weights = refine_vectors.refiner(EXACT, cache(**precision), merged)
    plain = refine_vectors.refiner(EXACT, cache(**precision), base, adapters=bank)
    for refiner in (with_adapter, by_weights, plain):
        assert [report.mode for report in run(refiner)] == ["build", "cached", "cached", "cached"]
    assert refine_vectors.relative_l2(with_adapter.latents.audio, by_weights.latents.audio) <= 1e-4
    assert refine_vectors.relative_l2(with_adapter.latents.audio, plain.latents.audio) > 1e-2


def test_the_base_weights_alone_are_used_whatever_is_active_around_it() -> None:
    base, bank, _ = adapted()
    plain = refine_vectors.refiner(EXACT, None, base, adapters=bank)
    with bank.using((("one", 1.0),)):
        inside = refine_vectors.refiner(EXACT, None, base, adapters=bank)
        run(inside)
    run(plain)
    assert torch.equal(inside.latents.audio, plain.latents.audio)


def test_a_pass_is_the_same_whatever_ran_before_and_leaves_no_hook() -> None:
    def hooks() -> int:
        return sum(len(module._forward_hooks) for module in refine_vectors.transformer().modules())

    before = hooks()
    refiners = [refine_vectors.refiner(EXACT, cache()) for _ in range(2)]
    run(refiners[0])
    run(guided(spec(cfg=2.0), (cache(), cache())))
    run(refiners[1])
    assert torch.equal(refiners[0].latents.audio, refiners[1].latents.audio)
    assert hooks() == before


def test_a_pass_holds_nothing_once_it_is_dropped_though_its_cache_lives() -> None:
    frozen = cache()
    refiner = refine_vectors.refiner(EXACT, frozen)
    run(refiner)
    rows = refiner._branches[0].cache_rows
    assert rows is not None
    held = [weakref.ref(rows._buffers[0]), weakref.ref(refiner._branches[0].text), weakref.ref(refiner._masked)]
    del refiner, rows
    gc.collect()
    assert [reference() for reference in held] == [None] * 3
    assert frozen.is_valid


def test_one_step_is_a_pass() -> None:
    refiner = refine_vectors.refiner(EXACT, cache(), spec=spec(steps=1, audio_denoise=0.01))
    (report,) = run(refiner)
    assert report.mode == "build"
    with pytest.raises(AssertionError, match="all 1 steps are done"):
        refiner.step()


def test_latents_of_no_clip_are_refused_by_their_shape() -> None:
    latents = refine_vectors.latents()
    with pytest.raises(InvalidRequestError, match=r"audio have shape \[32, 2, 37\]; they must have 4 axes"):
        refine_vectors.refiner(EXACT, latents=ChunkLatents(latents.video, latents.audio[0]), masks=Masks())


def test_a_longer_clip_is_refined_too() -> None:
    clip = dataclasses.replace(CLIP, num_frames=39, width=96, height=64)
    draw = torch.Generator().manual_seed(5)
    latents = ChunkLatents(torch.randn(1, 24, 12, 4, 6, generator=draw), torch.randn(1, 32, 2, 65, generator=draw))
    refiner = refine_vectors.refiner(EXACT, cache(), clip=clip, latents=latents, noise=None, masks=None)
    assert [report.mode for report in run(refiner)] == ["build", "cached", "cached", "cached"]
    assert refiner.latents.audio.shape == (1, 32, 2, 65)
