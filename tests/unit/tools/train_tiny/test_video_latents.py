from __future__ import annotations

import torch
from torch import Tensor

from core.geometry import num_video_latents
from tools.train_tiny.picture import render
from tools.train_tiny.video_latents import PERIOD, block_frames, clip_latents, latent_centres
from tools.train_tiny.world import COLOURS, RGB, Scene, Scenes, Thing, batch, positions, random_scene


def random_batch(count: int) -> Scenes:
    generator = torch.Generator().manual_seed(3)
    return batch([random_scene(generator) for _ in range(count)], torch.rand(count, 2, 2, generator=generator))


def test_the_blocks_of_frames_end_where_the_published_codec_ends_them() -> None:
    last = block_frames(num_video_latents(39))[:, -1]
    assert last.tolist() == [0, 4, 8, 12, 16, 17, 21, 25, 29, 33, 34, 38]


def told(channels: Tensor) -> Tensor:
    """Places `[..., 2]` that six channels tell precisely, checked against what they tell linearly."""
    points = 24.0 * channels[..., :2]
    turns = channels[..., 2:6].unflatten(-1, (2, 2))
    precise = torch.atan2(turns[..., 1], turns[..., 0]) / (2 * torch.pi) * PERIOD
    off = precise - points
    assert (torch.remainder(off + PERIOD / 2, PERIOD) - PERIOD / 2).abs().max() < 1e-3
    return points


def test_every_row_tells_where_the_objects_are_and_every_latent_where_it_is() -> None:
    scenes = random_batch(12)
    latents = clip_latents(scenes, 73).double().permute(0, 2, 3, 4, 1)  # [B, T, 6, 10, 24]
    frames = block_frames(latents.shape[1])
    at = positions(scenes, frames.flatten()).unflatten(2, (-1, 4)).mean(3)
    for i in range(2):
        there = scenes.present[:, i]
        points = told(latents[there, :, 0::2, i::2, 11:17])
        assert (points - at[there, i, :, None, None]).abs().max() < 1e-4
        again = 24.0 * latents[there, :, 1::2, 0::2, 17 + 2 * i : 19 + 2 * i]
        assert torch.equal(again, points[..., :2])
        assert not latents[~there, :, 0::2, i::2, 11:17].any()
    x, y = latent_centres()
    own = told(latents[0, 0, ..., 5:11])
    assert torch.allclose(own[..., 0], x.expand(6, -1), atol=1e-4)
    assert torch.allclose(own[..., 1], y[:, None].expand(-1, 10), atol=1e-4)


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
