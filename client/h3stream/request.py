"""What a caller asks for, and what the server resolves it to.

A request that can be constructed can be sent; whether it can be made is the server's to say, which knows its limits.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

from h3stream.errors import FieldViolation, InvalidRequestError

KvStorage = Literal["gpu", "cpu", "cpu_pinned"]
KV_STORAGES: tuple[KvStorage, ...] = get_args(KvStorage)

_INT32 = (-(2**31), 2**31 - 1)
_UINT64 = (0, 2**64 - 1)
MAX_PROMPT_BYTES = 1_000_000
"""A longer prompt would not fit a message; the server's own limit (GetServerInfo) is far lower."""


@dataclass(frozen=True)
class ClipSpec:
    """Everything that decides a streaming clip apart from prompt and weights; all values final."""

    num_frames: int
    """Frames at 24 per second: 17k + 5, k from 1 to 21."""
    width: int
    """Canvas width in pixels, a multiple of 32."""
    height: int
    """Canvas height in pixels, a multiple of 32."""
    steps: int
    """Noise forwards per chunk (NFE)."""
    video_shift: float
    """Shift of the video sigma grid."""
    audio_shift: float
    """Shift of the audio sigma grid."""
    sink: int
    """First KV cache entries kept for the whole clip; the text is entry 0 and counts."""
    window: int | None
    """Most recent chunks kept beside the sink; None keeps every chunk."""
    kv_storage: KvStorage
    """Where the KV cache lives."""
    seed: int
    """Seed of the clip's only random generator."""


@dataclass(frozen=True)
class GenerateRequest:
    """A clip to make. None leaves a choice to the server, whose defaults `Client.server_info` tells.

    Raises InvalidRequestError, with one violation per field, for a value that no message can hold.
    """

    prompt: str
    """What to show and what to sound like."""
    num_frames: int | None = None
    """Frames at 24 per second: 17k + 5, from 22 to 362."""
    width: int | None = None
    """Canvas width in pixels, a multiple of 32."""
    height: int | None = None
    """Canvas height in pixels, a multiple of 32."""
    steps: int | None = None
    """Noise forwards per chunk."""
    video_shift: float | None = None
    """Shift of the video sigma grid."""
    audio_shift: float | None = None
    """Shift of the audio sigma grid."""
    sink: int | None = None
    """First KV cache entries kept for the whole clip, the text included."""
    window: int | Literal["all"] | None = None
    """Most recent chunks kept beside the sink; "all" keeps every chunk."""
    kv_storage: KvStorage | None = None
    """Where the KV cache lives; changes speed and memory, never the clip."""
    seed: int | None = None
    """Seed of the clip: the same request makes the same clip."""
    cancel_on_disconnect: bool = False
    """Whether the job ends when its stream does, e.g. because this process has gone. Otherwise it goes on."""

    def __post_init__(self) -> None:
        violations = [
            *_prompt_violations(self.prompt),
            *(v for name in ("num_frames", "width", "height", "steps", "sink") for v in self._int_violations(name)),
            *(v for name in ("video_shift", "audio_shift") for v in self._float_violations(name)),
            *(self._int_violations("window", also=' or "all"') if self.window != "all" else ()),
            *self._int_violations("seed", _UINT64),
        ]
        if self.kv_storage is not None and self.kv_storage not in KV_STORAGES:
            violations.append(
                FieldViolation("kv_storage", f"kv_storage is {self.kv_storage!r}; it must be one of {KV_STORAGES}")
            )
        if not isinstance(self.cancel_on_disconnect, bool):
            violations.append(
                FieldViolation(
                    "cancel_on_disconnect",
                    f"cancel_on_disconnect is {self.cancel_on_disconnect!r}; it must be True or False",
                )
            )
        if violations:
            raise invalid_request(violations)

    def _int_violations(self, name: str, limits: tuple[int, int] = _INT32, also: str = "") -> list[FieldViolation]:
        value = getattr(self, name)
        if value is None or (type(value) is int and limits[0] <= value <= limits[1]):
            return []
        return [
            FieldViolation(
                name, f"{name} is {value!r:.80}; it must be an integer from {limits[0]} to {limits[1]}{also}"
            )
        ]

    def _float_violations(self, name: str) -> list[FieldViolation]:
        value = getattr(self, name)
        if value is None or (type(value) in (int, float) and abs(value) <= sys.float_info.max):  # NaN is not <=
            return []
        return [FieldViolation(name, f"{name} is {value!r:.80}; it must be a finite number")]


class RequestOptions(TypedDict, total=False):
    """The fields of `GenerateRequest` beside the prompt, as keyword arguments."""

    num_frames: int | None
    width: int | None
    height: int | None
    steps: int | None
    video_shift: float | None
    audio_shift: float | None
    sink: int | None
    window: int | Literal["all"] | None
    kv_storage: KvStorage | None
    seed: int | None
    cancel_on_disconnect: bool


def make_request(prompt: str | GenerateRequest, options: Mapping[str, Any]) -> GenerateRequest:
    """The request of a prompt and options, or a request with some fields replaced."""
    if isinstance(prompt, GenerateRequest):
        return dataclasses.replace(prompt, **options)
    return GenerateRequest(prompt, **options)


def invalid_request(violations: list[FieldViolation]) -> InvalidRequestError:
    """The error for one or more violations; its message holds them all."""
    return InvalidRequestError(
        "; ".join(violation.description for violation in violations), violations=tuple(violations)
    )


def _prompt_violations(prompt: str) -> list[FieldViolation]:
    if not isinstance(prompt, str):
        return [FieldViolation("prompt", f"prompt is {prompt!r:.80}; it must be a string")]
    try:
        size_bytes = len(prompt.encode())
    except UnicodeEncodeError as error:
        return [
            FieldViolation(
                "prompt", f"prompt holds a lone surrogate at character {error.start}; it must be Unicode text"
            )
        ]
    if size_bytes > MAX_PROMPT_BYTES:
        return [FieldViolation("prompt", f"prompt has {size_bytes} bytes; a message holds at most {MAX_PROMPT_BYTES}")]
    return []
