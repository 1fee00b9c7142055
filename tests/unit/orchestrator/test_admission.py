from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from core.artifacts import COMPARISON, DEFAULT_ARTIFACTS, REFINED_ARTIFACTS
from h3stream.adapters import AdapterChoice, AdapterUse
from h3stream.errors import InvalidRequestError, OffGridError, UnsupportedError
from h3stream.refine import RefineSpec
from h3stream.request import ClipSpec, GenerateRequest
from orchestrator.admission import make_plan, make_refine_plan, resolve, resolve_refinement
from orchestrator.model_info import DENSE_STEPS, STANDARD_CLIP, ModelInfo, dense_clip

MODEL = ModelInfo("model", STANDARD_CLIP, dense_clip(STANDARD_CLIP, DENSE_STEPS), "")


@dataclass(frozen=True)
class Facts:
    """An adapter of the registry."""

    name: str
    default_strength: float = 1.0
    is_streaming: bool = False
    trained_steps: int | None = None
    trained_video_shift: float | None = None
    trained_audio_shift: float | None = None


RAVEN = Facts("raven", is_streaming=True)
TURBO4 = Facts("turbo4", trained_steps=4, trained_video_shift=6.0, trained_audio_shift=3.0)
TURBO8 = Facts("turbo8", trained_steps=8, trained_video_shift=6.0, trained_audio_shift=3.0)
STYLE = Facts("style", default_strength=0.5)
REGISTRY = (RAVEN, STYLE, TURBO4, TURBO8)


def clip_of(*adapters: AdapterChoice, **fields: Any) -> ClipSpec:
    return resolve(GenerateRequest("a fox", adapters=adapters, **fields), MODEL, REGISTRY)


def violations(*adapters: AdapterChoice, **fields: Any) -> dict[str, str]:
    """Field to description of a request that is refused."""
    with pytest.raises(InvalidRequestError) as refused:
        clip_of(*adapters, **fields)
    return {v.field: v.description for v in refused.value.violations}


def test_the_standard_defaults_are_the_published_ones() -> None:
    assert dataclasses.astuple(clip_of()) == (124, 1344, 768, 4, 12.0, 3.0, 2, 2, "gpu", 0, "streaming", ())
    assert clip_of(mode="streaming") == clip_of()
    dense = clip_of(mode="dense")
    assert dataclasses.astuple(dense) == (124, 1344, 768, 50, 12.0, 3.0, 0, None, "gpu", 0, "dense", ())


def test_what_is_given_is_taken_as_it_is() -> None:
    model = dataclasses.replace(MODEL, default_clip=dataclasses.replace(STANDARD_CLIP, seed=5))
    request = GenerateRequest("a fox", num_frames=22, width=64, steps=1, window=0, seed=0, kv_storage="cpu")
    clip = resolve(request, model, REGISTRY)
    assert (clip.num_frames, clip.width, clip.height, clip.steps) == (22, 64, 768, 1)
    assert (clip.window, clip.seed, clip.kv_storage) == (0, 0, "cpu")
    dense = clip_of(mode="dense", num_frames=22, steps=3, video_shift=5.0, audio_shift=2.0, seed=9)
    assert (dense.num_frames, dense.steps, dense.video_shift, dense.audio_shift, dense.seed) == (22, 3, 5.0, 2.0, 9)


def test_all_chunks_are_kept_when_asked_for() -> None:
    assert clip_of(window="all").window is None


def test_a_frame_count_off_the_grid_is_its_own_error() -> None:
    with pytest.raises(OffGridError) as refused:
        clip_of(num_frames=100)
    assert [v.field for v in refused.value.violations] == ["num_frames"]
    with pytest.raises(InvalidRequestError) as both:
        resolve(GenerateRequest("", num_frames=100), MODEL, REGISTRY)
    assert type(both.value) is InvalidRequestError
    assert [v.field for v in both.value.violations] == ["prompt", "num_frames"]


@pytest.mark.parametrize(
    ("field", "value"), [("sink", 0), ("sink", 2), ("window", 2), ("window", "all"), ("kv_storage", "gpu")]
)
def test_what_a_dense_clip_has_not_is_refused_even_if_it_would_change_nothing(field: str, value: object) -> None:
    description = f"{field} is {value}; a dense clip has no KV cache, so it must be left out"
    assert violations(mode="dense", **{field: value}) == {field: description}


def test_everything_wrong_with_a_request_is_told_at_once() -> None:
    found = violations(
        AdapterChoice("turbo5"), AdapterChoice("style", 17), mode="dense", num_frames=40, sink=2, kv_storage="cpu"
    )
    assert list(found) == ["num_frames", "adapters[1].strength", "sink", "kv_storage", "adapters[0].name"]


def test_an_adapter_has_its_own_strength_unless_the_request_says_another() -> None:
    clip = clip_of(AdapterChoice("style"), AdapterChoice("turbo4", -0.25))
    assert clip.adapters == (AdapterUse("style", 0.5), AdapterUse("turbo4", -0.25))


def test_an_unknown_adapter_is_told_with_the_nearest_and_all_there_are() -> None:
    assert violations(AdapterChoice("style"), AdapterChoice("turbo")) == {
        "adapters[1].name": "adapters[1].name is 'turbo'; the nearest is turbo8; "
        "this server has raven, style, turbo4, turbo8"
    }
    assert violations(AdapterChoice("xyz")) == {
        "adapters[0].name": "adapters[0].name is 'xyz'; this server has raven, style, turbo4, turbo8"
    }
    with pytest.raises(InvalidRequestError, match=r"adapters\[0\]\.name is 'xyz'; this server has no adapters"):
        resolve(GenerateRequest("a fox", mode="dense", adapters=(AdapterChoice("xyz"),)), MODEL, ())


def test_a_name_that_no_adapter_can_have_is_told_once() -> None:
    (description,) = violations(AdapterChoice("a b")).values()
    assert description.startswith("adapters[0].name is 'a b'; it must be 1 to 64 letters")


def test_too_many_adapters_are_told_by_their_number_alone() -> None:
    assert violations(*(AdapterChoice("ghost") for _ in range(17))) == {
        "adapters": "adapters holds 17 adapters; at most 16 are accepted"
    }


@pytest.mark.parametrize("strength", [None, 1.0, 1])
def test_the_streaming_adapter_may_be_named_and_goes_without_saying(strength: float | None) -> None:
    named = clip_of(AdapterChoice("raven", strength), AdapterChoice("style"))
    assert named.adapters == (AdapterUse("style", 0.5),)
    assert named == clip_of(AdapterChoice("style"))


@pytest.mark.parametrize("strength", [0.5, 0.0, -1.0])
def test_the_streaming_adapter_has_no_other_strength_while_streaming(strength: float) -> None:
    assert violations(AdapterChoice("style"), AdapterChoice("raven", strength)) == {
        "adapters[1].strength": f"adapters[1].strength is {strength}; raven is what makes streaming possible and is "
        "always on at strength 1, so it must be 1 or left out"
    }


def test_the_streaming_adapter_cannot_be_named_twice_either() -> None:
    assert list(violations(AdapterChoice("raven"), AdapterChoice("raven"))) == ["adapters[1].name"]


def test_an_operator_s_strength_of_the_streaming_adapter_is_for_dense_clips() -> None:
    registry = (dataclasses.replace(RAVEN, default_strength=0.3),)
    choice = (AdapterChoice("raven"),)
    assert resolve(GenerateRequest("a fox", adapters=choice), MODEL, registry).adapters == ()
    dense = resolve(GenerateRequest("a fox", mode="dense", adapters=choice), MODEL, registry)
    assert dense.adapters == (AdapterUse("raven", 0.3),)
    chosen = resolve(GenerateRequest("a fox", mode="dense", adapters=(AdapterChoice("raven", 0.7),)), MODEL, registry)
    assert chosen.adapters == (AdapterUse("raven", 0.7),)


def test_without_a_streaming_adapter_only_dense_clips_can_be_made() -> None:
    for registry in ((), (STYLE,)):
        with pytest.raises(UnsupportedError, match=r"no streaming adapter.*mode dense.*--adapter PATH"):
            resolve(GenerateRequest("a fox"), MODEL, registry)
        assert resolve(GenerateRequest("a fox", mode="dense"), MODEL, registry).mode == "dense"
    with pytest.raises(InvalidRequestError):  # what is wrong with the request comes first
        resolve(GenerateRequest(""), MODEL, ())


def schedule(clip: ClipSpec) -> tuple[int, float, float]:
    return clip.steps, clip.video_shift, clip.audio_shift


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["turbo4"], (4, 6.0, 3.0)),
        (["style", "turbo4"], (4, 6.0, 3.0)),
        (["style"], (50, 12.0, 3.0)),
        (["turbo4", "turbo8"], (50, 12.0, 3.0)),
    ],
)
def test_a_dense_clip_has_the_schedule_that_is_trained_into_its_adapters(
    names: list[str], expected: tuple[int, float, float]
) -> None:
    assert schedule(clip_of(*map(AdapterChoice, names), mode="dense")) == expected


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Facts("other", trained_steps=4, trained_video_shift=6.0, trained_audio_shift=3.0), (4, 6.0, 3.0)),
        (Facts("other", trained_video_shift=6.0), (4, 6.0, 3.0)),
        (Facts("other", trained_audio_shift=5.0), (50, 12.0, 3.0)),
    ],
)
def test_adapters_agree_where_they_do_not_contradict(other: Facts, expected: tuple[int, float, float]) -> None:
    named = AdapterChoice("turbo4"), AdapterChoice("other")
    for choices in (named, named[::-1]):
        request = GenerateRequest("a fox", mode="dense", adapters=choices)
        assert schedule(resolve(request, MODEL, (TURBO4, other))) == expected


def test_what_is_not_trained_into_an_adapter_is_the_server_s_default() -> None:
    registry = (Facts("fast", trained_steps=6),)
    request = GenerateRequest("a fox", mode="dense", adapters=(AdapterChoice("fast"),))
    assert schedule(resolve(request, MODEL, registry)) == (6, 12.0, 3.0)


def test_what_a_request_says_of_its_schedule_is_not_changed() -> None:
    assert schedule(clip_of(AdapterChoice("turbo4"), mode="dense", steps=8)) == (8, 6.0, 3.0)


def test_in_streaming_the_streaming_adapter_has_the_say() -> None:
    assert schedule(clip_of(AdapterChoice("turbo8"))) == (4, 12.0, 3.0)


def plan_warnings(clip: ClipSpec, registry: tuple[Facts, ...] = REGISTRY) -> list[tuple[str, str]]:
    return [(w.reason, w.message) for w in make_plan(clip, MODEL, registry, 6_000_000).warnings]


def test_a_schedule_that_an_adapter_was_not_trained_for_is_warned_of_with_both() -> None:
    clip = clip_of(AdapterChoice("turbo4"), AdapterChoice("turbo8"), AdapterChoice("style"), mode="dense", steps=4)
    assert schedule(clip) == (4, 12.0, 3.0)
    assert plan_warnings(clip) == [
        (
            "ADAPTER_SCHEDULE_MISMATCH",
            "adapter turbo4 was trained with video_shift 6, but this clip has video_shift 12",
        ),
        (
            "ADAPTER_SCHEDULE_MISMATCH",
            "adapter turbo8 was trained with steps 8 and video_shift 6, but this clip has steps 4 and video_shift 12",
        ),
    ]
    assert plan_warnings(clip_of(AdapterChoice("turbo4"), mode="dense")) == []
    assert plan_warnings(clip_of(mode="dense")) == []


def test_the_streaming_adapter_s_schedule_counts_while_streaming_alone() -> None:
    registry = (dataclasses.replace(RAVEN, trained_steps=4, trained_video_shift=12.0, trained_audio_shift=3.0), TURBO4)
    assert plan_warnings(clip_of(), registry) == []
    message = "adapter raven was trained with steps 4, but this clip has steps 2"
    assert plan_warnings(clip_of(steps=2), registry) == [("ADAPTER_SCHEDULE_MISMATCH", message)]
    assert plan_warnings(clip_of(mode="dense", steps=2), registry) == []


def test_a_plan_counts_forwards_and_frames() -> None:
    plan = make_plan(dataclasses.replace(STANDARD_CLIP, num_frames=192), MODEL, REGISTRY, 6_000_000)
    assert (plan.num_noise_forwards, plan.num_clean_forwards) == (48, 11)
    assert (plan.num_video_latents, plan.num_audio_latents, plan.num_samples) == (57, 320, 256_000)
    assert [c.num_frames_emitted for c in plan.chunks] == [*range(0, 171, 17), 192]
    assert plan.expected_stream_bytes == (6_000_000 + 128_000) * 8 // 8


def test_a_dense_plan_differs_in_its_forwards_alone() -> None:
    plans = [
        make_plan(clip_of(mode=mode, num_frames=192, steps=5), MODEL, REGISTRY, 6_000_000)
        for mode in ("streaming", "dense")
    ]
    assert [(p.num_noise_forwards, p.num_clean_forwards) for p in plans] == [(60, 11), (5, 0)]
    for plan in plans:
        for field in ("clip", "num_noise_forwards", "num_clean_forwards"):
            plan.ClearField(field)
    assert plans[0] == plans[1]


def test_a_plan_warns_beyond_the_audited_range_and_passes_the_models_notice_on() -> None:
    model = dataclasses.replace(MODEL, notice="handle with care")
    plan = make_plan(dataclasses.replace(STANDARD_CLIP, num_frames=209), model, REGISTRY, 6_000_000)
    assert [w.reason for w in plan.warnings] == ["FRAMES_BEYOND_AUDITED_RANGE", "MODEL_NOTICE"]
    assert plan.warnings[1].message == "handle with care"


def test_a_refinement_is_completed_and_otherwise_left_as_it_is() -> None:
    clip = clip_of(seed=3)
    asked = RefineSpec(steps=4, adapters=[AdapterChoice("style"), AdapterChoice("turbo4", 0.25)])
    spec = resolve_refinement(asked, clip, REGISTRY, "spec")
    assert spec == dataclasses.replace(
        asked, seed=3, adapters=(AdapterChoice("style", 0.5), AdapterChoice("turbo4", 0.25))
    )
    assert resolve_refinement(RefineSpec(seed=0), clip, REGISTRY, "spec").seed == 0
    with_raven = RefineSpec(adapters=[AdapterChoice("raven", 0.5)])
    assert resolve_refinement(with_raven, clip, REGISTRY, "spec").adapters == (AdapterChoice("raven", 0.5),)


def test_a_refinement_is_refused_with_everything_that_is_wrong_with_the_request() -> None:
    spec = RefineSpec(steps=0, adapters=[AdapterChoice("styles"), AdapterChoice("styles")])
    found = violations(num_frames=23, refine_audio=spec)
    assert found.keys() == {
        *("num_frames", "refine_audio.steps", "refine_audio.adapters[0].name", "refine_audio.adapters[1].name"),
    }
    assert found["refine_audio.adapters[0].name"].startswith(
        "refine_audio.adapters[0].name is 'styles'; the nearest is style"
    )
    with pytest.raises(InvalidRequestError) as refused:
        resolve_refinement(spec, clip_of(), REGISTRY, "spec")
    assert {v.field.partition(".")[0] for v in refused.value.violations} == {"spec"}


def test_the_plan_of_a_clip_keeps_what_its_refinement_needs_and_makes() -> None:
    spec = resolve_refinement(RefineSpec(compare=True), clip_of(), REGISTRY, "spec")
    plan = make_plan(clip_of(), MODEL, REGISTRY, 1000, refinement=spec)
    assert tuple(plan.artifacts) == (*DEFAULT_ARTIFACTS, *REFINED_ARTIFACTS)
    assert [warning.reason for warning in plan.warnings] == []
    plan = make_plan(
        clip_of(), MODEL, REGISTRY, 1000, ["stream.mp4"], refinement=dataclasses.replace(spec, compare=False)
    )
    assert tuple(plan.artifacts) == (
        *("stream.mp4", "final.mp4", "latents.safetensors"),
        *(name for name in REFINED_ARTIFACTS if name != COMPARISON),
    )
    assert [warning.reason for warning in plan.warnings] == ["ARTIFACTS_ADDED"]
    assert not make_plan(clip_of(), MODEL, REGISTRY, 1000).HasField("refine_audio")


def test_the_plan_of_a_refinement_is_of_its_rendition() -> None:
    spec = resolve_refinement(RefineSpec(), clip_of(), REGISTRY, "spec")
    sound, pictures = (make_refine_plan(clip_of(), MODEL, spec, rate) for rate in (0, 6_000_000))
    assert sound.expected_stream_bytes < pictures.expected_stream_bytes / 10
    assert (sound.num_noise_forwards, sound.num_clean_forwards, len(sound.chunks)) == (0, 0, 8)
    assert set(sound.artifacts) == {*REFINED_ARTIFACTS, "timeline.json", "provenance.json"} - {COMPARISON}
