from __future__ import annotations

import torch

from core.geometry import num_video_latents
from tools.train_tiny.picture import render
from tools.train_tiny.video_latents import block_frames, clip_latents, latent_centres
from tools.train_tiny.world import COLOURS, RGB, WRAP_X, WRAP_Y, Scene, Thing, batch, positions, random_scene


def random_batch(count: int) -> object:
    generator = torch.Generator().manual_seed(3)
    return batch([random_scene(generator) for _ in range(count)], torch.rand(count, 2, 2, generator=generator))


def test_the_blocks_of_frames_end_where_the_published_codec_ends_them() -> None:
    last = block_frames(num_video_latents(39))[:, -1]
    assert last.tolist() == [0, 4, 8, 12, 16, 17, 21, 25, 29, 33, 34, 38]


def test_every_latent_tells_where_the_objects_are() -> None:
    scenes = random_batch(12)
    latents = clip_latents(scenes, 73).double()
    x, y = latent_centres()
    frames = block_frames(latents.shape[2])
    at = positions(scenes, frames.flatten()).unflatten(2, (-1, 4))
    way = torch.tensor([WRAP_X, WRAP_Y], dtype=torch.float64)
    at = (at[..., :1, :] + torch.remainder(at - at[..., :1, :] + way / 2, way) - way / 2).mean(3)
    for i in range(2):
        there = scenes.present[:, i]
        cos_x, sin_x, cos_y, sin_y = latents[there, 6 * i + 2 : 6 * i + 6].unbind(1)
        for cos, sin, centre, period, axis in (
            (cos_x, sin_x, x, WRAP_X / 4, 0),
            (cos_y, sin_y, y[:, None], WRAP_Y / 3, 1),
        ):
            told = torch.atan2(sin, cos) / (2 * torch.pi) * period + centre
            off = torch.remainder(told - at[there, i, :, axis, None, None] + period / 2, period) - period / 2
            assert off.abs().max() < 1e-3
        assert not latents[~there, 6 * i : 6 * i + 6].any()


def test_a_still_preview_can_be_read_off_three_channels() -> None:
    scenes = random_batch(6)
    latents = clip_latents(scenes, 39)
    middle = block_frames(12).mean(1)
    picture = render(scenes, middle).unflatten(3, (10, 16)).unflatten(2, (6, 16)).mean(dim=(3, 5))
    told = latents[:, 12:15].permute(0, 2, 3, 4, 1) / 2 + 0.4
    assert (told - picture).abs().mean() < 0.01
    assert (told - picture).abs().max() < 0.15


def test_the_second_kind_of_latent_tells_the_second_object_and_whether_it_is_there() -> None:
    one = Thing(0, COLOURS.index("red"), 1, 0)
    two = Thing(3, COLOURS.index("cyan"), 2, 0)
    latents = clip_latents(batch([Scene((one,), 0, 0, 0), Scene((one, two), 0, 0, 0)], torch.zeros(2, 2, 2)), 22)
    alone, both = latents[:, 18:, 0, 0, 1]
    assert alone.tolist() == [0, 0, 0, 0, 0, -1.5]
    assert torch.allclose(both[:3] / 2.4 + 0.5, torch.tensor(RGB[two.colour]))
    assert both[5] == two.size - 0.5
    assert (latents[0, :, :, 0::2, 0::2][18:] == latents[1, :, :, 0::2, 0::2][18:]).all()
