"""What a clip's frames show: background and objects, with the attributes and the track of each.

Nothing is assumed but the world itself. Colours are found first, each object's outline in the frames that show it best,
then its place in every frame, to a fraction of a pixel; its motion is the one that its track follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny.measure.motions import OUTLIER, UNREADABLE, best_fit
from tools.train_tiny.measure.templates import APPEARANCES, REACH, area, distances, find, reach
from tools.train_tiny.picture import backdrops, edge_profile, pixel_centres
from tools.train_tiny.world import HEIGHT, RGB, WIDTH, Thing

_SAMPLED = 24
"""Frames in which colours are looked for."""
_CANDIDATES, _LOOKS = 48, 12
"""Frames, at even distances, of which the best decide an object's outline; how many do."""
_CORE = 5
"""Side of the square in which all pixels have a colour where an object has it: an edge between two colours, which may
pass through a third, is thinner."""
_CORE_PIXELS = 12
"""So many of those show an object."""
_DOUBT = 1.5
"""What is less than so much nearer to a colour than to the backdrop shows no object: the backdrop may have a tint."""
_SEEN_SHARE = 0.25
"""Of the frames, in which an object must be seen."""
_SPLIT_SHARE = 0.1
"""Of the frames, in which two objects of one colour must be apart."""
_PART_CELLS = 30
"""Least size of a part of a mask that is an object, in cells of 2x2 pixels."""
_RELIABLE = 0.35
"""Share of an object that must be seen for its place to count."""
_ITERATIONS = 4
_DAMPING = 2.0
_LONGEST_STEP = 2.0
"""Of an iteration, pixels."""


@dataclass(frozen=True)
class SeenThing:
    """An object."""

    shape: int
    colour: int
    size: int
    motion: int | None
    """None where it follows none."""
    motion_error: float
    """Root mean square distance of its track from its motion, pixels."""
    jitter: float
    """Root mean square difference between its steps from frame to frame and its motion's, pixels: what stutters."""
    track: Tensor
    """Its centre, `[F, 2]` float64 pixels from the canvas's; where it cannot be seen, where its motion leads."""
    visible: Tensor
    """How much of it is seen, `[F]` in [0, 1]."""

    @property
    def thing(self) -> tuple[int, int, int, int | None]:
        """The attributes, in the order of the world's `Thing`."""
        return self.shape, self.colour, self.size, self.motion

    @property
    def reliable(self) -> Tensor:
        """Frames in which the track is measured, `[F]` bool."""
        return self.visible >= _RELIABLE

    def num_right(self, thing: Thing) -> int:
        """How many attributes are those of the thing."""
        return sum(mine == its for mine, its in zip(self.thing, thing, strict=True))


@dataclass(frozen=True)
class Picture:
    """What is seen."""

    background: int
    things: tuple[SeenThing, ...]
    """In no order that means anything."""


@dataclass(frozen=True)
class _Outline:
    """An object whose outline is known, with where it may be in every frame."""

    colour: int
    shape: int
    size: int
    track: Tensor
    """`[F, 2]` float32 pixels."""
    weight: Tensor
    """How far that can be relied on, `[F]` in [0, 1]."""


def read_picture(frames: Tensor) -> Picture:
    """What the frames `[F, H, W, 3]` uint8 show."""
    pixels = frames.float() / 255
    background = _background(pixels)
    backdrop = backdrops()[background]  # [H, 3]
    colours = _colours(pixels, backdrop)
    labels = _labels(pixels, backdrop, colours)
    outlines = []
    for number, colour in enumerate(colours, start=1):
        mask, others = labels == number, (labels != number) & (labels != 0)
        if len(colours) == 1 and (parts := _two_parts(mask)) is not None:
            outlines += [_followed(colour, mask, part) for part in parts]
        else:
            outlines.append(_outlined(colour, mask, others))
    outlines = _ordered(outlines, pixels)
    return Picture(background, tuple(_refined(index, outlines, pixels, backdrop) for index in range(len(outlines))))


def _background(pixels: Tensor) -> int:
    """The backdrop that most pixels have."""
    sample = pixels[:: max(1, len(pixels) // 8)]
    return int(
        torch.stack(
            [(1 - (sample - backdrop[:, None]).abs().amax(-1) / 0.12).clamp(min=0).mean() for backdrop in backdrops()]
        ).argmax()
    )


def _labels(pixels: Tensor, backdrop: Tensor, colours: list[int], margin: float = 1.0) -> Tensor:
    """Of every pixel, 0 where the backdrop is nearest, else 1 + the index into `colours`; `[F, H, W]` uint8.

    margin: by how much the backdrop counts as nearer than it is.
    """
    nearest = (pixels - backdrop[:, None]).square().sum(-1) / margin**2
    labels = torch.zeros(nearest.shape, dtype=torch.uint8)
    for number, colour in enumerate(colours, start=1):
        distance = (pixels - torch.tensor(RGB[colour])).square().sum(-1)
        labels[distance < nearest] = number
        nearest = torch.minimum(nearest, distance)
    return labels


def _colours(pixels: Tensor, backdrop: Tensor) -> list[int]:
    """Colours of the objects, those that are seen most first."""
    labels = _labels(pixels[:: max(1, len(pixels) // _SAMPLED)], backdrop, list(range(len(RGB))), _DOUBT)
    shares, sums = [], []
    for colour in range(len(RGB)):
        core = 1 - F.max_pool2d((labels != colour + 1).float(), _CORE, stride=1)
        num_pixels = core.sum(dim=(1, 2))
        shares.append(float((num_pixels >= _CORE_PIXELS).float().mean()))
        sums.append(float(num_pixels.sum()))
    seen = [colour for colour in range(len(RGB)) if shares[colour] >= _SEEN_SHARE]
    return sorted(seen, key=lambda colour: -sums[colour])


def _outlined(colour: int, mask: Tensor, others: Tensor) -> _Outline:
    """The only object of a colour.  mask: where it is seen, others: where others are; `[F, H, W]` bool."""
    shape, size = _appearance(mask, ~others)
    cells, valid = (F.avg_pool2d(x.float(), 2) for x in (mask, ~others))
    _, track = find(shape, size, 2, cells, valid)
    share = (mask.sum(dim=(1, 2)) / area(shape, size)).clamp(max=1.0)
    return _Outline(colour, shape, size, track, share * (share >= share.max().clamp(max=_RELIABLE)))


def _appearance(mask: Tensor, valid: Tensor) -> tuple[int, int]:
    """Shape and size that explain a mask best in the frames in which most of it is seen, off edges and others."""
    every = max(1, len(mask) // _CANDIDATES)
    mask, valid = mask[::every], valid[::every]
    on_border = mask.clone()
    on_border[:, 1:-1, 1:-1] = False
    near_others = F.max_pool2d((~valid).float(), 7, stride=1, padding=3).bool() & mask
    quality = mask.sum(dim=(1, 2)) - 4 * on_border.sum(dim=(1, 2)) - 2 * near_others.sum(dim=(1, 2))
    looks = quality.argsort(descending=True)[:_LOOKS]
    picked, picked_valid = mask[looks].float(), valid[looks].float()
    return min(APPEARANCES, key=lambda look: float(find(look[0], look[1], 1, picked, picked_valid)[0].sum()))


@dataclass(frozen=True)
class _Part:
    """One of two objects of a colour, in the frames in which they are apart."""

    frames: Tensor
    """`[K]` int64."""
    cells: Tensor
    """Where it is, `[K, H / 2, W / 2]` bool."""
    centres: Tensor
    """`[K, 2]` pixels."""
    weight: Tensor
    """`[K]`: less for what touches the edge of the canvas."""


def _two_parts(mask: Tensor) -> list[_Part] | None:
    """The two objects of which a mask `[F, H, W]` consists, or None if it is one."""
    cells = F.avg_pool2d(mask.float(), 2) > 0.5
    numbers = _components(cells)
    pairs: dict[int, list[Tensor]] = {}
    for frame in range(len(cells)):
        values, counts = numbers[frame][cells[frame]].unique(return_counts=True)
        large = values[counts >= _PART_CELLS]
        if len(large) == 2:
            pairs[frame] = [numbers[frame] == value for value in large]
    if len(pairs) < max(2, _SPLIT_SHARE * len(mask)):
        return None
    frames = torch.tensor(list(pairs))
    split = torch.stack([torch.stack(pair) for pair in pairs.values()])  # [K, 2, h, w]
    x, y = pixel_centres()
    count = split.sum(dim=(2, 3))
    centres = torch.stack(
        ((split * x.view(-1, 2).mean(1)).sum(dim=(2, 3)), (split * y.view(-1, 2).mean(1)[:, None]).sum(dim=(2, 3))), -1
    )
    centres = centres / count[..., None]  # [K, 2, 2]
    edge = split.clone()
    edge[..., 1:-1, 1:-1] = False
    weight = torch.where(edge.any(dim=3).any(dim=2), 0.05, 1.0)  # [K, 2]
    swapped = _swaps(frames, centres, weight)
    order = torch.stack((swapped, ~swapped), -1).long()  # [K, 2]
    rows = torch.arange(len(frames))
    return [
        _Part(frames, split[rows, pick], centres[rows, pick], weight[rows, pick]) for pick in order.flip(1).unbind(1)
    ]


def _components(cells: Tensor) -> Tensor:
    """Numbers that are equal for cells that hang together, `[F, h, w]`."""
    numbers = torch.arange(1, cells[0].numel() + 1, dtype=torch.float32).view(1, *cells.shape[1:]) * cells
    while True:
        spread = F.max_pool2d(numbers, 3, stride=1, padding=1) * cells
        if torch.equal(spread, numbers):
            return numbers
        numbers = spread


def _swaps(frames: Tensor, centres: Tensor, weight: Tensor) -> Tensor:
    """In which frames the two objects are the other way round, `[K]` bool, so that each follows some motion best.

    Within a run of frames each goes on from where it was; how runs belong together, which a crossing or a way out of
    sight separates, is tried out.
    """
    swapped = torch.zeros(len(frames), dtype=torch.bool)
    starts = [0]
    for k in range(1, len(frames)):
        step = (centres[k, :, None] - centres[k - 1]).norm(dim=-1)  # [2 now, 2 before]
        crossed = bool(step[0, 1] + step[1, 0] < step[0, 0] + step[1, 1])
        swapped[k] = swapped[k - 1] ^ crossed
        if int(frames[k] - frames[k - 1]) > 2:
            starts.append(k)
    runs = sorted(zip(starts, [*starts[1:], len(frames)], strict=True), key=lambda run: run[0] - run[1])
    length = int(frames[-1]) + 1
    for start, stop in runs[1:]:
        longer = [run for run in runs if run[1] - run[0] >= stop - start]
        kept = torch.cat([torch.arange(*run) for run in longer]).unique()
        errors = []
        for turned in (False, True):
            tried = swapped.clone()
            tried[start:stop] ^= turned
            errors.append(_pair_error(length, frames[kept], centres[kept], weight[kept], tried[kept]))
        swapped[start:stop] ^= errors[1] < errors[0]
    return swapped


def _pair_error(length: int, frames: Tensor, centres: Tensor, weight: Tensor, swapped: Tensor) -> float:
    total = 0.0
    for pick in (swapped.long(), 1 - swapped.long()):
        track, given = torch.zeros(length, 2, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)
        rows = torch.arange(len(frames))
        track[frames] = centres[rows, pick].double()
        given[frames] = weight[rows, pick].double()
        total += min(best_fit(track, given, size).error for size in range(3))
    return total


def _followed(colour: int, mask: Tensor, part: _Part) -> _Outline:
    """One of two objects of a colour, whose mask is of both."""
    near = F.max_pool2d(part.cells.float(), 3, stride=1, padding=1)
    near = F.interpolate(near[:, None], scale_factor=2)[:, 0] > 0
    mine = mask[part.frames] & near
    shape, size = _appearance(mine, mine | ~mask[part.frames])
    track, weight = torch.zeros(len(mask), 2), torch.zeros(len(mask))
    track[part.frames], weight[part.frames] = part.centres, part.weight
    return _Outline(colour, shape, size, track, weight)


def _ordered(outlines: list[_Outline], pixels: Tensor) -> list[_Outline]:
    """The objects, the one in front first, as far as pixels that both cover tell."""
    if len(outlines) != 2:
        return outlines
    first, second = outlines
    both = (first.weight > 0) & (second.weight > 0) & ((first.track - second.track).norm(dim=1) < 1.5 * REACH)
    if not bool(both.any()):
        return outlines
    frames = both.nonzero()[:, 0]
    masks = [_cover(outline, outline.track[frames], *_canvas(len(frames)))[0] for outline in outlines]
    shared = masks[0] * masks[1] > 0.9
    off = [(pixels[frames][shared] - torch.tensor(RGB[outline.colour])).square().sum() for outline in outlines]
    return outlines if off[0] <= off[1] else [second, first]


def _canvas(num_frames: int) -> tuple[Tensor, Tensor]:
    x, y = pixel_centres()
    return x.expand(num_frames, -1), y.expand(num_frames, -1)


def _cover(outline: _Outline, track: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """What an object covers, `[F, H, W]`, and how that changes as it moves in x and y, `[F, 2, H, W]`."""
    table = distances(outline.shape, outline.size, x - track[:, :1], y - track[:, 1:])
    cover, steepness = edge_profile(table[:, 0])
    return cover, table[:, 1:] * steepness[:, None]


def _refined(index: int, outlines: list[_Outline], pixels: Tensor, backdrop: Tensor) -> SeenThing:
    """An object, its place fitted to the pixels of every frame."""
    mine = outlines[index]
    guess = best_fit(mine.track.double(), mine.weight.double(), mine.size)
    start = _filled(mine, guess.track)
    others = [(_filled(other, _guess(other)), other, i < index) for i, other in enumerate(outlines) if i != index]
    patch = _Patch(pixels, backdrop, start, reach(mine.size))
    hidden = torch.zeros(patch.shape)
    below = patch.backdrop
    for track, other, is_front in others:
        cover, _ = _cover(other, track, patch.x, patch.y)
        below = below + cover[..., None] * (torch.tensor(RGB[other.colour]) - below) * (not is_front)
        if is_front:
            hidden = torch.maximum(hidden, cover)
    seen = patch.on_canvas * (1 - hidden)
    colour = torch.tensor(RGB[mine.colour])
    track = start
    contrast = colour - below  # [F, P, P, 3]
    size = contrast.square().sum(-1) * seen
    reached = ((patch.pixels - below) * contrast).sum(-1) * seen
    for _ in range(_ITERATIONS):
        cover, slope = _cover(mine, track, patch.x, patch.y)
        pull = (slope * (reached - cover * size)[:, None]).sum(dim=(2, 3))  # [F, 2]
        flat = slope.flatten(2)
        curve = (flat * size.flatten(1)[:, None]) @ flat.transpose(1, 2) + _DAMPING * torch.eye(2)
        track = track + torch.linalg.solve(curve, pull).clamp(-_LONGEST_STEP, _LONGEST_STEP)
    track = torch.where((track - start).norm(dim=1, keepdim=True) > OUTLIER, start, track)
    cover, _ = _cover(mine, track, patch.x, patch.y)
    visible = ((cover * seen).sum(dim=(1, 2)) / area(mine.shape, mine.size)).clamp(max=1.0)
    weight = (visible * (visible >= _RELIABLE)).double()
    fit = best_fit(track.double(), weight if bool(weight.any()) else torch.ones_like(weight), mine.size)
    motion = fit.motion if fit.error <= UNREADABLE else None
    jitter = _jitter(track.double() - fit.track, visible >= _RELIABLE)
    return SeenThing(mine.shape, mine.colour, mine.size, motion, fit.error, jitter, track.double(), visible)


def _jitter(off: Tensor, is_reliable: Tensor) -> float:
    """Root mean square change from frame to frame of how far a track is off its motion, `[F, 2]`."""
    steps = (off[1:] - off[:-1])[is_reliable[1:] & is_reliable[:-1]].norm(dim=1)
    return float(steps.square().mean().sqrt()) if len(steps) else 0.0


def _guess(outline: _Outline) -> Tensor:
    return best_fit(outline.track.double(), outline.weight.double(), outline.size).track


def _filled(outline: _Outline, guess: Tensor) -> Tensor:
    """The track, with a guess where it cannot be relied on."""
    return torch.where(outline.weight[:, None] >= _RELIABLE, outline.track, guess.float())


class _Patch:
    """The pixels around an object in every frame."""

    def __init__(self, pixels: Tensor, backdrop: Tensor, track: Tensor, reach: int) -> None:
        """track: `[F, 2]`, about which the patches lie.  reach: half their side, pixels."""
        x, y = pixel_centres()
        middle = track.clamp(min=torch.tensor([-WIDTH / 2, -HEIGHT / 2]), max=torch.tensor([WIDTH / 2, HEIGHT / 2]))
        side = torch.arange(-reach, reach)
        column = (middle[:, :1] + WIDTH / 2).round().long() + side  # [F, P]
        row = (middle[:, 1:] + HEIGHT / 2).round().long() + side
        self.x = column + float(x[0])
        """Of the pixels, `[F, P]`, as is `y`."""
        self.y = row + float(y[0])
        on_canvas = (
            (row >= 0)[:, :, None] & (row < HEIGHT)[:, :, None] & (column >= 0)[:, None] & (column < WIDTH)[:, None]
        )
        self.on_canvas = on_canvas.float()
        """`[F, P, P]`."""
        self.shape = on_canvas.shape
        row, column = row.clamp(0, HEIGHT - 1), column.clamp(0, WIDTH - 1)
        self.pixels = pixels[torch.arange(len(pixels))[:, None, None], row[:, :, None], column[:, None, :]]
        """`[F, P, P, 3]`."""
        self.backdrop = backdrop[row][:, :, None, :].expand_as(self.pixels)
