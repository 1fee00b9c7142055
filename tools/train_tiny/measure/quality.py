"""How good clips are, one by one and all together: what a benchmark prints and a test demands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.train_tiny.grammar import describe
from tools.train_tiny.measure.media import decoded
from tools.train_tiny.measure.reading import (
    ATTRIBUTES,
    Reading,
    click_errors,
    paired,
    pan_errors,
    read_scene,
    spoken,
    tone_error,
    verdicts,
)
from tools.train_tiny.measure.seams import KINDS, Changes, changes
from tools.train_tiny.training import generator
from tools.train_tiny.world import MOTIONS, Scene, random_scene

_STILL = MOTIONS.index("still")


@dataclass(frozen=True)
class Case:
    """A clip to ask for."""

    scene: Scene
    prompt: str
    seed: int
    """Of the request."""


@dataclass(frozen=True)
class Measured:
    """What a clip was found to be."""

    case: Case
    right: dict[str, bool]
    """Of every attribute."""
    words: dict[str, str]
    """What was read of every attribute."""
    frames: Tensor
    """`[F, H, W, 3]` uint8."""
    tracks: tuple[Tensor, ...]
    """Of every object of the scene that was found, in the scene's order: `[F, 2]` pixels."""
    changes: Changes
    path_errors: tuple[float, ...]
    """Of every object that follows a motion, its root mean square distance from it, pixels."""
    jitters: tuple[float, ...]
    """Of the same, that between its steps from frame to frame and the motion's, pixels."""
    pitch_error: float
    """Relative; 0 for silence."""
    pan_errors: Tensor
    """`[N]`."""
    click_errors: tuple[float, ...]
    """Frames."""
    num_missed_clicks: int
    num_lone_clicks: int
    tone_error: float | None
    """Of the partials' amplitudes, relative; None where no object was found."""

    @property
    def is_right(self) -> bool:
        """Whether every attribute is."""
        return all(self.right.values())

    @property
    def is_moving(self) -> bool:
        """Whether something should move."""
        return any(thing.motion != _STILL for thing in self.case.scene.things)


@dataclass(frozen=True)
class Spread:
    """The size of some errors."""

    count: int
    median: float
    most: float
    """Which 95 of 100 do not exceed."""
    worst: float

    def __str__(self) -> str:
        if not self.count:
            return "none"
        return f"median {self.median:.2g}, 95 % below {self.most:.2g}, worst {self.worst:.2g} (of {self.count})"


@dataclass(frozen=True)
class Summary:
    """How good some clips are."""

    count: int
    right: dict[str, float]
    """Share of the clips in which each attribute is right."""
    all_right: float
    """Share in which all are."""
    moving: dict[str, float]
    """Change at each kind of step over that elsewhere, of the clips in which something moves."""
    still: dict[str, float]
    """Change at each kind of step in 8-bit levels, of the others."""
    path: Spread
    """Pixels, as is the next."""
    jitter: Spread
    pitch: Spread
    """Relative errors of the fundamentals of the clips with a tone."""
    pan: Spread
    clicks: Spread
    """Frames."""
    num_missed_clicks: int
    num_lone_clicks: int
    tone: Spread
    """Relative errors of the partials' amplitudes of the clips with a tone."""


def held_out_cases(count: int, seed: int) -> list[Case]:
    """Prompts of scenes that training never saw, each with a seed of its own."""
    cases = []
    for index in range(count):
        random = generator(seed, "quality", index)
        scene = random_scene(random)
        while not scene.is_held_out:
            scene = random_scene(random)
        cases.append(Case(scene, describe(scene, random), 1000 * seed + index))
    return cases


def measured(case: Case, clip: bytes) -> Measured:
    """Measures a clip, an MP4 file, against the scene that its prompt describes."""
    frames, waveform = decoded(clip)
    return measured_reading(case, frames, read_scene(frames, waveform))


def measured_reading(case: Case, frames: Tensor, reading: Reading) -> Measured:
    """Measures what was read of frames `[F, H, W, 3]` uint8 and of a sound."""
    seen = paired(reading.picture, case.scene)
    clicks = click_errors(reading)
    return Measured(
        case=case,
        right=verdicts(reading, case.scene),
        words=spoken(reading, case.scene),
        frames=frames,
        tracks=tuple(thing.track for thing in seen[: len(case.scene.things)]),
        changes=changes(frames),
        path_errors=tuple(thing.motion_error for thing in seen if thing.motion is not None),
        jitters=tuple(thing.jitter for thing in seen if thing.motion is not None),
        pitch_error=reading.sound.pitch_error,
        pan_errors=pan_errors(reading.sound, seen[0]) if seen else torch.zeros(0),
        click_errors=clicks.errors,
        num_missed_clicks=clicks.num_missed,
        num_lone_clicks=clicks.num_lone,
        tone_error=tone_error(reading.sound, seen[0], case.scene) if seen else None,
    )


def summary(clips: Sequence[Measured]) -> Summary:
    """All of them together. Changes are pooled: a clip in which much moves counts for more."""
    moving = [clip.changes for clip in clips if clip.is_moving]
    still = [clip.changes for clip in clips if not clip.is_moving]
    sounding = [clip for clip in clips if clip.case.scene.pitch]
    return Summary(
        count=len(clips),
        right={name: sum(clip.right[name] for clip in clips) / len(clips) for name in ATTRIBUTES},
        all_right=sum(clip.is_right for clip in clips) / len(clips),
        moving=dict(zip(KINDS, _pooled(moving).ratio.tolist(), strict=True)),
        still=dict(zip(KINDS, _pooled(still).mean.tolist(), strict=True)),
        path=_spread([torch.tensor(clip.path_errors) for clip in clips]),
        jitter=_spread([torch.tensor(clip.jitters) for clip in clips]),
        pitch=_spread([torch.tensor([clip.pitch_error]) for clip in sounding]),
        pan=_spread([clip.pan_errors for clip in clips]),
        clicks=_spread([torch.tensor(clip.click_errors) for clip in clips]),
        num_missed_clicks=sum(clip.num_missed_clicks for clip in clips),
        num_lone_clicks=sum(clip.num_lone_clicks for clip in clips),
        tone=_spread([torch.tensor([clip.tone_error]) for clip in sounding if clip.tone_error is not None]),
    )


def _pooled(parts: Sequence[Changes]) -> Changes:
    nothing = torch.zeros(len(KINDS), dtype=torch.float64)
    return sum(parts, Changes(nothing, nothing))


def _spread(errors: Sequence[Tensor]) -> Spread:
    sizes = torch.cat([torch.zeros(0), *errors]).abs().double()
    if not len(sizes):
        return Spread(0, *3 * (float("nan"),))
    return Spread(len(sizes), float(sizes.median()), float(sizes.quantile(0.95)), float(sizes.max()))
