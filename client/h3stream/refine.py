"""How the sound of a finished clip is refined: extra denoising of the audio, the video frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

from h3stream.adapters import AdapterChoice, adapter_violations
from h3stream.errors import FieldViolation
from h3stream.fields import INT32, MAX_PROMPT_BYTES, UINT64, invalid_request, is_finite_or_none, text_violations

CacheContents = Literal["hidden", "kv"]
CachePrecision = Literal["int4", "fp8", "bf16"]
CacheText = Literal["live", "kept"]
CacheBackend = Literal["auto", "vram", "ram", "disk"]
OnNoRoom = Literal["error", "exact"]
StepMode = Literal["exact", "build", "cached"]


@dataclass(frozen=True)
class TimeRange:
    """A span of a clip, from its start."""

    start_s: float
    """Where it begins, in seconds."""
    end_s: float
    """Where it ends, in seconds; after its beginning."""


@dataclass(frozen=True)
class FrozenCacheSpec:
    """The cache of the frozen rows, which saves the later steps of a refinement most of their work."""

    enabled: bool = True
    """Whether there is one. Without it every step is exact."""
    contents: CacheContents = "hidden"
    """What it stores of each block: the input of attention, 2.7 times smaller, or K and V, nearly free to use."""
    precision: CachePrecision = "int4"
    """How it stores its rows; arithmetic is always done in the compute dtype."""
    text: CacheText = "live"
    """What cached steps do with the rows of the text, whose timestep moves: compute them, or keep them as built."""
    refresh_interval: int = 0
    """Cached steps after which it is built anew, 0 to 100; 0 builds it once."""
    backend: CacheBackend = "auto"
    """Where it lives; never changes a result. "disk" needs `allow_disk`."""
    allow_disk: bool = False
    """Whether it may live in files of the server, to which every build then writes all of it."""
    vram_margin_gb: float = 1.0
    """Device memory that is asked for beyond what is needed, in GiB, 0 to 64."""
    shared: bool = False
    """Whether it is taken from, and left for, other refinements of the same clip. A result then depends on what ran
    before: its first step may be a cached one."""
    on_no_room: OnNoRoom = "error"
    """What to do where no allowed place has room for it: fail, or do without."""


@dataclass(frozen=True)
class RefineSpec:
    """Extra denoising of a finished clip's sound, its video frozen.

    Raises InvalidRequestError, with one violation per field, for a value that no message can hold.
    """

    steps: int = 6
    """Forwards, 1 to 100."""
    audio_denoise: float = 0.5
    """How far back on the schedule the sound is put, 0.01 to 1: 0.3 to 0.6 keeps what is heard, 1 makes it anew."""
    video_denoise: float = 0.0
    """How far the video may move with it: 0, or 0.001 to 1. At 0 it is returned bit for bit."""
    sampler: str = "euler"
    """"euler", "heun" or "dpmpp_2m"."""
    scheduler: str = "simple"
    """"simple", or "native", the model's own grid."""
    cfg: float = 1.0
    """Guidance, 1 to 30; at 1 nothing is evaluated beside the prompt."""
    negative_prompt: str = ""
    """What guidance leads away from; only where `cfg` is not 1."""
    seed: int | None = None
    """Seed of its noise. None: the clip's."""
    adapters: Sequence[AdapterChoice] = ()
    """Adapters of every forward, each once; kept as a tuple. Empty: the base weights alone."""
    audio_range: TimeRange | None = None
    """The part of the sound that is refined. None: all of it."""
    cache: FrozenCacheSpec = FrozenCacheSpec()
    """The frozen-video cache."""
    compare: bool = False
    """Whether every step is also run exactly, and the two results are compared. Takes the time of both."""

    def __post_init__(self) -> None:
        if isinstance(self.adapters, Sequence) and not isinstance(self.adapters, str):
            object.__setattr__(self, "adapters", tuple(self.adapters))
        if violations := list(_violations(self)):
            raise invalid_request(violations)


class RefineOptions(TypedDict, total=False):
    """The fields of `RefineSpec` as keyword arguments."""

    steps: int
    audio_denoise: float
    video_denoise: float
    sampler: str
    scheduler: str
    cfg: float
    negative_prompt: str
    seed: int | None
    adapters: Sequence[AdapterChoice]
    audio_range: TimeRange | None
    cache: FrozenCacheSpec
    compare: bool


def make_spec(spec: RefineSpec | None, options: Mapping[str, Any]) -> RefineSpec:
    """The refinement of options, or a refinement with some fields replaced."""
    return dataclasses.replace(spec or RefineSpec(), **options)


_INTEGERS = {"steps": INT32, "refresh_interval": INT32, "seed": UINT64}
_NUMBERS = ("audio_denoise", "video_denoise", "cfg", "vram_margin_gb")
_TRUTHS = ("enabled", "allow_disk", "shared", "compare")
_NAMES = ("sampler", "scheduler")
_CHOICES: dict[str, tuple[str, ...]] = {
    "contents": get_args(CacheContents),
    "precision": get_args(CachePrecision),
    "text": get_args(CacheText),
    "backend": get_args(CacheBackend),
    "on_no_room": get_args(OnNoRoom),
}


def _violations(spec: RefineSpec) -> Iterator[FieldViolation]:
    yield from _field_violations(spec)
    yield from text_violations("negative_prompt", spec.negative_prompt, MAX_PROMPT_BYTES)
    yield from adapter_violations(spec.adapters)
    span = spec.audio_range
    if span is not None and not (isinstance(span, TimeRange) and _is_number(span.start_s) and _is_number(span.end_s)):
        yield FieldViolation(
            "audio_range", f"audio_range is {span!r:.80}; it must be a TimeRange of two finite numbers"
        )
    if isinstance(spec.cache, FrozenCacheSpec):
        yield from _field_violations(spec.cache, "cache.")
    else:
        yield FieldViolation("cache", f"cache is {spec.cache!r:.80}; it must be a FrozenCacheSpec")


def _field_violations(values: RefineSpec | FrozenCacheSpec, prefix: str = "") -> Iterator[FieldViolation]:
    for name in (field.name for field in dataclasses.fields(values)):
        value = getattr(values, name)
        if rule := _broken_rule(name, value):
            yield FieldViolation(f"{prefix}{name}", f"{prefix}{name} is {value!r:.80}; it must be {rule}")


def _broken_rule(name: str, value: object) -> str:
    """The rule that a scalar breaks; empty if it breaks none."""
    if name == "seed" and value is None:
        return ""
    if name in _INTEGERS:
        low, high = _INTEGERS[name]
        if not (type(value) is int and low <= value <= high):
            return f"an integer from {low} to {high}"
    if name in _NUMBERS and not _is_number(value):
        return "a finite number"
    if name in _TRUTHS and not isinstance(value, bool):
        return "True or False"
    if name in _CHOICES and value not in _CHOICES[name]:
        return f"one of {', '.join(_CHOICES[name])}"
    if name in _NAMES and not (isinstance(value, str) and value.isascii() and len(value) <= 64):
        return "a name of up to 64 ASCII characters"
    return ""


def _is_number(value: object) -> bool:
    return value is not None and is_finite_or_none(value)
