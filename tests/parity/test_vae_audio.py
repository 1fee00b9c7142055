"""The incremental audio decoder against RAVEN's waveform and against the whole-clip decode of the published class."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from core.clock import AUDIO_MARGIN_LATENTS
from core.geometry import chunk_table, num_audio_latents
from services.vae.audio_stream import AudioStream, SoundStatistics
from services.vae.weights import VaeModels, load_models
from tests.vae_model import RAVEN, audio_case, write_model_directory

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> VaeModels:
    torch.set_num_threads(1)
    return load_models(write_model_directory(tmp_path_factory.mktemp("model")), torch.float32)


def make_stream(models: VaeModels, total: int) -> AudioStream:
    return AudioStream(models.audio, models.audio_statistics, CPU, total)


@torch.inference_mode()
def whole_decode(models: VaeModels, latents: torch.Tensor) -> torch.Tensor:
    """The published class on the whole clip: `[2, S]`."""
    mean, std = (torch.tensor(v).view(1, -1, 1) for v in (models.audio_statistics.mean, models.audio_statistics.std))
    return models.audio.decode(latents[0].transpose(0, 1) * std + mean).sample[:, 0]


def test_the_waveform_is_that_of_the_reference(models: VaeModels) -> None:
    case = audio_case()
    stream = make_stream(models, 94)
    pieces = [stream.push(piece) for piece in case["latents"].split([29, 28, 28, 9], dim=3)]
    # Each push gives what its margin allows; the last one gives the rest.
    assert [piece.shape[1] // 800 for piece in pieces] == [12, 28, 28, 26]
    waveform = torch.cat(pieces, dim=1)
    assert waveform.shape == case["waveform"].shape[1:]
    error = (waveform - case["waveform"][0]).abs().max().item()
    whole = (waveform - whole_decode(models, case["latents"])).abs().max().item()
    print(f"waveform against RAVEN: max abs {error:.2e}; against the whole clip: {whole:.2e}")
    assert error <= 2e-5  # the vectors' own tolerance
    assert whole <= 2.5e-6  # what the margin of 17 was measured for
    assert stream.statistics.divisor == pytest.approx(float(case["divisor"]), abs=1e-6)


def test_without_its_margin_the_waveform_would_be_wrong(models: VaeModels) -> None:
    """Guards the test above: these vectors do show a margin that is too small."""
    latents = audio_case()["latents"]
    whole = whole_decode(models, latents)
    bare = torch.cat([whole_decode(models, piece) for piece in latents.split([29, 28, 28, 9], dim=3)], dim=1)
    assert (bare - whole).abs().max() > 0.1


@pytest.mark.parametrize("num_frames", [22, 39, 73])
def test_clips_of_every_cadence_equal_their_whole_decode(models: VaeModels, num_frames: int) -> None:
    total = num_audio_latents(num_frames)
    latents = torch.randn(1, 32, 2, total, generator=torch.Generator().manual_seed(num_frames))
    stream = make_stream(models, total)
    pieces = [stream.push(latents[..., c.audio_start : c.audio_stop]) for c in chunk_table(num_frames)]
    waveform = torch.cat(pieces, dim=1)
    whole = whole_decode(models, latents)
    assert waveform.shape == whole.shape
    assert (waveform - whole).abs().max() <= 2.5e-6


def test_a_stream_keeps_only_the_latents_it_still_needs(models: VaeModels) -> None:
    stream = make_stream(models, 320)
    for size in (29, 28, 28, 29):
        stream.push(torch.zeros(1, 32, 2, size))
    assert stream._latents is not None
    assert stream._latents.shape[2] == 2 * AUDIO_MARGIN_LATENTS
    assert stream._latents.untyped_storage().nbytes() == stream._latents.nbytes


@pytest.mark.parametrize("name", ["quiet", "loud"])
@pytest.mark.parametrize("block", [1600, 700, 1])
def test_the_normalisation_divisor_is_that_of_the_reference(name: str, block: int) -> None:
    case = load_file(RAVEN / "audio_norm.safetensors")
    waveform = case[f"{name}.in"][0]
    statistics = SoundStatistics()
    for piece in waveform.split(block, dim=1):
        statistics.add(piece)
    assert statistics.divisor == pytest.approx(float(case[f"{name}.divisor"]), abs=1e-6)
    torch.testing.assert_close(waveform / statistics.divisor, case[f"{name}.out"][0], rtol=1e-6, atol=1e-7)


def test_measurements_are_those_of_the_whole_waveform() -> None:
    waveform = torch.randn(2, 5000, generator=torch.Generator().manual_seed(3)).clamp(-1, 1) + 0.01
    statistics = SoundStatistics()
    for piece in waveform.split(800, dim=1):
        statistics.add(piece)
    assert statistics.count == 10_000
    assert statistics.std == pytest.approx(float(waveform.double().std()), rel=1e-12)
    assert statistics.mean == pytest.approx(float(waveform.double().mean()), rel=1e-12)
    assert statistics.peak == float(waveform.abs().max())
    assert statistics.num_clipped == int((waveform.abs() >= 1).sum()) > 0
