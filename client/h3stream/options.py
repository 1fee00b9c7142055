"""Options of the command line that several commands share."""

from __future__ import annotations

import argparse
import re
from typing import Any, get_args

from h3stream.adapters import AdapterChoice
from h3stream.refine import (
    CacheBackend,
    CacheContents,
    CachePrecision,
    CacheText,
    FrozenCacheSpec,
    OnNoRoom,
    RefineSpec,
    TimeRange,
)

_SPAN = re.compile(r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)")
_ADDRESS = re.compile(r"unix:.+|(?:[^\s/:\[\]]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")
_OUTPUTS = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
"""Other names of standard output."""
_SPEC_FIELDS = {
    "steps": "steps",
    "audio_denoise": "audio_denoise",
    "video_denoise": "video_denoise",
    "sampler": "sampler",
    "scheduler": "scheduler",
    "cfg": "cfg",
    "negative_prompt": "negative_prompt",
    "seed": "seed",
    "adapter": "adapters",
    "range": "audio_range",
    "compare": "compare",
}
"""Options that are fields of RefineSpec."""
_CACHE_FIELDS = {
    "contents": "contents",
    "precision": "precision",
    "text": "text",
    "refresh": "refresh_interval",
    "backend": "backend",
    "allow_disk": "allow_disk",
    "vram_margin_gb": "vram_margin_gb",
    "shared": "shared",
    "on_no_room": "on_no_room",
}
"""Options that are fields of FrozenCacheSpec; `--exact` is its `enabled`, turned round."""


def adapter_choice(text: str) -> AdapterChoice:
    """The adapter of NAME, NAME=STRENGTH or NAME:STRENGTH."""
    name, equals, strength = text.partition("=")
    if not equals and (match := re.fullmatch(r"(.+):([-+.\deE]+)", text)):
        name, equals, strength = match[1], ":", match[2]
    try:
        return AdapterChoice(name, float(strength) if equals else None)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME or NAME=STRENGTH: {strength!r} is no number") from None


def server_address(text: str) -> str:
    """The address of a server."""
    match = _ADDRESS.fullmatch(text)
    if not match or not 0 < int(match[1] or 1) < 65536 or not text.isprintable():
        rule = "give HOST:PORT, e.g. localhost:50051, or unix:PATH, in --server or H3STREAM_SERVER"
        raise argparse.ArgumentTypeError(f"{text!r} is no address of a server; {rule}")
    return text


def output_path(text: str) -> str:
    """A file to write, "-" for standard output."""
    return "-" if text in _OUTPUTS else text


def add_refine_options(group: argparse._ArgumentGroup, prefix: str = "") -> None:
    """Adds an option for everything that a refinement can be told; each is None where it is not given.

    prefix: what their names begin with, e.g. "refine-".
    """

    def add(name: str, help: str, **how: Any) -> None:
        group.add_argument(f"--{prefix}{name}", dest=_destination(name), default=None, help=help, **how)

    def flag(name: str, help: str) -> None:
        add(name, help, action="store_const", const=True)

    add("steps", "forwards (default: 6)", type=int, metavar="N")
    add("audio-denoise", "how far the sound is put back, 0.01 to 1 (default: 0.5)", type=float, metavar="X")
    add("video-denoise", "how far the video may move with it, 0 to 1 (default: 0)", type=float, metavar="X")
    add("sampler", "euler, heun or dpmpp_2m (default: euler)", metavar="NAME")
    add("scheduler", "simple or native (default: simple)", metavar="NAME")
    add("cfg", "guidance, 1 to 30 (default: 1)", type=float, metavar="X")
    add("negative-prompt", "what guidance leads away from", metavar="TEXT")
    add("seed", "seed of its noise (default: the clip's)", type=int, metavar="N")
    add(
        "adapter",
        "an adapter to refine with (default: none); may be given several times",
        action="append",
        type=adapter_choice,
        metavar="NAME[:STRENGTH]",
    )
    add("range", "the seconds whose sound is refined, e.g. 3-5 (default: all)", type=_span, metavar="FROM-TO")
    flag("exact", "without the cache: every step computes everything")
    add("contents", "what the cache stores (default: hidden)", choices=get_args(CacheContents))
    add("precision", "how it stores it (default: int4)", choices=get_args(CachePrecision))
    add("text", "what cached steps do with the text's rows (default: live)", choices=get_args(CacheText))
    add("refresh", "cached steps after which it is built anew (default: 0, never)", type=int, metavar="N")
    add("backend", "where it lives (default: auto)", choices=get_args(CacheBackend))
    flag("allow-disk", "let it live in files of the server")
    add("vram-margin-gb", "device memory asked for beyond what is needed, GiB (default: 1)", type=float, metavar="X")
    flag("shared", "take it from, and leave it for, other refinements of the clip")
    add("on-no-room", "what to do where it has no room: fail, or do without", choices=get_args(OnNoRoom))
    flag("compare", "run every step exactly, too, and tell how far the two lie apart")


def refine_spec(arguments: argparse.Namespace) -> RefineSpec | None:
    """The refinement that the options ask for; None where none of them is given.

    Raises InvalidRequestError for a value that no message can hold.
    """
    cache = _given(arguments, _CACHE_FIELDS)
    if getattr(arguments, _destination("exact")):
        cache["enabled"] = False
    fields = _given(arguments, _SPEC_FIELDS)
    if cache:
        fields["cache"] = FrozenCacheSpec(**cache)
    return RefineSpec(**fields) if fields else None


def _given(arguments: argparse.Namespace, fields: dict[str, str]) -> dict[str, Any]:
    values = {field: getattr(arguments, _destination(option)) for option, field in fields.items()}
    return {field: value for field, value in values.items() if value is not None}


def _destination(option: str) -> str:
    return f"refine_{option.replace('-', '_')}"


def _span(text: str) -> TimeRange:
    if match := _SPAN.fullmatch(text):
        return TimeRange(float(match[1]), float(match[2]))
    raise argparse.ArgumentTypeError(f"{text!r} is not FROM-TO in seconds, e.g. 3-5")
