"""What stands around the trained model's weights, on files in their place."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from core.request import clip_violations
from orchestrator.model_info import read_model_info
from tools.train_tiny.card import MAX_BYTES, problems, write_card
from tools.train_tiny.grammar import EXAMPLES

REPOSITORY_MODEL = Path(__file__).parents[4] / "models" / "tiny"
PARTS = ("transformer", "vae", "audio_vae", "text_encoder", "tokenizer")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in (*(f"{part}/weights" for part in PARTS), "adapters/raven.safetensors"):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_bytes(name.encode() * 100)
    write_card(tmp_path, 7, {"shape right": "99.5 %", "seams": "1.1"})
    return tmp_path


def test_a_server_takes_the_defaults_the_notice_and_the_examples(model: Path) -> None:
    info = read_model_info(model)
    clip, dense = info.default_clip, info.default_dense_clip
    assert (clip.num_frames, clip.width, clip.height, clip.steps, dense.steps) == (73, 160, 96, 4, 20)
    assert clip_violations(clip) == clip_violations(dense) == []
    assert "tiny" in info.notice
    assert info.examples == EXAMPLES


def test_the_card_says_what_it_is_and_is_not_and_how_it_was_made(model: Path) -> None:
    card = (model / "README.md").read_text()
    for said in ("none of MiniMax's weights", "video autoencoder is random", "--seed 7", EXAMPLES[-1]):
        assert said in card
    assert "| `vae` | AutoencoderKLMiniMaxH3 | 1 | decoder begun" in card
    assert "| shape right | 99.5 % |\n| seams | 1.1 |" in card
    write_card(model, 7, {})
    assert "measured |" not in (model / "README.md").read_text()


def test_the_checksums_are_what_sha256sum_takes(model: Path) -> None:
    assert problems(model) == []
    done = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=model, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count(": OK")) == (0, 9), done.stderr
    lines = (model / "SHA256SUMS").read_text().splitlines()
    assert lines == sorted(lines, key=lambda line: Path(line[66:]))


def test_a_card_that_is_written_again_is_the_same(model: Path) -> None:
    before = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    write_card(model, 7, {"shape right": "99.5 %", "seams": "1.1"})
    assert {path: path.read_bytes() for path in model.rglob("*") if path.is_file()} == before


def test_every_difference_from_the_checksums_is_told(model: Path) -> None:
    (model / "vae" / "weights").write_bytes(b"other")
    (model / "tokenizer" / "weights").unlink()
    (model / "transformer" / "more").touch()
    assert problems(model) == [
        "tokenizer/weights is missing",
        "transformer/more has no checksum",
        "vae/weights is not what its checksum says",
    ]


def test_a_directory_that_has_grown_too_large_is_told(model: Path) -> None:
    with open(model / "vae" / "weights", "wb") as file:
        file.truncate(MAX_BYTES)
    write_card(model, 7, {})
    assert [line.partition(" bytes")[2] for line in problems(model)] == [f"; at most {MAX_BYTES} are allowed"]


@pytest.mark.skipif(
    not REPOSITORY_MODEL.is_dir(), reason="there is no models/tiny; python -m tools.train_tiny makes it"
)
def test_the_repository_s_model_is_whole_small_enough_and_suggests_what_the_grammar_does() -> None:
    assert problems(REPOSITORY_MODEL) == []
    assert read_model_info(REPOSITORY_MODEL).examples == EXAMPLES
