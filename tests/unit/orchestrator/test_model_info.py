from __future__ import annotations

import json
from pathlib import Path

import pytest

from h3stream.errors import CheckpointError
from orchestrator.model_info import COMPONENTS, STANDARD_CLIP, read_model_info


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in COMPONENTS:
        (tmp_path / name).mkdir()
    return tmp_path


def write(directory: Path, values: object) -> None:
    (directory / "generation_config.json").write_text(json.dumps(values))


def test_a_published_model_has_the_standard_defaults(directory: Path) -> None:
    info = read_model_info(directory)
    assert (info.default_clip, info.notice) == (STANDARD_CLIP, "")


def test_a_model_may_state_its_own_defaults_and_a_notice(directory: Path) -> None:
    write(directory, {"num_frames": 39, "width": 256, "height": 160, "notice": "noise"})
    info = read_model_info(directory)
    assert (info.default_clip.num_frames, info.default_clip.width, info.default_clip.steps) == (39, 256, 4)
    assert info.notice == "noise"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"frames": 39}, "unknown defaults \\['frames'\\]"),
        ({"num_frames": 40}, "40"),
        ({"width": 100}, "100"),
        ({"video_shift": "x"}, "video_shift is 'x'; it must be a number"),
        ({"audio_shift": None}, "audio_shift is None; it must be a number"),
        ({"notice": 5}, "notice is 5; it must be a string"),
        ([], "is not a JSON object"),
        (5, "is not a JSON object"),
    ],
)
def test_a_wrong_default_is_named(directory: Path, values: object, message: str) -> None:
    write(directory, values)
    with pytest.raises(CheckpointError, match=message):
        read_model_info(directory)


def test_missing_components_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    with pytest.raises(CheckpointError, match="it lacks vae, audio_vae, text_encoder, tokenizer"):
        read_model_info(tmp_path)


def test_a_file_that_cannot_be_read_is_named(directory: Path) -> None:
    (directory / "generation_config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read: Is a directory"):
        read_model_info(directory)
