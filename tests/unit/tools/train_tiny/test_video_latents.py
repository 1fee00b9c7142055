from __future__ import annotations

import torch

from core.geometry import num_video_latents
from tools.train_tiny.picture import render
from tools.train_tiny.video_latents import PERIODS, block_frames, clip_latents, latent_centres
from tools.train_tiny.world import COLOURS, RGB, WRAP_X, WRAP_Y, Scene, Thing, batch, positions, random_scene


def random_batch(count: int) -> object:
    generator = torch.Generator().manual_seed(3)
    return batch([random_scene(generator) for _ in range(count)], torch.rand(count, 2, 2, generator=generator))


def test_the_blocks_of_frames_end_where_the_published_codec_ends_them() -> None:
    last = block_frames(num_video_latents(39))[:, -1]
    assert last.tolist() == [0, 4, 8, 12, 16, 17, 21, 25, 29, 33, 34, 38]


def test_every_row_tells_where_the_objects_are_and_every_latent_where_it_is() -> None:
    scenes = random_batch(12)
    latents = clip_latents(scenes, 73).double()
    frames = block_frames(latents.shape[2])
    at = positions(scenes, frames.flatten()).unflatten(2, (-1, 4))
    way = torch.tensor([WRAP_X, WRAP_Y], dtype=torch.float64)
    at = (at[..., :1, :] + torch.remainder(at - at[..., :1, :] + way / 2, way) - way / 2).mean(3)
    for i in range(2):
        there = scenes.present[:, i]
        told = latents[there, 13:21, :, 0::2, i::2]
        for name, (told_axis, axis) in {"x": (told[:, [0, 1, 4, 5]], 0), "y": (told[:, [2, 3, 6, 7]], 1)}.items():
            for place, period in ((told_axis[:, :2], PERIODS[0][axis]), (told_axis[:, 2:], PERIODS[1][axis])):
                point = torch.atan2(place[:, 1], place[:, 0]) / (2 * torch.pi) * period
                off = point - at[there, i, :, axis, None, None]
                off = torch.remainder(off + period / 2, period) - period / 2
                assert off.abs().max() < 1e-3, name
        assert not latents[~there, 13:21, :, 0::2, i::2].any()
    x, y = latent_centres()
    own_x = torch.atan2(latents[0, 6, 0, 0], latents[0, 5, 0, 0]) / (2 * torch.pi) * WRAP_X
    own_y = torch.atan2(latents[0, 8, 0, :, 0], latents[0, 7, 0, :, 0]) / (2 * torch.pi) * WRAP_Y
    assert torch.allclose(own_x, x, atol=1e-4)
    assert torch.allclose(own_y, y, atol=1e-4)


def test_a_still_preview_can_be_read_off_three_channels() -> None:
    scenes = random_batch(6)
    latents = clip_latents(scenes, 39)
    middle = block_frames(12).mean(1)
    picture = render(scenes, middle).unflatten(3, (10, 16)).unflatten(2, (6, 16)).mean(dim=(3, 5))
    told = latents[:, :3].permute(0, 2, 3, 4, 1) / 2 + 0.4
    assert (told - picture).abs().mean() < 0.01
    assert (told - picture).abs().max() < 0.15


def test_a_second_object_is_told_with_its_look_or_told_to_be_absent() -> None:
    one = Thing(0, COLOURS.index("red"), 1, 0)
    two = Thing(3, COLOURS.index("cyan"), 2, 0)
    latents = clip_latents(batch([Scene((one,), 0, 0, 0), Scene((one, two), 0, 0, 0)], torch.zeros(2, 2, 2)), 22)
    alone, both = latents[:, 18:23, 0, 1, 0]
    assert not alone.any()
    assert torch.allclose(both[:3] / 2.4 + 0.5, torch.tensor(RGB[two.colour]))
    assert latents[:, 20, 0, 1, 1].tolist() == [-1.5, two.size - 0.5]
