"""A whole model looked at before anything is started: full-size files without their bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from h3stream.errors import CheckpointError
from services.checkpoints.adapter_registry import read_registry
from services.checkpoints.components import Part
from services.checkpoints.model_files import check_model
from services.common.config import AdapterSource
from tests.weight_files import published, write_sparse

FILES: dict[Part, tuple[str, str]] = {
    "dit": ("dit.comfy_bf16", "minimax_h3_fl2va_bf16.safetensors"),
    "video_vae": ("video_vae.comfy_fp16", "minimax_h3_video_vae_fp16.safetensors"),
    "audio_vae": ("audio_vae.comfy_fp32", "minimax_h3_audio_vae_fp32.safetensors"),
    "text_encoder": ("text_encoder.comfy_nvfp4_awq", "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors"),
}
"""ComfyUI's files: key table and name."""


@pytest.fixture
def parts(tmp_path: Path) -> dict[Part, Path | None]:
    written: dict[Part, Path | None] = {"tokenizer": tmp_path / "tokenizer"}
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    for part, (table, name) in FILES.items():
        written[part] = write_sparse(tmp_path / name, published(table))
    return written


def check(parts: dict[Part, Path | None], *adapters: AdapterSource) -> None:
    check_model(None, parts, "auto", read_registry(adapters, None), allow_partial_adapters=False)


def test_the_published_files_are_in_order(parts: dict[Part, Path | None]) -> None:
    check(parts)


def test_everything_that_is_wrong_with_all_files_is_told_at_once(
    parts: dict[Part, Path | None], tmp_path: Path
) -> None:
    tensors = published("dit.comfy_bf16")
    del tensors["blocks.7.norm1.weight"]
    parts["dit"] = write_sparse(tmp_path / "minimax_h3_cut.safetensors", tensors)
    parts["video_vae"], parts["audio_vae"] = parts["audio_vae"], parts["video_vae"]
    parts["text_encoder"] = write_sparse(tmp_path / "something.safetensors", {"a": ((2, 2), "F32")})
    with pytest.raises(CheckpointError) as caught:
        check(parts)
    head, dit, vaes, text = str(caught.value).splitlines()
    assert head == "3 things are wrong with the model's files:"
    assert "minimax_h3_cut.safetensors" in dit
    assert "1 missing: blocks.7.norm1.weight" in dit
    assert vaes.startswith("- the two VAEs are swapped")
    assert "something.safetensors is not recognised" in text


def test_an_adapter_that_does_not_fit_the_dit_is_told_with_its_counts(
    parts: dict[Part, Path | None], tmp_path: Path
) -> None:
    tensors = {
        f"diffusion_model.blocks.{block}.mlp.fc2.lora_{side}.weight": (shape, "F32")
        for block in (49, 50)  # the DiT has blocks 0 to 49
        for side, shape in (("A", (4, 14336)), ("B", (5376, 4)))
    }
    source = AdapterSource("deep", write_sparse(tmp_path / "deep.safetensors", tensors))
    with pytest.raises(CheckpointError, match=r"deep\.safetensors does not fit the DiT: 1 of 2 modules match"):
        check(parts, source)
    headers = read_registry([source], None)
    check_model(None, parts, "auto", headers, allow_partial_adapters=True)


def test_a_layout_that_the_dit_cannot_have_is_refused(parts: dict[Part, Path | None]) -> None:
    with pytest.raises(CheckpointError, match="diffusers"):
        check_model(None, parts, "diffusers", (), allow_partial_adapters=False)


@pytest.mark.parametrize(
    ("text", "told"), [(None, "holds no vocabulary"), ('{"model": ', "tokenizer.json is not valid JSON")]
)
def test_a_folder_that_is_no_tokenizer_is_told_before_a_worker_loads_it(
    parts: dict[Part, Path | None], tmp_path: Path, text: str | None, told: str
) -> None:
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(CheckpointError, match=f"{path.parent} is no tokenizer: .*{told}"):
        check(parts)
