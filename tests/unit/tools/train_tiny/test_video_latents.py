from __future__ import annotations

import torch
from torch import Tensor

from core.geometry import num_video_latents
from tools.train_tiny.picture import render
from tools.train_tiny.video_latents import block_frames, clip_latents, latent_centres
from tools.train_tiny.world import COLOURS, MOTIONS, RGB, Scene, Scenes, Thing, batch, positions, random_scene


def random_batch(count: int) -> Scenes:
    generator = torch.Generator().manual_seed(3)
    return batch([random_scene(generator) for _ in range(count)], torch.rand(count, 2, 2, generator=generator))


def test_the_blocks_of_frames_end_where_the_published_codec_ends_them() -> None:
    last = block_frames(num_video_latents(39))[:, -1]
    assert last.tolist() == [0, 4, 8, 12, 16, 17, 21, 25, 29, 33, 34, 38]


def test_every_row_tells_where_the_objects_are_and_every_latent_where_it_is() -> None:
    scenes = random_batch(12)
    latents = clip_latents(scenes, 73).double().permute(0, 2, 3, 4, 1)  # [B, T, 6, 10, 24]
    frames = block_frames(latents.shape[1])
    at = positions(scenes, frames.flatten()).unflatten(2, (-1, 4)).mean(3)
    began = positions(scenes, torch.zeros(1))
    for i in range(2):
        there = scenes.present[:, i]
        upper, lower = latents[there, :, 0::2, i::2], latents[there, :, 1::2, 0::2]
        assert (24.0 * upper[..., 11:13] - at[there, i, :, None, None]).abs().max() < 1e-4
        assert (24.0 * upper[..., 15:17] - began[there, i, :, None, None]).abs().max() < 1e-4
        assert torch.equal(lower[..., 17 + 2 * i : 19 + 2 * i], upper[..., 11:13])
        assert not latents[~there, :, 0::2, i::2, 11:20].any()
    x, y = latent_centres()
    assert torch.allclose(24.0 * latents[..., 5], x, atol=1e-4)
    assert torch.allclose(24.0 * latents[..., 6], y[:, None], atol=1e-4)


def turned(cosine: Tensor, sine: Tensor, period: float) -> Tensor:
    return torch.atan2(sine, cosine) / (2 * torch.pi) * period


def apart(a: Tensor, b: Tensor, period: float) -> float:
    """The largest distance on a circle."""
    return float((torch.remainder(a - b + period / 2, period) - period / 2).abs().max())


def test_every_latent_tells_the_time() -> None:
    told = clip_latents(random_batch(2), 73).double().permute(0, 2, 3, 4, 1)  # [B, T, 6, 10, 24]
    middle = block_frames(told.shape[1]).mean(1)[:, None, None]
    assert torch.allclose(57.6 * told[..., 7] + 96.0, middle.expand_as(told[..., 7]), atol=1e-4)
    assert apart(turned(told[..., 9], told[..., 10], 60.0), middle, 60.0) < 1e-3
    for column, period in ((0, 30.0), (1, 120.0)):
        further = told[:, :, 1::2, column::2]
        assert apart(turned(further[..., 21], further[..., 22], period), middle, period) < 1e-3
    within = (5.6 * told[0, :, 0, 0, 8] + 8.0).round().int().tolist()
    assert within[:11] == [0, 4, 8, 12, 16, 0, 4, 8, 12, 16, 0]


def test_what_moves_tells_how_far_it_is_in_its_cycle() -> None:
    free = torch.rand(4, 2, 2, generator=torch.Generator().manual_seed(5))
    motions = [Thing(0, 0, 0, MOTIONS.index(name)) for name in ("bounce", "orbit", "right", "still")]
    latents = clip_latents(batch([Scene((thing,), 0, 0, 0) for thing in motions], free), 192).double()
    hop, orbit, mover, still = latents[:, 13:15, :, 0, 0] / 1.2
    seen = 24.0 * latents[:, 11:13, :, 0, 0]
    assert torch.allclose(hop.norm(dim=0), torch.ones_like(hop[0]))
    # It touches the ground at the beginning of each cycle: half a turn is the top.
    height = 43.0 - 12.0 - 36.0 * ((1 - hop[0]) / 2).sqrt()
    assert (height - seen[0, 1]).abs().max() < 4.0  # a latent tells the mean over its frames, and a touch is a corner
    assert (height - seen[0, 1]).abs().median() < 0.5
    centre = seen[1] - 22.0 * orbit
    assert (centre - centre.mean(1, keepdim=True)).abs().max() < 1.0
    assert apart(turned(mover[0], mover[1], 240.0), seen[2, 0], 240.0) < 1e-3
    assert not still.any()


def test_a_mover_that_comes_in_again_has_neither_jumped_within_a_latent_nor_changed_its_way() -> None:
    scenes = batch([Scene((Thing(0, 0, 0, MOTIONS.index("right")),), 0, 0, 0)], torch.full((1, 2, 2), 0.37))
    latents = clip_latents(scenes, 192).double()[0, :, :, 0, 0]
    assert torch.allclose(latents[17], torch.full_like(latents[17], 2.0), atol=1e-5)
    steps = torch.remainder(24.0 * latents[11].diff() + 120.0, 240.0) - 120.0
    frames = block_frames(latents.shape[1]).mean(1).diff()
    assert torch.allclose(steps, 2.0 * frames, atol=1e-4)


def test_a_still_preview_can_be_read_off_three_channels() -> None:
    scenes = random_batch(6)
    latents = clip_latents(scenes, 39)
    middle = block_frames(12).mean(1)
    picture = render(scenes, middle).unflatten(3, (10, 16)).unflatten(2, (6, 16)).mean(dim=(3, 5))
    seen = latents[:, :3].permute(0, 2, 3, 4, 1) / 2 + 0.4
    assert (seen - picture).abs().mean() < 0.01
    assert (seen - picture).abs().max() < 0.15


def test_a_second_object_is_told_with_its_look_or_told_to_be_absent() -> None:
    one = Thing(0, COLOURS.index("red"), 1, 0)
    two = Thing(3, COLOURS.index("cyan"), 2, 0)
    latents = clip_latents(batch([Scene((one,), 0, 0, 0), Scene((one, two), 0, 0, 0)], torch.zeros(2, 2, 2)), 22)
    alone, both = latents[:, 14:17, 0, 1, 0]
    assert not alone.any()
    assert torch.allclose(both / 2.4 + 0.5, torch.tensor(RGB[two.colour]))
    assert latents[:, 22, 0, 0, 1].tolist() == [-1.5, two.size - 0.5]
