from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tools.train_tiny import training, video_vae
from tools.train_tiny.picture import render
from tools.train_tiny.training import generator
from tools.train_tiny.video_latents import CORNERS, TOLD, latent_centres, latents
from tools.train_tiny.video_vae import Stencils, draw, initial_model, random_cells, random_windows, train_video_vae


@pytest.fixture(scope="module")
def stencils() -> Stencils:
    return Stencils()


@pytest.fixture(scope="module")
def model() -> Any:
    return initial_model(0)


def test_painted_frames_are_the_world_s(stencils: Stencils) -> None:
    scenes, frames = random_windows(3, generator(0, "test"))
    painted = stencils.paint(scenes, frames[:, 2])
    for b in range(3):
        true = render(scenes, frames[b, 2])[b].permute(3, 0, 1, 2)
        assert (painted[b] - true).abs().max() < 0.12  # edges are drawn at eighths of a pixel
        assert (painted[b] - true).abs().mean() < 1e-3


def test_single_latents_are_painted_as_in_the_whole_frame(stencils: Stencils) -> None:
    scenes, frames = random_windows(2, generator(1, "test"))
    x, y = latent_centres()
    every = stencils.paint_cells(scenes, frames[:, 2], x.repeat(6).expand(2, -1), y.repeat_interleave(10).expand(2, -1))
    whole = every.view(2, 6, 10, 3, 4, 16, 16).permute(0, 3, 4, 1, 5, 2, 6).reshape(2, 3, 4, 96, 160)
    assert torch.equal(whole, stencils.paint(scenes, frames[:, 2]))


@torch.no_grad()
def test_the_heads_fetch_what_each_kind_of_latent_tells_at_the_same_moment(model: Any) -> None:
    scenes, frames = random_windows(4, generator(2, "test"))
    given = latents(scenes, frames)
    fetched: list[torch.Tensor] = []
    handle = model.decoder.transformer_blocks[0].attn.register_forward_hook(
        lambda module, inputs, output: fetched.append(output)
    )
    model.decoder(given)
    handle.remove()
    found = fetched[0][:, : 7 * 60, 24:76].unflatten(1, (7, 6, 10)).unflatten(-1, (4, 13))
    for kind, (row, column) in enumerate(CORNERS):
        told = given[:, TOLD, :, row, column].transpose(1, 2)[:, :, None, None]
        assert (found[..., kind, :] - told).abs().mean() < 0.1 * told.abs().mean() + 0.02


@torch.no_grad()
def test_latents_are_drawn_as_in_their_windows(model: Any) -> None:
    scenes, frames = random_windows(2, generator(3, "test"))
    given = latents(scenes, frames)
    chosen = torch.tensor([0, 23, 59]).expand(2, 7, 3)
    alone = draw(model.decoder, given, chosen).unflatten(0, (2, 7, 3)).unflatten(-1, (3, 4, 16, 16))
    window = model.decoder(given).unflatten(2, (7, 4)).unflatten(4, (6, 16)).unflatten(6, (10, 16))
    for n, (row, column) in enumerate(((0, 0), (2, 3), (5, 9))):
        expected = window[:, :, :, :, row, :, column].transpose(1, 2)  # [B, 7, 3, 4, 16, 16]
        assert torch.allclose(alone[:, :, n], expected, atol=1e-4)


def test_a_stopped_run_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("DRAWING_STEPS", 3), ("WINDOW_STEPS", 2), ("_DRAWN_WINDOWS", 1), ("_WINDOWS", 1)):
        monkeypatch.setattr(video_vae, name, value)
    train_video_vae(tmp_path / "whole", tmp_path / "work", 0)

    monkeypatch.setattr(training, "CHECKPOINT_EVERY_S", 0.0)
    seeded = video_vae.generator

    def stop(seed: int, *names: object) -> torch.Generator:
        if names == ("video VAE, latents", 2):
            raise KeyboardInterrupt
        return seeded(seed, *names)

    monkeypatch.setattr(video_vae, "generator", stop)
    with pytest.raises(KeyboardInterrupt):
        train_video_vae(tmp_path / "again", tmp_path / "stopped", 0)
    monkeypatch.setattr(video_vae, "generator", seeded)
    train_video_vae(tmp_path / "again", tmp_path / "stopped", 0)
    name = "diffusion_pytorch_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_random_latents_lie_mostly_near_objects(stencils: Stencils) -> None:
    given, chosen, target = random_cells(stencils, generator(4, "test"))
    assert given.shape == (16, 24, 7, 6, 10)
    assert chosen.shape == (16, 7, 14)
    assert target.shape == (16 * 7 * 14, 3, 1024)
    crossed = target.flatten(1).std(1) > 0.05
    assert crossed.float().mean() > 0.3
