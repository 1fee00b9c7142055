from __future__ import annotations

from pathlib import Path

import pytest

from h3stream.job import ModelPart
from services.checkpoints.header import read_header, sampled_digest
from services.checkpoints.source import open_checkpoint
from services.common.parts import model_part, weight_digests
from tests.weight_files import write_sparse

TENSORS = {"a": ((3, 4), "F32"), "b": ((50,), "BF16"), "unread": ((100,), "F16")}


def test_a_part_is_told_by_what_is_read_of_it(tmp_path: Path) -> None:
    write_sparse(tmp_path / "vae" / "model.safetensors", TENSORS)
    checkpoint = open_checkpoint(tmp_path / "vae")
    read = [checkpoint.tensors[key] for key in ("a", "b")]
    expected = ModelPart("video_vae", "official", "vae", "BF16, F32", num_parameters=62, num_bytes=148)
    assert model_part("video_vae", "official", checkpoint, iter(read)) == expected


def test_digests_are_named_by_component_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("1", "2"):
        write_sparse(tmp_path / "transformer" / f"{name}.safetensors", {name: ((4,), "F32")})
    expected = {
        f"dit/{path.name}": sampled_digest(read_header(path)) for path in sorted((tmp_path / "transformer").iterdir())
    }
    assert weight_digests("dit", open_checkpoint(tmp_path / "transformer")) == expected
    assert len(set(expected.values())) == 2
    # However the same files are named, callers see the same names and never a path of the server's.
    monkeypatch.chdir(tmp_path / "transformer")
    assert weight_digests("dit", open_checkpoint(Path())) == expected
    assert model_part("dit", "diffusers", open_checkpoint(Path()), ()).source == "transformer"
    assert weight_digests("dit", open_checkpoint(Path("1.safetensors"))).keys() == {"dit/1.safetensors"}
