from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from h3stream.errors import CheckpointError
from services.vae.weights import load_models
from tests.vae_model import audio_case, video_case

VIDEO_WEIGHTS = Path("vae/diffusion_pytorch_model.safetensors")
AUDIO_WEIGHTS = Path("audio_vae/diffusion_pytorch_model.safetensors")


@pytest.fixture
def model(model_directory: Path, tmp_path: Path) -> Path:
    """A model directory of its own to spoil."""
    return shutil.copytree(model_directory, tmp_path / "model")


def edit_weights(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Adds, replaces or (None) removes tensors of a weight file."""
    state = {**load_file(path), **change}
    save_file({key: tensor for key, tensor in state.items() if tensor is not None}, path)


def edit_config(path: Path, **change: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def load_error(model: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_models(model, torch.float32)
    return str(caught.value)


def test_decoders_load_without_their_encoders(model: Path) -> None:
    models = load_models(model, torch.float32)
    stored = load_file(model / VIDEO_WEIGHTS)
    assert {k: v.shape for k, v in models.video.state_dict().items()} == {k: v.shape for k, v in stored.items()}
    assert torch.equal(models.video.state_dict()["decoder.proj_in.weight"], stored["decoder.proj_in.weight"])
    for vae in (models.video, models.audio):
        assert not hasattr(vae, "encoder")
        assert {t.device.type for t in (*vae.parameters(), *vae.buffers())} == {"cpu"}
        assert not any(p.requires_grad for p in vae.parameters())
    assert models.video_statistics.mean == pytest.approx(video_case()["latents_mean"].tolist())
    assert models.audio_statistics.std == pytest.approx(audio_case()["latents_std"].tolist())
    assert set(models.digests) == {str(VIDEO_WEIGHTS), str(AUDIO_WEIGHTS)}


def test_encoder_weights_are_accounted_for_but_stay_in_the_file(model: Path) -> None:
    edit_weights(model / VIDEO_WEIGHTS, {"quant_conv.weight": torch.ones(48, 48, 1, 1, 1)})
    assert "quant_conv.weight" not in load_models(model, torch.float32).video.state_dict()


def test_half_precision_leaves_the_published_float32_modules_alone(model: Path) -> None:
    state = load_models(model, torch.float16).video.state_dict()
    pinned = {key for key, tensor in state.items() if tensor.dtype == torch.float32}
    assert pinned == {
        *(f"decoder.transformer_blocks.{i}.{name}" for i in (0, 1) for name in ("norm1.weight", "norm2.weight")),
        *(f"decoder.transformer_blocks.{i}.{name}" for i in (0, 1) for name in ("scale1", "scale2")),
        "decoder.norm_out.weight",
        "decoder.norm_out.bias",
    }
    assert {tensor.dtype for key, tensor in state.items() if key not in pinned} == {torch.float16}


def test_sound_is_float32_and_its_weight_norm_is_folded(model: Path) -> None:
    models = load_models(model, torch.float16)
    state = models.audio.state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert not [key for key in state if key.endswith(("weight_g", "weight_v"))]
    stored = load_file(model / AUDIO_WEIGHTS)
    v, g = (stored[f"decoder.conv_pre.weight_{part}"] for part in "vg")
    expected = g * v / v.flatten(1).norm(dim=1)[:, None, None]
    torch.testing.assert_close(state["decoder.conv_pre.weight"], expected, rtol=1e-6, atol=1e-8)


def test_every_file_of_a_sharded_model_is_read(model: Path) -> None:
    state = load_file(model / VIDEO_WEIGHTS)
    keys = sorted(state)
    (model / VIDEO_WEIGHTS).unlink()
    for i, part in enumerate((keys[:10], keys[10:])):
        save_file(
            {key: state[key] for key in part}, model / f"vae/diffusion_pytorch_model-0000{i}-of-00002.safetensors"
        )
    assert torch.equal(load_models(model, torch.float32).video.state_dict()[keys[-1]], state[keys[-1]])


def test_swapped_vaes_are_named_as_that(model: Path) -> None:
    (model / "vae").rename(model / "other")
    (model / "audio_vae").rename(model / "vae")
    (model / "other").rename(model / "audio_vae")
    assert load_error(model) == (
        "the two VAEs are swapped: vae/ holds the audio VAE and audio_vae/ holds the video VAE"
    )


def test_another_class_is_named(model: Path) -> None:
    edit_config(model / "vae/config.json", _class_name="AutoencoderKLWan")
    assert "vae/config.json names the class 'AutoencoderKLWan', expected 'AutoencoderKLMiniMaxH3'" in load_error(model)


def test_an_unknown_key_is_named(model: Path) -> None:
    edit_weights(model / VIDEO_WEIGHTS, {"decoder.mask_token": torch.zeros(1)})
    assert "'decoder.mask_token'" in load_error(model)


def test_an_unknown_key_of_an_unused_module_is_named_too(model: Path) -> None:
    edit_weights(model / VIDEO_WEIGHTS, {"encoder.nothing.weight": torch.zeros(1)})
    assert "'encoder.nothing.weight'" in load_error(model)


def test_a_missing_key_is_named(model: Path) -> None:
    edit_weights(model / AUDIO_WEIGHTS, {"dec_in_proj.bias": None})
    assert "audio_vae lacks 1 weights, the first is 'dec_in_proj.bias'" in load_error(model)


def test_a_wrong_shape_is_named(model: Path) -> None:
    edit_weights(model / VIDEO_WEIGHTS, {"decoder.proj_in.bias": torch.zeros(65)})
    message = load_error(model)
    assert "'decoder.proj_in.bias' has shape [65]" in message
    assert "config.json asks for [64]" in message


def test_a_key_in_two_files_is_named(model: Path) -> None:
    state = load_file(model / VIDEO_WEIGHTS)
    save_file({"decoder.proj_in.bias": state["decoder.proj_in.bias"]}, model / "vae/more.safetensors")
    assert "'decoder.proj_in.bias' is in" in load_error(model)


def test_a_cut_off_file_is_named(model: Path) -> None:
    data = (model / VIDEO_WEIGHTS).read_bytes()
    (model / VIDEO_WEIGHTS).write_bytes(data[: len(data) // 2])
    assert f"{model / VIDEO_WEIGHTS} cannot be read" in load_error(model)


@pytest.mark.parametrize("value", [None, [0.0] * 31, [float("inf")] * 32])
def test_latent_statistics_must_be_there(model: Path, value: object) -> None:
    edit_config(model / "audio_vae/config.json", latents_mean=value)
    assert "latents_mean must be 32 finite numbers" in load_error(model)


def test_a_configuration_that_is_no_model_is_named(model: Path) -> None:
    edit_config(model / "audio_vae/config.json", decoder_rates=[5, 5, 2, 2, 2, 2, 3])
    assert "audio_vae/config.json does not describe a model" in load_error(model)


def test_another_geometry_is_refused(model: Path) -> None:
    edit_config(model / "vae/config.json", clip_length=13)
    assert load_error(model) == "vae: clip_length is 13, expected 17"
