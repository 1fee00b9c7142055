from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from h3stream.errors import CheckpointError
from services.common.checkpoint import header_digest, read_config, weight_files


def test_a_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden": 96, "name": "häx"}', encoding="utf-8")
    assert read_config(tmp_path) == {"hidden": 96, "name": "häx"}


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"{", "is not valid JSON"), (b"\xff\xfe", "is not valid JSON"), (b"[1]", "is not a JSON object")],
)
def test_a_damaged_config_is_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json {complaint}"):
        read_config(tmp_path)


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: Is a directory"):
        read_config(tmp_path)


def test_only_safetensors_are_listed_in_order(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "a.bin", "model.pt"):
        (tmp_path / name).touch()
    assert [path.name for path in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match="holds no safetensors file"):
        weight_files(tmp_path)


def test_the_digest_is_of_header_and_size(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(3)}, path)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    expected = hashlib.sha256(content[: 8 + length] + struct.pack("<Q", len(content))).hexdigest()
    assert header_digest(path) == expected


def test_another_layout_has_another_digest(tmp_path: Path) -> None:
    digests = set()
    for i, tensors in enumerate([{"x": torch.zeros(3)}, {"y": torch.zeros(3)}, {"x": torch.zeros(4)}]):
        save_file(tensors, tmp_path / f"{i}.safetensors")
        digests.add(header_digest(tmp_path / f"{i}.safetensors"))
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is not a safetensors file: it is 0 bytes long"),
        (b"1234567", "is not a safetensors file: it is 7 bytes long"),
        (struct.pack("<Q", 100) + b"{}", "is cut off or not a safetensors file"),
        (b"PK\x03\x04 a zip of pickles", "is cut off or not a safetensors file"),
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint):
        header_digest(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        header_digest(tmp_path / "x.safetensors")
