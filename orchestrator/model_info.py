"""What the orchestrator reads of a model directory: its name and the defaults it was made for. Never a weight."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.request import clip_violations
from h3stream.errors import CheckpointError
from h3stream.request import ClipSpec

STANDARD_CLIP = ClipSpec(
    num_frames=124,
    width=1344,
    height=768,
    steps=4,
    video_shift=12.0,
    audio_shift=3.0,
    sink=2,
    window=2,
    kv_storage="gpu",
    seed=0,
)
"""Defaults of the published model: its canvas rule at 16:9 and its default length, RAVEN's sampling and retention.

Source: docs/reference/h3-model.md §9, docs/reference/raven-streaming.md §1.
"""

COMPONENTS = ("transformer", "vae", "audio_vae", "text_encoder", "tokenizer")


@dataclass(frozen=True)
class ModelInfo:
    """A model directory as callers are told of it."""

    name: str
    """Name of the directory."""
    default_clip: ClipSpec
    """Values that a request's omitted fields take."""
    notice: str
    """What the model's maker wants every caller to know; empty for nothing."""


def read_model_info(directory: Path) -> ModelInfo:
    """Reads a model directory's `generation_config.json`, if it has one, over the standard defaults.

    Raises CheckpointError if a component is missing, the file cannot be read or a default is not valid.
    """
    missing = [name for name in COMPONENTS if not (directory / name).is_dir()]
    if missing:
        raise CheckpointError(f"{directory} is no model directory: it lacks {', '.join(missing)}")
    path = directory / "generation_config.json"
    values: dict[str, Any] = {}
    if path.exists():
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    notice = values.pop("notice", "")
    if not isinstance(notice, str):
        raise CheckpointError(f"{path}: notice is {notice!r}; it must be a string")
    known = {field.name for field in dataclasses.fields(ClipSpec)}
    if unknown := sorted(values.keys() - known):
        raise CheckpointError(f"{path}: unknown defaults {unknown}; known are {sorted(known)} and 'notice'")
    for name in ("video_shift", "audio_shift"):
        if type(values.get(name, 1.0)) not in (int, float):
            raise CheckpointError(f"{path}: {name} is {values[name]!r}; it must be a number")
    clip = dataclasses.replace(STANDARD_CLIP, **values)
    if violations := clip_violations(clip):
        raise CheckpointError(f"{path}: " + "; ".join(v.description for v in violations))
    return ModelInfo(directory.resolve().name, clip, notice)
