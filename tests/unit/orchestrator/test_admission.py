from __future__ import annotations

import dataclasses

import pytest

from h3stream.errors import InvalidRequestError, OffGridError
from h3stream.request import GenerateRequest
from orchestrator.admission import check, make_plan, resolve
from orchestrator.model_info import STANDARD_CLIP, ModelInfo

MODEL = ModelInfo("model", STANDARD_CLIP, "")


def test_the_standard_defaults_are_the_published_ones() -> None:
    clip = resolve(GenerateRequest("a fox"), STANDARD_CLIP)
    assert dataclasses.astuple(clip) == (124, 1344, 768, 4, 12.0, 3.0, 2, 2, "gpu", 0)
    check("a fox", clip)


def test_what_is_given_is_taken_as_it_is() -> None:
    request = GenerateRequest("a fox", num_frames=22, width=64, steps=1, window=0, seed=0, kv_storage="cpu")
    clip = resolve(request, dataclasses.replace(STANDARD_CLIP, seed=5))
    assert (clip.num_frames, clip.width, clip.height, clip.steps) == (22, 64, 768, 1)
    assert (clip.window, clip.seed, clip.kv_storage) == (0, 0, "cpu")


def test_all_chunks_are_kept_when_asked_for() -> None:
    assert resolve(GenerateRequest("a fox", window="all"), STANDARD_CLIP).window is None


def test_a_frame_count_off_the_grid_is_its_own_error() -> None:
    with pytest.raises(OffGridError) as refused:
        check("a fox", dataclasses.replace(STANDARD_CLIP, num_frames=100))
    assert [v.field for v in refused.value.violations] == ["num_frames"]
    with pytest.raises(InvalidRequestError) as both:
        check("", dataclasses.replace(STANDARD_CLIP, num_frames=100))
    assert type(both.value) is InvalidRequestError
    assert [v.field for v in both.value.violations] == ["prompt", "num_frames"]


def test_a_plan_counts_forwards_and_frames() -> None:
    plan = make_plan(dataclasses.replace(STANDARD_CLIP, num_frames=192), MODEL, 6_000_000)
    assert (plan.num_noise_forwards, plan.num_clean_forwards) == (48, 11)
    assert (plan.num_video_latents, plan.num_audio_latents, plan.num_samples) == (57, 320, 256_000)
    assert [c.num_frames_emitted for c in plan.chunks] == [*range(0, 171, 17), 192]
    assert plan.expected_stream_bytes == (6_000_000 + 128_000) * 8 // 8


def test_a_plan_warns_beyond_the_audited_range_and_passes_the_models_notice_on() -> None:
    model = ModelInfo("model", STANDARD_CLIP, "handle with care")
    plan = make_plan(dataclasses.replace(STANDARD_CLIP, num_frames=209), model, 6_000_000)
    assert [w.reason for w in plan.warnings] == ["FRAMES_BEYOND_AUDITED_RANGE", "MODEL_NOTICE"]
    assert plan.warnings[1].message == "handle with care"
