from __future__ import annotations

import torch

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


def test_every_latent_tells_the_time() -> None:
    told = clip_latents(random_batch(2), 73)[:, 7:11].double().permute(0, 2, 3, 4, 1)  # [B, T, 6, 10, 4]
    middle = block_frames(told.shape[1]).mean(1)[:, None, None]
    assert torch.allclose(57.6 * told[..., 0] + 96.0, middle, atol=1e-4)
    turned = torch.atan2(told[..., 2], told[..., 1]) / (2 * torch.pi) * 68.0
    assert (torch.remainder(turned - middle + 34.0, 68.0) - 34.0).abs().max() < 1e-3
    within = (5.6 * told[0, :, 0, 0, 3] + 8.0).round().int().tolist()
    assert within[:11] == [0, 4, 8, 12, 16, 0, 4, 8, 12, 16, 0]


def test_what_goes_in_cycles_tells_how_far_it_is() -> None:
    free = torch.rand(3, 2, 2, generator=torch.Generator().manual_seed(5))
    motions = [Thing(0, 0, 0, MOTIONS.index(name)) for name in ("bounce", "orbit", "right")]
    latents = clip_latents(batch([Scene((thing,), 0, 0, 0) for thing in motions], free), 39)
    hop, orbit, mover = latents[:, 13:15, :, 0, 0].double() / 1.2
    assert torch.allclose(hop.norm(dim=0), torch.ones(12, dtype=torch.float64))
    # It touches the ground at the beginning of each cycle: half a turn is the top.
    height = 36.0 * ((1 - hop[0]) / 2).sqrt()
    at = 43.0 - 12.0 - height
    seen = 24.0 * latents[0, 12, :, 0, 0].double()
    assert (at - seen).abs().max() < 3.0  # a latent tells the mean over its frames, and a touch is a corner
    assert (at - seen).abs().median() < 0.5
    centre = 24.0 * latents[1, 11:13, :, 0, 0].double() - 22.0 * orbit
    assert (centre - centre.mean(1, keepdim=True)).abs().max() < 1.0
    assert not mover.any()


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
