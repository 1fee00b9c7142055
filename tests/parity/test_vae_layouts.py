"""The small VAEs of the H3 vectors through our loader, in every published layout, against the published classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.vae.audio_stream import AudioStream
from services.vae.video_stream import PIXEL_MEAN, PIXEL_STD, VideoStream
from services.vae.weights import VaeModels, load_models
from tests.vae_layouts import LAYOUTS, Layout, lend_config, state, statistics, vector, write_vae, write_weights

CPU = torch.device("cpu")

VIDEO_TOLERANCE = 1e-4
AUDIO_TOLERANCE = 1e-5
"""The vectors' own tolerances, from their README."""


@pytest.fixture(scope="module")
def all_models(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, VaeModels]:
    torch.set_num_threads(1)
    return {layout: load(tmp_path_factory.mktemp(layout), layout) for layout in LAYOUTS}


@pytest.fixture(params=LAYOUTS)
def models(all_models: dict[Layout, VaeModels], request: pytest.FixtureRequest) -> VaeModels:
    return all_models[request.param]


def load(directory: Path, layout: Layout) -> VaeModels:
    return load_models(
        lend_config(directory / "model"),
        torch.float32,
        video_path=write_vae(directory / "video", "video", layout),
        audio_path=write_vae(directory / "audio", "audio", layout),
    )


@torch.inference_mode()
def decode_video(models: VaeModels, decoder_input: torch.Tensor, *, is_tiled: bool) -> torch.Tensor:
    # The tiles of the vectors: config.json, video_vae_tiling.
    models.video.enable_tiling(32, 32, 16, 16)
    models.video.use_tiling = is_tiled
    return models.video.decode(decoder_input).sample


@torch.inference_mode()
def decode_audio(models: VaeModels) -> torch.Tensor:
    return models.audio.decode(vector("audio_vae_cases")["decoder_input"]).sample


@pytest.mark.parametrize("case", ["tiled", "untiled"])
def test_frames_are_those_of_the_reference(models: VaeModels, case: str) -> None:
    expected = vector(f"video_vae_decode_{case}")
    frames = decode_video(models, expected["decoder_input"], is_tiled=case == "tiled")
    error = (frames - expected["output"]).abs().max().item()
    print(f"{case}: max abs {error:.2e}")
    assert error <= VIDEO_TOLERANCE


@torch.inference_mode()
def test_streamed_frames_are_those_of_the_reference(models: VaeModels) -> None:
    case = vector("video_vae_decode_tiled")
    models.video.enable_tiling(32, 32, 16, 16)
    stream = VideoStream(models.video, models.video_statistics, CPU)
    pieces = [frames for piece in case["latents_normalised"].split([5, 5, 2], dim=2) for frames in stream.push(piece)]
    frames = torch.cat([*pieces, stream.flush()], dim=2)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
    error = (frames - (case["output"] * std + mean).clamp(0, 1)).abs().max().item()
    print(f"streamed: max abs {error:.2e}")
    assert error <= VIDEO_TOLERANCE


@torch.inference_mode()
def test_the_waveform_is_that_of_the_reference(models: VaeModels) -> None:
    case = vector("audio_vae_cases")
    whole = (decode_audio(models) - case["waveform"]).abs().max().item()
    stream = AudioStream(models.audio, models.audio_statistics, CPU, total_latents=56)
    latents = case["latents_normalised"].transpose(0, 1)[None]  # [1, 32, 2, 56]
    streamed = torch.cat([stream.push(piece) for piece in latents.split([29, 27], dim=3)], dim=1)
    error = (streamed - case["waveform"][:, 0]).abs().max().item()
    print(f"whole: max abs {whole:.2e}; streamed: {error:.2e}")
    assert max(whole, error) <= AUDIO_TOLERANCE


def test_every_layout_gives_the_same_frames_bit_for_bit(all_models: dict[Layout, VaeModels]) -> None:
    latents = vector("video_vae_decode_untiled")["decoder_input"]
    expected = decode_video(all_models["diffusers"], latents, is_tiled=False)
    for layout in LAYOUTS:
        assert torch.equal(decode_video(all_models[layout], latents, is_tiled=False), expected), layout


def test_the_unfolded_layouts_give_the_same_sound_bit_for_bit(all_models: dict[Layout, VaeModels]) -> None:
    assert torch.equal(decode_audio(all_models["official"]), decode_audio(all_models["diffusers"]))


def test_folded_weight_norm_is_the_same_but_for_rounding(all_models: dict[Layout, VaeModels]) -> None:
    folded, computed = (all_models[layout].audio.state_dict() for layout in ("comfyui", "diffusers"))
    assert folded.keys() == computed.keys()
    ulps = (
        max(((folded[key] - computed[key]).abs() / computed[key].abs().clamp(min=1e-3)).max() for key in folded) * 2**23
    )
    sound = (decode_audio(all_models["comfyui"]) - decode_audio(all_models["diffusers"])).abs().max().item()
    print(f"folded by the file against folded here: weights {ulps:.1f} units in the last place, waveform {sound:.2e}")
    assert ulps <= 3  # norm, division and multiplication in another order
    assert sound <= 1e-6  # float noise of a waveform of magnitude 1


def test_a_half_precision_file_decodes_as_its_rounded_weights_do(tmp_path: Path) -> None:
    """The fp16 file of ComfyUI: the same frames, to the bit, as the diffusers folder with the weights rounded."""
    torch.set_num_threads(1)
    rounded = {key: tensor.half() for key, tensor in state("video", "comfyui").items()}
    file = write_weights(tmp_path / "minimax_h3_video_vae_fp16.safetensors", rounded)
    folder = write_vae(tmp_path / "other", "video", "diffusers")
    widened = {key: tensor.half().float() for key, tensor in state("video", "diffusers").items()}
    write_weights(folder / "diffusion_pytorch_model.safetensors", widened)
    audio = write_vae(tmp_path, "audio", "comfyui")
    model = lend_config(tmp_path / "model")
    for dtype in (torch.float32, torch.float16):
        latents = vector("video_vae_decode_untiled")["decoder_input"].to(dtype)
        given, expected = (load_models(model, dtype, video_path=path, audio_path=audio) for path in (file, folder))
        frames = decode_video(given, latents, is_tiled=False)
        assert torch.equal(frames, decode_video(expected, latents, is_tiled=False))
        assert given.video.decoder.norm_out.weight.dtype == torch.float32
        assert given.video.decoder.proj_in.weight.dtype == dtype
    # Of the two sources of statistics the model directory has none here, so these are the file's rounded ones.
    assert given.video_statistics.mean == tuple(statistics("video")["latents_mean"].half().tolist())
