"""Where the parts of a model are looked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from h3stream.errors import ConfigError
from services.checkpoints.components import FOLDERS, Part, part_path


@pytest.mark.parametrize(
    ("part", "folder"), [(part, folder) for part, folders in FOLDERS.items() for folder in folders]
)
def test_a_part_is_found_in_every_published_folder(part: Part, folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir(parents=True)
    if part == "tokenizer":
        (tmp_path / folder / "tokenizer_config.json").write_text("{}")
    assert part_path(tmp_path, part) == tmp_path / folder


def test_the_first_folder_that_is_there_is_the_one(tmp_path: Path) -> None:
    (tmp_path / "FL2VA" / "transformer").mkdir(parents=True)
    assert part_path(tmp_path, "dit") == tmp_path / "FL2VA/transformer"
    (tmp_path / "transformer").mkdir()
    assert part_path(tmp_path, "dit") == tmp_path / "transformer"


def test_weights_of_the_text_encoder_alone_are_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "text_encoder").mkdir()
    with pytest.raises(ConfigError, match="give --tokenizer PATH"):
        part_path(tmp_path, "tokenizer")


def test_a_path_of_its_own_replaces_the_directorys(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"")
    assert part_path(tmp_path, "video_vae", other) == other
    assert part_path(None, "video_vae", other) == other


@pytest.mark.parametrize("name", ["absent", "x" * 5000, "nul\0"])
def test_a_path_that_is_not_there_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^dit: .* does not exist"):
        part_path(None, "dit", tmp_path / name)
    with pytest.raises(ConfigError, match=re.escape("has none of transformer, FL2VA/transformer; give --dit PATH")):
        part_path(tmp_path / name, "dit")


def test_a_part_that_nobody_named_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="audio_vae is not set: give --audio-vae PATH, or --model DIR"):
        part_path(None, "audio_vae")
