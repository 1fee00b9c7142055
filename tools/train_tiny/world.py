"""The procedural world that the tiny model knows: scenes, their motion and their sound, as exact functions of time.

A scene is a choice of attributes, which a prompt can name, and of free numbers, which it cannot: the seed of a request
chooses those. Everything that is seen and heard follows from the two. Positions are pixels from the centre of the
canvas, x to the right and y down; time is counted in frames of 1/24 s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from core.geometry import AUDIO_LATENTS_PER_SECOND, FPS

WIDTH, HEIGHT = 160, 96
"""The canvas, pixels."""
MAX_FRAMES = 192
"""Longest clip of the world."""
NUM_OBJECTS = 2

SHAPES = ("circle", "square", "triangle", "star")
COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "white")
SIZES = ("small", "medium", "large")
MOTIONS = ("still", "right", "left", "up", "down", "bounce", "orbit")
BACKGROUNDS = ("night", "sunset", "meadow", "fog", "sea")
PITCHES = ("silent", "low", "middle", "high")
RHYTHMS = ("hum", "pulse", "tick")

RGB = (
    (0.92, 0.10, 0.12),
    (1.00, 0.50, 0.05),
    (0.98, 0.90, 0.15),
    (0.12, 0.75, 0.20),
    (0.10, 0.85, 0.90),
    (0.15, 0.30, 0.98),
    (0.65, 0.15, 0.85),
    (0.97, 0.97, 0.97),
)
"""Of each colour."""
RADII = (12.0, 17.0, 23.0)
"""Of each size, pixels."""
HORIZON = 16.0
"""Where the ground begins in a background that has one."""


@dataclass(frozen=True)
class Backdrop:
    """Colours of a background, each RGB: the sky falls linearly from `top` to `bottom`, then comes the ground."""

    top: tuple[float, float, float]
    bottom: tuple[float, float, float]
    ground: tuple[float, float, float] | None
    """None where the sky reaches the lower edge."""


BACKDROPS = (
    Backdrop((0.02, 0.02, 0.10), (0.10, 0.12, 0.34), None),
    Backdrop((0.24, 0.12, 0.34), (0.60, 0.32, 0.22), (0.09, 0.05, 0.09)),
    Backdrop((0.26, 0.42, 0.60), (0.52, 0.60, 0.62), (0.10, 0.28, 0.10)),
    Backdrop((0.44, 0.45, 0.47), (0.22, 0.23, 0.25), None),
    Backdrop((0.10, 0.30, 0.38), (0.30, 0.46, 0.50), (0.02, 0.12, 0.24)),
)
"""Of each background."""

FUNDAMENTALS = (0.0, 200.0, 400.0, 800.0)
"""Of each pitch, Hz."""
PARTIALS = (200.0, 400.0, 600.0, 800.0, 1200.0, 1600.0, 2400.0)
"""Every frequency of the world's tones, Hz: multiples of 40, so a steady tone repeats with every audio latent."""
HARMONICS = (1.0, 0.45, 0.22)
"""Amplitude of a tone's first, second and third partial, relative."""
TONE_LEVEL = 0.36
"""Amplitude of the first partial of a tone at its loudest, both channels together, of full scale."""
CLICK_LEVEL = 0.5
"""Peak of a click, both channels together, of full scale."""
PULSE_PERIODS = (0, 24, 12)
"""Audio latents from one stroke to the next, of each rhythm; 0 is held."""
PULSE_DECAY = 5.0
"""Audio latents in which a stroke falls to 1/e."""

LAP_FRAMES = 120.0
"""In which a mover crosses the canvas and, out of sight, comes back to where it was."""
LAP_X, LAP_Y = 240.0, 176.0
"""Length of that way, pixels: 40 more than the canvas on each side, so that nothing of an object is seen to jump."""
SPEED_X, SPEED_Y = LAP_X / LAP_FRAMES, LAP_Y / LAP_FRAMES
"""Of a mover, pixels a frame."""
START_X, START_Y = 58.0, 36.0
"""How far from the centre movers start, on the side that they come from."""
GROUND = 43.0
"""What a bouncing object's lowest edge touches."""
BOUNCE_FRAMES, BOUNCE_HEIGHT = LAP_FRAMES / 4, 36.0
"""From one touch to the next; how far it rises."""
ORBIT_FRAMES, ORBIT_RADIUS = LAP_FRAMES / 2, 22.0
CYCLIC = ("bounce", "orbit")
"""Motions that go in cycles in sight."""
FIRST_PHASES, PHASE_SPREAD = (0.15, 0.65), 0.16
"""About where in its cycle each object begins, as a free number: the first touches the ground after a third of a
bounce; and how much of a cycle that varies by.
"""
PAN_WIDTH = 80.0
"""Distance from the centre at which a sound comes from one side alone but for `PAN_DEPTH`."""
PAN_DEPTH = 0.9
FADE = 30.0
"""Pixels beyond the edge over which a sound fades out."""


class Thing(NamedTuple):
    """One object's attributes, each an index into its table above."""

    shape: int
    colour: int
    size: int
    motion: int


@dataclass(frozen=True)
class Scene:
    """What a prompt says."""

    things: tuple[Thing, ...]
    """One or two; the first lies in front, and the tone comes from where it is."""
    background: int
    pitch: int
    rhythm: int
    """0 where there is no tone."""

    def __post_init__(self) -> None:
        assert 1 <= len(self.things) <= NUM_OBJECTS
        assert self.pitch or not self.rhythm, "a silent scene has no rhythm"

    @property
    def is_held_out(self) -> bool:
        """Whether the scene is kept from training: one in six, by the hash of its attributes."""
        return hashlib.sha256(repr(astuple(self)).encode()).digest()[0] % 6 == 0


@dataclass(frozen=True)
class Scenes:
    """A batch of scenes with their free numbers, as tensors."""

    present: Tensor
    """`[B, 2]` bool."""
    shape: Tensor
    """`[B, 2]` int64, as are the next three."""
    colour: Tensor
    size: Tensor
    motion: Tensor
    background: Tensor
    """`[B]` int64, as are the next two."""
    pitch: Tensor
    rhythm: Tensor
    free: Tensor
    """`[B, 2, 2]` in [0, 1): two numbers per object, which place it and say where in its motion it begins."""

    @property
    def radius(self) -> Tensor:
        """`[B, 2]` float64 pixels."""
        return torch.tensor(RADII, dtype=torch.float64)[self.size]

    def __len__(self) -> int:
        return len(self.background)

    def repeated(self, count: int) -> Scenes:
        """Every scene `count` times in a row."""
        return Scenes(**{field.name: getattr(self, field.name).repeat_interleave(count, 0) for field in fields(self)})


def batch(scenes: Sequence[Scene], free: Tensor) -> Scenes:
    """The scenes as tensors.  free: `[B, 2, 2]` in [0, 1)."""
    columns = [
        [[(*scene.things, Thing(0, 0, 0, 0))[i][k] for i in range(NUM_OBJECTS)] for scene in scenes] for k in range(4)
    ]
    shape, colour, size, motion = (torch.tensor(column) for column in columns)
    return Scenes(
        present=torch.tensor([[i < len(scene.things) for i in range(NUM_OBJECTS)] for scene in scenes]),
        shape=shape,
        colour=colour,
        size=size,
        motion=motion,
        background=torch.tensor([scene.background for scene in scenes]),
        pitch=torch.tensor([scene.pitch for scene in scenes]),
        rhythm=torch.tensor([scene.rhythm for scene in scenes]),
        free=free.double(),
    )


def beginnings(scenes: Sequence[Scene], generator: torch.Generator) -> Tensor:
    """Free numbers of clips of these scenes, `[B, 2, 2]`: any, but for those of objects that bounce or orbit.

    Those begin at about one place of their cycle, the second object half a cycle after the first. Few steps begin with
    the mean of all that a prompt may mean: among places in a row it is one of them, in a circle it would be none.
    """
    free = torch.rand(len(scenes), NUM_OBJECTS, 2, generator=generator)
    for b, scene in enumerate(scenes):
        for i, thing in enumerate(scene.things):
            if MOTIONS[thing.motion] in CYCLIC:
                free[b, i, 0] = FIRST_PHASES[i] + PHASE_SPREAD * (free[b, i, 0] - 0.5)
    return free


def random_scene(generator: torch.Generator) -> Scene:
    """Any scene of the world: half of them with two objects, a quarter without a tone."""

    def pick(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    things = tuple(
        Thing(pick(len(SHAPES)), pick(len(COLOURS)), pick(len(SIZES)), pick(len(MOTIONS)))
        for _ in range(1 + pick(NUM_OBJECTS))
    )
    pitch = pick(len(PITCHES))
    return Scene(things, pick(len(BACKGROUNDS)), pitch, pick(len(RHYTHMS)) if pitch else 0)


def on_lap(places: Tensor) -> Tensor:
    """Places `[..., 2]`, or ways between two, brought back to one lap about the centre by whole laps."""
    laps = torch.tensor([LAP_X, LAP_Y], dtype=places.dtype)
    return torch.remainder(places + laps / 2, laps) - laps / 2


def positions(scenes: Scenes, frames: Tensor) -> Tensor:
    """Centre of every object, `[B, 2, F, 2]` float64 pixels (x, y).

    frames: `[F]` or `[B, F]` instants in frames; fractions and negative ones are fine.
    """
    two = scenes.present.all(dim=1)[:, None, None]  # two objects keep to their sides
    side = torch.tensor([-1.0, 1.0], dtype=torch.float64)[None, :, None]
    spread = torch.where(two, 0.5, 1.0).double()
    home_x, home_y = torch.where(two, 38.0 * side, 0.0), torch.where(two, 14.0 * side, 0.0)
    u, v = ((scenes.free[:, :, i, None] - 0.5) for i in range(2))  # [B, 2, 1]
    t = frames.double()
    t = t[None, None, :] if t.ndim == 1 else t[:, None, :]
    motion, radius = scenes.motion[:, :, None], scenes.radius[:, :, None]
    still_x, still_y = home_x + 48.0 * spread * u, home_y + 24.0 * spread * v
    zero = torch.zeros_like(t)
    sweep_x, sweep_y = SPEED_X * t - START_X, SPEED_Y * t - START_Y
    across, along = 24.0 * u, 12.0 * u
    turn = 2 * torch.pi * (t / ORBIT_FRAMES + u)
    hop = BOUNCE_HEIGHT * torch.sin(torch.pi * (t / BOUNCE_FRAMES + u)).abs()
    along_x = home_x + 40.0 * spread * v
    x = [
        still_x + zero,
        across + sweep_x,
        across - sweep_x,
        along_x + zero,
        along_x + zero,
        along_x + zero,
        home_x + 24.0 * spread * v + ORBIT_RADIUS * torch.cos(turn),
    ]
    y = [
        still_y + zero,
        home_y + 20.0 * spread * v + zero,
        home_y + 20.0 * spread * v + zero,
        along - sweep_y,
        along + sweep_y,
        GROUND - radius - hop,
        0.5 * home_y + ORBIT_RADIUS * torch.sin(turn),
    ]
    stacked = torch.stack([torch.stack(torch.broadcast_tensors(*x)), torch.stack(torch.broadcast_tensors(*y))], -1)
    index = motion[None, ..., None].expand(1, *stacked.shape[1:])
    return on_lap(stacked.gather(0, index)[0])


def pan(x: Tensor) -> Tensor:
    """Where a sound at x comes from: -1 left, 0 centre, 1 right."""
    return PAN_DEPTH * (x / PAN_WIDTH).clamp(-1.0, 1.0)


def audibility(position: Tensor) -> Tensor:
    """How much of a sound at `[..., 2]` is heard: all of it on the canvas, none where its object is out of sight."""
    edge = torch.tensor([WIDTH / 2, HEIGHT / 2], dtype=position.dtype)
    beyond = (position.abs() - edge).amax(dim=-1)
    return (1.0 - beyond / FADE).clamp(0.0, 1.0)


def gains(position: Tensor) -> Tensor:
    """Share of a sound at `[..., 2]` that goes to the left and the right channel, `[..., 2]`; they add up to its
    audibility.
    """
    side = pan(position[..., 0])
    return torch.stack((1.0 - side, 1.0 + side), -1) * (0.5 * audibility(position))[..., None]


def latent_frames(num_latents: int) -> Tensor:
    """Instant of the middle of every audio latent, `[A]` frames."""
    return (torch.arange(num_latents, dtype=torch.float64) + 0.5) * FPS / AUDIO_LATENTS_PER_SECOND


def envelopes(scenes: Scenes, num_latents: int) -> Tensor:
    """Loudness of the tone in every audio latent, `[B, A]` in [0, 1], before its place in the picture counts."""
    index = torch.arange(num_latents, dtype=torch.float64)
    period = torch.tensor(PULSE_PERIODS)[scenes.rhythm][:, None]
    strokes = torch.exp(-torch.remainder(index[None], period.clamp(min=1).double()) / PULSE_DECAY)
    return torch.where(period > 0, strokes, 1.0) * (scenes.pitch > 0)[:, None]


def tone_amplitudes(scenes: Scenes, num_latents: int) -> Tensor:
    """Amplitude of every partial in every audio latent, `[B, 7, 2, A]` of full scale: partial, channel, latent."""
    place = gains(positions(scenes, latent_frames(num_latents))[:, 0])  # [B, A, 2]
    loudness = TONE_LEVEL * envelopes(scenes, num_latents)[:, None, None, :] * place.transpose(1, 2)[:, None]
    return spectra()[scenes.pitch][:, :, None, None] * loudness


def spectra() -> Tensor:
    """Relative amplitude of every partial at every pitch, `[4, 7]`."""
    table = torch.zeros(len(PITCHES), len(PARTIALS), dtype=torch.float64)
    for pitch, fundamental in enumerate(FUNDAMENTALS):
        for harmonic, amplitude in enumerate(HARMONICS, start=1):
            if fundamental:
                table[pitch, PARTIALS.index(harmonic * fundamental)] = amplitude
    return table


def touches(scenes: Scenes, num_frames: int) -> list[list[tuple[int, float]]]:
    """Of each scene, every moment at which a bouncing object touches the ground: (object, instant in frames)."""
    events: list[list[tuple[int, float]]] = []
    for b in range(len(scenes)):
        found = []
        for i in range(NUM_OBJECTS):
            if not scenes.present[b, i] or MOTIONS[int(scenes.motion[b, i])] != "bounce":
                continue
            phase = float(scenes.free[b, i, 0]) - 0.5
            count = -int(-phase // 1)  # the first whole number of half turns that is not before the clip
            while (instant := (count - phase) * BOUNCE_FRAMES) < num_frames:
                found.append((i, instant))
                count += 1
        events.append(found)
    return events


def click_amplitudes(scenes: Scenes, num_frames: int, num_latents: int) -> Tensor:
    """Amplitude of the click that begins in every audio latent, `[B, 2, A]` of full scale: channel, latent."""
    clicks = torch.zeros(len(scenes), 2, num_latents, dtype=torch.float64)
    for b, events in enumerate(touches(scenes, num_frames)):
        for thing, instant in events:
            latent = int(instant * AUDIO_LATENTS_PER_SECOND / FPS)
            if latent < num_latents:
                at = positions(scenes, torch.tensor([instant]))[b, thing, 0]
                clicks[b, :, latent] += CLICK_LEVEL * gains(at)
    return clicks
