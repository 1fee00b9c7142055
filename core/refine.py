"""What a refinement of a clip's sound is: which requests can be done, and at which noise levels its steps lie.

Source: docs/reference/audio-refine.md §1, §3.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

from core.geometry import AUDIO_LATENTS_PER_SECOND, FPS
from core.request import (
    MAX_SEED,
    MAX_STEPS,
    MIN_SEED,
    MIN_STEPS,
    AdapterValues,
    Violation,
    adapter_violations,
    integer_violations,
    prompt_violations,
    range_violations,
)
from core.schedule import dense_sigmas, float32, shifted

SAMPLERS = ("euler", "heun", "dpmpp_2m")
"""Deterministic, and safe where video and sound run on two schedules: `heun` needs the model at grid points only, and
the log-SNR that `dpmpp_2m` steps in differs between the two streams by a constant."""
SCHEDULERS = ("simple", "native")
MIN_DENOISE = 0.01
FULL_DENOISE = 0.9999
"""Above this the schedule is not cut."""
FROZEN = 1e-3
"""A stream that may nowhere move this far is frozen."""
MIN_CFG, MAX_CFG = 1.0, 30.0
MAX_REFRESH_INTERVAL = 100
MAX_VRAM_MARGIN_GB = 64.0
TABLE_SIZE = 1000
"""Noise levels that the `simple` scheduler picks from."""
NEAR_NAME = 0.4
"""How alike a name must be to be told as the nearest: enough for "euler_ancestral" to be told "euler"."""


class RangeValues(Protocol):
    """A span of a clip; the SDK's TimeRange is one."""

    @property
    def start_s(self) -> float:
        """Where it begins, in seconds."""

    @property
    def end_s(self) -> float:
        """Where it ends, in seconds."""


class CacheValues(Protocol):
    """What is checked of the frozen-video cache; the SDK's FrozenCacheSpec is one."""

    @property
    def enabled(self) -> bool:
        """Whether there is one."""

    @property
    def backend(self) -> str:
        """Where it lives."""

    @property
    def allow_disk(self) -> bool:
        """Whether it may live in files."""

    @property
    def shared(self) -> bool:
        """Whether it outlives the refinement."""

    @property
    def refresh_interval(self) -> int:
        """Cached steps after which it is built anew."""

    @property
    def vram_margin_gb(self) -> float:
        """Device memory asked for beyond what is needed, in GiB."""


class RefineValues(Protocol):
    """A refinement that has every default filled in; the SDK's RefineSpec is one."""

    @property
    def steps(self) -> int:
        """Forwards."""

    @property
    def audio_denoise(self) -> float:
        """How far back on the schedule the sound is put."""

    @property
    def video_denoise(self) -> float:
        """How far the video may move."""

    @property
    def sampler(self) -> str:
        """How a step is made of the model's answers."""

    @property
    def scheduler(self) -> str:
        """How the noise levels are picked."""

    @property
    def cfg(self) -> float:
        """Guidance."""

    @property
    def negative_prompt(self) -> str:
        """What guidance leads away from."""

    @property
    def seed(self) -> int | None:
        """Seed of its noise; None for the clip's."""

    @property
    def adapters(self) -> Sequence[AdapterValues]:
        """Adapters of every forward."""

    @property
    def audio_range(self) -> RangeValues | None:
        """The part of the sound that is refined."""

    @property
    def cache(self) -> CacheValues:
        """The frozen-video cache."""


def refine_violations(spec: RefineValues, num_frames: int, prefix: str) -> list[Violation]:
    """Every rule that a refinement breaks, in the order of its fields; empty if it can be done.

    num_frames: of the clip.  prefix: what the names of the fields begin with, e.g. "refine_audio".
    """
    return [
        Violation(f"{prefix}.{v.field}", f"{prefix}.{v.description}", v.reason) for v in _violations(spec, num_frames)
    ]


def _violations(spec: RefineValues, num_frames: int) -> Iterator[Violation]:
    yield from _schedule_violations(spec)
    yield from _video_denoise_violations(spec.video_denoise)
    yield from _sampler_violations(spec.sampler)
    yield from _name_violations("scheduler", spec.scheduler, SCHEDULERS)
    yield from range_violations("cfg", spec.cfg, MIN_CFG, MAX_CFG)
    yield from _negative_prompt_violations(spec)
    if spec.seed is not None:
        yield from integer_violations("seed", spec.seed, MIN_SEED, MAX_SEED)
    yield from adapter_violations(spec.adapters)
    if spec.audio_range is not None:
        yield from _audio_range_violations(spec.audio_range, num_frames / FPS)
    cache = spec.cache
    yield from integer_violations("cache.refresh_interval", cache.refresh_interval, 0, MAX_REFRESH_INTERVAL)
    yield from range_violations("cache.vram_margin_gb", cache.vram_margin_gb, 0.0, MAX_VRAM_MARGIN_GB)
    if cache.backend == "disk" and not cache.allow_disk:
        description = (
            "cache.backend is disk, which is not used unless cache.allow_disk is true: every build writes the whole "
            "cache; allow it, or choose auto, vram or ram"
        )
        yield Violation("cache.backend", description, "DISK_NOT_ALLOWED")
    if cache.shared and cache.backend == "vram":
        description = (
            "cache.backend is vram, where a shared cache cannot stay: between jobs the device belongs to other "
            "workers; choose auto, ram or disk"
        )
        yield Violation("cache.backend", description, "SHARED_IN_VRAM")


def _schedule_violations(spec: RefineValues) -> Iterator[Violation]:
    steps = integer_violations("steps", spec.steps, MIN_STEPS, MAX_STEPS)
    denoise = range_violations("audio_denoise", spec.audio_denoise, MIN_DENOISE, 1.0)
    yield from (*steps, *denoise)
    if steps or denoise or spec.scheduler != "simple":
        return
    length = schedule_length(spec.steps, spec.audio_denoise)
    if length > TABLE_SIZE:
        description = (
            f"audio_denoise is {spec.audio_denoise:g}: its {spec.steps} steps lie on {length} levels, and simple picks "
            f"from a table of {TABLE_SIZE}; the nearest valid value is {spec.steps / TABLE_SIZE:g}; or choose native"
        )
        yield Violation("audio_denoise", description, "TOO_FINE")


def _video_denoise_violations(denoise: float) -> list[Violation]:
    """A video that moves too little to be told from a frozen one is not frozen in silence."""
    if 0 < denoise < FROZEN:
        description = (
            f"video_denoise is {denoise!r}; it must be 0, which freezes the video, or from {FROZEN:g} to 1; the "
            f"nearest valid values are 0 and {FROZEN:g}"
        )
        return [Violation("video_denoise", description, "OUT_OF_RANGE")]
    return range_violations("video_denoise", denoise, 0.0, 1.0)


def _sampler_violations(sampler: str) -> Iterator[Violation]:
    lowered = sampler.lower()
    reason = ""
    if "ancestral" in lowered or "sde" in lowered or lowered in ("ddpm", "lcm"):
        reason = "it draws fresh noise in every step, of which the sound would get its own share on another schedule; "
    elif lowered in ("dpm_2", "dpm_fast", "dpm_adaptive", "uni_pc", "uni_pc_bh2", "deis", "ipndm", "ipndm_v", "lms"):
        reason = "it extrapolates in the one sigma that it knows, and video and sound run on two; "
    elif "cfg_pp" in lowered:
        reason = "it steps along the unguided estimate, which has no counterpart where one stream is frozen; "
    yield from _name_violations("sampler", sampler, SAMPLERS, why=reason)


def _name_violations(field: str, name: str, allowed: tuple[str, ...], *, why: str = "") -> Iterator[Violation]:
    if name not in allowed:
        nearest = difflib.get_close_matches(name.lower(), allowed, n=1, cutoff=NEAR_NAME)
        hint = f"the nearest is {nearest[0]}; " if nearest else ""
        yield Violation(field, f"{field} is {name!r}; {why}{hint}there are {', '.join(allowed)}", "UNKNOWN_VALUE")


def _negative_prompt_violations(spec: RefineValues) -> Iterator[Violation]:
    if not spec.negative_prompt:
        if spec.cfg > MIN_CFG:
            description = (
                f"negative_prompt is empty, but with cfg {spec.cfg:g} it is encoded as the prompt is, which takes at "
                "least one word; write one, or set cfg to 1"
            )
            yield Violation("negative_prompt", description, "EMPTY")
        return
    if spec.cfg == MIN_CFG:
        description = (
            "negative_prompt is set, but with cfg 1 nothing is evaluated beside the prompt; leave it out, or set cfg "
            "above 1"
        )
        yield Violation("negative_prompt", description, "NEEDS_CFG")
    for violation in prompt_violations(spec.negative_prompt):
        yield Violation("negative_prompt", f"negative_prompt: {violation.description}", violation.reason)


def _audio_range_violations(span: RangeValues, duration_s: float) -> Iterator[Violation]:
    """A span that reaches beyond the clip is refused, not cut."""
    one_latent_s = 1 / AUDIO_LATENTS_PER_SECOND
    if not 0 <= span.start_s < duration_s:
        nearest = duration_s - one_latent_s if span.start_s > 0 else 0
        description = (
            f"audio_range.start_s is {span.start_s:g}; it must be at least 0 and before the clip's end at "
            f"{duration_s:.3f}; the nearest valid value is {nearest:.3f}"
        )
        yield Violation("audio_range.start_s", description, "OUT_OF_RANGE")
    elif not span.start_s < span.end_s:
        nearest = min(span.start_s + one_latent_s, duration_s)
        description = (
            f"audio_range.end_s is {span.end_s:g}; it must lie after its start at {span.start_s:g}; the nearest valid "
            f"value is {nearest:.3f}"
        )
        yield Violation("audio_range.end_s", description, "OUT_OF_RANGE")
    if span.end_s > duration_s + 0.5 / 1000:  # whoever writes the clip's length with three digits means its end
        description = (
            f"audio_range.end_s is {span.end_s:g}; it must be at most the clip's length; the nearest valid value is "
            f"{duration_s:.3f}"
        )
        yield Violation("audio_range.end_s", description, "OUT_OF_RANGE")


def schedule_length(steps: int, denoise: float) -> int:
    """Intervals of the whole schedule of which a refinement runs the last `steps`.

    The quotient is a plain float division, truncated: 7 / 0.14 gives 49.
    """
    return steps if denoise > FULL_DENOISE else int(steps / denoise)


def refine_sigmas(
    steps: int, denoise: float, video_shift: float, audio_shift: float, scheduler: str = "simple"
) -> tuple[tuple[float, float], ...]:
    """Video and audio noise levels between which the steps lie: `steps + 1` pairs, falling to (0, 0).

    Raises ValueError where two of them coincide.
    """
    length = schedule_length(steps, denoise)
    if scheduler == "native":
        grids = (dense_sigmas(length, video_shift), dense_sigmas(length, audio_shift))
        pairs = tuple(zip(*grids, strict=True))[-steps - 1 :]
    else:
        video = simple_sigmas(length, video_shift)[-steps - 1 :]
        pairs = tuple((sigma, _other_shift(sigma, video_shift, audio_shift)) for sigma in video)
    if any(a[0] <= b[0] or a[1] <= b[1] for a, b in itertools.pairwise(pairs)):
        raise ValueError(f"{length} steps at shifts {video_shift} and {audio_shift} lie too close together")
    return pairs


def simple_sigmas(length: int, shift: float) -> tuple[float, ...]:
    """`length + 1` float32 noise levels, picked evenly from a table of 1000, then 0."""
    picked = (TABLE_SIZE - int(x * TABLE_SIZE / length) for x in range(length))
    return (*(float32(shifted(i / TABLE_SIZE, shift)) for i in picked), 0.0)


def _other_shift(sigma: float, shift: float, other: float) -> float:
    """The noise level at another shift of the same point of the base grid."""
    return shifted(sigma / (shift - (shift - 1) * sigma), other)
