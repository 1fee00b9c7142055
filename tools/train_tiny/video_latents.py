"""Video latents of a scene, by formula: what the video decoder draws from and what the DiT learns to make.

A latent does not hold pixels but what is to be drawn, so that a small error moves an object a little and blurs nothing.
Every latent says where both objects are, seen from its own centre; what they are like is told by four kinds of latents
in turn, one for each place in the 2 x 2 patch of a DiT row:

    channels 0-5, 6-11   first and second object: how far right and how far below (saturating, tells near from far),
                         then cosine and sine of the distance in x and in y (precise)
    12-14                mean colour of the pixels that the latent stands for: what a linear preview shows
    15                   height of the latent in the picture
    16-17                which kind it is
    18-23, first kind    first object: colour, shape (2), size
           second kind   second object: the same
           third kind    both objects: way in x, way in y, and bend of the way in y within the latent's four frames
           fourth kind   background: colour of the sky's middle, colour at the lower edge

Values are of the order of 1, so the model's latent statistics are mean 0 and deviation 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.geometry import (
    FRAMES_PER_CHUNK,
    LATENTS_PER_CHUNK,
    SPATIAL_COMPRESSION,
    VIDEO_LATENT_CHANNELS,
    num_video_latents,
)
from tools.train_tiny.picture import backdrops, coverage
from tools.train_tiny.world import HEIGHT, RADII, RGB, SHAPES, WIDTH, WRAP_X, WRAP_Y, Scenes, positions

ROWS, COLUMNS = HEIGHT // SPATIAL_COMPRESSION, WIDTH // SPATIAL_COMPRESSION
BLOCK_FRAMES = 4
"""Frames that one latent decodes to. Of a chunk's first latent only the last one is shown."""
_PERIOD_X, _PERIOD_Y = WRAP_X / 4, WRAP_Y / 3
"""Distances after which the precise channels repeat, pixels: a mover's way round is a whole number of them."""
_NEAR = 24.0
"""Distance at which the saturating channels reach tanh(1), pixels."""
_PRECISE = 1.3
"""Amplitude of the precise channels."""
_SAMPLES = 4
"""Points per axis whose mean is a latent's colour."""


def block_frames(num_latents: int) -> Tensor:
    """The four frames of every latent, `[T, 4]` float64; those of a chunk's first latent overlap the one before."""
    index = torch.arange(num_latents)
    last = FRAMES_PER_CHUNK * (index // LATENTS_PER_CHUNK) + 4 * (index % LATENTS_PER_CHUNK)
    return (last[:, None] + torch.arange(1 - BLOCK_FRAMES, 1)).double()


def clip_latents(scenes: Scenes, num_frames: int) -> Tensor:
    """Latents of whole clips, `[B, 24, T, 6, 10]` float32."""
    return latents(scenes, block_frames(num_video_latents(num_frames)))


def latents(scenes: Scenes, frames: Tensor) -> Tensor:
    """Latents of these frames, `[B, 24, T, 6, 10]` float32.

    frames: `[T, 4]` or `[B, T, 4]` instants, four in a row for each latent.
    """
    flat = frames.flatten(-2)
    at = positions(scenes, flat).unflatten(2, (-1, BLOCK_FRAMES))  # [B, 2, T, 4, 2]
    way = torch.tensor([WRAP_X, WRAP_Y], dtype=at.dtype)
    # A mover that comes back on the other side does so between two frames: counted on from the first.
    at = at[..., :1, :] + torch.remainder(at - at[..., :1, :] + way / 2, way) - way / 2
    middle = at.mean(dim=3)  # [B, 2, T, 2]
    moved = (at[..., 3, :] - at[..., 0, :]) / 4.0
    bend = (at[..., 3, 1] + at[..., 0, 1] - at[..., 1, 1] - at[..., 2, 1]) / 3.0

    num_scenes, num_latents = len(scenes), middle.shape[2]
    out = torch.zeros(num_scenes, num_latents, ROWS, COLUMNS, VIDEO_LATENT_CHANNELS, dtype=torch.float64)
    x, y = latent_centres()
    present = scenes.present[:, :, None, None, None]
    away_x = middle[..., 0, None, None] - x  # [B, 2, T, 1, COLUMNS]
    away_y = middle[..., 1, None, None] - y[:, None]  # [B, 2, T, ROWS, 1]
    for i in range(2):
        seen = torch.stack(
            torch.broadcast_tensors(
                torch.tanh(away_x[:, i] / _NEAR),
                torch.tanh(away_y[:, i] / _NEAR),
                _PRECISE * torch.cos(2 * torch.pi * away_x[:, i] / _PERIOD_X),
                _PRECISE * torch.sin(2 * torch.pi * away_x[:, i] / _PERIOD_X),
                _PRECISE * torch.cos(2 * torch.pi * away_y[:, i] / _PERIOD_Y),
                _PRECISE * torch.sin(2 * torch.pi * away_y[:, i] / _PERIOD_Y),
            ),
            -1,
        )
        out[..., 6 * i : 6 * i + 6] = seen * present[:, i, ..., None]
    out[..., 12:15] = 2.0 * (_mean_colours(scenes, middle) - 0.4)
    out[..., 15] = y[:, None] / 28.0
    kind_row, kind_column = torch.arange(ROWS) % 2, torch.arange(COLUMNS) % 2
    out[..., 16] = 2.0 * kind_row[:, None] - 1.0
    out[..., 17] = 2.0 * kind_column - 1.0
    look = _looks(scenes)[:, :, None, None, None]  # [B, 2, 1, 1, 1, 6]
    out[:, :, 0::2, 0::2, 18:] = look[:, 0]
    out[:, :, 0::2, 1::2, 18:] = look[:, 1]
    way_told = torch.cat((moved, bend[..., None]), -1) * scenes.present[:, :, None, None]  # [B, 2, T, 3]
    out[:, :, 1::2, 0::2, 18:] = way_told.permute(0, 2, 1, 3).flatten(2)[:, :, None, None]
    pictures = backdrops()
    backdrop = torch.cat((pictures[:, HEIGHT // 3], pictures[:, -1]), -1)[scenes.background]  # [B, 6]
    out[:, :, 1::2, 1::2, 18:] = 4.0 * (backdrop.double() - 0.3)[:, None, None, None]
    return out.permute(0, 4, 1, 2, 3).float().contiguous()


def latent_centres() -> tuple[Tensor, Tensor]:
    """x `[10]` and y `[6]` of the middles of the latents, pixels from the centre of the canvas."""
    x, y = (SPATIAL_COMPRESSION * (torch.arange(n, dtype=torch.float64) + 0.5 - n / 2) for n in (COLUMNS, ROWS))
    return x, y


def _looks(scenes: Scenes) -> Tensor:
    """Colour, shape and size of every object, `[B, 2, 6]`; an object that is not there has a size of its own."""
    colour = 2.4 * (torch.tensor(RGB, dtype=torch.float64)[scenes.colour] - 0.5)
    shape = 1.2 * torch.stack((2.0 * (scenes.shape % 2) - 1.0, 2.0 * (scenes.shape // 2) - 1.0), -1)
    size = scenes.size[..., None] - 0.5
    there = torch.cat((colour, shape, size), -1)
    absent = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -1.5], dtype=torch.float64)
    return torch.where(scenes.present[..., None], there, absent)


def _mean_colours(scenes: Scenes, middle: Tensor) -> Tensor:
    """Mean colour of the pixels of every latent at the middle of its frames, `[B, T, 6, 10, 3]`.

    middle: `[B, 2, T, 2]` centres of the objects.
    """
    step = SPATIAL_COMPRESSION // _SAMPLES
    points_x, points_y = (step * (torch.arange(n // step) + 0.5) - n / 2 for n in (WIDTH, HEIGHT))
    backdrop = backdrops()[scenes.background].unflatten(1, (-1, step)).mean(2)  # [B, 24, 3]
    picture = backdrop[:, None, :, None].expand(-1, middle.shape[2], -1, len(points_x), -1).clone()
    colours, radii = torch.tensor(RGB), torch.tensor(RADII)
    for i in (1, 0):
        for shape in range(len(SHAPES)):
            which = torch.nonzero(scenes.present[:, i] & (scenes.shape[:, i] == shape)).flatten()
            at = middle[which, i].float()[..., None, None]  # [b, T, 2, 1, 1]
            radius = radii[scenes.size[which, i]][:, None, None, None]
            mask = coverage(shape, points_x - at[:, :, 0], points_y[:, None] - at[:, :, 1], radius)[..., None]
            colour = colours[scenes.colour[which, i]][:, None, None, None]
            picture[which] += mask * (colour - picture[which])
    cells: Tensor = picture.unflatten(3, (-1, _SAMPLES)).unflatten(2, (-1, _SAMPLES)).mean(dim=(3, 5))
    return cells.double()
