"""What the world looks like: every frame of a scene as pixels, exactly.

An object is the inside of a signed distance, its edge `EDGE` pixels soft and without a corner; the first object lies in
front of the second.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tools.train_tiny.world import BACKDROPS, HEIGHT, HORIZON, RADII, RGB, SHAPES, WIDTH, Scenes, positions

EDGE = 7.0
"""Width of an object's edge, pixels: what the video decoder can still draw where an edge crosses a latent. Half of the
change lies within a third of it.
"""
_SQUARE, _TRIANGLE, _STAR_OUTER, _STAR_INNER = 0.88, 1.25, 1.3, 0.58
"""Half a side, and distances of the corners, in radii: shapes of one size cover about the same area."""


def signed_distance(shape: int, x: Tensor, y: Tensor, radius: Tensor | float) -> Tensor:
    """Pixels to the outline of a shape around 0, negative inside; x, y and radius broadcast."""
    name = SHAPES[shape]
    if name == "circle":
        return torch.hypot(x, y) - radius
    if name == "square":
        over_x, over_y = x.abs() - _SQUARE * radius, y.abs() - _SQUARE * radius
        outside = torch.hypot(over_x.clamp(min=0), over_y.clamp(min=0))
        return outside + torch.maximum(over_x, over_y).clamp(max=0)
    # A polygon whose size is 1 and whose first corner points up.
    corners = (
        [(_TRIANGLE, 2 * math.pi * k / 3) for k in range(3)]
        if name == "triangle"
        else [((_STAR_OUTER, _STAR_INNER)[k % 2], math.pi * k / 5) for k in range(10)]
    )
    points = [(distance * math.sin(angle), -distance * math.cos(angle)) for distance, angle in corners]
    return radius * _polygon_distance(points, x / radius, y / radius)


def _polygon_distance(points: list[tuple[float, float]], x: Tensor, y: Tensor) -> Tensor:
    """Signed distance to a polygon: the nearest edge's, negative where a ray crosses the outline an odd number of
    times.
    """
    x, y = torch.broadcast_tensors(x, y)
    nearest = torch.full_like(x, math.inf)
    inside = torch.zeros_like(x, dtype=torch.bool)
    for (ax, ay), (bx, by) in zip(points, points[1:] + points[:1], strict=True):
        along = (((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / ((bx - ax) ** 2 + (by - ay) ** 2)).clamp(0, 1)
        nearest = torch.minimum(nearest, torch.hypot(x - ax - along * (bx - ax), y - ay - along * (by - ay)))
        if ay != by:
            crosses = ((y < ay) != (y < by)) & (x < ax + (y - ay) / (by - ay) * (bx - ax))
            inside ^= crosses
    return torch.where(inside, -nearest, nearest)


def coverage(shape: int, x: Tensor, y: Tensor, radius: Tensor | float) -> Tensor:
    """How much of a pixel at (x, y) from the centre a shape covers, in [0, 1]."""
    return edge_profile(signed_distance(shape, x, y, radius))[0]


def edge_profile(distance: Tensor) -> tuple[Tensor, Tensor]:
    """How much of a pixel at a signed distance from an outline is covered, in [0, 1], and by how much less for every
    pixel further out.
    """
    inside = (0.5 - distance / EDGE).clamp(0.0, 1.0)
    return inside.square() * (3.0 - 2.0 * inside), 6.0 / EDGE * inside * (1.0 - inside)


def pixel_centres() -> tuple[Tensor, Tensor]:
    """x `[W]` and y `[H]` of the canvas's pixels, from its centre."""
    return torch.arange(WIDTH) + 0.5 - WIDTH / 2, torch.arange(HEIGHT) + 0.5 - HEIGHT / 2


def backdrops() -> Tensor:
    """Every background, `[5, H, 3]` RGB in [0, 1]: the same in all columns."""
    _, y = pixel_centres()
    table = []
    for backdrop in BACKDROPS:
        lowest = HEIGHT / 2 if backdrop.ground is None else HORIZON
        fall = ((y + HEIGHT / 2) / (lowest + HEIGHT / 2))[:, None].clamp(max=1.0)
        sky = (1 - fall) * torch.tensor(backdrop.top) + fall * torch.tensor(backdrop.bottom)
        if backdrop.ground is not None:
            sky = torch.where((y > HORIZON)[:, None], torch.tensor(backdrop.ground), sky)
        table.append(sky)
    return torch.stack(table)


def render(scenes: Scenes, frames: Tensor) -> Tensor:
    """Frames `[B, F, H, W, 3]` float32 RGB in [0, 1] at the instants `[F]`."""
    x, y = pixel_centres()
    centres = positions(scenes, frames).float()  # [B, 2, F, 2]
    picture = backdrops()[scenes.background][:, None, :, None, :].expand(-1, len(frames), -1, WIDTH, -1).clone()
    for b in range(len(scenes)):
        for i in (1, 0):
            if scenes.present[b, i]:
                at = centres[b, i, :, :, None, None]  # [F, 2, 1, 1]
                radius = RADII[int(scenes.size[b, i])]
                mask = coverage(int(scenes.shape[b, i]), x - at[:, 0], y[:, None] - at[:, 1], radius)[..., None]
                colour = torch.tensor(RGB[int(scenes.colour[b, i])])
                picture[b] += mask * (colour - picture[b])
    return picture
