"""The map that stills are made with: what it predicts, and that it is made once for each VAE."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from h3stream.errors import PhaseError
from services.common.ledger import ResidencyLedger, read_ledger
from services.common.preview_map import PreviewMap
from services.common.residency import DeviceWeights
from services.vae import preview_map as module
from services.vae.preview_map import find_preview_map, fit_preview_map, latent_colours
from services.vae.video_stream import VideoStream
from services.vae.weights import VaeModels, load_models

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(model_directory: Path) -> VaeModels:
    return load_models(model_directory, torch.float32)


@pytest.fixture
def weights(models: VaeModels, tmp_path: Path) -> DeviceWeights:
    return DeviceWeights((models.video, models.audio), CPU, ResidencyLedger(tmp_path / "ledger", "vae"))


def predicted(preview_map: PreviewMap, latents: torch.Tensor) -> torch.Tensor:
    """Colours `[3, 5, H, W]` of the first five latents."""
    weights, bias = torch.tensor(preview_map.weights).view(3, 24), torch.tensor(preview_map.bias)
    return torch.einsum("kc,cthw->kthw", weights, latents[0, :, :5]) + bias.view(3, 1, 1, 1)


def test_it_predicts_the_colours_of_latents_that_it_was_not_fitted_to(models: VaeModels) -> None:
    found = fit_preview_map(models.video, models.video_statistics, CPU)
    latents = torch.randn(1, 24, 7, 6, 10, generator=torch.Generator().manual_seed(17))
    (frames,) = VideoStream(models.video, models.video_statistics, CPU).push(latents)
    real, guess = latent_colours(frames), predicted(found, latents)
    for colour in range(3):
        pair = torch.stack([real[colour].flatten(), guess[colour].flatten()])
        assert torch.corrcoef(pair)[0, 1] > 0.5
    mean = real.mean(dim=(1, 2, 3), keepdim=True)
    assert (guess - real).square().mean() < 0.75 * (mean - real).square().mean()
    assert fit_preview_map(models.video, models.video_statistics, CPU) == found


def test_a_latent_s_colour_is_the_mean_of_its_own_pixels() -> None:
    frames = torch.zeros(1, 3, 17, 32, 48)
    frames[:, 0, 1:5, 16:, 32:] = 1.0  # latent 1, row 1, column 2
    frames[:, 1, 13, :16, :16] = 1.0  # one of the four frames of latent 4, row 0, column 0
    colours = latent_colours(frames)
    assert colours.shape == (3, 5, 2, 3)
    assert colours[0].nonzero().tolist() == [[1, 1, 2]]
    assert colours[0, 1, 1, 2] == 1.0
    assert colours[1].nonzero().tolist() == [[4, 0, 0]]
    assert colours[1, 4, 0, 0] == 0.25


def test_it_is_fitted_once_and_kept(models: VaeModels, weights: DeviceWeights, tmp_path: Path) -> None:
    cache = tmp_path / "maps"
    found = find_preview_map(models, weights, cache)
    assert found is not None
    assert [entry.event for entry in read_ledger(tmp_path / "ledger")] == ["enter", "leave"]
    assert not weights.is_resident
    assert find_preview_map(models, weights, cache) == found
    assert len(read_ledger(tmp_path / "ledger")) == 2
    (kept,) = cache.iterdir()

    other = dataclasses.replace(models, digests={**models.digests, "video_vae/another.safetensors": "00"})
    find_preview_map(other, weights, cache)
    assert len(list(cache.iterdir())) == 2
    assert len(read_ledger(tmp_path / "ledger")) == 4

    kept.write_text(kept.read_text()[:-9])
    assert find_preview_map(models, weights, cache) == found
    kept.write_text('{"weights": [1.0], "bias": [0.0, 0.0, 0.0]}')
    assert find_preview_map(models, weights, cache) == found
    assert find_preview_map(models, weights, None) == found


def test_a_worker_that_cannot_have_one_starts_without(
    models: VaeModels, weights: DeviceWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = ResidencyLedger(tmp_path / "ledger", "dit")
    holder.enter(1)
    assert find_preview_map(models, weights, None) is None
    holder.leave()

    def fails(*_: object) -> PreviewMap:
        raise PhaseError("the video decoder returned values that are not numbers")

    with monkeypatch.context() as patch:
        patch.setattr(module, "fit_preview_map", fails)
        assert find_preview_map(models, weights, None) is None
    assert not weights.is_resident

    (tmp_path / "file").touch()
    assert find_preview_map(models, weights, tmp_path / "file") is not None


def test_a_map_that_cannot_be_written_leaves_nothing_behind(
    models: VaeModels, weights: DeviceWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert find_preview_map(models, weights, tmp_path / "maps") is not None
    assert list((tmp_path / "maps").iterdir()) == []
