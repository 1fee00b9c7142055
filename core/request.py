"""Whether a request can be made, decided before anything is loaded or queued.

Every rule that a request breaks is found at once. What arrives here is final: defaults have been filled in, and nothing
is rounded, clamped or shrunk to make it fit; the descriptions name what would fit instead.

Source: docs/reference/raven-streaming.md §1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core.geometry import (
    AUDITED_FRAMES,
    CANVAS_MULTIPLE,
    FRAMES_PER_CHUNK,
    MAX_CANVAS_PIXELS,
    MAX_CHUNKS,
    MAX_FRAMES,
    MIN_CHUNKS,
    MIN_FRAMES,
    TAIL_FRAMES,
)
from core.prompt import ALLOWED_SPECIAL_TOKENS, MAX_PROMPT_BYTES, control_character, refused_token

MIN_STEPS, MAX_STEPS = 1, 100
MIN_SHIFT, MAX_SHIFT = 0.01, 100.0
MIN_SINK, MAX_SINK = 1, 64
MIN_WINDOW, MAX_WINDOW = 0, 64
MIN_SEED, MAX_SEED = 0, 2**64 - 1
DISTINCT_SEEDS = 2**32
"""Seeds that make noise of their own: torch's CPU generator, a Mersenne Twister, is seeded with 32 bits."""
KV_STORAGES = ("gpu", "cpu", "cpu_pinned")
MODES = ("streaming", "dense")
MIN_PREVIEW_SIDE, MAX_PREVIEW_SIDE = 16, 512
MAX_ADAPTERS = 16
MAX_STRENGTH = 16.0
"""Largest magnitude of an adapter's strength; a finished adapter is used at 1, a further one mostly below."""
STREAMING_STRENGTH = 1.0
"""Streaming was distilled into its adapter: while streaming it is always on, at this strength."""
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What an adapter may be called."""

MAX_SIDE = MAX_CANVAS_PIXELS // CANVAS_MULTIPLE
"""Longest canvas side: any aspect is allowed, and the other side is at least 32."""


class AdapterValues(Protocol):
    """An adapter that a clip is sampled with; the SDK's AdapterUse is one."""

    @property
    def name(self) -> str:
        """Name in the server's registry."""

    @property
    def strength(self) -> float:
        """What its update is multiplied with."""


class ClipValues(Protocol):
    """The values of a clip that has every default filled in; the SDK's ClipSpec is one."""

    @property
    def num_frames(self) -> int:
        """Frames at 24 per second."""

    @property
    def width(self) -> int:
        """Canvas width in pixels."""

    @property
    def height(self) -> int:
        """Canvas height in pixels."""

    @property
    def steps(self) -> int:
        """Noise forwards: of each chunk when streaming, of the whole clip in dense mode."""

    @property
    def video_shift(self) -> float:
        """Shift of the video sigma grid."""

    @property
    def audio_shift(self) -> float:
        """Shift of the audio sigma grid."""

    @property
    def sink(self) -> int:
        """First KV cache entries kept for the whole clip, the text included; 0 in dense mode."""

    @property
    def window(self) -> int | None:
        """Most recent chunks kept beside the sink; None keeps every chunk. None in dense mode."""

    @property
    def kv_storage(self) -> str:
        """Where the KV cache lives."""

    @property
    def seed(self) -> int:
        """Seed of the clip's only random generator."""

    @property
    def mode(self) -> str:
        """How it is sampled."""

    @property
    def adapters(self) -> Sequence[AdapterValues]:
        """Adapters beside the streaming adapter."""


class PreviewValues(Protocol):
    """How stills are made; the SDK's PreviewSpec is one."""

    @property
    def max_side(self) -> int:
        """Longer side in pixels; 0 for none."""

    @property
    def every_steps(self) -> int:
        """Noise forwards from one to the next."""


@dataclass(frozen=True)
class Violation:
    """One rule that one field of a request breaks."""

    field: str
    """Name of the request field."""
    description: str
    """The value, the rule and the nearest valid values, in a sentence."""
    reason: str
    """Stable name of the rule in UPPER_SNAKE_CASE."""


def clip_violations(clip: ClipValues) -> list[Violation]:
    """Every rule that a clip breaks, in the order of its fields; empty if the clip can be made.

    A canvas whose area is too large is reported at `width`, after what is wrong with either side alone.
    """
    return [
        *_frame_violations(clip.num_frames),
        *_side_violations("width", clip.width),
        *_side_violations("height", clip.height),
        *_area_violations(clip.width, clip.height),
        *integer_violations("steps", clip.steps, MIN_STEPS, MAX_STEPS),
        *range_violations("video_shift", clip.video_shift, MIN_SHIFT, MAX_SHIFT),
        *range_violations("audio_shift", clip.audio_shift, MIN_SHIFT, MAX_SHIFT),
        *_retention_violations(clip),
        *_choice_violations("kv_storage", clip.kv_storage, KV_STORAGES),
        *integer_violations("seed", clip.seed, MIN_SEED, MAX_SEED),
        *_choice_violations("mode", clip.mode, MODES),
        *adapter_violations(clip.adapters),
    ]


def preview_violations(preview: PreviewValues) -> list[Violation]:
    """Every rule that a request for stills breaks; empty if they can be made. A `max_side` of 0 asks for none."""
    side = (
        integer_violations("preview.max_side", preview.max_side, MIN_PREVIEW_SIDE, MAX_PREVIEW_SIDE, also=" or 0")
        if preview.max_side != 0
        else []
    )
    return [*side, *integer_violations("preview.every_steps", preview.every_steps, 1, MAX_STEPS)]


def clip_warnings(clip: ClipValues) -> list[tuple[str, str]]:
    """(reason, message) of what the caller of a valid clip should know before it starts."""
    warnings = []
    if clip.num_frames > AUDITED_FRAMES and clip.mode == "streaming":
        message = (
            f"{clip.num_frames} frames are beyond the audited range: "
            f"the RAVEN adapter was audited up to {AUDITED_FRAMES} frames"
        )
        warnings.append(("FRAMES_BEYOND_AUDITED_RANGE", message))
    if clip.seed >= DISTINCT_SEEDS:
        message = (
            f"seed {clip.seed} makes the same noise as seed {clip.seed % DISTINCT_SEEDS}: "
            "the generator reads the low 32 bits"
        )
        warnings.append(("SEED_NOT_DISTINCT", message))
    return warnings


def prompt_violations(prompt: str) -> list[Violation]:
    """Every rule that a prompt breaks; empty if it can be encoded."""
    try:
        num_bytes = len(prompt.encode())
    except UnicodeEncodeError as error:
        surrogate = f"U+{ord(prompt[error.start]):04X} at character {error.start}"
        return [
            _prompt_violation("NOT_UNICODE", f"holds the lone surrogate {surrogate}; it must be valid Unicode text")
        ]
    if not prompt.strip():
        found = f"is {len(prompt)} characters of white space" if prompt else "is empty"
        return [_prompt_violation("EMPTY", f"{found}; at least one token is needed, so write at least one word")]
    violations = []
    if num_bytes > MAX_PROMPT_BYTES:
        violations.append(
            _prompt_violation(
                "TOO_LONG", f"is {num_bytes} bytes of UTF-8; at most {MAX_PROMPT_BYTES} bytes are accepted"
            )
        )
    position = control_character(prompt)
    if position is not None:
        violations.append(
            _prompt_violation(
                "CONTROL_CHARACTER",
                f"holds the control character U+{ord(prompt[position]):04X} at character {position}; "
                "of these only tab, line feed and carriage return are accepted",
            )
        )
    token = refused_token(prompt)
    if token is not None:
        violations.append(
            _prompt_violation(
                "CONTROL_TOKEN",
                f"holds the control token {token}, which would not be read as text; "
                f"the special tokens accepted are {' '.join(ALLOWED_SPECIAL_TOKENS)}",
            )
        )
    return violations


def _prompt_violation(reason: str, found: str) -> Violation:
    return Violation("prompt", f"the prompt {found}", f"PROMPT_{reason}")


def _frame_violations(frames: int) -> list[Violation]:
    """The order of the checks is fixed: integer, grid, minimum, maximum."""
    if not _is_integer(frames):
        return [_not_an_integer("num_frames", frames)]
    rule = f"17k + 5 with k from {MIN_CHUNKS} to {MAX_CHUNKS}"
    k, beyond = divmod(frames - TAIL_FRAMES, FRAMES_PER_CHUNK)
    if beyond:
        below = frames - beyond
        nearest = _nearest(below, below + FRAMES_PER_CHUNK, MIN_FRAMES, MAX_FRAMES)
        return [Violation("num_frames", f"num_frames is {frames}; it must be {rule}; {nearest}", "FRAMES_OFF_GRID")]
    if k < MIN_CHUNKS:
        description = (
            f"num_frames is {frames}, which is 17k + 5 with k = {k}, but k must be at least {MIN_CHUNKS}; "
            f"the minimum is {MIN_FRAMES}"
        )
        return [Violation("num_frames", description, "FRAMES_TOO_FEW")]
    if k > MAX_CHUNKS:
        description = f"num_frames is {frames}; it must be {rule}; the maximum is {MAX_FRAMES}"
        return [Violation("num_frames", description, "FRAMES_TOO_MANY")]
    return []


def _side_violations(name: str, pixels: int) -> list[Violation]:
    if not _is_integer(pixels):
        return [_not_an_integer(name, pixels)]
    if pixels < 1:
        description = (
            f"{name} is {pixels}; it must be a positive multiple of {CANVAS_MULTIPLE}; "
            f"the nearest valid value is {CANVAS_MULTIPLE}"
        )
        return [Violation(name, description, "CANVAS_NOT_POSITIVE")]
    beyond = pixels % CANVAS_MULTIPLE
    if beyond:
        below = pixels - beyond
        nearest = _nearest(below, below + CANVAS_MULTIPLE, CANVAS_MULTIPLE, MAX_SIDE)
        description = f"{name} is {pixels}; it must be a multiple of {CANVAS_MULTIPLE}; {nearest}"
        return [Violation(name, description, "CANVAS_NOT_MULTIPLE")]
    return []


def _area_violations(width: int, height: int) -> list[Violation]:
    if (
        not (_is_integer(width) and _is_integer(height))
        or min(width, height) < 1
        or width * height <= MAX_CANVAS_PIXELS
    ):
        return []
    smaller = "{} x {}".format(*_largest_canvas_like(width, height))
    description = (
        f"the canvas {width} x {height} has {width * height} pixels; at most {MAX_CANVAS_PIXELS} (1376 x 768) are "
        f"accepted; the nearest smaller canvas of about the same aspect is {smaller}"
    )
    return [Violation("width", description, "CANVAS_TOO_LARGE")]


def _largest_canvas_like(width: int, height: int) -> tuple[int, int]:
    """A valid (width, height) of about the aspect of a canvas that is too large, close to the largest area."""
    area = MAX_CANVAS_PIXELS // CANVAS_MULTIPLE**2
    columns = min(max(1, math.isqrt(area * width // height)), area)
    rows = min(-(-columns * height // width), area // columns)
    return columns * CANVAS_MULTIPLE, rows * CANVAS_MULTIPLE


def range_violations(name: str, value: float, low: float, high: float) -> list[Violation]:
    """What is wrong with a number that must lie in a range."""
    rule = f"it must be from {low:g} to {high:g}"
    if math.isnan(value):
        return [Violation(name, f"{name} is NaN, not a number; {rule}", "NOT_A_NUMBER")]
    if not low <= value <= high:
        nearest = low if value < low else high
        found = repr(value) if math.isfinite(value) else f"infinite ({value})"
        description = f"{name} is {found}; {rule}; the nearest valid value is {nearest:g}"
        return [Violation(name, description, "OUT_OF_RANGE")]
    return []


def integer_violations(name: str, value: int, low: int, high: int, *, also: str = "") -> list[Violation]:
    """What is wrong with an integer that must lie in a range."""
    if not _is_integer(value):
        return [_not_an_integer(name, value)]
    if not low <= value <= high:
        nearest = low if value < low else high
        description = f"{name} is {value}; it must be from {low} to {high}{also}; the nearest valid value is {nearest}"
        return [Violation(name, description, "OUT_OF_RANGE")]
    return []


def _retention_violations(clip: ClipValues) -> list[Violation]:
    if clip.mode == "dense":
        return [
            Violation(name, f"{name} is {value}; a dense clip has no KV cache, so it must be left out", "NOT_IN_DENSE")
            for name, value, unset in (("sink", clip.sink, 0), ("window", clip.window, None))
            if value != unset
        ]
    window = [] if clip.window is None else integer_violations("window", clip.window, MIN_WINDOW, MAX_WINDOW)
    return [*integer_violations("sink", clip.sink, MIN_SINK, MAX_SINK), *window]


def _choice_violations(name: str, value: str, allowed: tuple[str, ...]) -> list[Violation]:
    if value in allowed:
        return []
    return [Violation(name, f"{name} is {value!r}; it must be one of {', '.join(allowed)}", "UNKNOWN_VALUE")]


def adapter_violations(adapters: Sequence[AdapterValues]) -> list[Violation]:
    """What is wrong with a list of adapters; whether there are such is the registry's to say."""
    if len(adapters) > MAX_ADAPTERS:
        description = f"adapters holds {len(adapters)} adapters; at most {MAX_ADAPTERS} are accepted"
        return [Violation("adapters", description, "TOO_MANY")]
    violations = []
    names = [adapter.name for adapter in adapters]
    for index, adapter in enumerate(adapters):
        field = f"adapters[{index}]"
        if ADAPTER_NAME.fullmatch(adapter.name) is None:
            rule = "it must be 1 to 64 letters, digits, dots, dashes and underscores, the first a letter or a digit"
            violations.append(
                Violation(f"{field}.name", f"{field}.name is {adapter.name[:80]!r}; {rule}", "NOT_A_NAME")
            )
        elif adapter.name in names[:index]:
            violations.append(
                Violation(f"{field}.name", f"{field}.name repeats {adapter.name!r}; each can be named once", "REPEATED")
            )
        if not 0 < abs(adapter.strength) <= MAX_STRENGTH:  # NaN compares false
            rule = f"it must not be 0 and be from {-MAX_STRENGTH:g} to {MAX_STRENGTH:g}"
            violations.append(
                Violation(f"{field}.strength", f"{field}.strength is {adapter.strength!r}; {rule}", "OUT_OF_RANGE")
            )
    return violations


def _is_integer(value: object) -> bool:
    # True is an int in Python and 39.0 is not; neither is what a caller meant by a count.
    return isinstance(value, int) and not isinstance(value, bool)


def _not_an_integer(name: str, value: object) -> Violation:
    return Violation(name, f"{name} is {value!r}; an integer is needed", "NOT_AN_INTEGER")


def _nearest(below: int, above: int, low: int, high: int) -> str:
    """The valid neighbours of a value between two grid points, as the end of a sentence."""
    if below < low:
        return f"the nearest valid value is {low}"
    if above > high:
        return f"the nearest valid value is {high}"
    return f"the nearest valid values are {below} and {above}"
