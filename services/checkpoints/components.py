"""Where the parts of a model lie in a model directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from h3stream.errors import ConfigError

Part = Literal["dit", "video_vae", "audio_vae", "text_encoder", "tokenizer"]

FOLDERS: dict[Part, tuple[str, ...]] = {
    "dit": ("transformer", "FL2VA/transformer"),
    "video_vae": ("vae", "video_vae/source", "FL2VA/video_vae/source"),
    "audio_vae": ("audio_vae", "FL2VA/audio_vae"),
    "text_encoder": ("text_encoder", "FL2VA/text_encoder"),
    "tokenizer": ("tokenizer", "FL2VA/tokenizer"),
}
"""Folders of the published diffusers and official repositories, the first that is there being the one.

Source: docs/reference/h3-model.md §3, §4.6, §5.3, §6.5.
"""


def part_path(model_directory: Path | None, part: Part, override: Path | None = None) -> Path:
    """The file or folder of a part: the one that replaces the model directory's, else the directory's own.

    Raises ConfigError, naming the setting, if there is none.
    """
    setting = part.replace("_", "-")
    if override is not None:
        if not os.path.exists(override):
            raise ConfigError(f"{part}: {override} does not exist")
        return override
    if model_directory is None:
        raise ConfigError(f"{part} is not set: give --{setting} PATH, or --model DIR with all parts")
    found = find_part(model_directory, part)
    if found is None:
        raise ConfigError(f"{part}: {model_directory} has none of {', '.join(FOLDERS[part])}; give --{setting} PATH")
    return found


def find_part(model_directory: Path, part: Part) -> Path | None:
    """The folder of a part in a model directory; None if it has none."""
    paths = (model_directory / folder for folder in FOLDERS[part])
    return next((path for path in paths if os.path.isdir(path)), None)
