from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from h3stream.errors import CheckpointError, ConfigError
from services.checkpoints import video_vae
from services.checkpoints.key_map import stored_shape
from services.checkpoints.source import open_checkpoint
from services.vae.weights import LatentStatistics, load_models
from tests.vae_layouts import (
    LAYOUTS,
    Layout,
    class_config,
    lend_config,
    state,
    statistics,
    write_json,
    write_vae,
    write_weights,
)
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


def load_error(model: Path | None, **paths: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_models(model, torch.float32, **paths)
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
    assert set(models.digests) == {f"video_vae/{VIDEO_WEIGHTS.name}", f"audio_vae/{AUDIO_WEIGHTS.name}"}


def test_what_decoding_does_not_need_is_accounted_for_but_stays_on_the_disk(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for component in ("video", "audio"):
        write_vae(model, component, "diffusers")  # with their encoders
    reads: list[tuple[int, int]] = []

    def recorded(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = os.preadv(fd, buffers, offset)
        reads.append((offset, offset + count))
        return count

    monkeypatch.setattr("services.common.weights.os", SimpleNamespace(preadv=recorded))
    models = load_models(model, torch.float32)
    decoders = ("decoder", "post_quant_conv", "dec_in_proj")
    needed = [
        (tensor.info.start, tensor.info.stop)
        for path in (model / "vae", model / "audio_vae")
        for key, tensor in open_checkpoint(path).tensors.items()
        if key.startswith(decoders)
    ]
    assert sorted(reads) == sorted(needed)
    assert sum(part.num_bytes for part in models.parts) == sum(stop - start for start, stop in needed)


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


@pytest.mark.parametrize("has_index", [False, True])
def test_every_file_of_a_sharded_model_is_read(model: Path, has_index: bool) -> None:
    tensors = load_file(model / VIDEO_WEIGHTS)
    keys = sorted(tensors)
    (model / VIDEO_WEIGHTS).unlink()
    weight_map = {}
    for i, part in enumerate((keys[:10], keys[10:])):
        name = f"diffusion_pytorch_model-0000{i}-of-00002.safetensors"
        save_file({key: tensors[key] for key in part}, model / "vae" / name)
        weight_map |= dict.fromkeys(part, name)
    if has_index:
        write_json(model / "vae/diffusion_pytorch_model.safetensors.index.json", {"weight_map": weight_map})
        save_file(tensors, model / "vae/left_over.safetensors")  # that the index does not name
    models = load_models(model, torch.float32)
    assert torch.equal(models.video.state_dict()[keys[-1]], tensors[keys[-1]])
    assert len(models.digests) == 3


@pytest.mark.parametrize("audio_layout", LAYOUTS)
@pytest.mark.parametrize("video_layout", LAYOUTS)
def test_swapped_vaes_are_named_as_that(tmp_path: Path, video_layout: Layout, audio_layout: Layout) -> None:
    video = write_vae(tmp_path / "a", "video", video_layout)
    audio = write_vae(tmp_path / "b", "audio", audio_layout)
    assert load_error(None, video_path=audio, audio_path=video) == (
        f"the two VAEs are swapped: {audio}, given as the video VAE, is the audio VAE ({audio_layout} layout) and "
        f"{video}, given as the audio VAE, is the video VAE ({video_layout} layout)"
    )


def test_swapped_folders_of_a_model_directory_are_named_as_that(model: Path) -> None:
    (model / "vae").rename(model / "other")
    (model / "audio_vae").rename(model / "vae")
    (model / "other").rename(model / "audio_vae")
    assert load_error(model).startswith(
        f"the two VAEs are swapped: {model / 'vae'}, given as the video VAE, is the audio"
    )


def test_the_same_vae_twice_is_named(model: Path) -> None:
    assert load_error(model, audio_path=model / "vae") == (
        f"{model / 'vae'} is the video VAE (diffusers layout), not the audio VAE"
    )
    assert load_error(model, video_path=model / "audio_vae") == (
        f"{model / 'audio_vae'} is the audio VAE (diffusers layout), not the video VAE"
    )


def test_a_refused_variant_is_named_with_the_reason(model: Path, tmp_path: Path) -> None:
    half = {key: tensor.half() for key, tensor in state("audio", "comfyui").items()}
    path = write_weights(tmp_path / "sound.safetensors", half)
    assert load_error(model, audio_path=path).startswith(f"{path} is a copy of the audio VAE in F16, which is audibly")


def test_a_missing_file_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing does not exist"):
        load_models(model, torch.float32, video_path=tmp_path / "nothing")
    with pytest.raises(ConfigError, match="audio_vae is not set: give --audio-vae PATH"):
        load_models(None, torch.float32, video_path=model / "vae")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_loaded_is_told(model: Path, tmp_path: Path, layout: Layout) -> None:
    models = load_models(
        lend_config(tmp_path / "model"),
        torch.float32,
        video_path=(video := write_vae(tmp_path / "video", "video", layout)),
        audio_path=(audio := write_vae(tmp_path / "audio", "audio", layout)),
    )
    told_video, told_audio = models.parts
    assert (told_video.component, told_video.layout, told_video.source) == ("video_vae", layout, video.name)
    assert (told_audio.component, told_audio.layout, told_audio.source) == ("audio_vae", layout, audio.name)
    # Only what is read counts: the same weights in every layout, but for what is folded.
    read = sum(tensor.numel() for key, tensor in state("video", "diffusers").items() if "encoder" not in key)
    assert told_video.num_parameters == read - state("video", "diffusers")["quant_conv.weight"].numel() - 48
    assert told_audio.data_types == "F32"
    assert len(models.digests) == 2


def test_another_class_is_named(model: Path) -> None:
    edit_config(model / "vae/config.json", _class_name="AutoencoderKLWan")
    message = load_error(model)
    assert "config.json names the class 'AutoencoderKLWan', expected 'AutoencoderKLMiniMaxH3'" in message


def test_weights_of_another_class_are_named(model: Path) -> None:
    edit_config(model / "vae/config.json", _class_name="AutoencoderKLWan")
    save_file({"decoder.conv_in.weight": torch.zeros(1)}, model / VIDEO_WEIGHTS)
    assert load_error(model) == (
        f"{model / 'vae'} is not recognised as any part of the model; expected the video VAE, and its config.json "
        "names the class 'AutoencoderKLWan'"
    )


def test_all_that_is_wrong_is_named_at_once(model: Path) -> None:
    edit_weights(
        model / VIDEO_WEIGHTS,
        {
            "decoder.mask_token": torch.zeros(1),
            "encoder.nothing.weight": torch.zeros(1),
            "decoder.proj_in.bias": torch.zeros(65),
            "decoder.norm_out.bias": None,
        },
    )
    assert load_error(model) == (
        f"{model / 'vae'}, taken for the video VAE in the diffusers layout with the dimensions of "
        f"{model / 'vae/config.json'}: "
        "2 unknown: decoder.mask_token, encoder.nothing.weight; 1 missing: decoder.norm_out.bias; "
        "1 of shape [65], expected [64]: decoder.proj_in.bias"
    )


def test_a_key_in_two_files_is_named(model: Path) -> None:
    state = load_file(model / VIDEO_WEIGHTS)
    save_file({"decoder.proj_in.bias": state["decoder.proj_in.bias"]}, model / "vae/more.safetensors")
    assert "holds 'decoder.proj_in.bias', which" in load_error(model)


def test_a_cut_off_file_is_named(model: Path) -> None:
    data = (model / VIDEO_WEIGHTS).read_bytes()
    (model / VIDEO_WEIGHTS).write_bytes(data[: len(data) // 2])
    message = load_error(model)
    assert message.startswith(f"{model / VIDEO_WEIGHTS}: ")
    assert "the file is cut off" in message


def test_a_configuration_that_is_no_model_is_named(model: Path) -> None:
    edit_config(model / "audio_vae/config.json", decoder_rates=[5, 5, 2, 2, 2, 2, 3])
    assert "audio_vae/config.json does not describe a model" in load_error(model)


@pytest.mark.parametrize(("name", "value"), [("clip_length", 13), ("token_drop", 2)])
def test_another_geometry_is_refused(model: Path, name: str, value: int) -> None:
    edit_config(model / "vae/config.json", **{name: value})
    assert load_error(model) == f"vae: {name} is {value}, expected {17 if name == 'clip_length' else 3}"


# --- latent statistics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "0", [0.0] * 31, [True] * 32, [[0.0]] * 32, [1e300] * 32])
def test_latent_statistics_must_be_finite_numbers(model: Path, value: object) -> None:
    edit_config(model / "audio_vae/config.json", latents_mean=value)
    assert load_error(model) == f"{model / 'audio_vae/config.json'}: latents_mean must be 32 finite numbers"


def test_deviations_must_be_above_zero(model: Path) -> None:
    edit_config(model / "vae/config.json", latents_std=[1.0] * 23 + [0.0])
    assert load_error(model) == f"{model / 'vae/config.json'}: latents_std must be above 0"


def video_statistics(model_directory: Path, audio: Path, video: Path) -> LatentStatistics:
    return load_models(model_directory, torch.float32, video_path=video, audio_path=audio).video_statistics


def test_a_configuration_goes_before_the_rounded_copies_of_a_half_precision_file(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "services.vae.weights")
    exact, audio = statistics("video"), model / "audio_vae"
    half = {key: tensor.half() for key, tensor in state("video", "comfyui").items()}
    file = write_weights(tmp_path / "files/video.safetensors", half)
    lender = lend_config(tmp_path / "lender")

    def found() -> torch.Tensor:
        return torch.tensor(video_statistics(lender, audio, file).mean)

    assert torch.equal(found(), exact["latents_mean"].half().float())
    assert "Norms and residual scales are stored as F16" in caplog.text
    # The model directory's are the same before rounding, so it knows better.
    write_json(lender / "vae/config.json", class_config("video"))
    assert torch.equal(found(), exact["latents_mean"])
    # Those of another model are none of this file's business.
    write_json(lender / "vae/config.json", {**class_config("video"), "latents_mean": [3.0] * 24})
    assert torch.equal(found(), exact["latents_mean"].half().float())
    # But its own configuration must not contradict it.
    own = write_json(file.parent / "config.json", {**class_config("video"), "latents_mean": [3.0] * 24})
    assert load_error(lender, video_path=file, audio_path=audio) == (
        f"{own} has other latent statistics than {file}: one of the two belongs to another model"
    )


def test_statistics_of_a_file_are_checked_too(model: Path, tmp_path: Path) -> None:
    spoilt = {**state("audio", "comfyui"), "latents_std": torch.full((32,), torch.nan)}
    path = write_weights(tmp_path / "sound.safetensors", spoilt)
    assert load_error(model, audio_path=path) == f"{path}: latents_std must be 32 finite numbers"


def test_the_official_files_have_their_statistics_beside_them(model: Path, tmp_path: Path) -> None:
    folder = write_vae(tmp_path, "video", "official")
    lender = lend_config(tmp_path / "lender")
    audio = model / "audio_vae"
    exact = tuple(statistics("video")["latents_mean"].tolist())
    assert video_statistics(lender, audio, folder).mean == exact
    assert video_statistics(lender, audio, folder / "model.safetensors").mean == exact


def test_where_to_get_statistics_is_told(model: Path, tmp_path: Path) -> None:
    folder = write_vae(tmp_path, "video", "official")
    (folder.parent / "config.json").unlink()
    assert load_error(lend_config(tmp_path / "lender"), video_path=folder, audio_path=model / "audio_vae") == (
        f"{folder} holds no latent statistics, and no config.json with latents_mean and latents_std was found; put the "
        "vae/config.json of the published diffusers repository beside the weights, or give --model DIR that has it"
    )


# --- sources of different kinds ----------------------------------------------------------------------------------


def test_files_need_no_model_directory(model: Path, tmp_path: Path) -> None:
    """ComfyUI's two files alone, of a size whose dimensions shapes show: the video decoder has heads of 64."""
    config = json.loads((model / "vae/config.json").read_text())
    config = {**config, "decoder_num_attention_heads": 1, "decoder_attention_head_dim": 64}
    shapes = video_vae.parameter_shapes({**video_vae.PUBLISHED.defaults, **config})
    generator = torch.Generator().manual_seed(5)
    rules = video_vae.key_map("comfyui", {**video_vae.PUBLISHED.defaults, **config})
    tensors = {
        key: torch.randn(stored_shape(rule, shapes), generator=generator).half() / 8
        for key, rule in rules.items()
        if rule.targets
    }
    mean, std = torch.zeros(24).half(), torch.ones(24).half()
    video = write_weights(tmp_path / "video.safetensors", {**tensors, "latents_mean": mean, "latents_std": std})
    audio = write_vae(tmp_path, "audio", "comfyui")
    models = load_models(None, torch.float16, video_path=video, audio_path=audio)
    assert models.video.config.decoder_num_attention_heads == 1
    assert models.video_statistics == LatentStatistics((0.0,) * 24, (1.0,) * 24)
    assert models.audio_statistics.mean == tuple(statistics("audio")["latents_mean"].tolist())
    assert {part.layout for part in models.parts} == {"comfyui"}


def test_an_official_repository_is_a_model_directory(tmp_path: Path) -> None:
    for component in ("video", "audio"):
        write_vae(tmp_path / "FL2VA", component, "official")
    write_json(tmp_path / "FL2VA/video_vae/source/config.json", class_config("video"))
    models = load_models(tmp_path, torch.float32)
    assert [part.layout for part in models.parts] == ["official", "official"]
    assert models.digests.keys() == {"video_vae/model.safetensors", "audio_vae/model.safetensors"}
