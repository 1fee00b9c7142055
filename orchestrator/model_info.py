"""What the orchestrator reads of a model's files: its name and the defaults it was made for. Never a weight."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.request import clip_violations, prompt_violations
from h3stream.errors import CheckpointError, ConfigError
from h3stream.request import ClipSpec
from services.checkpoints.components import FOLDERS, Part, part_path

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

DENSE_STEPS = 50
"""Forwards of a dense clip: the libraries' default of 50, counted in forwards as sglang and vLLM do.

Source: docs/reference/h3-model.md §7, §9.
"""
GENERATION_CONFIG = "generation_config.json"
MAX_EXAMPLES = 32
"""A server tells them all in one message."""
_DEFAULTS = frozenset(field.name for field in dataclasses.fields(ClipSpec)) - {"mode", "adapters"} | {"dense_steps"}
"""Keys of `generation_config.json`. The mode and the adapters are for each request to say."""


@dataclass(frozen=True)
class ModelInfo:
    """A model as callers are told of it."""

    name: str
    """Name of its directory, or of its DiT where it has none."""
    default_clip: ClipSpec
    """Values that the omitted fields of a streaming request take."""
    default_dense_clip: ClipSpec
    """Values that the omitted fields of a dense request take."""
    notice: str
    """What the model's maker wants every caller to know; empty for nothing."""
    examples: tuple[str, ...] = ()
    """Prompts that the model's maker suggests, to try it with."""


def read_model_info(directory: Path | None, parts: Mapping[Part, Path | None] | None = None) -> ModelInfo:
    """Reads a model directory's `generation_config.json`, if there is one, over the standard defaults.

    parts: what is in place of the directory's own parts.  directory: None where `parts` has all of them.
    Raises ConfigError if a part is missing, CheckpointError if the file cannot be read or a default is not valid.
    """
    parts = parts or {}
    _check_parts(directory, parts)
    path = None if directory is None else directory / GENERATION_CONFIG
    values = _read(path) if path is not None and path.exists() else {}
    notice, examples = values.pop("notice", ""), tuple(values.pop("examples", ()))
    dense_steps = values.pop("dense_steps", DENSE_STEPS)
    clip = dataclasses.replace(STANDARD_CLIP, **values)
    if violations := clip_violations(clip):
        raise CheckpointError(f"{path}: " + "; ".join(v.description for v in violations))
    dense = dense_clip(clip, dense_steps)
    for violation in clip_violations(dense):  # of its steps: the rest is the streaming clip's
        raise CheckpointError(f"{path}: dense_{violation.description}")
    return ModelInfo(_name(directory, parts), clip, dense, notice, examples)


def read_examples(directory: Path) -> tuple[str, ...]:
    """The prompts that a model directory's `generation_config.json` suggests, if any.

    Raises CheckpointError if the file cannot be read.
    """
    path = directory / GENERATION_CONFIG
    return tuple(_read(path).get("examples", ())) if path.exists() else ()


def dense_clip(clip: ClipSpec, steps: int) -> ClipSpec:
    """The dense clip of the size, the shifts and the seed of a streaming one."""
    return dataclasses.replace(clip, mode="dense", steps=steps, sink=0, window=None, kv_storage="gpu")


def _check_parts(directory: Path | None, parts: Mapping[Part, Path | None]) -> None:
    """Raises ConfigError that names every part that is missing."""
    missing = []
    for part in FOLDERS:
        try:
            part_path(directory, part, parts.get(part))
        except ConfigError as error:
            missing.append(str(error))
    if missing:
        raise ConfigError("; ".join(missing))


def _read(path: Path) -> dict[str, Any]:
    """The defaults in a file, each of a type that a clip can be checked with."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    if unknown := sorted(values.keys() - _DEFAULTS - {"notice", "examples"}):
        known = f"{sorted(_DEFAULTS)}, 'notice' and 'examples'"
        raise CheckpointError(f"{path}: unknown defaults {unknown}; known are {known}")
    if not isinstance(notice := values.get("notice", ""), str):
        raise CheckpointError(f"{path}: notice is {notice!r}; it must be a string")
    _check_examples(path, values.get("examples", []))
    for name in ("video_shift", "audio_shift"):
        if type(values.get(name, 1.0)) not in (int, float):
            raise CheckpointError(f"{path}: {name} is {values[name]!r}; it must be a number")
    return values


def _check_examples(path: Path, examples: object) -> None:
    """Raises CheckpointError for anything but a list of prompts that can be asked for."""
    if not isinstance(examples, list) or not all(isinstance(example, str) for example in examples):
        raise CheckpointError(f"{path}: examples is {examples!r:.80}; it must be a list of strings")
    if len(examples) > MAX_EXAMPLES:
        raise CheckpointError(f"{path}: there are {len(examples)} examples; at most {MAX_EXAMPLES} are told")
    for number, example in enumerate(examples, start=1):
        for violation in prompt_violations(example):
            raise CheckpointError(f"{path}: example {number}: {violation.description}")


def _name(directory: Path | None, parts: Mapping[Part, Path | None]) -> str:
    if directory is not None:
        return directory.resolve().name
    dit = part_path(None, "dit", parts.get("dit"))
    return dit.name if dit.is_dir() else dit.stem
