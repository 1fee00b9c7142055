"""Every published file is one part of the model and no other, whatever it is called; other models are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from h3stream.errors import CheckpointError
from services.checkpoints.identify import PARTS, expect, identify
from services.checkpoints.layout import Component
from services.checkpoints.source import open_checkpoint
from tests.weight_files import TABLES, published, write_sparse

SINGLE_FILES: dict[str, tuple[Component, str]] = {
    "dit.comfy_bf16": ("dit", "comfyui"),
    "dit.diffusers": ("dit", "diffusers"),
    "video_vae.comfy_fp16": ("video_vae", "comfyui"),
    "video_vae.official": ("video_vae", "official"),
    "video_vae.diffusers": ("video_vae", "diffusers"),
    "audio_vae.comfy_fp32": ("audio_vae", "comfyui"),
    "audio_vae.diffusers_and_official": ("audio_vae", "diffusers"),
    "text_encoder.comfy_bf16": ("text_encoder", "comfyui"),
    "text_encoder.comfy_nvfp4_awq": ("text_encoder", "comfyui"),
    "text_encoder.transformers": ("text_encoder", "transformers"),
}


@pytest.mark.parametrize("name", SINGLE_FILES)
def test_a_published_file_is_one_part_and_no_other(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_sparse(tmp_path / "renamed.safetensors", published(name)))
    found = identify(checkpoint)
    assert found is not None
    assert (found.component, found.layout) == SINGLE_FILES[name]
    assert found.refusal is None
    assert [component for component, part in PARTS.items() if part.recognise(checkpoint)] == [found.component]
    assert PARTS[found.component].file_problems(checkpoint, found) == []


def test_an_adapter_is_an_adapter_and_nothing_else() -> None:
    checkpoint = open_checkpoint(TABLES.parent / "raven" / "lora_raven.safetensors")
    assert [component for component, part in PARTS.items() if part.recognise(checkpoint)] == ["adapter"]


@pytest.mark.parametrize("name", SINGLE_FILES)
def test_a_file_behind_a_prefix_that_nobody_knows_is_not_recognised(name: str, tmp_path: Path) -> None:
    tensors = {f"first_stage.wrapped.{key}": value for key, value in published(name).items()}
    assert identify(open_checkpoint(write_sparse(tmp_path / "x.safetensors", tensors))) is None


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"weight": ((2,), "F32")},
        {"model.diffusion_model.input_blocks.0.0.weight": ((4, 4, 3, 3), "F16")},
        {"double_blocks.0.img_attn.qkv.weight": ((12, 4), "BF16")},
        {"blocks.0.self_attn.q.weight": ((4, 4), "BF16"), "patch_embedding.weight": ((4, 16, 1, 2, 2), "BF16")},
        {"decoder.conv_in.weight": ((4, 4, 3, 3), "F32"), "encoder.conv_in.weight": ((4, 4, 3, 3), "F32")},
        {"text_model.encoder.layers.0.self_attn.q_proj.weight": ((4, 4), "F16")},
        {"\x1b[31m": ((1,), "U8")},
    ],
    ids=["nothing", "anything", "a UNet", "FLUX", "Wan", "an image VAE", "CLIP", "a strange name"],
)
def test_other_models_are_not_recognised(tensors: dict[str, tuple[tuple[int, ...], str]], tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "x.safetensors", tensors)
    assert identify(open_checkpoint(path)) is None
    with pytest.raises(CheckpointError, match="not recognised as any part of the model; expected the video VAE"):
        expect(path, "video_vae")


def test_what_is_expected_is_opened(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "x.safetensors", published("audio_vae.comfy_fp32"))
    checkpoint, recognition = expect(path, "audio_vae")
    assert checkpoint.path == path
    assert recognition == identify(checkpoint)


def test_another_part_is_named_as_exactly_that(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "x.safetensors", published("audio_vae.comfy_fp32"))
    with pytest.raises(CheckpointError) as caught:
        expect(path, "video_vae")
    assert str(caught.value) == f"{path} is the audio VAE (comfyui layout), not the video VAE"


def test_a_refused_variant_is_refused_with_its_reason(tmp_path: Path) -> None:
    tensors = {key: (shape, "F8_E4M3") for key, (shape, _) in published("text_encoder.comfy_bf16").items()}
    path = write_sparse(tmp_path / "x.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"x\.safetensors has FP8 weights"):
        expect(path, "text_encoder")
    with pytest.raises(CheckpointError, match="is the text encoder"):
        expect(path, "dit")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        expect(tmp_path / "x.safetensors", "dit")
