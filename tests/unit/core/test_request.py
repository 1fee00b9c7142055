"""Every row of the reference's table of refusals that our API can meet, and what the caller must be told."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.geometry import MAX_CANVAS_PIXELS, chunk_table, num_audio_latents, num_video_latents, valid_frame_counts
from core.prompt import ALLOWED_SPECIAL_TOKENS, MAX_PROMPT_BYTES
from core.request import (
    KV_STORAGES,
    MODES,
    Violation,
    clip_violations,
    clip_warnings,
    preview_violations,
    prompt_violations,
)
from h3stream.adapters import AdapterUse
from h3stream.request import ClipSpec, KvStorage, SamplingMode

CLIP = ClipSpec(
    num_frames=39,
    width=64,
    height=64,
    steps=4,
    video_shift=12.0,
    audio_shift=3.0,
    sink=2,
    window=2,
    kv_storage="gpu",
    seed=0,
)


DENSE = dataclasses.replace(CLIP, mode="dense", sink=0, window=None)


def violation(**changes: Any) -> Violation:
    """The only violation of an otherwise valid clip."""
    (found,) = clip_violations(dataclasses.replace(CLIP, **changes))
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *({"num_frames": n} for n in valid_frame_counts()),
        {"width": 32, "height": 32},
        {"width": 1376, "height": 768},
        {"width": 768, "height": 1376},
        {"width": 33_024, "height": 32},
        {"steps": 1},
        {"steps": 100},
        {"video_shift": 0.01, "audio_shift": 100.0},
        {"sink": 1, "window": 0},
        {"sink": 64, "window": 64},
        {"window": None},
        *({"kv_storage": storage} for storage in KV_STORAGES),
        {"seed": 2**64 - 1},
        {"mode": "dense", "sink": 0, "window": None},
        {"adapters": (AdapterUse("a", 16.0), AdapterUse("A", -16.0), AdapterUse("0._-" + 60 * "z", 5e-324))},
        {"adapters": tuple(AdapterUse(f"style-{n}", 1.0) for n in range(16))},
    ],
)
def test_values_at_the_edge_of_the_rules_are_accepted(changes: Any) -> None:
    assert clip_violations(dataclasses.replace(CLIP, **changes)) == []


def test_storages_are_those_of_the_sdk() -> None:
    assert get_args(KvStorage) == KV_STORAGES


def test_modes_are_those_of_the_sdk() -> None:
    assert get_args(SamplingMode) == MODES


@pytest.mark.parametrize(
    ("frames", "nearest"),
    [
        (-1, "the nearest valid value is 22"),
        (0, "the nearest valid value is 22"),
        (21, "the nearest valid value is 22"),
        (23, "the nearest valid values are 22 and 39"),
        (40, "the nearest valid values are 39 and 56"),
        (193, "the nearest valid values are 192 and 209"),
        (361, "the nearest valid values are 345 and 362"),
        (363, "the nearest valid value is 362"),
        (2**31 - 1, "the nearest valid value is 362"),
    ],
)
def test_frames_off_the_grid_name_the_rule_and_the_neighbours(frames: int, nearest: str) -> None:
    found = violation(num_frames=frames)
    assert (found.field, found.reason) == ("num_frames", "FRAMES_OFF_GRID")
    assert found.description == f"num_frames is {frames}; it must be 17k + 5 with k from 1 to 21; {nearest}"


def test_five_frames_are_on_the_grid_but_too_few() -> None:
    found = violation(num_frames=5)
    assert found.reason == "FRAMES_TOO_FEW"
    assert (
        found.description == "num_frames is 5, which is 17k + 5 with k = 0, but k must be at least 1; the minimum is 22"
    )


def test_frames_on_the_grid_beyond_the_maximum_name_it() -> None:
    found = violation(num_frames=379)
    assert found.reason == "FRAMES_TOO_MANY"
    assert "379" in found.description
    assert found.description.endswith("the maximum is 362")


@pytest.mark.parametrize("frames", [39.0, 39.5, "39", True])
def test_frames_that_are_no_integer_say_that_one_is_needed(frames: Any) -> None:
    found = violation(num_frames=frames)
    assert found == Violation("num_frames", f"num_frames is {frames!r}; an integer is needed", "NOT_AN_INTEGER")


@pytest.mark.parametrize(("frames", "warned"), [(192, False), (209, True), (362, True)])
def test_clips_beyond_the_audited_range_are_made_with_a_warning(frames: int, warned: bool) -> None:
    clip = dataclasses.replace(CLIP, num_frames=frames)
    assert clip_violations(clip) == []
    warnings = clip_warnings(clip)
    assert [reason for reason, _ in warnings] == ["FRAMES_BEYOND_AUDITED_RANGE"] * warned
    assert all(str(frames) in message and "192" in message for _, message in warnings)
    # The audit was of streaming with its adapter: the base model made such clips before there was one.
    assert clip_warnings(dataclasses.replace(DENSE, num_frames=frames)) == []


@pytest.mark.parametrize(("seed", "twin"), [(2**32, "0"), (2**63 + 7, "7")])
def test_a_seed_that_shares_its_noise_with_a_smaller_one_is_made_with_a_warning(seed: int, twin: str) -> None:
    clip = dataclasses.replace(CLIP, seed=seed)
    assert clip_violations(clip) == []
    assert [(reason, f"as seed {twin}:" in text) for reason, text in clip_warnings(clip)] == [
        ("SEED_NOT_DISTINCT", True)
    ]
    assert clip_warnings(dataclasses.replace(CLIP, seed=2**32 - 1)) == []


@pytest.mark.parametrize("side", ["width", "height"])
@pytest.mark.parametrize("pixels", [0, -32, -1])
def test_a_side_that_is_not_positive_is_named_with_its_value(side: str, pixels: int) -> None:
    found = violation(**{side: pixels})
    assert (found.field, found.reason) == (side, "CANVAS_NOT_POSITIVE")
    assert found.description.startswith(f"{side} is {pixels}; ")
    assert "the nearest valid value is 32" in found.description


@pytest.mark.parametrize("side", ["width", "height"])
@pytest.mark.parametrize(
    ("pixels", "nearest"), [(1, "value is 32"), (33, "values are 32 and 64"), (1375, "values are 1344 and 1376")]
)
def test_a_side_off_the_grid_names_the_neighbouring_multiples(side: str, pixels: int, nearest: str) -> None:
    found = violation(**{side: pixels})
    assert (found.field, found.reason) == (side, "CANVAS_NOT_MULTIPLE")
    assert found.description == f"{side} is {pixels}; it must be a multiple of 32; the nearest valid {nearest}"


@pytest.mark.parametrize("side", ["width", "height"])
def test_a_side_that_is_no_integer_says_that_one_is_needed(side: str) -> None:
    assert violation(**{side: 64.0}) == Violation(side, f"{side} is 64.0; an integer is needed", "NOT_AN_INTEGER")


@pytest.mark.parametrize(
    ("width", "height", "smaller"),
    [
        (1376, 800, "1344 x 768"),
        (1408, 768, "1376 x 768"),
        (1920, 1088, "1344 x 768"),
        (1088, 1920, "768 x 1376"),
        (2048, 2048, "1024 x 1024"),
        (33_056, 32, "33024 x 32"),
        (32, 2**31 - 32, "32 x 33024"),
    ],
)
def test_an_area_too_large_names_cap_canvas_product_and_a_smaller_canvas(width: int, height: int, smaller: str) -> None:
    found = violation(width=width, height=height)
    assert (found.field, found.reason) == ("width", "CANVAS_TOO_LARGE")
    assert found.description == (
        f"the canvas {width} x {height} has {width * height} pixels; at most 1056768 (1376 x 768) are accepted; "
        f"the nearest smaller canvas of about the same aspect is {smaller}"
    )


@given(st.integers(1, 2**31), st.integers(1, 2**31))
def test_the_canvas_suggested_instead_is_valid_and_no_larger(width: int, height: int) -> None:
    found = [
        v
        for v in clip_violations(dataclasses.replace(CLIP, width=width, height=height))
        if v.reason == "CANVAS_TOO_LARGE"
    ]
    assert bool(found) == (width * height > MAX_CANVAS_PIXELS)
    for v in found:
        smaller = re.search(r"aspect is (\d+) x (\d+)$", v.description)
        assert smaller is not None
        columns, rows = int(smaller[1]), int(smaller[2])
        assert clip_violations(dataclasses.replace(CLIP, width=columns, height=rows)) == []
        assert columns <= max(width, 32)
        assert rows <= max(height + 31, 32)


@given(st.integers(33, 100), st.integers(33, 100))
def test_the_canvas_suggested_instead_keeps_the_aspect(columns: int, rows: int) -> None:
    width, height = 32 * columns, 32 * rows
    found = violation(width=width, height=height)
    smaller = re.search(r"aspect is (\d+) x (\d+)$", found.description)
    assert smaller is not None
    ratio = int(smaller[1]) / int(smaller[2]) / (width / height)
    assert 0.9 < ratio < 1.1
    assert int(smaller[1]) * int(smaller[2]) > 0.88 * MAX_CANVAS_PIXELS


@pytest.mark.parametrize(
    ("field", "value", "rule", "nearest"),
    [
        ("steps", 0, "from 1 to 100", "1"),
        ("steps", 101, "from 1 to 100", "100"),
        ("video_shift", 0.0, "from 0.01 to 100", "0.01"),
        ("video_shift", -3.0, "from 0.01 to 100", "0.01"),
        ("audio_shift", 100.00000000000001, "from 0.01 to 100", "100"),
        ("sink", 0, "from 1 to 64", "1"),
        ("sink", 65, "from 1 to 64", "64"),
        ("window", -1, "from 0 to 64", "0"),
        ("window", 65, "from 0 to 64", "64"),
        ("seed", -1, "from 0 to 18446744073709551615", "0"),
        ("seed", 2**64, "from 0 to 18446744073709551615", "18446744073709551615"),
    ],
)
def test_a_value_out_of_range_names_value_range_and_nearest(field: str, value: float, rule: str, nearest: str) -> None:
    found = violation(**{field: value})
    description = f"{field} is {value!r}; it must be {rule}; the nearest valid value is {nearest}"
    assert found == Violation(field, description, "OUT_OF_RANGE")


@pytest.mark.parametrize("field", ["steps", "sink", "window", "seed"])
def test_counts_that_are_no_integer_say_that_one_is_needed(field: str) -> None:
    assert violation(**{field: 2.5}) == Violation(field, f"{field} is 2.5; an integer is needed", "NOT_AN_INTEGER")


@pytest.mark.parametrize("field", ["video_shift", "audio_shift"])
def test_shifts_that_are_no_finite_number_are_refused_by_name(field: str) -> None:
    assert violation(**{field: math.nan}).description == f"{field} is NaN, not a number; it must be from 0.01 to 100"
    assert violation(**{field: math.inf}).description == (
        f"{field} is infinite (inf); it must be from 0.01 to 100; the nearest valid value is 100"
    )
    assert violation(**{field: -math.inf}).description == (
        f"{field} is infinite (-inf); it must be from 0.01 to 100; the nearest valid value is 0.01"
    )


def test_an_unknown_storage_names_the_known_ones() -> None:
    found = violation(kv_storage="disk")
    assert found == Violation(
        "kv_storage", "kv_storage is 'disk'; it must be one of gpu, cpu, cpu_pinned", "UNKNOWN_VALUE"
    )


def test_an_unknown_mode_names_the_known_ones() -> None:
    assert violation(mode="turbo") == Violation(
        "mode", "mode is 'turbo'; it must be one of streaming, dense", "UNKNOWN_VALUE"
    )


@pytest.mark.parametrize(("field", "value"), [("sink", 2), ("window", 0), ("window", 2)])
def test_a_dense_clip_has_no_sink_and_no_window(field: str, value: int) -> None:
    (found,) = clip_violations(dataclasses.replace(DENSE, **{field: value}))
    assert found == Violation(
        field, f"{field} is {value}; a dense clip has no KV cache, so it must be left out", "NOT_IN_DENSE"
    )


def test_a_streaming_clip_needs_a_sink() -> None:
    assert violation(sink=0).reason == "OUT_OF_RANGE"


@pytest.mark.parametrize("name", ["", "a b", "-a", ".a", "a/b", "a=b", "a:b", "ä", "a\n", 65 * "a"])
def test_an_adapter_s_name_that_is_none_is_refused_with_the_rule(name: str) -> None:
    found = violation(adapters=(AdapterUse("turbo", 1.0), AdapterUse(name, 1.0)))
    assert (found.field, found.reason) == ("adapters[1].name", "NOT_A_NAME")
    rule = "it must be 1 to 64 letters, digits, dots, dashes and underscores, the first a letter or a digit"
    assert found.description == f"adapters[1].name is {name!r}; {rule}"


@pytest.mark.parametrize("strength", [0.0, -0.0, 16.000000000000004, -17.0, math.inf, math.nan])
def test_an_adapter_s_strength_names_the_range(strength: float) -> None:
    found = violation(adapters=(AdapterUse("turbo", strength),))
    assert (found.field, found.reason) == ("adapters[0].strength", "OUT_OF_RANGE")
    assert found.description == f"adapters[0].strength is {strength!r}; it must not be 0 and be from -16 to 16"


def test_an_adapter_can_be_named_once() -> None:
    found = violation(adapters=(AdapterUse("turbo", 1.0), AdapterUse("style", 1.0), AdapterUse("turbo", 0.5)))
    assert found == Violation(
        "adapters[2].name", "adapters[2].name repeats 'turbo'; each can be named once", "REPEATED"
    )


def test_too_many_adapters_are_refused_by_their_number_alone() -> None:
    found = violation(adapters=tuple(AdapterUse("", 0.0) for _ in range(17)))
    assert found == Violation("adapters", "adapters holds 17 adapters; at most 16 are accepted", "TOO_MANY")


def test_everything_wrong_is_reported_at_once_in_field_order() -> None:
    clip = ClipSpec(
        num_frames=23,
        width=2001,
        height=0,
        steps=0,
        video_shift=math.nan,
        audio_shift=math.inf,
        sink=0,
        window=-1,
        kv_storage="disk",  # type: ignore[arg-type]
        seed=-1,
        mode="turbo",  # type: ignore[arg-type]
        adapters=17 * (AdapterUse("a", 1.0),),
    )
    assert [v.field for v in clip_violations(clip)] == [field.name for field in dataclasses.fields(ClipSpec)]


def test_a_canvas_off_the_grid_and_too_large_is_told_both() -> None:
    found = clip_violations(dataclasses.replace(CLIP, width=2000, height=2000))
    assert [(v.field, v.reason) for v in found] == [
        ("width", "CANVAS_NOT_MULTIPLE"),
        ("height", "CANVAS_NOT_MULTIPLE"),
        ("width", "CANVAS_TOO_LARGE"),
    ]


@given(
    st.builds(
        ClipSpec,
        num_frames=st.integers(0, 400),
        width=st.integers(-32, 3000),
        height=st.integers(-32, 3000),
        steps=st.integers(-1, 101),
        video_shift=st.floats(),
        audio_shift=st.floats(),
        sink=st.integers(-1, 70),
        window=st.one_of(st.none(), st.integers(-1, 70)),
        kv_storage=st.sampled_from(KV_STORAGES),
        seed=st.integers(-1, 2**64),
        mode=st.sampled_from(MODES),
    )
)
def test_every_violation_has_a_field_a_sentence_and_a_stable_reason(clip: ClipSpec) -> None:
    for v in clip_violations(clip):
        assert v.field in {field.name for field in dataclasses.fields(ClipSpec)}
        assert str(getattr(clip, v.field)).removeprefix("-").lower() in v.description.lower()
        assert re.fullmatch(r"[A-Z]+(_[A-Z]+)*", v.reason)


@given(st.integers(-50, 500))
def test_a_frame_count_is_accepted_exactly_when_it_has_a_chunk_table(num_frames: int) -> None:
    found = clip_violations(dataclasses.replace(CLIP, num_frames=num_frames))
    assert (not found) == (num_frames in valid_frame_counts())
    if not found:
        chunks = chunk_table(num_frames)
        assert sum(c.num_video_latents for c in chunks) == num_video_latents(num_frames)
        assert sum(c.num_audio_latents for c in chunks) == num_audio_latents(num_frames)


@pytest.mark.parametrize(
    "prompt",
    [
        "a",
        "rain on a tin roof",
        "漢字 🌧 naïve",
        "line\n\tbreak\r\n",
        " ".join(ALLOWED_SPECIAL_TOKENS),
        "a" * MAX_PROMPT_BYTES,
    ],
)
def test_prompts_that_can_be_encoded_are_accepted(prompt: str) -> None:
    assert prompt_violations(prompt) == []


def prompt_violation(prompt: str) -> Violation:
    """The only violation of a prompt."""
    (found,) = prompt_violations(prompt)
    assert found.field == "prompt"
    return found


@pytest.mark.parametrize("prompt", ["", " ", "\n\t \u3000"])
def test_a_prompt_without_text_is_told_that_a_token_is_needed(prompt: str) -> None:
    found = prompt_violation(prompt)
    assert found.reason == "PROMPT_EMPTY"
    assert "at least one token is needed" in found.description


@pytest.mark.parametrize(("prompt", "num_bytes"), [("a" * 16_385, 16_385), ("漢" * 5462, 16_386)])
def test_a_prompt_is_measured_in_bytes(prompt: str, num_bytes: int) -> None:
    found = prompt_violation(prompt)
    assert found.reason == "PROMPT_TOO_LONG"
    assert found.description == f"the prompt is {num_bytes} bytes of UTF-8; at most 16384 bytes are accepted"


def test_a_control_token_is_refused_by_name_with_the_allowed_seven() -> None:
    found = prompt_violation("a cat <|image_pad|> on a roof")
    assert found.reason == "PROMPT_CONTROL_TOKEN"
    assert "<|image_pad|>" in found.description
    assert all(token in found.description for token in ALLOWED_SPECIAL_TOKENS)


@pytest.mark.parametrize(("character", "name"), [("\0", "U+0000"), ("\x1b", "U+001B"), ("\x7f", "U+007F")])
def test_a_control_character_is_refused_by_name_and_place(character: str, name: str) -> None:
    found = prompt_violation(f"rain{character}")
    assert found.reason == "PROMPT_CONTROL_CHARACTER"
    assert f"{name} at character 4" in found.description


def test_a_lone_surrogate_is_refused_by_name_and_place() -> None:
    found = prompt_violation("rain \ud83d")
    assert found.reason == "PROMPT_NOT_UNICODE"
    assert "U+D83D at character 5" in found.description


def test_a_prompt_may_break_several_rules_at_once() -> None:
    found = prompt_violations("\0<|im_start|>" + "a" * MAX_PROMPT_BYTES)
    assert [v.reason for v in found] == ["PROMPT_TOO_LONG", "PROMPT_CONTROL_CHARACTER", "PROMPT_CONTROL_TOKEN"]


@dataclass(frozen=True)
class Stills:
    max_side: int = 256
    every_steps: int = 1


@pytest.mark.parametrize("stills", [Stills(), Stills(0), Stills(16), Stills(512, 100)])
def test_stills_that_can_be_made(stills: Stills) -> None:
    assert preview_violations(stills) == []


@pytest.mark.parametrize(
    ("stills", "field", "reason", "nearest"),
    [
        (Stills(15), "preview.max_side", "OUT_OF_RANGE", "16 to 512 or 0; the nearest valid value is 16"),
        (Stills(-1), "preview.max_side", "OUT_OF_RANGE", "16"),
        (Stills(513), "preview.max_side", "OUT_OF_RANGE", "512"),
        (Stills(0, 0), "preview.every_steps", "OUT_OF_RANGE", "1"),
        (Stills(256, 101), "preview.every_steps", "OUT_OF_RANGE", "100"),
        (Stills(256, True), "preview.every_steps", "NOT_AN_INTEGER", "needed"),
    ],
)
def test_stills_that_cannot_be_made_say_which_nearly_can(stills: Stills, field: str, reason: str, nearest: str) -> None:
    (violation,) = preview_violations(stills)
    assert (violation.field, violation.reason) == (field, reason)
    assert violation.description.startswith(f"{field} is ")
    assert violation.description.endswith(nearest)
