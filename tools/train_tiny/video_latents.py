"""Video latents of a scene, by formula: what the video decoder draws from and what the DiT learns to make.

A latent does not hold pixels but what is to be drawn, so that a small error moves an object a little and blurs nothing.
The whole scene is told by the four latents of a DiT row, in turn, and by every row alike: errors of single rows average
out, and no row has to know where it is.

    channels 0-2         mean colour of the pixels that the latent stands for: what a linear preview shows
    3-4                  which of the four it is
    5-6                  where its middle is: x and y
    7-10                 the time: since the clip began, within the chunk, and in turns of an orbit (2)
    11-23, upper left    first object: where it is, its phase where it moves (2), where it began, its way in x and
                         in y within the latent's four frames, the bend of the latter, shape (2), size
           upper right   second object: the same
           lower left    colour of both objects, where they are once more, and the time in turns of a bounce (2)
           lower right   background: colour of the sky's middle, colour at the lower edge; the objects' ways once more,
                         and the time in turns of a mover's lap (2)

The time and where an object began are the same for many latents; with them its place is a simple function, which the
DiT finds much sooner than how places follow from each other.
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
from tools.train_tiny.world import (
    BOUNCE_FRAMES,
    CYCLIC,
    HEIGHT,
    LAP_FRAMES,
    LAP_X,
    LAP_Y,
    MAX_FRAMES,
    MOTIONS,
    ORBIT_FRAMES,
    RADII,
    RGB,
    SHAPES,
    WIDTH,
    Scenes,
    on_lap,
    positions,
)

ROWS, COLUMNS = HEIGHT // SPATIAL_COMPRESSION, WIDTH // SPATIAL_COMPRESSION
BLOCK_FRAMES = 4
"""Frames that one latent decodes to. Of a chunk's first latent only the last one is shown."""
_UNIT = 24.0
"""Pixels that are 1."""
_AMPLITUDE = 1.2
"""Of cosines and sines."""
TOLD = slice(11, VIDEO_LATENT_CHANNELS)
"""Channels of which each of a row's four latents tells another part of the scene."""
OWN_PLACE, TIME = slice(5, 7), slice(7, 11)
"""Channels that tell where a latent is, and when."""
LOOK, COLOURS = slice(20, 23), slice(11, 17)
"""Channels in which the upper two latents of a row tell shape and size, and the lower two colours."""
MOVED, AGAIN, FURTHER = slice(11, 20), slice(17, 21), slice(21, 23)
"""Channels in which the upper two latents of a row tell where an object is and goes, in which the lower two tell that
again, and in which those tell the time.
"""
CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))
"""Row and column of the four latents in a DiT row."""
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
    at = at[..., :1, :] + on_lap(at - at[..., :1, :])
    middle = on_lap(at.mean(dim=3))  # [B, 2, T, 2]
    moved = (at[..., 3, :] - at[..., 0, :]) / 3.0
    bend = (at[..., 3, 1] + at[..., 0, 1] - at[..., 1, 1] - at[..., 2, 1]) / 3.0

    out = torch.zeros(len(scenes), middle.shape[2], ROWS, COLUMNS, VIDEO_LATENT_CHANNELS, dtype=torch.float64)
    x, y = latent_centres()
    out[..., :3] = 2.0 * (_mean_colours(scenes, middle) - 0.4)
    out[..., 3] = 2.0 * (torch.arange(ROWS) % 2)[:, None] - 1.0
    out[..., 4] = 2.0 * (torch.arange(COLUMNS) % 2) - 1.0
    out[..., OWN_PLACE] = torch.stack(torch.broadcast_tensors(x, y[:, None]), -1) / _UNIT
    time = frames.double()[..., :, None, None, :]
    out[..., TIME] = torch.cat((_times(time), _turns(time, ORBIT_FRAMES)), -1)
    out[:, :, 1::2, 0::2, FURTHER] = _turns(time, BOUNCE_FRAMES)
    out[:, :, 1::2, 1::2, FURTHER] = _turns(time, LAP_FRAMES)
    there = scenes.present[:, :, None, None]
    shape = 1.2 * torch.stack((2.0 * (scenes.shape % 2) - 1.0, 2.0 * (scenes.shape // 2) - 1.0), -1)
    size = torch.where(scenes.present, scenes.size - 0.5, -1.5)[..., None]  # an absent object has one of its own
    fixed = torch.cat((shape * scenes.present[..., None], size), -1)[:, :, None].expand(-1, -1, middle.shape[2], -1)
    began = positions(scenes, torch.zeros(1))  # [B, 2, 1, 2]
    places = (middle / _UNIT, phases(scenes, middle, frames.double().mean(-1)), began.expand_as(middle) / _UNIT)
    things = torch.cat((torch.cat((*places, moved, bend[..., None]), -1) * there, fixed), -1)  # [B, 2, T, 12]
    colour = 2.4 * (torch.tensor(RGB, dtype=torch.float64)[scenes.colour] - 0.5) * scenes.present[..., None]
    pictures = backdrops()
    backdrop = torch.cat((pictures[:, HEIGHT // 3], pictures[:, -1]), -1)[scenes.background]  # [B, 6]
    out[:, :, 0::2, 0::2, 11:23] = things[:, 0, :, None, None]
    out[:, :, 0::2, 1::2, 11:23] = things[:, 1, :, None, None]
    out[:, :, 1::2, 0::2, 11:17] = colour.flatten(1)[:, None, None, None]
    out[:, :, 1::2, 0::2, AGAIN] = things[..., :2].permute(0, 2, 1, 3).flatten(2)[:, :, None, None]
    out[:, :, 1::2, 1::2, 11:17] = 4.0 * (backdrop.double() - 0.3)[:, None, None, None]
    out[:, :, 1::2, 1::2, AGAIN] = things[..., 6:8].permute(0, 2, 1, 3).flatten(2)[:, :, None, None]
    return out.permute(0, 4, 1, 2, 3).float().contiguous()


def _times(frames: Tensor) -> Tensor:
    """Time since the clip began and within the chunk, `[..., 2]`.  frames: `[..., 4]` instants."""
    half = FRAMES_PER_CHUNK // 2
    since_the_clip = (frames.mean(-1) - MAX_FRAMES / 2) / (0.3 * MAX_FRAMES)
    within_the_chunk = (torch.remainder(frames[..., -1], FRAMES_PER_CHUNK) - half) / (0.7 * half)
    return torch.stack((since_the_clip, within_the_chunk), -1)


def _turns(frames: Tensor, period: float) -> Tensor:
    """Time in turns of a period, as cosine and sine `[..., 2]`.  frames: `[..., 4]` instants."""
    return _circle(frames.mean(-1) / period)


def _circle(turns: Tensor) -> Tensor:
    """Cosine and sine of turns, `[..., 2]`."""
    return _AMPLITUDE * torch.stack(((2 * torch.pi * turns).cos(), (2 * torch.pi * turns).sin()), -1)


def phases(scenes: Scenes, at: Tensor, frames: Tensor) -> Tensor:
    """Cosine and sine of how far every object that moves is in its cycle, `[B, 2, T, 2]`; 0 for others.

    at: where the objects are, `[B, 2, T, 2]`.  frames: `[T]` or `[B, T]` instants.
    """
    t = frames[None, None] if frames.ndim == 1 else frames[:, None]
    motion = scenes.motion[:, :, None]
    period = torch.where(motion == MOTIONS.index("bounce"), BOUNCE_FRAMES, ORBIT_FRAMES)
    sideways = (motion == MOTIONS.index("right")) | (motion == MOTIONS.index("left"))
    along = torch.where(sideways, at[..., 0] / LAP_X, at[..., 1] / LAP_Y)
    repeats = torch.isin(motion, torch.tensor([MOTIONS.index(name) for name in CYCLIC]))
    turns = torch.where(repeats, t / period + scenes.free[:, :, 0, None] - 0.5, along)
    return _circle(turns) * (motion != MOTIONS.index("still"))[..., None]


def latent_centres() -> tuple[Tensor, Tensor]:
    """x `[10]` and y `[6]` of the middles of the latents, pixels from the centre of the canvas."""
    x, y = (SPATIAL_COMPRESSION * (torch.arange(n, dtype=torch.float64) + 0.5 - n / 2) for n in (COLUMNS, ROWS))
    return x, y


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
