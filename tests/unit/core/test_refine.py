"""Which refinements can be done, and at which noise levels their steps lie."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.refine import MIN_DENOISE, SAMPLERS, SCHEDULERS, refine_sigmas, refine_violations, schedule_length
from core.request import Violation
from core.schedule import dense_sigmas
from h3stream.adapters import AdapterUse
from h3stream.refine import FrozenCacheSpec, RefineSpec, TimeRange

SCHEDULES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "audio_refine" / "policy.json").read_text()
)["schedules"]
NUM_FRAMES = 124  # 5.167 s
DEFAULT_CACHE = FrozenCacheSpec()


@dataclass(frozen=True)
class Spec:
    """A refinement whose values no SDK has looked at."""

    steps: int = 6
    audio_denoise: float = 0.5
    video_denoise: float = 0.0
    sampler: str = "euler"
    scheduler: str = "simple"
    cfg: float = 1.0
    negative_prompt: str = ""
    seed: int | None = None
    adapters: tuple[AdapterUse, ...] = ()
    audio_range: TimeRange | None = None
    cache: FrozenCacheSpec = DEFAULT_CACHE


def violations(**values: Any) -> list[Violation]:
    return refine_violations(Spec(**values), NUM_FRAMES, "refine_audio")


@pytest.mark.parametrize("case", SCHEDULES, ids=lambda case: f"{case['steps']}-{case['audio_denoise']}")
def test_levels_are_the_references(case: dict[str, Any]) -> None:
    assert schedule_length(case["steps"], case["audio_denoise"]) == case["length"]
    pairs = refine_sigmas(case["steps"], case["audio_denoise"], 12.0, 3.0)
    assert [video for video, _ in pairs] == pytest.approx(case["sigmas_video"], rel=0, abs=1e-6)
    assert [audio for _, audio in pairs] == pytest.approx(case["sigmas_audio"], rel=0, abs=1e-6)


@pytest.mark.parametrize(
    ("steps", "denoise", "length"),
    [(6, 0.7, 8), (3, 0.8, 3), (7, 0.14, 49), (1, 0.01, 100), (6, 0.9999, 6), (6, 0.99995, 6), (10, 0.999, 10)],
)
def test_the_length_of_a_schedule_is_cut_off_and_not_rounded(steps: int, denoise: float, length: int) -> None:
    assert schedule_length(steps, denoise) == length
    assert len(refine_sigmas(steps, denoise, 12.0, 3.0)) == steps + 1


def test_a_full_native_schedule_is_the_dense_grid_of_either_stream() -> None:
    pairs = refine_sigmas(8, 1.0, 12.0, 3.0, "native")
    assert tuple(video for video, _ in pairs) == dense_sigmas(8, 12.0)
    assert tuple(audio for _, audio in pairs) == dense_sigmas(8, 3.0)


def test_a_native_schedule_is_cut_from_the_end_of_a_longer_one() -> None:
    assert refine_sigmas(6, 0.3, 12.0, 3.0, "native") == refine_sigmas(20, 1.0, 12.0, 3.0, "native")[-7:]
    assert refine_sigmas(3, 0.8, 12.0, 3.0, "native") == refine_sigmas(3, 1.0, 12.0, 3.0, "native")


def test_schedulers_agree_where_the_table_has_the_very_levels() -> None:
    simple, native = (refine_sigmas(5, 0.5, 12.0, 3.0, scheduler) for scheduler in SCHEDULERS)
    assert list(itertools.chain(*simple)) == pytest.approx(list(itertools.chain(*native)), rel=0, abs=1e-6)


@given(
    steps=st.integers(1, 100),
    denoise=st.floats(MIN_DENOISE, 1.0),
    shifts=st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)),
    scheduler=st.sampled_from(SCHEDULERS),
)
def test_what_breaks_no_rule_has_levels_that_fall_to_0(
    steps: int, denoise: float, shifts: tuple[float, float], scheduler: str
) -> None:
    if violations(steps=steps, audio_denoise=denoise, scheduler=scheduler):
        assert scheduler == "simple"
        assert schedule_length(steps, denoise) > 1000
        return
    pairs = refine_sigmas(steps, denoise, *shifts, scheduler)
    assert len(pairs) == steps + 1
    assert pairs[-1] == (0.0, 0.0)
    assert max(pairs[0]) <= 1 + 3e-6
    for before, after in itertools.pairwise(pairs):
        assert before[0] > after[0]
        assert before[1] > after[1]


def test_levels_that_coincide_are_refused() -> None:
    with pytest.raises(ValueError, match="too close together"):
        refine_sigmas(11, 0.01, 12.0, 3.0, "simple")


@pytest.mark.parametrize("steps", range(11, 101))
def test_the_nearest_denoise_that_a_table_allows_is_allowed(steps: int) -> None:
    (violation,) = violations(steps=steps, audio_denoise=0.01)
    nearest = float(violation.description.partition("nearest valid value is ")[2].partition(";")[0])
    assert violations(steps=steps, audio_denoise=nearest) == []


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_what_the_sdk_takes_by_default_breaks_no_rule(sampler: str, scheduler: str) -> None:
    assert violations(sampler=sampler, scheduler=scheduler) == []
    # The SDK's own type is one of the values that the rules are about.
    assert refine_violations(RefineSpec(), NUM_FRAMES, "refine_audio") == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [
        {"steps": 1},
        {"steps": 100, "audio_denoise": 0.1},
        {"audio_denoise": 0.01},
        {"audio_denoise": 1.0},
        {"steps": 100, "audio_denoise": 0.01, "scheduler": "native"},
        {"video_denoise": 1.0},
        {"video_denoise": 0.001},
        {"cfg": 30.0, "negative_prompt": "noise"},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"audio_range": TimeRange(0.0, 124 / 24)},
        {"audio_range": TimeRange(0.0, 5.167)},  # what is printed as the clip's end
        {"audio_range": TimeRange(5.1, 5.15)},
        {"adapters": (AdapterUse("a", -1.0), AdapterUse("b", 16.0))},
        {"cache": FrozenCacheSpec(backend="disk", allow_disk=True)},
        {"cache": FrozenCacheSpec(shared=True, backend="ram")},
        {"cache": FrozenCacheSpec(refresh_interval=100, vram_margin_gb=64.0)},
    ],
)
def test_what_lies_at_the_edge_of_a_rule_breaks_none(values: dict[str, Any]) -> None:
    assert violations(**values) == []


@pytest.mark.parametrize(
    ("values", "field", "reason", "told"),
    [
        ({"steps": 0}, "steps", "OUT_OF_RANGE", "steps is 0; it must be from 1 to 100; the nearest valid value is 1"),
        ({"steps": 101}, "steps", "OUT_OF_RANGE", "the nearest valid value is 100"),
        ({"steps": 4.0}, "steps", "NOT_AN_INTEGER", "an integer is needed"),
        ({"audio_denoise": 0.0}, "audio_denoise", "OUT_OF_RANGE", "the nearest valid value is 0.01"),
        ({"audio_denoise": 1.5}, "audio_denoise", "OUT_OF_RANGE", "the nearest valid value is 1"),
        ({"audio_denoise": float("nan")}, "audio_denoise", "NOT_A_NUMBER", "not a number"),
        (
            {"steps": 11, "audio_denoise": 0.01},
            "audio_denoise",
            "TOO_FINE",
            "1100 levels, and simple picks from a table of 1000; the nearest valid value is 0.011; or choose native",
        ),
        ({"video_denoise": -0.1}, "video_denoise", "OUT_OF_RANGE", "the nearest valid value is 0"),
        *(
            (
                {"video_denoise": value},
                "video_denoise",
                "OUT_OF_RANGE",
                f"video_denoise is {value!r}; it must be 0, which freezes the video, or from 0.001 to 1; the nearest "
                "valid values are 0 and 0.001",
            )
            for value in (5e-324, 0.0005, 0.0009999999)
        ),
        ({"video_denoise": 1.01}, "video_denoise", "OUT_OF_RANGE", "the nearest valid value is 1"),
        ({"sampler": "Euler"}, "sampler", "UNKNOWN_VALUE", "the nearest is euler; there are euler, heun, dpmpp_2m"),
        (
            {"sampler": "euler_ancestral"},
            "sampler",
            "UNKNOWN_VALUE",
            "it draws fresh noise in every step, of which the sound would get its own share on another schedule; the "
            "nearest is euler; ",
        ),
        ({"sampler": "dpmpp_2m_sde"}, "sampler", "UNKNOWN_VALUE", "the nearest is dpmpp_2m; "),
        ({"sampler": "uni_pc"}, "sampler", "UNKNOWN_VALUE", "extrapolates in the one sigma that it knows"),
        ({"sampler": "euler_cfg_pp"}, "sampler", "UNKNOWN_VALUE", "steps along the unguided estimate"),
        ({"sampler": "a; b"}, "sampler", "UNKNOWN_VALUE", "sampler is 'a; b'; there are euler, heun, dpmpp_2m"),
        ({"scheduler": "simpel"}, "scheduler", "UNKNOWN_VALUE", "the nearest is simple; there are simple, native"),
        ({"cfg": 0.5}, "cfg", "OUT_OF_RANGE", "the nearest valid value is 1"),
        ({"cfg": 31.0, "negative_prompt": "noise"}, "cfg", "OUT_OF_RANGE", "the nearest valid value is 30"),
        ({"negative_prompt": "noise"}, "negative_prompt", "NEEDS_CFG", "leave it out, or set cfg above 1"),
        ({"cfg": 2.0}, "negative_prompt", "EMPTY", "write one, or set cfg to 1"),
        ({"cfg": 2.0, "negative_prompt": "a\x00b"}, "negative_prompt", "PROMPT_CONTROL_CHARACTER", "negative_prompt: "),
        ({"seed": -1}, "seed", "OUT_OF_RANGE", "the nearest valid value is 0"),
        ({"seed": 2**64}, "seed", "OUT_OF_RANGE", f"the nearest valid value is {2**64 - 1}"),
        ({"adapters": (AdapterUse("a", 17.0),)}, "adapters[0].strength", "OUT_OF_RANGE", "from -16 to 16"),
        ({"adapters": (AdapterUse("a", 1.0),) * 2}, "adapters[1].name", "REPEATED", "each can be named once"),
        (
            {"audio_range": TimeRange(-1.0, 2.0)},
            "audio_range.start_s",
            "OUT_OF_RANGE",
            "at least 0 and before the clip's end at 5.167; the nearest valid value is 0.000",
        ),
        ({"audio_range": TimeRange(5.2, 5.1)}, "audio_range.start_s", "OUT_OF_RANGE", "nearest valid value is 5.142"),
        ({"audio_range": TimeRange(2.0, 2.0)}, "audio_range.end_s", "OUT_OF_RANGE", "nearest valid value is 2.025"),
        ({"audio_range": TimeRange(5.16, 5.0)}, "audio_range.end_s", "OUT_OF_RANGE", "nearest valid value is 5.167"),
        ({"audio_range": TimeRange(1.0, 5.2)}, "audio_range.end_s", "OUT_OF_RANGE", "nearest valid value is 5.167"),
        (
            {"cache": FrozenCacheSpec(refresh_interval=101)},
            "cache.refresh_interval",
            "OUT_OF_RANGE",
            "the nearest valid value is 100",
        ),
        (
            {"cache": FrozenCacheSpec(vram_margin_gb=-1.0)},
            "cache.vram_margin_gb",
            "OUT_OF_RANGE",
            "the nearest valid value is 0",
        ),
        (
            {"cache": FrozenCacheSpec(backend="disk")},
            "cache.backend",
            "DISK_NOT_ALLOWED",
            "allow it, or choose auto, vram or ram",
        ),
        (
            {"cache": FrozenCacheSpec(backend="vram", shared=True)},
            "cache.backend",
            "SHARED_IN_VRAM",
            "choose auto, ram or disk",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_broken_rule_is_told_with_what_would_do(values: dict[str, Any], field: str, reason: str, told: str) -> None:
    (violation,) = violations(**values)
    assert (violation.field, violation.reason) == (f"refine_audio.{field}", reason)
    assert violation.description.startswith("refine_audio.")
    assert told in violation.description


def test_every_broken_rule_is_told_in_the_order_of_the_fields() -> None:
    broken = replace(
        Spec(),
        steps=0,
        audio_denoise=2.0,
        video_denoise=2.0,
        sampler="x",
        scheduler="y",
        cfg=0.0,
        seed=-1,
        audio_range=TimeRange(9.0, 10.0),
        cache=FrozenCacheSpec(refresh_interval=-1, vram_margin_gb=65.0, backend="disk"),
    )
    assert [v.field.removeprefix("refine_audio.") for v in refine_violations(broken, NUM_FRAMES, "refine_audio")] == [
        *("steps", "audio_denoise", "video_denoise", "sampler", "scheduler", "cfg", "seed"),
        *("audio_range.start_s", "audio_range.end_s", "cache.refresh_interval", "cache.vram_margin_gb"),
        "cache.backend",
    ]
