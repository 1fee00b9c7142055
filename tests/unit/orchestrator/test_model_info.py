from __future__ import annotations

import json
from pathlib import Path

import pytest

from h3stream.errors import CheckpointError, ConfigError
from orchestrator.model_info import STANDARD_CLIP, read_examples, read_model_info
from services.checkpoints.components import FOLDERS, Part


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for folders in FOLDERS.values():
        (tmp_path / folders[0]).mkdir()
    return tmp_path


def write(directory: Path, values: object) -> None:
    (directory / "generation_config.json").write_text(json.dumps(values))


def test_a_published_model_has_the_standard_defaults(directory: Path) -> None:
    info = read_model_info(directory)
    assert (info.default_clip, info.notice) == (STANDARD_CLIP, "")
    dense = info.default_dense_clip
    assert (dense.mode, dense.steps, dense.video_shift, dense.audio_shift) == ("dense", 50, 12.0, 3.0)
    assert (dense.sink, dense.window, dense.num_frames, dense.width) == (0, None, 124, 1344)


def test_a_model_may_state_its_own_defaults_and_a_notice(directory: Path) -> None:
    write(directory, {"num_frames": 39, "width": 256, "height": 160, "notice": "noise"})
    info = read_model_info(directory)
    assert (info.default_clip.num_frames, info.default_clip.width, info.default_clip.steps) == (39, 256, 4)
    assert info.notice == "noise"


def test_a_model_may_suggest_examples(directory: Path) -> None:
    assert read_model_info(directory).examples == read_examples(directory) == ()
    write(directory, {"examples": ["A star.", "A box."]})
    assert read_model_info(directory).examples == read_examples(directory) == ("A star.", "A box.")


def test_a_model_may_state_the_forwards_of_a_dense_clip_apart(directory: Path) -> None:
    write(directory, {"num_frames": 39, "steps": 2, "dense_steps": 7, "video_shift": 6, "seed": 3})
    clip, dense = read_model_info(directory).default_clip, read_model_info(directory).default_dense_clip
    assert (clip.steps, dense.steps) == (2, 7)
    assert [(c.num_frames, c.video_shift, c.seed) for c in (clip, dense)] == [(39, 6, 3)] * 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dense_steps": 0}, "dense_steps is 0; it must be from 1 to 100; the nearest valid value is 1"),
        ({"dense_steps": "x"}, "dense_steps is 'x'; an integer is needed"),
        ({"mode": "dense"}, "unknown defaults \\['mode'\\]"),
        ({"adapters": []}, "unknown defaults \\['adapters'\\]"),
        ({"frames": 39}, "unknown defaults \\['frames'\\]"),
        ({"num_frames": 40}, "40"),
        ({"width": 100}, "100"),
        ({"video_shift": "x"}, "video_shift is 'x'; it must be a number"),
        ({"audio_shift": None}, "audio_shift is None; it must be a number"),
        ({"notice": 5}, "notice is 5; it must be a string"),
        ({"examples": "a fox"}, "examples is 'a fox'; it must be a list of strings"),
        ({"examples": ["a fox", 5]}, r"examples is \['a fox', 5\]; it must be a list of strings"),
        ({"examples": ["a fox", " "]}, "example 2: the prompt is 1 characters of white space"),
        ({"examples": ["a fox"] * 33}, "there are 33 examples; at most 32 are told"),
        ([], "is not a JSON object"),
        (5, "is not a JSON object"),
    ],
)
def test_a_wrong_default_is_named(directory: Path, values: object, message: str) -> None:
    write(directory, values)
    with pytest.raises(CheckpointError, match=message):
        read_model_info(directory)


def test_missing_parts_are_all_named_with_their_flags(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    with pytest.raises(ConfigError) as refused:
        read_model_info(tmp_path)
    for flag in ("--video-vae", "--audio-vae", "--text-encoder", "--tokenizer"):
        assert f"give {flag} PATH" in str(refused.value)
    assert "--dit" not in str(refused.value)


def test_a_part_of_its_own_makes_up_for_a_missing_one(directory: Path) -> None:
    (directory / "transformer").rmdir()
    with pytest.raises(ConfigError, match="give --dit PATH"):
        read_model_info(directory)
    dit = directory / "minimax_h3_fl2va_bf16.safetensors"
    dit.touch()
    assert read_model_info(directory, {"dit": dit}).name == directory.name


def test_without_a_directory_the_model_is_called_after_its_dit_and_has_the_standard_defaults(tmp_path: Path) -> None:
    (tmp_path / "part").touch()
    parts: dict[Part, Path | None] = dict.fromkeys(FOLDERS, tmp_path / "part")
    (tmp_path / "minimax_h3_fl2va_bf16.safetensors").touch()
    (tmp_path / "h3.v2").mkdir()
    for file, name in (("minimax_h3_fl2va_bf16.safetensors", "minimax_h3_fl2va_bf16"), ("h3.v2", "h3.v2")):
        info = read_model_info(None, {**parts, "dit": tmp_path / file})
        assert (info.name, info.default_clip) == (name, STANDARD_CLIP)


def test_a_file_that_cannot_be_read_is_named(directory: Path) -> None:
    (directory / "generation_config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read: Is a directory"):
        read_model_info(directory)
